// backend/prefetcher.h: predicts the next layer's experts and has the worthwhile ones read ahead.
//
// Two predictors. router: the next layer's router applied to this layer's normalised input (the residual stream changes little from layer to
// layer), rescaled by the ratio of the two norms' weights. temporal: how often an expert was used lately, as the sum over its uses of
// kTemporalDecay^(tokens since): the previous token's experts first, then those that are hot. A prediction counts only if its expert is not in the
// cache. Which of them are read is decided by prefetch/admission.h; every mode pays by that rule, modes differ in what may be predicted.
//
// One instance per llama context; it learns from its own predictions. Threads: the context's, under PagedExperts' lock.

#pragma once

#include "backend/inner-backend.h"
#include "backend/paged-experts.h"
#include "prefetch/admission.h"

#include <vector>

namespace mkd {

class Prefetcher {
  public:
    // This layer's experts were chosen (used [n_expert]), before any is read.
    void observe(PagedExperts & experts, int i_layer, const std::vector<uint8_t> & used);
    // This layer's demand reads are on their way. input: what its experts are given, F32 [n_embd, 1, n_tokens].
    void plan(PagedExperts & experts, int i_layer, const ggml_tensor & input, int n_expert_used, InnerBackend & inner);

    // This layer's last demand read has arrived.
    void demand_done();

    const PrefetchAdmission & admission() const { return admission_; }

  private:
    static constexpr double  kTemporalDecay  = 0.8;
    static constexpr double  kMissesWeight   = 0.05;
    static constexpr double  kFewMisses      = 0.05; // per batch, on average: prediction would cost more than it can gain
    static constexpr int64_t kMaxTokens      = 32;   // of a large batch, the router is asked about so many

    struct Layer {
        std::vector<double>     score;    // of temporal, scaled
        double                  use = 1;  // what a use is worth now
        std::vector<Prediction> predicted;
        int                     victim = -1; // predicted to be unused
        double                  misses = 1;  // running mean per batch
    };

    void attach(PagedExperts & experts);
    void ask_router(PagedExperts & experts, int i_layer, const ggml_tensor & input, int n_expert_used, InnerBackend & inner);
    void ask_past(PagedExperts & experts, int i_layer, int n_expert_used);

    PagedExperts *       experts_ = nullptr; // whose layers these are
    std::vector<Layer>   layers_;
    PrefetchAdmission    admission_;
    int64_t              t_idle_us_ = 0; // since when the storage has had no demand
    bool                 decode_    = true;
    std::vector<uint8_t> keep_;
    std::vector<float>   input_, logits_, votes_;
    std::vector<int>     order_;
};

} // namespace mkd
