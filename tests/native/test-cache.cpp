// The expert cache: every arrow of the state table in cache/expert-cache.h, the hard bound, LRU order.

#include "base/error.h"
#include "cache/expert-cache.h"

#include <doctest/doctest.h>

#include <random>
#include <set>

using mkd::ExpertCache;
using Outcome = ExpertCache::Outcome;
using State   = ExpertCache::State;

namespace {

constexpr uint32_t kAll = 0b111;

ExpertCache make_cache(int n_expert, int n_slots, int n_layers = 1) {
    std::vector<ExpertCache::LayerQuota> quotas((size_t) n_layers, { n_expert, n_slots });
    return ExpertCache(quotas, mkd::make_lru_policy(std::vector<int>((size_t) n_layers, n_expert)));
}

// route, acquire, load, release: the expert ends up ready
void bring(ExpertCache & cache, int expert, int i_layer = 0) {
    const int32_t id = expert;
    cache.routed(i_layer, &id, 1, 1);
    const ExpertCache::Lease lease = cache.acquire(i_layer, expert, kAll);
    REQUIRE((lease.outcome == Outcome::load || lease.outcome == Outcome::hit));
    if (lease.outcome == Outcome::load) {
        cache.ready(i_layer, expert, kAll);
    }
    cache.release(i_layer, expert);
}

} // namespace

TEST_CASE("cache: free -> loading -> pinned -> ready -> pinned") {
    ExpertCache cache = make_cache(8, 2);
    CHECK(cache.state(0, 5) == State::free);
    ExpertCache::Lease lease = cache.acquire(0, 5, kAll);
    CHECK(lease.outcome == Outcome::load);
    CHECK(lease.missing == kAll);
    CHECK(lease.evicted == -1);
    CHECK(cache.state(0, 5) == State::loading);
    cache.ready(0, 5, kAll);
    CHECK(cache.state(0, 5) == State::pinned);
    cache.release(0, 5);
    CHECK(cache.state(0, 5) == State::ready);
    lease = cache.acquire(0, 5, kAll);
    CHECK(lease.outcome == Outcome::hit);
    CHECK(cache.state(0, 5) == State::pinned);
    CHECK(cache.acquire(0, 5, kAll).outcome == Outcome::hit); // a second pin
    cache.release(0, 5);
    CHECK(cache.state(0, 5) == State::pinned);
    cache.release(0, 5);
    CHECK(cache.state(0, 5) == State::ready);
}

TEST_CASE("cache: a failed load frees the slot") {
    ExpertCache cache = make_cache(8, 1);
    CHECK(cache.acquire(0, 1, kAll).outcome == Outcome::load);
    cache.fail(0, 1);
    cache.release(0, 1);
    CHECK(cache.state(0, 1) == State::free);
    CHECK(cache.present(0, 1) == 0);
    CHECK(cache.acquire(0, 2, kAll).outcome == Outcome::load);
}

TEST_CASE("cache: parts are remembered, only the missing ones are asked for") {
    ExpertCache cache = make_cache(8, 1);
    CHECK(cache.acquire(0, 1, 0b011).missing == 0b011);
    cache.ready(0, 1, 0b011);
    cache.release(0, 1);
    CHECK(cache.present(0, 1) == 0b011);
    const ExpertCache::Lease lease = cache.acquire(0, 1, kAll);
    CHECK(lease.outcome == Outcome::load);
    CHECK(lease.missing == 0b100);
    CHECK(cache.state(0, 1) == State::loading);
    cache.ready(0, 1, 0b100);
    cache.release(0, 1);
    CHECK(cache.acquire(0, 1, kAll).outcome == Outcome::hit);
}

TEST_CASE("cache: with every slot pinned acquire returns no slot, and does not grow") {
    ExpertCache cache = make_cache(8, 2);
    for (const int expert : { 0, 1 }) {
        CHECK(cache.acquire(0, expert, kAll).outcome == Outcome::load);
        cache.ready(0, expert, kAll);
    }
    CHECK(cache.acquire(0, 2, kAll).outcome == Outcome::no_slot);
    CHECK(cache.n_slots(0) == 2);
    cache.release(0, 1);
    const ExpertCache::Lease lease = cache.acquire(0, 2, kAll);
    CHECK(lease.outcome == Outcome::load);
    CHECK(lease.evicted == 1);
}

