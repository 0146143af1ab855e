// cache/replay-policies.h: eviction policies that the engine does not offer: one for a pool that all layers share, and the optimum.
//
// A pool is an ExpertCache of a single layer, whose experts are those of all layers, numbered through.

#pragma once

#include "cache/eviction-policy.h"

namespace mkd {

// LRU over a pool in which every layer keeps a share: an expert leaves only if its layer has more than that, counting those that the current batch
// wants. If those that could leave so are all pinned, none does until one is released.
//   layer_of  [expert of the pool] its layer
//   share     [layer] slots
std::unique_ptr<EvictionPolicy> make_protected_lru_policy(const std::vector<int> & layer_of, const std::vector<int> & share);

// Bélády's: the expert whose next use lies farthest ahead leaves; of several, e.g. of those that are not used again, the one with the lowest number
// (experts of one batch are all needed at once: which of them leaves does not change the number of hits). No bypass: what is wanted is brought in.
//   uses  [i_layer][expert] the calls of routed() for this layer, counted from 0, that will name the expert; ascending. routed() must follow them.
std::unique_ptr<EvictionPolicy> make_belady_policy(std::vector<std::vector<std::vector<int64_t>>> uses);

} // namespace mkd
