// backend/flash-buffer.h: the buffer type of routed experts, which holds no bytes.
//
// llama.cpp allocates the merged expert tensors (blk.L.ffn_*_exps.weight) in a buffer of this type, because tensor_buft_overrides says so. The buffer
// hands out addresses that nobody may read, remembers which tensor is which layer and role, and hides the tensors' names while the model loads:
// the loader skips a tensor whose name it does not find in the file, so nothing of a routed range is read. restore_names() puts them back.
//
// One buffer type object per model; its context is the model's PagedExperts. Threads: as the model's loading.

#pragma once

#include "backend/paged-experts.h"
#include "ggml-backend-impl.h"

#include <memory>
#include <string>
#include <vector>

namespace mkd {

// What the expert matmul finds in tensor->extra.
struct FlashTensor {
    PagedExperts * experts = nullptr;
    int            i_layer = -1;
    int            i_part  = -1;
    ggml_tensor *  tensor  = nullptr;
    std::string    name;
};

class FlashBufferType {
  public:
    explicit FlashBufferType(PagedExperts & experts);

    ggml_backend_buffer_type_t buft() { return &buft_; }
    // After loading. Returns how many tensors of the package were bound.
    size_t restore_names();
    // Why init_tensor refused a tensor; empty if none was.
    const std::string & problem() const { return problem_; }

    static bool is_flash(ggml_backend_buffer_type_t buft);

  private:
    friend struct FlashBufferCalls;
    ggml_backend_buffer_type                  buft_;
    PagedExperts &                            experts_;
    std::vector<std::unique_ptr<FlashTensor>> tensors_;
    std::string                               problem_;
};

// Null if src is not a routed expert tensor of ours.
const FlashTensor * flash_tensor(const ggml_tensor * tensor);

} // namespace mkd
