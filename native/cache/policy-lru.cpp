#include "cache/eviction-policy.h"

#include <algorithm>

namespace mkd {

namespace {

class LruPolicy final : public EvictionPolicy {
  public:
    explicit LruPolicy(const std::vector<int> & n_slots) {
        for (const int n : n_slots) {
            last_used_.emplace_back((size_t) n, 0);
        }
    }

    void touched(int i_layer, int slot) override { last_used_[(size_t) i_layer][(size_t) slot] = ++clock_; }

    int victim(int i_layer, const std::vector<int> & candidates) override {
        const std::vector<uint64_t> & used = last_used_[(size_t) i_layer];
        return *std::min_element(candidates.begin(), candidates.end(),
                                 [&](int a, int b) { return used[(size_t) a] < used[(size_t) b]; });
    }

  private:
    std::vector<std::vector<uint64_t>> last_used_;
    uint64_t                           clock_ = 0;
};

} // namespace

std::unique_ptr<EvictionPolicy> make_lru_policy(const std::vector<int> & n_slots) {
    return std::make_unique<LruPolicy>(n_slots);
}

} // namespace mkd
