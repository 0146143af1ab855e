// session/session.h: an engine and what its KV cache holds.
//
// Everything that decodes goes through here, so that the tokens of sequence 0 are always known: a new prompt keeps the longest prefix that is
// already in the cache. Where they are not known (a caller placed its own positions) or the cache cannot drop a tail (recurrent models, a sliding
// window that has moved on), the sequence is emptied instead: slower, never wrong.
//
// All arguments are checked before llama.cpp sees them: some of its own checks abort the process.
//
// Threads: one at a time, as the engine.

#pragma once

#include "model/engine.h"

#include <memory>
#include <vector>

namespace mkd {

// One llama_decode, as mkd_decode's arguments.
struct BatchView {
    const int32_t * ids      = nullptr;
    int32_t         n_tokens = 0;
    const int32_t * pos      = nullptr; // null: continue each sequence
    const int32_t * seq_id   = nullptr; // null: all 0
    const int8_t *  output   = nullptr; // null: the last token only
};

class Session {
  public:
    // n_outputs_max as in mkd_session_params: 0: n_batch
    Session(std::unique_ptr<Engine> engine, int32_t n_outputs_max);

    Engine &       engine() { return *engine_; }
    const Engine & engine() const { return *engine_; }

    // Throws Error: ARG, INTERRUPTED (before or while decoding), CONTEXT, and what the engine throws. Then none of the batch stays in the cache.
    void decode(const BatchView & batch);

    // Continues sequence 0 in chunks of n_batch; only the last token gets logits. Chunks that were decoded before an error stay.
    void decode_prompt(const int32_t * ids, int32_t n_tokens);

    // Continues sequence 0 one token at a time; itl_us [n_tokens]. Throws Error as decode.
    void decode_each(const int32_t * ids, int32_t n_tokens, int64_t * itl_us);

    // Makes sequence 0 a prefix of ids, the longest that is in the cache but at most n_tokens - 1 (the last one is always decoded again: its
    // logits are needed). Returns its length.
    int32_t keep_prefix(const int32_t * ids, int32_t n_tokens);

    // Positions [p0, p1) of seq_id (-1: all; p1 -1: to the end). Throws Error(ARG); Error(UNSUPPORTED) if this cache cannot do that.
    void    memory_remove(int32_t seq_id, int32_t p0, int32_t p1);
    int32_t memory_pos_max(int32_t seq_id) const; // -1: empty. Throws Error(ARG)

    int32_t n_past() const { return memory_pos_max(0) + 1; } // tokens of sequence 0
    int32_t n_ctx_seq() const;                               // most that one sequence can hold

    void check_ids(const int32_t * ids, int32_t n_tokens) const; // throws Error(ARG)

  private:
    void check_batch(const BatchView & batch) const;
    void check_seq_id(int32_t seq_id) const;
    void empty_sequence_0();
    void remember(const BatchView & batch);

    std::unique_ptr<Engine> engine_;
    int32_t                 n_outputs_max_;
    std::vector<int32_t>    history_;              // tokens of sequence 0 by position
    bool                    history_known_ = true; // history_ is what the cache holds
};

} // namespace mkd
