// session/generate.cpp: see the header.

#include "session/generate.h"

#include "base/clock.h"
#include "session/sampling.h"
#include "session/text-stream.h"

namespace mkd {

namespace {

// An interrupt that comes too late for this answer must not stop the next one.
class InterruptScope {
  public:
    explicit InterruptScope(Engine & engine) : engine_(engine) {}
    ~InterruptScope() { engine_.clear_interrupt(); }
    InterruptScope(const InterruptScope &)             = delete;
    InterruptScope & operator=(const InterruptScope &) = delete;

  private:
    Engine & engine_;
};

void check(const Session & session, const GenerateRequest & request) {
    if (request.n_prompt > session.n_ctx_seq()) {
        fail(MKD_ERR_CONTEXT, "the prompt has %d tokens, the context holds %d; raise -c", request.n_prompt, session.n_ctx_seq());
    }
    session.check_ids(request.prompt, request.n_prompt);
    if (request.n_predict < -1) {
        fail(MKD_ERR_ARG, "n_predict %d is out of range; expected 0 or more, or -1 for no bound", request.n_predict);
    }
    for (const std::string & stop : request.stops) {
        if (!is_valid_utf8(stop)) {
            fail(MKD_ERR_ARG, "a stop string is not valid UTF-8");
        }
    }
}

class Generation {
  public:
    Generation(Session & session, const GenerateRequest & request)
        : session_(session), request_(request), vocab_(session.engine().vocab()), has_text_(llama_vocab_type(vocab_) != LLAMA_VOCAB_TYPE_NONE),
          sampler_(vocab_, request.sampling), text_(request.stops) {
        result_.seed = sampler_.seed();
    }

    mkd_generated run() {
        const int64_t t_start = now_us();
        result_.stop          = prompt() ? MKD_STOP_LENGTH : MKD_STOP_INTERRUPTED;
        const int64_t t_prompt = now_us();
        result_.prompt_us      = t_prompt - t_start;
        if (result_.stop == MKD_STOP_LENGTH && request_.n_predict != 0) {
            t_last_           = t_prompt;
            result_.stop      = tokens();
            result_.generate_us = t_last_ - t_prompt;
        }
        return result_;
    }

  private:
    // False: interrupted.
    bool prompt() {
        result_.n_cached = session_.keep_prefix(request_.prompt, request_.n_prompt);
        try {
            session_.decode_prompt(request_.prompt + result_.n_cached, request_.n_prompt - result_.n_cached);
        } catch (const Error & error) {
            if (error.status() != MKD_ERR_INTERRUPTED) {
                throw;
            }
        }
        result_.n_prompt = session_.n_past() - result_.n_cached;
        return session_.n_past() == request_.n_prompt;
    }

    mkd_stop tokens() {
        for (;;) {
            const llama_token id = sampler_.sample(llama_get_logits_ith(session_.engine().ctx(), -1));
            t_last_              = now_us();
            if (has_text_ && llama_vocab_is_eog(vocab_, id)) {
                return finish(MKD_STOP_EOG);
            }
            ++result_.n_generated;
            std::string text    = piece_text(id);
            const bool  stopped = text_.stopped();
            const bool  is_last = result_.n_generated == request_.n_predict;
            const bool  is_full = session_.n_past() >= session_.n_ctx_seq();
            if (!stopped && (is_last || is_full)) {
                text += text_.finish();
            }
            if (!show(id, text)) {
                return MKD_STOP_INTERRUPTED;
            }
            if (stopped || is_last || is_full) {
                return stopped ? MKD_STOP_STRING : is_last ? MKD_STOP_LENGTH : MKD_STOP_CONTEXT;
            }
            const mkd_stop stop = decode(id);
            if (stop != MKD_STOP_LENGTH) {
                return finish(stop);
            }
        }
    }

    // MKD_STOP_LENGTH: go on.
    mkd_stop decode(llama_token id) {
        BatchView batch;
        batch.ids      = &id;
        batch.n_tokens = 1;
        try {
            session_.decode(batch);
        } catch (const Error & error) {
            if (error.status() == MKD_ERR_INTERRUPTED) {
                return MKD_STOP_INTERRUPTED;
            }
            if (error.status() == MKD_ERR_CONTEXT) { // other sequences share the cache
                return MKD_STOP_CONTEXT;
            }
            throw;
        }
        return MKD_STOP_LENGTH;
    }

    std::string piece_text(llama_token id) {
        if (!has_text_) {
            return ""; // llama.cpp aborts when asked
        }
        std::string piece(64, '\0');
        int32_t     n = llama_token_to_piece(vocab_, id, piece.data(), (int32_t) piece.size(), 0, false);
        if (n < 0) {
            piece.resize((size_t) -n);
            n = llama_token_to_piece(vocab_, id, piece.data(), (int32_t) piece.size(), 0, false);
        }
        return text_.feed(piece.data(), n > 0 ? (size_t) n : 0);
    }

    bool show(int32_t id, const std::string & text) const {
        return !request_.on_token || request_.on_token(id, text.c_str(), text.size(), t_last_, request_.user);
    }

    // Text held back as a possible stop string belongs to the answer after all; no token is left to bring it.
    mkd_stop finish(mkd_stop stop) {
        const std::string rest = text_.finish();
        if (!rest.empty()) {
            show(-1, rest);
        }
        return stop;
    }

    Session &               session_;
    const GenerateRequest & request_;
    const llama_vocab *     vocab_;
    const bool              has_text_; // false: a model without a tokenizer, ids only
    Sampler                 sampler_;
    TextStream              text_;
    mkd_generated           result_{};
    int64_t                 t_last_ = 0;
};

} // namespace

mkd_generated generate(Session & session, const GenerateRequest & request) {
    const InterruptScope scope(session.engine());
    check(session, request);
    return Generation(session, request).run();
}

} // namespace mkd
