// cache/replay.h: what a cache of so many slots would have hit, had it seen a recorded routing.
//
// The replay drives the engine's own ExpertCache and EvictionPolicy through what LayerVisit does in a decode without prefetch: for every batch and
// layer the policy is told; the distinct experts are acquired, those that are here first, each part in ascending order, and stay pinned until the
// layer is computed; then they are released. Where a batch has more distinct experts than its layer has slots, the first quarter of the slots is
// given back as soon as none is free. (There the engine gives back what arrives first, so its counts may differ by a few; elsewhere they are equal.)
//
// A request is one distinct (layer, expert) of a batch; it is a hit if the expert was in its slot when the batch reached the layer. The cache is
// empty at first. Pure and deterministic: no clock, no random numbers.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace mkd {

// A recorded routing. The ids are the caller's memory.
struct Routing {
    const int32_t *  ids           = nullptr; // [n_tokens][n_moe_layer][n_expert_used], in router order
    int64_t          n_tokens      = 0;
    int              n_expert_used = 0;
    std::vector<int> n_expert;     // [n_moe_layer]
    std::vector<int> batch_tokens; // tokens of each batch; their sum is n_tokens. Empty: one each, as in decode

    int n_moe_layer() const { return (int) n_expert.size(); }
};

struct ReplayResult {
    uint64_t n_requests  = 0;
    uint64_t n_hits      = 0;
    uint64_t n_first     = 0; // requests that were the first of their expert: no cache hits these
    uint64_t n_evictions = 0;

    uint64_t n_loads() const { return n_requests - n_hits; }
};

// Scores a policy.
//   n_slots  [n_moe_layer], 1..n_expert each
//   policy   lru, lfu       as in the engine: every layer has its own slots
//            belady         likewise, but the expert that is needed again last leaves: with these slots nobody hits more, as long as the experts of
//                           every batch fit
//            lru-global     one LRU over all layers' slots together
//            lru-protected  likewise, but every layer keeps min(n_expert_used, its n_slots)
//            belady-global  Bélády over all layers' slots together: likewise, however the slots are shared out
// Throws Error(ARG).
ReplayResult replay(const Routing & routing, const std::vector<int> & n_slots, const std::string & policy);

// Shares out total slots among the layers so that LRU hits most in this routing (exactly, from its stack distances, if no batch needs more than a
// layer's slots). Every layer gets at least min(n_expert_used, total / n_moe_layer, its n_expert) and at most its n_expert.
// Throws Error(ARG).
std::vector<int> best_lru_quotas(const Routing & routing, int64_t total);

} // namespace mkd
