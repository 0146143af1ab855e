// backend/inner-backend.h: ggml's CPU backend, for a few nodes at a time.
//
// The expert device computes by handing small graphs to it. Threads: one at a time (the context's).

#pragma once

#include "ggml-backend.h"
#include "ggml.h"

#include <vector>

namespace mkd {

class InnerBackend {
  public:
    static constexpr size_t kMaxNodes = 16;

    InnerBackend(); // throws Error(LLAMA)
    ~InnerBackend();
    InnerBackend(const InnerBackend &)             = delete;
    InnerBackend & operator=(const InnerBackend &) = delete;

    void set_n_threads(int n_threads);
    void set_abort_callback(ggml_abort_callback callback, void * data);
    void set_threadpool(ggml_threadpool_t pool); // null: ggml's own choice. Must outlive the last run

    ggml_status run(std::vector<ggml_tensor> & nodes); // in order; at most kMaxNodes

  private:
    ggml_backend_t    cpu_   = nullptr;
    ggml_threadpool_t pool_  = nullptr;
    ggml_context *    ctx_   = nullptr; // holds graph_ only
    ggml_cgraph *     graph_ = nullptr;
};

// A contiguous tensor over data.
ggml_tensor make_tensor(ggml_type type, int64_t ne0, int64_t ne1, int64_t ne2, void * data);
void        set_contiguous(ggml_tensor & tensor); // strides from ne and type

} // namespace mkd
