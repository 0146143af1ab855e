// backend/resident-buffer.h: the buffer type of resident weights: host memory in huge pages, filled after llama.cpp has made the tensors.
//
// The same as ggml's CPU buffer type, but for two things. Its memory is an anonymous mapping that asks for huge pages: loading takes a page fault
// per 2 MiB instead of one per 4 KiB, and matmuls miss the TLB less; where there are no huge pages it is plain memory. And while the model
// loads, it hides its tensors' names, so that llama.cpp reads none of them (as in backend/flash-buffer.h): model/resident-loader.h brings
// their bytes afterwards, in the order of the file and by several lanes.
//
// One object per model; it must outlive the model. Threads: as the model's loading.

#pragma once

#include "ggml-backend-impl.h"

#include <string>
#include <utility>
#include <vector>

namespace mkd {

class ResidentBufferType {
  public:
    using NamedTensor = std::pair<ggml_tensor *, std::string>;

    ResidentBufferType();
    ResidentBufferType(const ResidentBufferType &)             = delete;
    ResidentBufferType & operator=(const ResidentBufferType &) = delete;

    ggml_backend_buffer_type_t buft() { return &buft_; }

    // After loading: names are back, later tensors (a LoRA's) keep theirs. Returns the tensors that still need their bytes.
    std::vector<NamedTensor> restore_names();

  private:
    friend struct ResidentBufferCalls;
    ggml_backend_buffer_type buft_;
    std::vector<NamedTensor> tensors_;
    bool                     loading_ = true;
};

} // namespace mkd