TEST_CASE("cache: a policy may let nobody leave") {
    struct Stubborn final : mkd::EvictionPolicy {
        int  expert = -1;
        void routed(int, const int32_t *, int, int) override {}
        int  victim(int, const std::vector<int> &) override { return expert; }
    };
    auto        policy   = std::make_unique<Stubborn>();
    Stubborn &  stubborn = *policy;
    ExpertCache cache({ { 8, 2 } }, std::move(policy));
    bring(cache, 0);
    bring(cache, 1);
    const ExpertCache::Lease lease = cache.acquire(0, 2, kAll);
    CHECK(lease.outcome == Outcome::no_slot);
    CHECK(lease.evicted == -1);
    CHECK(cache.victim(0) == -1);
    CHECK(cache.n_present(0) == 2);
    CHECK(cache.state(0, 2) == State::free);
    stubborn.expert = 1;
    CHECK(cache.acquire(0, 2, kAll).evicted == 1);
}

TEST_CASE("cache: the least recently used expert leaves") {
    ExpertCache cache = make_cache(8, 3);
    for (const int expert : { 0, 1, 2, 0 }) {
        bring(cache, expert);
    }
    CHECK(cache.victim(0) == 1);
    bring(cache, 3);
    CHECK(cache.state(0, 1) == State::free);
    CHECK(cache.victim(0) == 2);
    CHECK(cache.acquire(0, 4, kAll).evicted == 2);
}

TEST_CASE("cache: LFU keeps what is used often, until that is long ago") {
    ExpertCache cache({ { 8, 2 } }, mkd::make_lfu_policy({ 8 }, 0.5));
    for (const int expert : { 0, 0, 0, 1 }) {
        bring(cache, expert);
    }
    CHECK(cache.victim(0) == 0); // 1/2 + 1/4 + 1/8 < 1
    bring(cache, 0);
    bring(cache, 2); // 0: 1/2 + ..., 1: 1/4
    CHECK(cache.state(0, 1) == State::free);
    for (int i = 0; i < 8; ++i) {
        bring(cache, 2);
    }
    CHECK(cache.victim(0) == 0);
}

TEST_CASE("cache: LFU scores survive their own growth") {
    ExpertCache cache({ { 8, 2 } }, mkd::make_lfu_policy({ 8 }, 0.5));
    for (int i = 0; i < 5000; ++i) { // 2^5000 is no double
        bring(cache, i % 2);
        REQUIRE(cache.victim(0) == (i == 0 ? -1 : 1 - i % 2));
    }
}

TEST_CASE("cache: a prefetch takes a slot without a pin, and only from whom it may") {
    ExpertCache cache = make_cache(8, 2);
    bring(cache, 0);
    bring(cache, 1);
    std::vector<uint8_t> keep(8, 0);
    keep[0] = keep[1] = 1;
    CHECK(cache.reserve(0, 2, kAll, keep).outcome == Outcome::no_slot);
    CHECK(cache.n_present(0) == 2);
    keep[1] = 0;
    ExpertCache::Lease lease = cache.reserve(0, 2, kAll, keep);
    CHECK(lease.outcome == Outcome::load);
    CHECK(lease.evicted == 1);
    CHECK(cache.state(0, 2) == State::loading);
    CHECK(cache.reserve(0, 2, kAll, keep).outcome == Outcome::joined);
    CHECK(cache.clear(0) == 1); // not what is on its way
    cache.ready(0, 2, kAll);
    CHECK(cache.state(0, 2) == State::ready);
    CHECK(cache.reserve(0, 2, kAll, keep).outcome == Outcome::hit);
}

