#include "cache/eviction-policy.h"

#include <algorithm>

namespace mkd {

namespace {

class LruPolicy final : public EvictionPolicy {
  public:
    explicit LruPolicy(const std::vector<int> & n_expert) {
        for (const int n : n_expert) {
            last_used_.emplace_back((size_t) n, 0);
        }
    }

    void routed(int i_layer, const int32_t * ids, int n_expert_used, int n_tokens) override {
        for (int i = 0; i < n_expert_used * n_tokens; ++i) {
            last_used_[(size_t) i_layer][(size_t) ids[i]] = ++clock_;
        }
    }

    int victim(int i_layer, const std::vector<int> & candidates) override {
        const std::vector<uint64_t> & used = last_used_[(size_t) i_layer];
        return *std::min_element(candidates.begin(), candidates.end(), [&](int a, int b) { return used[(size_t) a] < used[(size_t) b]; });
    }

  private:
    std::vector<std::vector<uint64_t>> last_used_; // [i_layer][expert]; 0: never
    uint64_t                           clock_ = 0;
};

// Instead of ageing every score at every token, the value of a use grows by 1 / decay; all are scaled down before they overflow.
class LfuPolicy final : public EvictionPolicy {
  public:
    LfuPolicy(const std::vector<int> & n_expert, double decay) : growth_(1 / decay) {
        for (const int n : n_expert) {
            layers_.push_back({ std::vector<double>((size_t) n, 0), std::vector<uint64_t>((size_t) n, 0), 1 });
        }
    }

    void routed(int i_layer, const int32_t * ids, int n_expert_used, int n_tokens) override {
        Layer & layer = layers_[(size_t) i_layer];
        for (int t = 0; t < n_tokens; ++t) {
            layer.use *= growth_;
            if (layer.use > kLargest) {
                for (double & score : layer.scores) {
                    score /= layer.use;
                }
                layer.use = 1;
            }
            for (int k = 0; k < n_expert_used; ++k) {
                const auto expert = (size_t) ids[t * n_expert_used + k];
                layer.scores[expert] += layer.use;
                layer.last_used[expert] = ++clock_;
            }
        }
    }

    int victim(int i_layer, const std::vector<int> & candidates) override {
        const Layer & layer = layers_[(size_t) i_layer];
        return *std::min_element(candidates.begin(), candidates.end(), [&](int a, int b) {
            const double sa = layer.scores[(size_t) a], sb = layer.scores[(size_t) b];
            return sa != sb ? sa < sb : layer.last_used[(size_t) a] < layer.last_used[(size_t) b];
        });
    }

  private:
    static constexpr double kLargest = 1e200;

    struct Layer {
        std::vector<double>   scores;
        std::vector<uint64_t> last_used;
        double                use; // what a use is worth now
    };
    std::vector<Layer> layers_;
    double             growth_;
    uint64_t           clock_ = 0;
};

} // namespace

std::unique_ptr<EvictionPolicy> make_lru_policy(const std::vector<int> & n_expert) {
    return std::make_unique<LruPolicy>(n_expert);
}

std::unique_ptr<EvictionPolicy> make_lfu_policy(const std::vector<int> & n_expert, double decay) {
    return std::make_unique<LfuPolicy>(n_expert, decay);
}

std::unique_ptr<EvictionPolicy> make_policy(const std::string & name, const std::vector<int> & n_expert) {
    return name == "lru" ? make_lru_policy(n_expert) : name == "lfu" ? make_lfu_policy(n_expert) : nullptr;
}

} // namespace mkd
