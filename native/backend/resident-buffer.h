// backend/resident-buffer.h: the buffer type of resident weights: resident.gguf as it lies in its file, in anonymous memory.
//
// Like mmap, but with memory that nobody takes away: the buffer has the file's layout, so the file can be read straight into it, front to back,
// aligned, without a copy (model/resident-loader.h), before llama.cpp has even made the tensors. When llama.cpp then asks for a tensor's place, it
// is given that place, and the tensor's name is hidden while the model loads, so that llama.cpp reads nothing (as in backend/flash-buffer.h).
//
// One object per model; it must outlive the model. Threads: as the model's loading; the memory is the loader's until that is done.

#pragma once

#include "base/huge-memory.h"
#include "ggml-backend-impl.h"

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace mkd {

class ResidentBufferType {
  public:
    struct Place {
        uint64_t offset, bytes; // in the file
    };

    // memory: room for the whole file, which somebody else fills; outlives this. places: by tensor name.
    ResidentBufferType(const HugeMemory & memory, std::map<std::string, Place> places);
    ResidentBufferType(const ResidentBufferType &)             = delete;
    ResidentBufferType & operator=(const ResidentBufferType &) = delete;

    ggml_backend_buffer_type_t buft() { return &buft_; }

    // After loading: names are back; later tensors (a LoRA's) get memory of their own.
    void restore_names();

  private:
    friend struct ResidentBufferCalls;
    ggml_backend_buffer_type                           buft_;
    std::map<std::string, Place>                       places_;
    const HugeMemory &                                 memory_;
    std::vector<std::pair<ggml_tensor *, std::string>> hidden_;
    bool                                               loading_ = true;
};

} // namespace mkd
