#include "cache/replay-policies.h"

#include <algorithm>

namespace mkd {

namespace {

class ProtectedLruPolicy final : public EvictionPolicy {
  public:
    ProtectedLruPolicy(const std::vector<int> & layer_of, const std::vector<int> & share)
        : layer_of_(layer_of), share_(share), last_used_(layer_of.size(), 0), wanted_(layer_of.size(), 0), n_held_(share.size(), 0) {}

    void routed(int, const int32_t * ids, int n_expert_used, int n_tokens) override {
        batch_ += 1;
        distinct_.clear();
        for (int i = 0; i < n_expert_used * n_tokens; ++i) {
            const auto expert  = (size_t) ids[i];
            last_used_[expert] = ++clock_;
            if (wanted_[expert] != batch_) {
                wanted_[expert] = batch_;
                distinct_.push_back(ids[i]);
            }
        }
    }

    // Only the batch's own experts can be pinned or on their way, so that the candidates are all others that are here.
    int victim(int, const std::vector<int> & candidates) override {
        std::fill(n_held_.begin(), n_held_.end(), 0);
        for (const int expert : distinct_) {
            n_held_[layer(expert)] += 1;
        }
        for (const int expert : candidates) {
            n_held_[layer(expert)] += wanted_[(size_t) expert] != batch_;
        }
        int chosen = -1;
        for (const int expert : candidates) {
            if (n_held_[layer(expert)] > share_[layer(expert)] && (chosen < 0 || older(expert, chosen))) {
                chosen = expert;
            }
        }
        return chosen;
    }

  private:
    size_t layer(int expert) const { return (size_t) layer_of_[(size_t) expert]; }
    bool   older(int a, int b) const { return last_used_[(size_t) a] < last_used_[(size_t) b]; }

    std::vector<int>      layer_of_, share_;
    std::vector<uint64_t> last_used_;
    std::vector<uint64_t> wanted_;   // the last batch that named the expert
    std::vector<int>      distinct_; // experts of this batch
    std::vector<int>      n_held_;   // scratch
    uint64_t              clock_ = 0;
    uint64_t              batch_ = 0;
};

class BeladyPolicy final : public EvictionPolicy {
  public:
    explicit BeladyPolicy(std::vector<std::vector<std::vector<int64_t>>> uses) : uses_(std::move(uses)), now_(uses_.size(), -1) {
        for (const auto & layer : uses_) {
            next_.emplace_back(layer.size(), 0);
        }
    }

    void routed(int i_layer, const int32_t * ids, int n_expert_used, int n_tokens) override {
        const int64_t now = ++now_[(size_t) i_layer];
        for (int i = 0; i < n_expert_used * n_tokens; ++i) {
            const std::vector<int64_t> & uses = uses_[(size_t) i_layer][(size_t) ids[i]];
            size_t &                     next = next_[(size_t) i_layer][(size_t) ids[i]];
            while (next < uses.size() && uses[next] <= now) {
                next += 1;
            }
        }
    }

    int victim(int i_layer, const std::vector<int> & candidates) override {
        return *std::max_element(candidates.begin(), candidates.end(), [&](int a, int b) {
            const int64_t ua = next_use(i_layer, a), ub = next_use(i_layer, b);
            return ua != ub ? ua < ub : a > b;
        });
    }

  private:
    int64_t next_use(int i_layer, int expert) const {
        const std::vector<int64_t> & uses = uses_[(size_t) i_layer][(size_t) expert];
        const size_t                 next = next_[(size_t) i_layer][(size_t) expert];
        return next < uses.size() ? uses[next] : INT64_MAX;
    }

    std::vector<std::vector<std::vector<int64_t>>> uses_;
    std::vector<std::vector<size_t>>               next_; // [i_layer][expert] index into uses_ of the next one
    std::vector<int64_t>                           now_;  // [i_layer]
};

} // namespace

std::unique_ptr<EvictionPolicy> make_protected_lru_policy(const std::vector<int> & layer_of, const std::vector<int> & share) {
    return std::make_unique<ProtectedLruPolicy>(layer_of, share);
}

std::unique_ptr<EvictionPolicy> make_belady_policy(std::vector<std::vector<std::vector<int64_t>>> uses) {
    return std::make_unique<BeladyPolicy>(std::move(uses));
}

} // namespace mkd
