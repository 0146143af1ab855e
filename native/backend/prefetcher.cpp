#include "backend/prefetcher.h"

#include "base/clock.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace mkd {

void Prefetcher::attach(PagedExperts & experts) {
    if (experts_ == &experts) {
        return;
    }
    experts_ = &experts;
    layers_.assign((size_t) experts.n_layers(), Layer{});
    for (int i = 0; i < experts.n_layers(); ++i) {
        layers_[(size_t) i].score.assign((size_t) experts.layer(i).n_expert(), 0);
    }
}

void Prefetcher::observe(PagedExperts & experts, int i_layer, const std::vector<uint8_t> & used) {
    attach(experts);
    experts.harvest();
    experts.settle_prefetches(i_layer, used);
    if (experts.prefetch_mode() == PrefetchMode::off) {
        return;
    }
    Layer & layer = layers_[(size_t) i_layer];
    for (const Prediction & prediction : layer.predicted) {
        admission_.saw_prediction(prediction, used[(size_t) prediction.expert]);
    }
    layer.predicted.clear();
    if (layer.victim >= 0) {
        admission_.saw_victim(used[(size_t) layer.victim]);
        layer.victim = -1;
    }
    const ReadMeter meter = experts.reads().meter();
    admission_.saw_reads(meter.bytes, meter.busy_us);

    int n_misses = 0;
    layer.use /= kTemporalDecay;
    for (size_t e = 0; e < used.size(); ++e) {
        if (used[e]) {
            layer.score[e] += layer.use;
            n_misses += experts.present(i_layer, (int) e) != experts.layer(i_layer).all_parts();
        }
    }
    if (layer.use > 1e100) {
        for (double & score : layer.score) {
            score /= layer.use;
        }
        layer.use = 1;
    }
    layer.misses += kMissesWeight * (n_misses - layer.misses);
    if (n_misses > 0 && t_idle_us_ > 0) {
        admission_.saw_window(decode_, (double) (now_us() - t_idle_us_));
    }
    t_idle_us_ = 0;
}

void Prefetcher::demand_done() {
    t_idle_us_ = now_us();
}

void Prefetcher::ask_past(PagedExperts & experts, int i_layer, int n_expert_used) {
    Layer & layer = layers_[(size_t) i_layer];
    order_.clear();
    for (int e = 0; e < (int) layer.score.size(); ++e) {
        if (layer.score[(size_t) e] > 0 && !experts.present(i_layer, e)) {
            order_.push_back(e);
        }
    }
    const auto n = std::min(order_.size(), (size_t) n_expert_used);
    std::partial_sort(order_.begin(), order_.begin() + (std::ptrdiff_t) n, order_.end(), [&](int a, int b) {
        return layer.score[(size_t) a] != layer.score[(size_t) b] ? layer.score[(size_t) a] > layer.score[(size_t) b] : a < b;
    });
    for (size_t i = 0; i < n; ++i) {
        layer.predicted.push_back({ order_[i], Predictor::temporal, (int) i });
    }
}

