// The memory plan: the budget is a hard bound, layers stay even, the error names the minimum.

#include "base/error.h"
#include "model/memory-plan.h"

#include <doctest/doctest.h>

#include <string>

using namespace mkd;

namespace {

PackageIndex make_index(int n_layers, int n_expert, size_t stride_bytes) {
    PackageIndex index;
    for (int i = 0; i < n_layers; ++i) {
        LayerExperts layer;
        layer.layer        = i;
        layer.stride_bytes = stride_bytes;
        layer.experts.resize((size_t) n_expert);
        index.layers.push_back(layer);
    }
    return index;
}

const FixedMemory kFixed = { 1000, 200, 300, 40, 60 }; // 1600 bytes

} // namespace

TEST_CASE("memory plan: no budget, every expert has a slot") {
    const MemoryPlan plan = plan_memory(make_index(3, 8, 100), kFixed, 2, 0, 0);
    CHECK(plan.n_slots == std::vector<int>{ 8, 8, 8 });
    CHECK(plan.info.slots_bytes == 2400);
    CHECK(plan.info.total_bytes == 4000);
}

TEST_CASE("memory plan: the budget is never passed, and no slot that fits is left out") {
    for (uint64_t budget = 1600 + 600; budget <= 1600 + 2500; budget += 37) {
        const MemoryPlan plan = plan_memory(make_index(3, 8, 100), kFixed, 2, budget, 0);
        CHECK(plan.info.total_bytes <= budget);
        if (plan.info.n_slots < 24) {
            CHECK(plan.info.total_bytes + 100 > budget);
        }
        CHECK(plan.n_slots.front() - plan.n_slots.back() <= 1);
        CHECK(plan.info.slots_per_layer >= 2);
    }
}

TEST_CASE("memory plan: one byte below the minimum is an error that names it") {
    const PackageIndex index = make_index(3, 8, 100);
    CHECK(plan_memory(index, kFixed, 2, 2200, 0).info.n_slots == 6);
    try {
        plan_memory(index, kFixed, 2, 2199, 0);
        FAIL("accepted a budget below the minimum");
    } catch (const Error & error) {
        CHECK(error.status() == MKD_ERR_BUDGET);
        CHECK(std::string(error.what()).find("needs at least") != std::string::npos);
    }
}

TEST_CASE("memory plan: explicit slots") {
    const PackageIndex index = make_index(3, 8, 100);
    CHECK(plan_memory(index, kFixed, 2, 0, 4).info.n_slots == 12);
    CHECK(plan_memory(index, kFixed, 2, 0, 99).info.n_slots == 24);
    CHECK_THROWS_AS(plan_memory(index, kFixed, 2, 0, 1), Error);
    CHECK_THROWS_AS(plan_memory(index, kFixed, 2, 2600, 4), Error); // 1600 + 1200 > 2600
}