TEST_CASE("cache: an expert on its way can be joined, and outlives the end of that read") {
    ExpertCache                cache = make_cache(8, 1);
    const std::vector<uint8_t> keep(8, 0);
    cache.reserve(0, 3, kAll, keep);
    ExpertCache::Lease lease = cache.acquire(0, 3, kAll);
    CHECK(lease.outcome == Outcome::joined);
    CHECK(lease.missing == kAll);
    CHECK(cache.acquire(0, 4, kAll).outcome == Outcome::no_slot);
    cache.ready(0, 3, 0b001);
    CHECK(cache.state(0, 3) == State::loading);
    cache.fail(0, 3); // given up half-way
    CHECK(cache.state(0, 3) == State::pinned);
    CHECK(cache.present(0, 3) == 0b001);
    lease = cache.acquire(0, 3, kAll);
    CHECK(lease.outcome == Outcome::load);
    CHECK(lease.missing == 0b110);
    cache.ready(0, 3, 0b110);
    cache.release(0, 3);
    cache.release(0, 3);
    CHECK(cache.state(0, 3) == State::ready);
}

TEST_CASE("cache: a reserved expert that never came leaves a free slot") {
    ExpertCache cache = make_cache(8, 1);
    cache.reserve(0, 3, kAll, std::vector<uint8_t>(8, 0));
    cache.fail(0, 3);
    CHECK(cache.state(0, 3) == State::free);
    CHECK(cache.n_present(0) == 0);
}

TEST_CASE("cache: layers do not push each other out") {
    ExpertCache cache = make_cache(8, 2, 2);
    bring(cache, 0, 0);
    for (int expert = 0; expert < 8; ++expert) {
        bring(cache, expert, 1);
    }
    CHECK(cache.state(0, 0) == State::ready);
}

TEST_CASE("cache: clear drops what is not pinned") {
    ExpertCache cache = make_cache(8, 3);
    bring(cache, 0);
    bring(cache, 1);
    CHECK(cache.acquire(0, 1, kAll).outcome == Outcome::hit);
    CHECK(cache.clear(0) == 1);
    CHECK(cache.state(0, 0) == State::free);
    CHECK(cache.state(0, 1) == State::pinned);
}

TEST_CASE("cache: misuse is an error, not silence") {
    ExpertCache cache = make_cache(8, 2);
    CHECK_THROWS_AS(cache.release(0, 3), mkd::Error);
    CHECK_THROWS_AS(cache.ready(0, 3, kAll), mkd::Error);
    bring(cache, 3);
    CHECK_THROWS_AS(cache.release(0, 3), mkd::Error);
    CHECK_THROWS_AS(make_cache(4, 5), mkd::Error);
    CHECK_THROWS_AS(make_cache(4, 0), mkd::Error);
}

TEST_CASE("cache: random walk keeps one slot per expert and one expert per slot") {
    std::mt19937 rng(7);
    ExpertCache  cache = make_cache(32, 12);
    for (int step = 0; step < 2000; ++step) {
        std::set<int> batch;
        while (batch.size() < 8) {
            batch.insert((int) (rng() % 32));
        }
        std::set<int> slots;
        for (const int expert : batch) {
            const ExpertCache::Lease lease = cache.acquire(0, expert, kAll);
            REQUIRE((lease.outcome == Outcome::hit || lease.outcome == Outcome::load));
            REQUIRE(slots.insert(lease.slot).second);
            if (lease.outcome == Outcome::load && rng() % 16 == 0) {
                cache.fail(0, expert);
                cache.release(0, expert);
                slots.erase(lease.slot);
                const ExpertCache::Lease again = cache.acquire(0, expert, kAll);
                REQUIRE(again.outcome == Outcome::load);
                REQUIRE(slots.insert(again.slot).second);
                cache.ready(0, expert, kAll);
            } else if (lease.outcome == Outcome::load) {
                cache.ready(0, expert, kAll);
            }
        }
        for (const int expert : batch) {
            REQUIRE(cache.present(0, expert) == kAll);
            cache.release(0, expert);
        }
    }
}
