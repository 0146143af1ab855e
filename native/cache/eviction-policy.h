// cache/eviction-policy.h: who leaves when a layer's slots are full.
//
// One interface, so that policies can be compared on recorded traces. A policy sees one layer at a time: layers have their own slots, so a
// budget below one token's working set cannot make one layer push out all others (a global LRU would hit 0 %).

#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace mkd {

class EvictionPolicy {
  public:
    virtual ~EvictionPolicy() = default;

    // An expert was requested and now sits in slot (hit or fresh).
    virtual void touched(int i_layer, int slot) = 0;
    // Picks one of candidates (slots of i_layer that may be evicted; never empty).
    virtual int victim(int i_layer, const std::vector<int> & candidates) = 0;
};

// Least recently used. n_slots: slots of each layer.
std::unique_ptr<EvictionPolicy> make_lru_policy(const std::vector<int> & n_slots);

} // namespace mkd
