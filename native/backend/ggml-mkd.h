// backend/ggml-mkd.h: our ggml backend, in the shape of ggml's own.

#pragma once

#include "ggml-backend.h"

#ifdef __cplusplus
extern "C" {
#endif

// The registry entry with its one device, "MKD". Not registered with ggml until ggml_backend_mkd_register().
ggml_backend_reg_t ggml_backend_mkd_reg(void);

// Registers once; every llama_context made afterwards has the device. Throws mkd::Error(VERSION) if ggml's registry does not know it then.
void ggml_backend_mkd_register(void);

#ifdef __cplusplus
}

#include <exception>

namespace mkd {

// The error that made the last graph_compute on this thread fail, and forgets it. Null if there was none.
std::exception_ptr take_backend_error();

// The pool that expert matmuls use in every graph_compute on this thread from now on; null: ggml makes and ends one for each, where it was built
// without OpenMP. A thread-local, because a backend instance has no way back to the session whose context it belongs to.
void set_expert_threadpool(ggml_threadpool_t pool);

} // namespace mkd
#endif
