// c_api/mkd-session.cpp: sessions of mkd.h, over session/ and model/.
//
// Every call checks its pointers, runs inside guarded() and does nothing else: the work and its rules are in session/.

#include "backend/paged-experts.h"
#include "c_api/guard.h"
#include "c_api/params.h"
#include "mkd.h"
#include "session/generate.h"
#include "session/session.h"

#include <climits>

using mkd::fail;
using mkd::guarded;
using mkd::guarded_value;
using mkd::require;
using mkd::require_struct;

struct mkd_session {
    mkd::Session session;
};

namespace {

mkd::Session & of(mkd_session_t handle) { return require(handle, "session")->session; }

// The vocabulary, if there is one: llama.cpp aborts when asked for text without.
const llama_vocab * vocab_of(mkd_session_t handle) {
    const llama_vocab * vocab = of(handle).engine().vocab();
    if (llama_vocab_type(vocab) == LLAMA_VOCAB_TYPE_NONE) {
        fail(MKD_ERR_UNSUPPORTED, "the model has no vocabulary");
    }
    return vocab;
}

bool is_token(mkd_session_t handle, int32_t id) { return id >= 0 && id < of(handle).engine().model_info().n_vocab; }

} // namespace

extern "C" {

struct mkd_session_params mkd_session_default_params(void) { return mkd::default_session_params(); }

enum mkd_status mkd_session_init(const struct mkd_session_params * params, mkd_session_t * out) {
    return guarded([&] {
        *require(out, "out") = nullptr;
        mkd::check_session_params(require_struct(params, "mkd_session_params"));
        *out = new mkd_session{ mkd::Session(mkd::Engine::open(*params), params->n_outputs_max) };
    });
}

void mkd_session_free(mkd_session_t session) { delete session; }

void mkd_session_interrupt(mkd_session_t session) { // a signal handler may be here: nothing but the flag
    if (session) {
        session->session.engine().interrupt();
    }
}

// ---------------------------------------------------------------- what was loaded

enum mkd_status mkd_session_model_info(mkd_session_t session, struct mkd_model_info * out) {
    return guarded([&] { *require(out, "out") = of(session).engine().model_info(); });
}

enum mkd_status mkd_session_memory_info(mkd_session_t session, struct mkd_memory_info * out) {
    return guarded([&] { *require(out, "out") = of(session).engine().memory_info(); });
}

enum mkd_status mkd_session_load_info(mkd_session_t session, struct mkd_load_info * out) {
    return guarded([&] { *require(out, "out") = of(session).engine().load_info(); });
}

int32_t mkd_session_meta(mkd_session_t session, const char * key, char * buf, size_t buf_bytes) {
    return guarded_value<int32_t>(-1, [&] {
        return llama_model_meta_val_str(of(session).engine().model(), require(key, "key"), buf, buf ? buf_bytes : 0);
    });
}

// ---------------------------------------------------------------- tokens

int32_t mkd_tokenize(mkd_session_t session, const char * text, int32_t text_bytes, int32_t * ids, int32_t max, bool add_special, bool parse_special) {
    return guarded_value<int32_t>(INT32_MIN, [&] {
        if (text_bytes < 0 || max < 0) {
            fail(MKD_ERR_ARG, "text_bytes %d, max %d: expected 0 or more", text_bytes, max);
        }
        return llama_tokenize(vocab_of(session), require(text, "text"), text_bytes, max > 0 ? require(ids, "ids") : nullptr, max, add_special,
                              parse_special);
    });
}

int32_t mkd_token_to_piece(mkd_session_t session, int32_t id, char * buf, int32_t buf_bytes, bool special) {
    return guarded_value<int32_t>(INT32_MIN, [&] {
        const llama_vocab * vocab = vocab_of(session);
        if (!is_token(session, id) || buf_bytes < 0) {
            fail(MKD_ERR_ARG, "id %d, buf_bytes %d: out of range", id, buf_bytes);
        }
        return llama_token_to_piece(vocab, id, buf_bytes > 0 ? require(buf, "buf") : nullptr, buf_bytes, 0, special);
    });
}

bool mkd_token_is_eog(mkd_session_t session, int32_t id) {
    return guarded_value<bool>(false, [&] { return is_token(session, id) && llama_vocab_is_eog(vocab_of(session), id); });
}

// ---------------------------------------------------------------- decode

enum mkd_status mkd_decode(mkd_session_t session, const int32_t * ids, int32_t n_tokens, const int32_t * pos, const int32_t * seq_id,
                           const int8_t * output) {
    return guarded([&] {
        mkd::BatchView batch;
        batch.ids      = ids;
        batch.n_tokens = n_tokens;
        batch.pos      = pos;
        batch.seq_id   = seq_id;
        batch.output   = output;
        of(session).decode(batch);
    });
}

const float * mkd_logits(mkd_session_t session, int32_t i_token) {
    return guarded_value<const float *>(nullptr, [&] { return llama_get_logits_ith(of(session).engine().ctx(), i_token); });
}

enum mkd_status mkd_memory_remove(mkd_session_t session, int32_t seq_id, int32_t p0, int32_t p1) {
    return guarded([&] { of(session).memory_remove(seq_id, p0, p1); });
}

int32_t mkd_memory_pos_max(mkd_session_t session, int32_t seq_id) {
    return guarded_value<int32_t>(-1, [&] { return of(session).memory_pos_max(seq_id); });
}

// ---------------------------------------------------------------- generate

struct mkd_sampling mkd_sampling_default(void) {
    mkd_sampling sampling{};
    sampling.struct_bytes = sizeof(sampling);
    sampling.seed         = LLAMA_DEFAULT_SEED;
    sampling.temp         = 0.8f;
    sampling.top_k        = 40;
    sampling.top_p        = 0.95f;
    sampling.min_p        = 0.05f;
    return sampling;
}

enum mkd_status mkd_generate(mkd_session_t session, const int32_t * prompt, int32_t n_prompt, int32_t n_predict,
                             const struct mkd_sampling * sampling, const char * const * stops, int32_t n_stops, mkd_token_callback on_token,
                             void * user, struct mkd_generated * out) {
    return guarded([&] {
        *require(out, "out") = mkd_generated{};
        mkd::GenerateRequest request;
        request.prompt    = prompt;
        request.n_prompt  = n_prompt;
        request.n_predict = n_predict;
        request.sampling  = require_struct(sampling, "mkd_sampling");
        request.on_token  = on_token;
        request.user      = user;
        for (int32_t i = 0; i < n_stops; ++i) {
            request.stops.emplace_back(require(require(stops, "stops")[i], "a stop string"));
        }
        *out = mkd::generate(of(session), request);
    });
}

enum mkd_status mkd_decode_each(mkd_session_t session, const int32_t * ids, int32_t n_tokens, int64_t * itl_us) {
    return guarded([&] { of(session).decode_each(ids, n_tokens, require(itl_us, "itl_us")); });
}

// ---------------------------------------------------------------- experts

// A stock GGUF has no experts of ours: its counters are zero, and there is nothing to clear.

enum mkd_status mkd_stats_get(mkd_session_t session, struct mkd_stats * out) {
    return guarded([&] {
        const mkd::PagedExperts * experts = of(session).engine().experts();
        *require(out, "out")              = experts ? experts->stats() : mkd_stats{};
    });
}

enum mkd_status mkd_stats_reset(mkd_session_t session) {
    return guarded([&] {
        if (mkd::PagedExperts * experts = of(session).engine().experts()) {
            experts->reset_stats();
        }
    });
}

enum mkd_status mkd_cache_clear(mkd_session_t session) {
    return guarded([&] {
        if (mkd::PagedExperts * experts = of(session).engine().experts()) {
            experts->clear();
        }
    });
}

enum mkd_status mkd_cache_set_cold(mkd_session_t session, bool cold) {
    return guarded([&] {
        mkd::PagedExperts * experts = of(session).engine().experts();
        if (experts) {
            experts->set_cold(cold);
        } else if (cold) {
            fail(MKD_ERR_UNSUPPORTED, "a stock GGUF has no expert cache that could be kept cold; convert it to a package");
        }
    });
}

enum mkd_status mkd_session_set_hooks(mkd_session_t session, const struct mkd_hooks * hooks) {
    return guarded([&] {
        const mkd_hooks     wanted  = hooks ? require_struct(hooks, "mkd_hooks") : mkd_hooks{};
        mkd::PagedExperts * experts = of(session).engine().experts();
        if (experts) {
            experts->set_hooks(wanted);
        } else if (wanted.on_route || wanted.on_load || wanted.on_evict) {
            fail(MKD_ERR_UNSUPPORTED, "a stock GGUF has no expert cache and calls no hooks; convert it to a package");
        }
    });
}

} // extern "C"
