// model/memory-plan.h: how many expert slots a budget leaves.
//
// Pure arithmetic: everything fixed (resident weights, KV cache, compute and work buffers, the rest) is known; what the budget leaves is given
// to the layers as whole slots, evenly, a remainder to the first layers. Each layer needs at least one token's experts.

#pragma once

#include "mkd.h"
#include "store/package-index.h"

#include <vector>

namespace mkd {

struct FixedMemory {
    uint64_t resident_bytes, kv_bytes, compute_bytes, work_bytes, other_bytes;

    uint64_t total() const { return resident_bytes + kv_bytes + compute_bytes + work_bytes + other_bytes; }
};

struct MemoryPlan {
    std::vector<int> n_slots; // [n_moe_layer]
    mkd_memory_info  info;
};

// budget_bytes 0: no bound. cache_slots 0: as many as the budget leaves (all experts without a budget).
// Throws Error(BUDGET) naming the minimum, Error(ARG) for cache_slots below n_expert_used.
MemoryPlan plan_memory(const PackageIndex & index, const FixedMemory & fixed, int n_expert_used, uint64_t budget_bytes, int cache_slots);

} // namespace mkd
