// Replays of recorded routing: every policy on sequences counted by hand, the optimum against all others, the cliff of one LRU over all layers, waves.

#include "base/error.h"
#include "cache/replay.h"
#include "mkd.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <set>

using mkd::best_lru_quotas;
using mkd::replay;
using mkd::ReplayResult;
using mkd::Routing;

namespace {

// The ids must outlive it.
Routing routing_of(const std::vector<int32_t> & ids, std::vector<int> n_expert, int n_expert_used = 1, std::vector<int> batch_tokens = {}) {
    Routing routing;
    routing.ids           = ids.data();
    routing.n_tokens      = (int64_t) (ids.size() / n_expert.size()) / n_expert_used;
    routing.n_expert_used = n_expert_used;
    routing.n_expert      = std::move(n_expert);
    routing.batch_tokens  = std::move(batch_tokens);
    return routing;
}

uint64_t hits(const Routing & routing, const std::vector<int> & n_slots, const char * policy) {
    return replay(routing, n_slots, policy).n_hits;
}

// Tokens that prefer some experts and some of the last token's, so that policies differ. Distinct experts per token and layer.
std::vector<int32_t> random_ids(std::mt19937 & random, int n_tokens, const std::vector<int> & n_expert, int n_expert_used) {
    std::vector<int32_t>              ids;
    std::vector<std::vector<int32_t>> last(n_expert.size());
    for (int t = 0; t < n_tokens; ++t) {
        for (size_t i = 0; i < n_expert.size(); ++i) {
            std::vector<int32_t> chosen;
            while ((int) chosen.size() < n_expert_used) {
                int32_t expert = (int32_t) (random() % (unsigned) n_expert[i]);
                if (random() % 2) {
                    expert = expert * expert / n_expert[i]; // low numbers more often
                } else if (!last[i].empty() && random() % 2) {
                    expert = last[i][random() % last[i].size()];
                }
                if (std::find(chosen.begin(), chosen.end(), expert) == chosen.end()) {
                    chosen.push_back(expert);
                }
            }
            ids.insert(ids.end(), chosen.begin(), chosen.end());
            last[i] = chosen;
        }
    }
    return ids;
}

// The most that any sequence of evictions hits in one layer: tries them all.
uint64_t most_hits(const std::vector<int32_t> & ids, size_t n_slots, size_t at, std::set<int32_t> held) {
    for (; at < ids.size(); ++at) {
        if (held.count(ids[at])) {
            return 1 + most_hits(ids, n_slots, at + 1, held);
        }
        if (held.size() == n_slots) {
            uint64_t most = 0;
            for (const int32_t expert : held) {
                std::set<int32_t> rest = held;
                rest.erase(expert);
                rest.insert(ids[at]);
                most = std::max(most, most_hits(ids, n_slots, at + 1, rest));
            }
            return most;
        }
        held.insert(ids[at]);
    }
    return 0;
}

std::string message_of(const Routing & routing, const std::vector<int> & n_slots, const char * policy) {
    try {
        replay(routing, n_slots, policy);
    } catch (const mkd::Error & error) {
        CHECK(error.status() == MKD_ERR_ARG);
        return error.what();
    }
    return "";
}

} // namespace

TEST_CASE("replay: LRU, LFU and Belady on a sequence counted by hand") {
    const std::vector<int32_t> ids = { 0, 1, 0, 2, 0, 1, 2, 0 };
    const Routing              one = routing_of(ids, { 4 });
    // LRU, 2 slots: 0 1 0+ 2(-1) 0+ 1(-2) 2(-0) 0(-1)
    ReplayResult result = replay(one, { 2 }, "lru");
    CHECK(result.n_requests == 8);
    CHECK(result.n_hits == 2);
    CHECK(result.n_loads() == 6);
    CHECK(result.n_evictions == 4);
    CHECK(result.n_first == 3);
    // LFU keeps 0, which is used most: 0 1 0+ 2(-1) 0+ 1(-2) 2(-1) 0+
    result = replay(one, { 2 }, "lfu");
    CHECK(result.n_hits == 3);
    CHECK(result.n_evictions == 3);
    // Belady: 0 1 0+ 2(-1) 0+ 1(-0: 2 comes first) 2+ 0(-1 or 2)
    result = replay(one, { 2 }, "belady");
    CHECK(result.n_hits == 3);
    CHECK(result.n_evictions == 3);
    CHECK(result.n_first == 3);
    for (const char * policy : { "lru", "lfu", "belady", "lru-global", "lru-protected", "belady-global" }) {
        CAPTURE(policy);
        CHECK(hits(one, { 3 }, policy) == 5); // all but the first of each
        CHECK(replay(one, { 4 }, policy).n_evictions == 0);
    }
}

