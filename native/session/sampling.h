// session/sampling.h: logits -> one token.
//
// The chain is llama.cpp's default one with the samplers that mkd_sampling offers, in its order: suppressed tokens, top-k, top-p, min-p, temperature,
// draw; greedy when temp <= 0. A grammar works as in llama.cpp's common code: the chain's token is kept if the grammar allows it, else
// the grammar filters all candidates and the chain draws again. So the same seed gives the same text as llama.cpp's own programs.
//
// Guarantees: the seed is always a number that can be given again (a random one is drawn here); a bad grammar or value is an Error, never an
// abort. What it does not do: penalties, DRY, XTC, mirostat.

#pragma once

#include "llama.h"
#include "mkd.h"

#include <memory>
#include <vector>

namespace mkd {

class Sampler {
  public:
    // Throws Error(ARG): a value is out of range, the grammar cannot be parsed.
    Sampler(const llama_vocab * vocab, const mkd_sampling & sampling);

    // Picks a token and accepts it. logits: [n_vocab]. Throws Error(LLAMA): no token is possible.
    llama_token sample(const float * logits);

    uint32_t seed() const { return seed_; }

  private:
    struct Deleter {
        void operator()(llama_sampler * sampler) const { llama_sampler_free(sampler); }
    };
    using SamplerPtr = std::unique_ptr<llama_sampler, Deleter>;

    void        add(llama_sampler * sampler); // takes it
    void        set_candidates(const float * logits);
    llama_token pick(bool with_grammar);

    int32_t                       n_vocab_;
    uint32_t                      seed_;
    SamplerPtr                    chain_;
    SamplerPtr                    grammar_; // null: none
    std::vector<llama_token_data> candidates_;
};

} // namespace mkd
