// c_api/mkd.cpp: status, version, store and iobench of mkd.h. Sessions are in c_api/mkd-session.cpp,
// replays in c_api/mkd-replay.cpp.

#include "c_api/guard.h"
#include "io/iobench.h"
#include "llama.h"
#include "mkd.h"
#include "store/expert-store.h"

#include <cstdio>

#if !defined(MKD_VERSION)
#    define MKD_VERSION "0.1.0"
#endif
#if !defined(MKD_REVISION)
#    define MKD_REVISION "unknown"
#endif

// ---------------------------------------------------------------- last error

namespace mkd {

namespace {

thread_local std::string t_last_error;

} // namespace

void clear_last_error() noexcept { t_last_error.clear(); }

void set_last_error(const char * text) noexcept {
    try {
        t_last_error = text;
        for (char & c : t_last_error) {
            c = c == '\n' || c == '\r' ? ' ' : c;
        }
        t_last_error.erase(t_last_error.find_last_not_of(' ') + 1);
    } catch (...) {
        t_last_error.clear(); // no memory for the text; the status still says what happened
    }
}

const char * last_error() noexcept { return t_last_error.c_str(); }

} // namespace mkd

using mkd::fail;
using mkd::guarded;
using mkd::guarded_value;
using mkd::require;
using mkd::require_struct;

extern "C" {

const char * mkd_last_error(void) { return mkd::last_error(); }

const char * mkd_status_name(enum mkd_status status) {
    switch (status) {
        case MKD_OK:              return "MKD_OK";
        case MKD_ERR_ARG:         return "MKD_ERR_ARG";
        case MKD_ERR_IO:          return "MKD_ERR_IO";
        case MKD_ERR_FORMAT:      return "MKD_ERR_FORMAT";
        case MKD_ERR_CORRUPT:     return "MKD_ERR_CORRUPT";
        case MKD_ERR_BUDGET:      return "MKD_ERR_BUDGET";
        case MKD_ERR_NOMEM:       return "MKD_ERR_NOMEM";
        case MKD_ERR_LLAMA:       return "MKD_ERR_LLAMA";
        case MKD_ERR_INTERRUPTED: return "MKD_ERR_INTERRUPTED";
        case MKD_ERR_UNSUPPORTED: return "MKD_ERR_UNSUPPORTED";
        case MKD_ERR_CONTEXT:     return "MKD_ERR_CONTEXT";
        case MKD_ERR_VERSION:     return "MKD_ERR_VERSION";
    }
    return "MKD_ERR_?";
}

// ---------------------------------------------------------------- version

int32_t      mkd_abi_version(void) { return MKD_ABI_VERSION; }
const char * mkd_version(void) { return MKD_VERSION; }
const char * mkd_revision(void) { return MKD_REVISION; }
const char * mkd_llama_version(void) { return llama_version(); }

// ---------------------------------------------------------------- store

struct mkd_store {
    std::unique_ptr<mkd::ExpertStore> experts;
};

enum mkd_status mkd_store_init(const char * package, mkd_store_t * out) {
    return guarded([&] {
        *require(out, "out") = nullptr;
        mkd::StoreOptions options;
        options.verify = MKD_VERIFY_ALWAYS;
        *out = new mkd_store{ mkd::ExpertStore::open(mkd::PackageIndex::open(require(package, "package")), options) };
    });
}

void mkd_store_free(mkd_store_t store) { delete store; }

int32_t mkd_store_n_expert(mkd_store_t store, int32_t layer) {
    return guarded_value<int32_t>(0, [&] { return require(store, "store")->experts->n_expert(layer); });
}

uint64_t mkd_store_expert_stride_bytes(mkd_store_t store, int32_t layer) {
    return guarded_value<uint64_t>(0, [&] { return require(store, "store")->experts->stride_bytes(layer); });
}

enum mkd_status mkd_store_read(mkd_store_t store, int32_t layer, int32_t expert, void * dst, uint64_t dst_bytes) {
    return guarded([&] {
        require(dst, "dst");
        mkd::ExpertStore & experts = *require(store, "store")->experts;
        if (dst_bytes < experts.stride_bytes(layer)) {
            fail(MKD_ERR_ARG, "dst has %llu bytes; an expert of layer %d needs %llu", (unsigned long long) dst_bytes, layer,
                 (unsigned long long) experts.stride_bytes(layer));
        }
        experts.read_expert(layer, expert, dst);
    });
}

// ---------------------------------------------------------------- iobench

enum mkd_status mkd_iobench(const struct mkd_iobench_params * params, struct mkd_iobench_result * out) {
    return guarded([&] {
        require(require_struct(params, "mkd_iobench_params").path, "path");
        std::string note;
        *require(out, "out") = mkd::run_iobench(*params, &note);
        snprintf(out->note, sizeof out->note, "%s", note.c_str());
    });
}

} // extern "C"
