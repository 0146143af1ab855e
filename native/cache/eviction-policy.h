// cache/eviction-policy.h: who leaves when a layer's slots are full.
//
// One interface for the engine and for replays of recorded routing (cache/replay.h), so that what is scored is what runs. A policy learns what
// every token chose, hits or not, and compares experts of one layer.
//
// Threads: one at a time.

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace mkd {

class EvictionPolicy {
  public:
    virtual ~EvictionPolicy() = default;

    // The tokens of one batch were routed: ids [n_tokens][n_expert_used], before any of them is acquired.
    virtual void routed(int i_layer, const int32_t * ids, int n_expert_used, int n_tokens) = 0;
    // Picks the one of candidates (experts of i_layer that may leave; never empty) that leaves. -1: none of them as long as others are pinned.
    virtual int victim(int i_layer, const std::vector<int> & candidates) = 0;
};

// Least recently used.
std::unique_ptr<EvictionPolicy> make_lru_policy(const std::vector<int> & n_expert);

// Least frequently used, with ageing: an expert's score is the sum over its uses of kLfuDecay^(tokens since). Equal scores: the less recent one leaves.
// The decay was chosen on SmolMoE's traces (docs/io.md has the table); 0 would be LRU, 1 plain LFU.
constexpr double                kLfuDecay = 0.95;
std::unique_ptr<EvictionPolicy> make_lfu_policy(const std::vector<int> & n_expert, double decay = kLfuDecay);

// "lru" or "lfu"; n_expert: experts of each layer. Null for another name.
std::unique_ptr<EvictionPolicy> make_policy(const std::string & name, const std::vector<int> & n_expert);

} // namespace mkd