void Prefetcher::ask_router(PagedExperts & experts, int i_layer, const ggml_tensor & input, int n_expert_used, InnerBackend & inner) {
    const Router & router = experts.router(i_layer);
    if (!router.weight || input.ne[0] != router.weight->ne[0] || input.ne[1] != 1 || input.type != GGML_TYPE_F32) {
        return;
    }
    const int64_t n_embd = input.ne[0], n_tokens = std::min(input.ne[2], kMaxTokens);
    const auto    n_expert = (size_t) router.weight->ne[1];
    input_.resize((size_t) (n_embd * n_tokens));
    logits_.resize(n_expert * (size_t) n_tokens);
    for (int64_t t = 0; t < n_tokens; ++t) { // spread over the batch
        const auto * row = (const float *) ((const char *) input.data + (size_t) (t * input.ne[2] / n_tokens) * input.nb[2]);
        float *      out = input_.data() + t * n_embd;
        for (int64_t i = 0; i < n_embd; ++i) {
            out[i] = router.rescale.empty() ? row[i] : row[i] * router.rescale[(size_t) i];
        }
    }
    ggml_tensor              rows = make_tensor(GGML_TYPE_F32, n_embd, n_tokens, 1, input_.data());
    std::vector<ggml_tensor> nodes(1, make_tensor(GGML_TYPE_F32, (int64_t) n_expert, n_tokens, 1, logits_.data()));
    nodes[0].op     = GGML_OP_MUL_MAT;
    nodes[0].flags  = GGML_TENSOR_FLAG_COMPUTE;
    nodes[0].src[0] = const_cast<ggml_tensor *>(router.weight);
    nodes[0].src[1] = &rows;
    if (inner.run(nodes) != GGML_STATUS_SUCCESS) {
        return; // interrupted: the pass ends anyway
    }
    // each token votes for the experts that it would choose; ties by how sure it was
    votes_.assign(n_expert, 0);
    order_.resize(n_expert);
    for (int64_t t = 0; t < n_tokens; ++t) {
        float * score = logits_.data() + (size_t) t * n_expert;
        for (size_t e = 0; e < n_expert; ++e) {
            score[e] += router.bias ? ((const float *) router.bias->data)[e] : 0;
            if (router.select) {
                score[e] = 1 / (1 + std::exp(-score[e])) + ((const float *) router.select->data)[e];
            }
        }
        std::iota(order_.begin(), order_.end(), 0);
        const auto k = std::min(order_.size(), (size_t) n_expert_used);
        std::partial_sort(order_.begin(), order_.begin() + (std::ptrdiff_t) k, order_.end(),
                          [&](int a, int b) { return score[a] != score[b] ? score[a] > score[b] : a < b; });
        for (size_t i = 0; i < k; ++i) {
            votes_[(size_t) order_[i]] += 1 + (float) (k - i) / (float) (k * (size_t) kMaxTokens * 2);
        }
    }
    order_.clear();
    for (size_t e = 0; e < n_expert; ++e) {
        if (votes_[e] > 0) {
            order_.push_back((int) e);
            keep_[e] = 1;
        }
    }
    std::sort(order_.begin(), order_.end(), [&](int a, int b) {
        return votes_[(size_t) a] != votes_[(size_t) b] ? votes_[(size_t) a] > votes_[(size_t) b] : a < b;
    });
    Layer & layer = layers_[(size_t) i_layer];
    for (size_t i = 0; i < order_.size(); ++i) { // the rank among all that it would choose; those in the cache need no reading
        if (!experts.present(i_layer, order_[i])) {
            layer.predicted.push_back({ order_[i], Predictor::router, (int) i });
        }
    }
}

void Prefetcher::plan(PagedExperts & experts, int i_layer, const ggml_tensor & input, int n_expert_used, InnerBackend & inner) {
    const PrefetchMode mode = experts.prefetch_mode();
    const int          next = (i_layer + 1) % experts.n_layers();
    Layer &            layer = layers_[(size_t) next];
    decode_                  = input.ne[2] == 1;
    if (mode == PrefetchMode::off || experts.all_present(next) || layer.misses < kFewMisses) {
        return;
    }
    keep_.assign((size_t) experts.layer(next).n_expert(), 0);
    layer.predicted.clear();
    if (mode != PrefetchMode::temporal && next > 0) {
        ask_router(experts, next, input, n_expert_used, inner);
    }
    if (mode != PrefetchMode::router) {
        ask_past(experts, next, n_expert_used);
    }
    layer.victim = experts.victim(next);
    if (layer.victim >= 0 && keep_[(size_t) layer.victim]) {
        layer.victim = -1; // it would not be chosen
    }
    const uint64_t chunk_bytes = (uint64_t) experts.reads().chunk_bytes() * ReadQueue::kPrefetchLanes;
    for (const Prediction & p : admission_.admit(layer.predicted, decode_, experts.layer(next).stride_bytes, chunk_bytes, experts.n_free(next))) {
        if (!experts.prefetch(next, p.expert, keep_)) {
            break;
        }
    }
}

} // namespace mkd
