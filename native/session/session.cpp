// session/session.cpp: see the header.

#include "session/session.h"

#include "base/clock.h"

#include <algorithm>

namespace mkd {

Session::Session(std::unique_ptr<Engine> engine, int32_t n_outputs_max)
    : engine_(std::move(engine)), n_outputs_max_(n_outputs_max > 0 ? n_outputs_max : engine_->model_info().n_batch) {}

int32_t Session::n_ctx_seq() const { return (int32_t) llama_n_ctx_seq(engine_->ctx()); }

// ---------------------------------------------------------------- checks

void Session::check_ids(const int32_t * ids, int32_t n_tokens) const {
    if (!ids || n_tokens < 1) {
        fail(MKD_ERR_ARG, "no tokens were given");
    }
    const int32_t n_vocab = engine_->model_info().n_vocab;
    for (int32_t i = 0; i < n_tokens; ++i) {
        if (ids[i] < 0 || ids[i] >= n_vocab) {
            fail(MKD_ERR_ARG, "token %d has id %d; expected 0..%d", i, ids[i], n_vocab - 1);
        }
    }
}

void Session::check_seq_id(int32_t seq_id) const {
    const int32_t n_seq_max = engine_->model_info().n_seq_max;
    if (seq_id < 0 || seq_id >= n_seq_max) {
        fail(MKD_ERR_ARG, "sequence %d is out of range; expected 0..%d (n_seq_max)", seq_id, n_seq_max - 1);
    }
}

void Session::check_batch(const BatchView & batch) const {
    const mkd_model_info & info = engine_->model_info();
    if (batch.n_tokens > info.n_batch) { // before anything of the arrays is read
        fail(MKD_ERR_ARG, "a batch of %d tokens; at most %d (n_batch)", batch.n_tokens, info.n_batch);
    }
    check_ids(batch.ids, batch.n_tokens);
    int32_t n_outputs = batch.output ? 0 : 1;
    for (int32_t i = 0; i < batch.n_tokens; ++i) {
        if (batch.seq_id) {
            check_seq_id(batch.seq_id[i]);
        }
        if (batch.pos && batch.pos[i] < 0) {
            fail(MKD_ERR_ARG, "token %d has position %d; expected 0 or more", i, batch.pos[i]);
        }
        n_outputs += batch.output && batch.output[i] ? 1 : 0;
    }
    if (n_outputs > n_outputs_max_) {
        fail(MKD_ERR_ARG, "%d tokens ask for logits; at most %d (n_outputs_max)", n_outputs, n_outputs_max_);
    }
}

// ---------------------------------------------------------------- decode

void Session::decode(const BatchView & batch) {
    check_batch(batch);
    if (engine_->interrupted()) {
        engine_->clear_interrupt();
        fail(MKD_ERR_INTERRUPTED, "interrupted");
    }
    const size_t               n = (size_t) batch.n_tokens;
    std::vector<llama_token>   ids(batch.ids, batch.ids + n); // llama_batch is not const
    std::vector<llama_pos>     pos;
    std::vector<llama_seq_id>  seq_ids;
    std::vector<llama_seq_id*> seq_id_rows;
    std::vector<int32_t>       n_seq_ids;
    std::vector<int8_t>        outputs;
    llama_batch                llama = {};
    llama.n_tokens                   = batch.n_tokens;
    llama.token                      = ids.data();
    if (batch.pos) {
        pos.assign(batch.pos, batch.pos + n);
        llama.pos = pos.data();
    }
    if (batch.seq_id) {
        seq_ids.assign(batch.seq_id, batch.seq_id + n);
        n_seq_ids.assign(n, 1);
        for (llama_seq_id & seq_id : seq_ids) {
            seq_id_rows.push_back(&seq_id);
        }
        llama.seq_id   = seq_id_rows.data();
        llama.n_seq_id = n_seq_ids.data();
    }
    if (batch.output) {
        outputs.assign(batch.output, batch.output + n);
        llama.logits = outputs.data();
    }
    try {
        engine_->decode(llama);
        llama_synchronize(engine_->ctx());
    } catch (...) {
        if (n_past() != (int32_t) history_.size() && history_known_) {
            empty_sequence_0(); // a cache that could not take the batch back
        }
        throw;
    }
    remember(batch);
}

void Session::remember(const BatchView & batch) {
    for (int32_t i = 0; i < batch.n_tokens; ++i) {
        if (batch.seq_id && batch.seq_id[i] != 0) {
            continue;
        }
        history_known_ = history_known_ && (!batch.pos || batch.pos[i] == (int32_t) history_.size());
        history_.push_back(batch.ids[i]);
    }
}

void Session::decode_prompt(const int32_t * ids, int32_t n_tokens) {
    const int32_t n_batch = engine_->model_info().n_batch;
    for (int32_t i = 0; i < n_tokens; i += n_batch) {
        BatchView batch;
        batch.ids      = ids + i;
        batch.n_tokens = std::min(n_batch, n_tokens - i);
        decode(batch);
    }
}

void Session::decode_each(const int32_t * ids, int32_t n_tokens, int64_t * itl_us) {
    check_ids(ids, n_tokens);
    if (n_tokens > n_ctx_seq() - n_past()) {
        fail(MKD_ERR_CONTEXT, "%d tokens after %d do not fit into the context of %d; raise -c", n_tokens, n_past(), n_ctx_seq());
    }
    for (int32_t i = 0; i < n_tokens; ++i) {
        const int64_t t_start = now_us();
        BatchView     batch;
        batch.ids      = ids + i;
        batch.n_tokens = 1;
        decode(batch);
        itl_us[i] = now_us() - t_start;
    }
}

// ---------------------------------------------------------------- memory

void Session::empty_sequence_0() {
    llama_memory_seq_rm(llama_get_memory(engine_->ctx()), 0, -1, -1); // removing a whole sequence never fails
    history_.clear();
    history_known_ = true;
}

int32_t Session::keep_prefix(const int32_t * ids, int32_t n_tokens) {
    if (!history_known_ || n_past() != (int32_t) history_.size()) {
        empty_sequence_0();
        return 0;
    }
    const int32_t n_max = std::min((int32_t) history_.size(), n_tokens - 1);
    int32_t       n     = 0;
    while (n < n_max && history_[(size_t) n] == ids[n]) {
        ++n;
    }
    if (n == (int32_t) history_.size()) {
        return n;
    }
    // The token at position n looks back over the window; what a small sliding-window cache has dropped does not come back.
    const llama_memory_t memory  = llama_get_memory(engine_->ctx());
    const int32_t        n_swa   = llama_model_n_swa(engine_->model());
    const bool           dropped = n_swa > 0 && llama_memory_seq_pos_min(memory, 0) > std::max(0, n - n_swa);
    if (n == 0 || dropped || !llama_memory_seq_rm(memory, 0, n, -1)) {
        empty_sequence_0();
        return 0;
    }
    history_.resize((size_t) n);
    return n;
}

void Session::memory_remove(int32_t seq_id, int32_t p0, int32_t p1) {
    if (seq_id != -1) {
        check_seq_id(seq_id);
    }
    if (p0 < 0 || p1 < -1) {
        fail(MKD_ERR_ARG, "positions [%d, %d) are out of range; expected 0 or more, the end may be -1", p0, p1);
    }
    const llama_memory_t memory = llama_get_memory(engine_->ctx());
    if (seq_id == -1 && p0 == 0 && p1 == -1) {
        llama_memory_clear(memory, false);
    } else if (!llama_memory_seq_rm(memory, seq_id, p0, p1)) {
        fail(MKD_ERR_UNSUPPORTED, "this model's cache cannot remove positions [%d, %d) of sequence %d; remove the whole sequence", p0, p1, seq_id);
    }
    if (seq_id > 0) {
        return;
    }
    const int32_t n = (int32_t) history_.size();
    if (p0 == 0 && (p1 == -1 || n_past() == 0)) {
        history_.clear();
        history_known_ = true;
    } else if (p1 == -1 || p1 >= n) {
        history_.resize((size_t) std::min(n, p0));
    } else {
        history_known_ = history_known_ && (p0 >= n || p0 >= p1); // a hole
    }
}

int32_t Session::memory_pos_max(int32_t seq_id) const {
    check_seq_id(seq_id);
    return llama_memory_seq_pos_max(llama_get_memory(engine_->ctx()), seq_id);
}

} // namespace mkd
