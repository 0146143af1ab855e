#include "model/memory-plan.h"

#include "base/error.h"

#include <algorithm>
#include <cmath>

namespace mkd {

namespace {

constexpr uint64_t kMinimumMarginBytes = 128u << 10; // by how much the measured part differs between two runs of one configuration

double mib(uint64_t bytes) {
    return (double) bytes / (1 << 20);
}

double mib_rounded_up(uint64_t bytes) { // to what is printed, so that the printed number is enough
    return std::ceil(mib(bytes) * 10) / 10;
}

} // namespace

MemoryPlan plan_memory(const PackageIndex & index, const FixedMemory & fixed, int n_expert_used, uint64_t budget_bytes, int cache_slots) {
    if (cache_slots < 0 || (cache_slots > 0 && cache_slots < n_expert_used)) {
        fail(MKD_ERR_ARG, "cache slots: %d per layer, but one token uses %d experts; give at least %d", cache_slots, n_expert_used,
             n_expert_used);
    }
    uint64_t minimum_slots_bytes = 0;
    for (const LayerExperts & layer : index.layers) {
        minimum_slots_bytes += (uint64_t) std::min(n_expert_used, layer.n_expert()) * layer.stride_bytes;
    }
    MemoryPlan        plan{};
    mkd_memory_info & info = plan.info;
    info.budget_bytes      = budget_bytes;
    info.resident_bytes    = fixed.resident_bytes;
    info.kv_bytes          = fixed.kv_bytes;
    info.compute_bytes     = fixed.compute_bytes;
    info.work_bytes        = fixed.work_bytes;
    info.other_bytes       = fixed.other_bytes;
    info.minimum_bytes     = fixed.total() + minimum_slots_bytes + kMinimumMarginBytes;

    const bool bounded = budget_bytes > 0;
    if (bounded && budget_bytes < fixed.total() + minimum_slots_bytes) {
        fail(MKD_ERR_BUDGET,
             "memory budget %.1f MiB is too small: this configuration needs at least %.1f MiB (resident %.1f, KV %.1f, compute %.1f, work %.1f, "
             "other %.1f, one token's experts %.1f); raise --memory or lower -c/-ub",
             mib(budget_bytes), mib_rounded_up(info.minimum_bytes), mib(fixed.resident_bytes), mib(fixed.kv_bytes), mib(fixed.compute_bytes),
             mib(fixed.work_bytes), mib(fixed.other_bytes), mib(minimum_slots_bytes));
    }

    uint64_t left = bounded ? budget_bytes - fixed.total() : UINT64_MAX;
    for (const LayerExperts & layer : index.layers) {
        const int n = cache_slots > 0 ? std::min(cache_slots, layer.n_expert()) : std::min(n_expert_used, layer.n_expert());
        plan.n_slots.push_back(n);
        info.slots_bytes += (uint64_t) n * layer.stride_bytes;
    }
    if (cache_slots > 0 && info.slots_bytes > left) {
        fail(MKD_ERR_BUDGET, "%d cache slots per layer take %.1f MiB, the budget of %.1f MiB leaves %.1f MiB for slots", cache_slots,
             mib(info.slots_bytes), mib(budget_bytes), mib(left));
    }
    if (cache_slots == 0) {
        // round by round, so that the layers stay even
        for (bool grew = true; grew;) {
            grew = false;
            for (size_t i = 0; i < index.layers.size(); ++i) {
                const LayerExperts & layer = index.layers[i];
                if (plan.n_slots[i] < layer.n_expert() && layer.stride_bytes <= left - info.slots_bytes) {
                    plan.n_slots[i] += 1;
                    info.slots_bytes += layer.stride_bytes;
                    grew = true;
                }
            }
        }
    }
    info.total_bytes     = fixed.total() + info.slots_bytes;
    info.slots_per_layer = *std::min_element(plan.n_slots.begin(), plan.n_slots.end());
    for (const int n : plan.n_slots) {
        info.n_slots += n;
    }
    return plan;
}

} // namespace mkd