TEST_CASE("replay: a batch's experts count once, are pinned together and hit only what was there before it") {
    // 2 used, batches of 2, 1 and 1 tokens: {0 1 2}, {2 3}, {0 3}
    const std::vector<int32_t> ids     = { 0, 1, 1, 2, 2, 3, 0, 3 };
    const Routing              routing = routing_of(ids, { 4 }, 2, { 2, 1, 1 });
    const ReplayResult         result  = replay(routing, { 3 }, "lru");
    CHECK(result.n_requests == 3 + 2 + 2);
    CHECK(result.n_first == 4);
    // {0 1 2} no hit; {2+ 3} pushes out 0, the first named; {3+ 0} pushes out 1
    CHECK(result.n_hits == 2);
    CHECK(result.n_evictions == 2);
}

TEST_CASE("replay: more experts than slots come in waves") {
    const std::vector<int32_t> ids     = { 0, 1, 2, 3, 4, 5, 5, 4 };
    const Routing              routing = routing_of(ids, { 6 }, 1, { 6, 2 });
    // 4 slots: 0 1 2 3, then 0 leaves for 4, 1 for 5; the next batch finds both
    ReplayResult result = replay(routing, { 4 }, "lru");
    CHECK(result.n_requests == 8);
    CHECK(result.n_hits == 2);
    CHECK(result.n_evictions == 2);
    result = replay(routing, { 1 }, "lru");
    CHECK(result.n_hits == 1); // the last one computed
    CHECK(result.n_evictions == 6);
}

TEST_CASE("replay: one LRU over all layers hits nothing below a token's working set; the others do") {
    std::vector<int32_t> ids;
    constexpr int        kLayers = 4, kTokens = 50;
    for (int t = 0; t < kTokens; ++t) {
        for (int i = 0; i < kLayers; ++i) {
            ids.insert(ids.end(), { 7, 1 + t % 2 }); // 7 always, 1 and 2 in turn
        }
    }
    const Routing          routing = routing_of(ids, std::vector<int>(kLayers, 8), 2);
    const std::vector<int> scarce(kLayers, 1); // 4 slots, a token needs 8 experts
    CHECK(hits(routing, scarce, "lru-global") == 0);
    CHECK(hits(routing, scarce, "lru-protected") > 0);
    CHECK(hits(routing, scarce, "belady-global") > 0);
    CHECK(hits(routing, scarce, "lru") > 0);
    // 8 slots: 12 experts are used in turn. Each layer keeps its 2, of which 7 hits at every token but the first.
    const std::vector<int> enough(kLayers, 2);
    CHECK(hits(routing, enough, "lru-global") == (kTokens - 1) * kLayers);
    CHECK(hits(routing, enough, "lru-protected") == (kTokens - 1) * kLayers);
    CHECK(hits(routing, enough, "lru") == (kTokens - 1) * kLayers);
}

TEST_CASE("replay: the protected share holds, what is above it goes to who needs it") {
    // Layer 0 uses one expert for ever, layer 1 three in turn: with 4 slots in all everything fits, but not with 2 each.
    std::vector<int32_t> ids;
    for (int t = 0; t < 30; ++t) {
        ids.insert(ids.end(), { 5, t % 3 });
    }
    const Routing routing = routing_of(ids, { 6, 6 });
    CHECK(hits(routing, { 2, 2 }, "lru") == 29);
    CHECK(hits(routing, { 2, 2 }, "lru-protected") == 29 + 27);
    CHECK(hits(routing, { 2, 2 }, "belady-global") == 29 + 27);
    // Two layers go through 6 experts each: one LRU forgets the 2 that the third one always uses; its share protects them.
    ids.clear();
    for (int t = 0; t < 60; ++t) {
        ids.insert(ids.end(), { 2 * (t % 3), 2 * (t % 3) + 1, 2 * (t % 3), 2 * (t % 3) + 1, 0, 1 });
    }
    const Routing uneven = routing_of(ids, { 6, 6, 2 }, 2);
    CHECK(hits(uneven, { 1, 1, 2 }, "lru-global") == 0);
    CHECK(hits(uneven, { 1, 1, 2 }, "lru-protected") == 59 * 2);
}

