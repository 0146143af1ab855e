// c_api/params.cpp: see the header.

#include "c_api/params.h"

#include "base/error.h"
#include "c_api/guard.h"
#include "ggml.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>

namespace mkd {

namespace {

// What llama.cpp's own programs accept for -ctk and -ctv.
constexpr ggml_type kKvTypes[] = { GGML_TYPE_F32,  GGML_TYPE_F16,    GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0,
                                   GGML_TYPE_Q4_1, GGML_TYPE_IQ4_NL, GGML_TYPE_Q5_0, GGML_TYPE_Q5_1 };
constexpr int32_t   kMaxLanes  = 256;
constexpr uint64_t  kMaxChunk  = 1u << 30;

void check_range(const char * name, int32_t value, int32_t low, int32_t high) {
    if (value < low || value > high) {
        fail(MKD_ERR_ARG, "%s %d is out of range; expected %d..%d", name, value, low, high);
    }
}

void check_kv_type(const char * name, int32_t type) {
    if (type != -1 && std::find(std::begin(kKvTypes), std::end(kKvTypes), type) == std::end(kKvTypes)) {
        std::string names;
        for (const ggml_type kv_type : kKvTypes) {
            names += (names.empty() ? "" : ", ") + std::string(ggml_type_name(kv_type));
        }
        fail(MKD_ERR_ARG, "%s: ggml type %d is no type of a KV cache; expected one of %s", name, type, names.c_str());
    }
}

} // namespace

mkd_session_params default_session_params() {
    mkd_session_params params{};
    params.struct_bytes = sizeof(params);
    params.load         = MKD_LOAD_PAGED;
    params.n_ctx        = 4096;
    params.n_batch      = 2048;
    params.n_ubatch     = 512;
    params.n_seq_max    = 1;
    params.type_k       = -1;
    params.type_v       = -1;
    params.direct_io    = true;
#if !defined(__x86_64__) && !defined(__i386__)
    params.use_extra_bufts = true;
#endif
    params.swa_full   = true; // as llama_context_default_params: a new turn of a chat keeps its prefix
    params.verify     = MKD_VERIFY_FIRST;
    params.prefetch     = MKD_PREFETCH_AUTO;
    params.cache_policy = MKD_CACHE_LFU;
    params.lora_scale = 1.0f;
    return params;
}

void check_session_params(const mkd_session_params & params) {
    if (!params.path || !*params.path) {
        fail(MKD_ERR_ARG, "path is empty; expected a package folder or a GGUF file");
    }
    check_range("load", params.load, MKD_LOAD_PAGED, MKD_LOAD_NONE);
    check_range("cache_slots", params.cache_slots, 0, INT32_MAX);
    check_range("n_ctx", params.n_ctx, 0, INT32_MAX);
    check_range("n_batch", params.n_batch, 1, INT32_MAX);
    check_range("n_ubatch", params.n_ubatch, 1, INT32_MAX);
    check_range("n_seq_max", params.n_seq_max, 1, 256);
    check_range("n_outputs_max", params.n_outputs_max, 0, INT32_MAX);
    const int32_t n_outputs = params.n_outputs_max > 0 ? params.n_outputs_max : params.n_batch;
    if (n_outputs < params.n_seq_max) { // llama.cpp keeps a row of logits for every sequence
        fail(MKD_ERR_ARG, "%s %d is less than n_seq_max %d", params.n_outputs_max > 0 ? "n_outputs_max" : "n_batch", n_outputs, params.n_seq_max);
    }
    check_range("n_threads", params.n_threads, 0, GGML_MAX_N_THREADS);
    check_range("n_lanes", params.n_lanes, 0, kMaxLanes);
    if (params.io_chunk_bytes % MKD_ALIGN_BYTES != 0 || params.io_chunk_bytes > kMaxChunk) {
        fail(MKD_ERR_ARG, "io_chunk_bytes %llu: expected a multiple of %d up to %llu, or 0", (unsigned long long) params.io_chunk_bytes,
             MKD_ALIGN_BYTES, (unsigned long long) kMaxChunk);
    }
    check_range("io", params.io, MKD_IO_AUTO, MKD_IO_URING);
    check_range("prefetch", params.prefetch, MKD_PREFETCH_OFF, MKD_PREFETCH_AUTO);
    check_range("cache_policy", params.cache_policy, MKD_CACHE_LRU, MKD_CACHE_LFU);
    check_range("verify", params.verify, MKD_VERIFY_FIRST, MKD_VERIFY_OFF);
    check_kv_type("type_k", params.type_k);
    check_kv_type("type_v", params.type_v);
    if (!std::isfinite(params.lora_scale)) {
        fail(MKD_ERR_ARG, "lora_scale %g is not a finite number", (double) params.lora_scale);
    }
    if (params.load != MKD_LOAD_PAGED && (params.memory_budget_bytes != 0 || params.cache_slots != 0)) {
        fail(MKD_ERR_ARG, "%s: a memory budget or cache slots need a package; convert the model first", params.path);
    }
}

} // namespace mkd
