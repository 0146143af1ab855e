// session/sampling.cpp: see the header.

#include "session/sampling.h"

#include "base/error.h"
#include "base/llama-log.h"

#include <algorithm>
#include <cmath>
#include <random>

namespace mkd {

namespace {

constexpr int kMaxGrammarNesting = 1000; // llama.cpp's parser recurses; some 20,000 levels overflow the stack

// Counts brackets, those in literals too: a grammar that nears the bound is not one that a person wrote.
void check_nesting(const char * grammar) {
    int depth = 0;
    for (const char * c = grammar; *c; ++c) {
        depth += *c == '(' ? 1 : *c == ')' && depth > 0 ? -1 : 0;
        if (depth > kMaxGrammarNesting) {
            fail(MKD_ERR_ARG, "the grammar is nested too deep: more than %d brackets are open", kMaxGrammarNesting);
        }
    }
}

constexpr size_t kMinKeep = 0; // llama.cpp's default: filters may leave a single token

uint32_t random_seed() {
    std::random_device device;
    uint32_t           seed;
    do {
        seed = device();
    } while (seed == LLAMA_DEFAULT_SEED);
    return seed;
}

void check_ranges(const mkd_sampling & s) {
    if (!std::isfinite(s.temp)) {
        fail(MKD_ERR_ARG, "temp %g is not a finite number", (double) s.temp);
    }
    if (!(s.top_p >= 0.0f)) {
        fail(MKD_ERR_ARG, "top_p %g is out of range; expected 0..1 (1: off)", (double) s.top_p);
    }
    if (!(s.min_p <= 1.0f)) {
        fail(MKD_ERR_ARG, "min_p %g is out of range; expected 0..1 (0: off)", (double) s.min_p);
    }
}

bool is_possible(float logit) { return logit > -INFINITY; } // false for NaN too

} // namespace

Sampler::Sampler(const llama_vocab * vocab, const mkd_sampling & s) : n_vocab_(llama_vocab_n_tokens(vocab)) {
    check_ranges(s);
    seed_ = s.seed == LLAMA_DEFAULT_SEED ? random_seed() : s.seed;

    llama_sampler_chain_params params = llama_sampler_chain_default_params();
    params.no_perf                    = true;
    chain_.reset(llama_sampler_chain_init(params));

    int32_t                       n_suppressed = 0;
    const llama_token *           suppressed   = llama_vocab_get_suppress_tokens(vocab, &n_suppressed);
    std::vector<llama_logit_bias> biases;
    for (int32_t i = 0; i < n_suppressed; ++i) {
        biases.push_back({ suppressed[i], -INFINITY });
    }
    if (!biases.empty()) {
        add(llama_sampler_init_logit_bias(n_vocab_, (int32_t) biases.size(), biases.data()));
    }
    if (s.temp <= 0.0f) {
        add(llama_sampler_init_greedy());
    } else {
        if (s.top_k > 0) {
            add(llama_sampler_init_top_k(s.top_k));
        }
        if (s.top_p < 1.0f) {
            add(llama_sampler_init_top_p(s.top_p, kMinKeep));
        }
        if (s.min_p > 0.0f) {
            add(llama_sampler_init_min_p(s.min_p, kMinKeep));
        }
        add(llama_sampler_init_temp(s.temp));
        add(llama_sampler_init_dist(seed_));
    }
    if (s.grammar && *s.grammar) {
        if (llama_vocab_type(vocab) == LLAMA_VOCAB_TYPE_NONE) {
            fail(MKD_ERR_ARG, "a grammar needs a model with a vocabulary");
        }
        clear_llama_log();
        check_nesting(s.grammar);
        grammar_.reset(llama_sampler_init_grammar(vocab, s.grammar, "root"));
        if (!grammar_) {
            fail(MKD_ERR_ARG, "the grammar cannot be used (GBNF with a rule 'root' is expected): %s", last_llama_log().c_str());
        }
    }
    candidates_.reserve((size_t) n_vocab_);
}

void Sampler::add(llama_sampler * sampler) {
    if (!sampler) {
        fail(MKD_ERR_LLAMA, "llama.cpp cannot make a sampler: %s", last_llama_log().c_str());
    }
    llama_sampler_chain_add(chain_.get(), sampler);
}

void Sampler::set_candidates(const float * logits) {
    candidates_.resize((size_t) n_vocab_);
    for (llama_token id = 0; id < n_vocab_; ++id) {
        candidates_[(size_t) id] = { id, logits[id], 0.0f };
    }
}

llama_token Sampler::pick(bool with_grammar) {
    llama_token_data_array array = { candidates_.data(), candidates_.size(), -1, false };
    if (with_grammar) {
        llama_sampler_apply(grammar_.get(), &array);
    }
    const auto possible = [](const llama_token_data & candidate) { return is_possible(candidate.logit); };
    if (std::none_of(candidates_.begin(), candidates_.end(), possible)) {
        fail(MKD_ERR_LLAMA, with_grammar ? "the grammar allows no token of this vocabulary here" : "the model's logits are not numbers");
    }
    llama_sampler_apply(chain_.get(), &array);
    if (array.selected < 0 || (size_t) array.selected >= array.size || !is_possible(array.data[array.selected].logit)) {
        fail(MKD_ERR_LLAMA, "no token can be drawn from the model's logits");
    }
    return array.data[array.selected].id;
}

llama_token Sampler::sample(const float * logits) {
    set_candidates(logits);
    llama_token id = pick(false);
    if (grammar_) {
        llama_token_data       single = { id, 1.0f, 0.0f };
        llama_token_data_array array  = { &single, 1, -1, false };
        llama_sampler_apply(grammar_.get(), &array);
        if (!is_possible(single.logit)) {
            set_candidates(logits);
            id = pick(true);
        }
        llama_sampler_accept(grammar_.get(), id);
    }
    llama_sampler_accept(chain_.get(), id);
    return id;
}

} // namespace mkd