TEST_CASE("replay: quotas follow the need and are never worse than equal ones") {
    std::vector<int32_t> ids;
    for (int t = 0; t < 30; ++t) {
        ids.insert(ids.end(), { 5, t % 3 });
    }
    CHECK(best_lru_quotas(routing_of(ids, { 6, 6 }), 4) == std::vector<int>{ 1, 3 });
    std::mt19937 random(7);
    for (int round = 0; round < 30; ++round) {
        const std::vector<int>     n_expert = { 6 + round % 5, 8, 10 };
        const std::vector<int32_t> trace    = random_ids(random, 60, n_expert, 2);
        const Routing              routing  = routing_of(trace, n_expert, 2);
        for (const int n : { 2, 3, 4, 5 }) {
            const std::vector<int> quotas = best_lru_quotas(routing, 3 * n);
            CHECK(std::accumulate(quotas.begin(), quotas.end(), 0) == 3 * n);
            CHECK(*std::min_element(quotas.begin(), quotas.end()) >= 2);
            uint64_t best = 0; // of all quotas
            for (int a = 2; a <= std::min(n_expert[0], 3 * n - 4); ++a) {
                for (int b = 2; b <= std::min(8, 3 * n - a - 2); ++b) {
                    const int c = 3 * n - a - b;
                    best        = c > n_expert[2] ? best : std::max(best, hits(routing, { a, b, c }, "lru"));
                }
            }
            CHECK(hits(routing, quotas, "lru") == best);
        }
    }
    const Routing routing = routing_of(ids, { 6, 6 });
    CHECK(best_lru_quotas(routing, 2) == std::vector<int>{ 1, 1 });
    CHECK(best_lru_quotas(routing, 12) == std::vector<int>{ 6, 6 });
    CHECK_THROWS_AS(best_lru_quotas(routing, 1), mkd::Error);
    CHECK_THROWS_AS(best_lru_quotas(routing, 13), mkd::Error);
}

TEST_CASE("replay: Belady equals the best of all possible evictions") {
    std::mt19937 random(3);
    for (int round = 0; round < 40; ++round) {
        std::vector<int32_t> ids;
        for (int t = 0; t < 14; ++t) {
            ids.push_back((int32_t) (random() % 5));
        }
        const Routing one = routing_of(ids, { 5 });
        for (const size_t n_slots : { 1, 2, 3 }) {
            const uint64_t most = most_hits(ids, n_slots, 0, {});
            CHECK(hits(one, { (int) n_slots }, "belady") == most);
            CHECK(hits(one, { (int) n_slots }, "belady-global") == most);
        }
    }
}

TEST_CASE("replay: nobody beats Belady with the same slots") {
    std::mt19937 random(11);
    bool         differ = false;
    for (int round = 0; round < 60; ++round) {
        const std::vector<int>     n_expert = { 8, 10 + round % 6, 12 };
        const int                  n_used   = 1 + round % 3;
        const std::vector<int32_t> ids      = random_ids(random, 120, n_expert, n_used);
        // at most 2 tokens a batch: its experts fit into 6 slots
        const Routing     routing = routing_of(ids, n_expert, n_used, round % 2 ? std::vector<int>(60, 2) : std::vector<int>{});
        const int         n       = 2 * n_used + (int) (random() % 3);
        const std::vector<std::vector<int>> splits = { { n, n, n }, best_lru_quotas(routing, 3 * n) };
        for (const std::vector<int> & n_slots : splits) {
            const bool         fits    = *std::min_element(n_slots.begin(), n_slots.end()) >= (round % 2 ? 2 * n_used : n_used);
            const ReplayResult optimum = replay(routing, n_slots, "belady");
            const ReplayResult shared  = replay(routing, n_slots, "belady-global");
            for (const char * policy : { "lru", "lfu" }) {
                const ReplayResult online = replay(routing, n_slots, policy);
                CHECK(online.n_requests == optimum.n_requests);
                CHECK(online.n_first == optimum.n_first);
                CHECK(online.n_hits + online.n_first <= online.n_requests);
                CHECK((!fits || online.n_hits <= optimum.n_hits));
                CHECK(online.n_hits <= shared.n_hits);
                differ |= online.n_hits < optimum.n_hits;
            }
            for (const char * policy : { "lru-global", "lru-protected", "belady" }) {
                CHECK(hits(routing, n_slots, policy) <= shared.n_hits);
            }
        }
    }
    CHECK(differ);
}

TEST_CASE("replay: one layer makes a pool and a layer the same") {
    std::mt19937               random(5);
    const std::vector<int32_t> ids = random_ids(random, 200, { 12 }, 3);
    const Routing              one = routing_of(ids, { 12 }, 3);
    for (const int n : { 3, 5, 8 }) {
        CHECK(hits(one, { n }, "lru-global") == hits(one, { n }, "lru"));
        CHECK(hits(one, { n }, "lru-protected") == hits(one, { n }, "lru"));
        CHECK(hits(one, { n }, "belady-global") == hits(one, { n }, "belady"));
        CHECK(hits(one, { n }, "lru") == hits(one, { n }, "lru")); // and the same again
    }
}

TEST_CASE("replay: what makes no sense is refused, in one line that names it") {
    const std::vector<int32_t> ids = { 0, 1, 2, 3 };
    const Routing              one = routing_of(ids, { 4, 4 });
    CHECK(message_of(one, { 2, 2 }, "fifo") ==
          "replay: no policy 'fifo'; expected lru, lfu, belady, lru-global, lru-protected or belady-global");
    CHECK(message_of(one, { 2, 0 }, "lru") == "replay: 0 slots for the 4 experts of MoE layer 1; expected 1..4");
    CHECK(message_of(one, { 5, 2 }, "lru-global") == "replay: 5 slots for the 4 experts of MoE layer 0; expected 1..4");
    CHECK(message_of(one, { 2 }, "lru") == "replay: slots of 1 layers for 2 MoE layers");
    CHECK(message_of(routing_of(ids, { 4, 3 }), { 1, 1 }, "lru") == "replay: token 1, MoE layer 1: expert 3 of 3");
    CHECK(message_of(routing_of(ids, { 1 }, 2), { 1 }, "lru") == "replay: a layer has 1 experts, and 2 are used");
    CHECK(message_of(routing_of(ids, { 4, 4 }, 1, { 1, 2 }), { 1, 1 }, "lru") == "replay: the batches have 3 tokens together, the routing 2");
    CHECK(message_of(routing_of(ids, { 4, 4 }, 1, { 2, 0 }), { 1, 1 }, "lru").find("a batch of 0 tokens") != std::string::npos);
    CHECK(message_of(Routing{}, {}, "lru").find("ids of 0 tokens") != std::string::npos);
    const std::vector<int32_t> negative = { 0, -1 };
    CHECK(message_of(routing_of(negative, { 4 }), { 1 }, "lru") == "replay: token 1, MoE layer 0: expert -1 of 4");
}

TEST_CASE("replay: the C API gives the same numbers, and refuses") {
    const std::vector<int32_t> ids = { 0, 1, 0, 2, 0, 1, 2, 0 };
    const int32_t              n_expert = 4, n_slots = 2;
    const int32_t              batches[] = { 6, 2 };
    mkd_replay_params          params{};
    params.struct_bytes  = sizeof params;
    params.ids           = ids.data();
    params.n_tokens      = 8;
    params.n_moe_layer   = 1;
    params.n_expert_used = 1;
    params.n_expert      = &n_expert;
    params.n_slots       = &n_slots;
    params.policy        = "lru";
    mkd_replay_result result{};
    REQUIRE(mkd_cache_replay(&params, &result) == MKD_OK);
    CHECK(result.n_requests == 8);
    CHECK(result.n_hits == 2);
    CHECK(result.n_loads == 6);
    CHECK(result.n_first == 3);
    CHECK(result.n_evictions == 4);
    params.batch_tokens = batches;
    params.n_batch      = 2;
    REQUIRE(mkd_cache_replay(&params, &result) == MKD_OK);
    CHECK(result.n_requests == 5);

    int32_t quota = 0;
    REQUIRE(mkd_cache_quotas(&params, 3, &quota) == MKD_OK);
    CHECK(quota == 3);
    CHECK(mkd_cache_quotas(&params, 5, &quota) == MKD_ERR_ARG);
    CHECK(std::string(mkd_last_error()) == "replay: 5 slots for 1 MoE layers; expected 1..4");
    CHECK(mkd_cache_quotas(&params, 3, nullptr) == MKD_ERR_ARG);

    const auto refused = [&](auto change, const char * said) {
        mkd_replay_params wrong = params;
        change(wrong);
        CHECK(mkd_cache_replay(&wrong, &result) == MKD_ERR_ARG);
        CAPTURE(mkd_last_error());
        CHECK(strstr(mkd_last_error(), said) != nullptr);
    };
    refused([](auto & p) { p.struct_bytes = 8; }, "struct_bytes is 8");
    refused([](auto & p) { p.ids = nullptr; }, "ids is NULL");
    refused([](auto & p) { p.n_expert = nullptr; }, "n_expert is NULL");
    refused([](auto & p) { p.n_slots = nullptr; }, "n_slots is NULL");
    refused([](auto & p) { p.policy = nullptr; }, "policy is NULL");
    refused([](auto & p) { p.n_moe_layer = 0; }, "n_moe_layer 0");
    refused([](auto & p) { p.n_tokens = -1; }, "n_batch 2 is out of range");
    refused([](auto & p) { p.n_batch = 0; }, "n_batch 0");
    refused([](auto & p) { p.n_expert_used = 0; }, "0 experts used");
    CHECK(mkd_cache_replay(nullptr, &result) == MKD_ERR_ARG);
    CHECK(mkd_cache_replay(&params, nullptr) == MKD_ERR_ARG);
}
