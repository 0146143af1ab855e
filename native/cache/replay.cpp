#include "cache/replay.h"

#include "base/error.h"
#include "cache/expert-cache.h"
#include "cache/replay-policies.h"

#include <algorithm>
#include <numeric>

namespace mkd {

namespace {

constexpr uint32_t kWhole   = 1;       // an expert is one part
constexpr int64_t  kMaxSize = 1 << 30; // of a batch's ids, and of all slots

// One batch at one layer.
struct Visit {
    int                  i_layer = 0;
    int                  n_tokens = 0;
    std::vector<int32_t> ids;     // [n_tokens][n_expert_used]
    std::vector<int>     experts; // distinct, ascending
};

int64_t sum(const std::vector<int> & values) {
    return std::accumulate(values.begin(), values.end(), int64_t{ 0 });
}

void check(const Routing & routing) {
    if (!routing.ids || routing.n_tokens < 1 || routing.n_expert_used < 1 || routing.n_expert.empty()) {
        fail(MKD_ERR_ARG, "replay: ids of %lld tokens, %d MoE layers, %d experts used; expected at least one of each",
             (long long) (routing.ids ? routing.n_tokens : 0), routing.n_moe_layer(), routing.n_expert_used);
    }
    for (const int n : routing.n_expert) {
        if (n < routing.n_expert_used) {
            fail(MKD_ERR_ARG, "replay: a layer has %d experts, and %d are used", n, routing.n_expert_used);
        }
    }
    if (sum(routing.n_expert) > kMaxSize) {
        fail(MKD_ERR_ARG, "replay: %lld experts are more than %lld", (long long) sum(routing.n_expert), (long long) kMaxSize);
    }
    const auto per_token = (int64_t) routing.n_moe_layer() * routing.n_expert_used;
    for (const int n : routing.batch_tokens) {
        if (n < 1 || n > kMaxSize / per_token) {
            fail(MKD_ERR_ARG, "replay: a batch of %d tokens; expected 1..%lld", n, (long long) (kMaxSize / per_token));
        }
    }
    if (!routing.batch_tokens.empty() && sum(routing.batch_tokens) != routing.n_tokens) {
        fail(MKD_ERR_ARG, "replay: the batches have %lld tokens together, the routing %lld", (long long) sum(routing.batch_tokens),
             (long long) routing.n_tokens);
    }
    const int32_t * id = routing.ids;
    for (int64_t t = 0; t < routing.n_tokens; ++t) {
        for (int i = 0; i < routing.n_moe_layer(); ++i) {
            for (int k = 0; k < routing.n_expert_used; ++k, ++id) {
                if (*id < 0 || *id >= routing.n_expert[(size_t) i]) {
                    fail(MKD_ERR_ARG, "replay: token %lld, MoE layer %d: expert %d of %d", (long long) t, i, *id, routing.n_expert[(size_t) i]);
                }
            }
        }
    }
}

// Calls each(visit) in the order of decoding. offset [n_moe_layer] is added to the ids of a layer.
template <class Each> void for_each_visit(const Routing & routing, const std::vector<int> & offset, Each && each) {
    const int64_t        n_used = routing.n_expert_used, n_layer = routing.n_moe_layer();
    const auto           n_batches = routing.batch_tokens.empty() ? routing.n_tokens : (int64_t) routing.batch_tokens.size();
    std::vector<uint8_t> seen((size_t) sum(routing.n_expert), 0);
    Visit                visit;
    int64_t              first = 0;
    for (int64_t b = 0; b < n_batches; ++b, first += visit.n_tokens) {
        visit.n_tokens = routing.batch_tokens.empty() ? 1 : routing.batch_tokens[(size_t) b];
        for (visit.i_layer = 0; visit.i_layer < n_layer; ++visit.i_layer) {
            visit.ids.clear();
            visit.experts.clear();
            for (int64_t t = first; t < first + visit.n_tokens; ++t) {
                const int32_t * ids = routing.ids + (t * n_layer + visit.i_layer) * n_used;
                for (int64_t k = 0; k < n_used; ++k) {
                    const int expert = ids[k] + offset[(size_t) visit.i_layer];
                    visit.ids.push_back(expert);
                    if (!seen[(size_t) expert]) {
                        seen[(size_t) expert] = 1;
                        visit.experts.push_back(expert);
                    }
                }
            }
            for (const int expert : visit.experts) {
                seen[(size_t) expert] = 0;
            }
            std::sort(visit.experts.begin(), visit.experts.end());
            each(visit);
        }
    }
}

// How the layers' experts are numbered in the cache: each layer's from 0, or (one pool) all of them through.
struct Numbering {
    bool             pool;
    std::vector<int> offset;   // [n_moe_layer]
    std::vector<int> n_expert; // [layer of the cache]
    std::vector<int> layer_of; // [expert of the pool]

    Numbering(const Routing & routing, bool is_pool) : pool(is_pool), n_expert(routing.n_expert) {
        int n = 0;
        for (int i = 0; i < routing.n_moe_layer(); ++i) {
            offset.push_back(pool ? n : 0);
            n += routing.n_expert[(size_t) i];
            layer_of.resize((size_t) n, i);
        }
        if (pool) {
            n_expert.assign(1, n);
        }
    }
    int cache_layer(const Visit & visit) const { return pool ? 0 : visit.i_layer; }
};

std::vector<std::vector<std::vector<int64_t>>> list_uses(const Routing & routing, const Numbering & numbering) {
    std::vector<std::vector<std::vector<int64_t>>> uses;
    for (const int n : numbering.n_expert) {
        uses.emplace_back((size_t) n);
    }
    std::vector<int64_t> now(numbering.n_expert.size(), 0);
    for_each_visit(routing, numbering.offset, [&](const Visit & visit) {
        const auto i_layer = (size_t) numbering.cache_layer(visit);
        for (const int expert : visit.experts) {
            uses[i_layer][(size_t) expert].push_back(now[i_layer]);
        }
        now[i_layer] += 1;
    });
    return uses;
}

// What LayerVisit does. order: scratch.
void replay_visit(ExpertCache & cache, int i_layer, const Visit & visit, int n_expert_used, std::vector<int> & order, ReplayResult & result) {
    cache.routed(i_layer, visit.ids.data(), n_expert_used, visit.n_tokens);
    order           = visit.experts;
    const auto rest = std::stable_partition(order.begin(), order.end(), [&](int expert) { return cache.present(i_layer, expert) != 0; });
    result.n_requests += order.size();
    result.n_hits += (uint64_t) (rest - order.begin());
    const auto step  = (size_t) std::max(1, cache.n_slots(i_layer) / 4);
    size_t     first = 0; // still pinned: order[first..)
    for (size_t i = 0; i < order.size(); ++i) {
        ExpertCache::Lease lease = cache.acquire(i_layer, order[i], kWhole);
        while (lease.outcome == ExpertCache::Outcome::no_slot && first < i) {
            for (const size_t end = std::min(i, first + step); first < end; ++first) {
                cache.release(i_layer, order[first]);
            }
            lease = cache.acquire(i_layer, order[i], kWhole);
        }
        if (lease.outcome == ExpertCache::Outcome::load) {
            cache.ready(i_layer, order[i], kWhole);
        }
        result.n_evictions += lease.evicted >= 0;
    }
    for (; first < order.size(); ++first) {
        cache.release(i_layer, order[first]);
    }
}

} // namespace

ReplayResult replay(const Routing & routing, const std::vector<int> & n_slots, const std::string & policy) {
    check(routing);
    if (n_slots.size() != routing.n_expert.size()) {
        fail(MKD_ERR_ARG, "replay: slots of %zu layers for %d MoE layers", n_slots.size(), routing.n_moe_layer());
    }
    std::vector<int> share;
    for (size_t i = 0; i < n_slots.size(); ++i) {
        if (n_slots[i] < 1 || n_slots[i] > routing.n_expert[i]) {
            fail(MKD_ERR_ARG, "replay: %d slots for the %d experts of MoE layer %zu; expected 1..%d", n_slots[i], routing.n_expert[i], i,
                 routing.n_expert[i]);
        }
        share.push_back(std::min(routing.n_expert_used, n_slots[i]));
    }
    const bool                      is_protected = policy == "lru-protected";
    const Numbering                 numbering(routing, is_protected || policy == "lru-global" || policy == "belady-global");
    std::unique_ptr<EvictionPolicy> evict;
    if (is_protected) {
        evict = make_protected_lru_policy(numbering.layer_of, share);
    } else if (policy == "lru-global") {
        evict = make_lru_policy(numbering.n_expert);
    } else if (policy == "belady" || policy == "belady-global") {
        evict = make_belady_policy(list_uses(routing, numbering));
    } else if (!(evict = make_policy(policy, numbering.n_expert))) {
        fail(MKD_ERR_ARG, "replay: no policy '%s'; expected lru, lfu, belady, lru-global, lru-protected or belady-global", policy.c_str());
    }
    std::vector<ExpertCache::LayerQuota> quotas;
    for (size_t i = 0; i < numbering.n_expert.size(); ++i) {
        quotas.push_back({ numbering.n_expert[i], numbering.pool ? (int) sum(n_slots) : n_slots[i] });
    }
    ExpertCache          cache(quotas, std::move(evict));
    ReplayResult         result;
    std::vector<int>     order;
    std::vector<uint8_t> seen(numbering.layer_of.size(), 0);
    const Numbering      through(routing, true);
    for_each_visit(routing, numbering.offset, [&](const Visit & visit) {
        replay_visit(cache, numbering.cache_layer(visit), visit, routing.n_expert_used, order, result);
        const int to_through = through.offset[(size_t) visit.i_layer] - numbering.offset[(size_t) visit.i_layer];
        for (const int expert : visit.experts) {
            uint8_t & known = seen[(size_t) (expert + to_through)];
            result.n_first += !known;
            known = 1;
        }
    });
    return result;
}

std::vector<int> best_lru_quotas(const Routing & routing, int64_t total) {
    check(routing);
    const int  n_layer   = routing.n_moe_layer();
    const auto all_slots = sum(routing.n_expert);
    if (total < n_layer || total > all_slots) {
        fail(MKD_ERR_ARG, "replay: %lld slots for %d MoE layers; expected %d..%lld", (long long) total, n_layer, n_layer, (long long) all_slots);
    }
    // hits[i_layer][distance]: requests that hit with more than so many slots (Mattson et al. 1970). The stack is what LRU's order is before the
    // batch; the batch then moves its experts to the top, the last named first.
    std::vector<std::vector<uint64_t>> hits;
    std::vector<std::vector<int>>      stack((size_t) n_layer);
    for (const int n : routing.n_expert) {
        hits.emplace_back((size_t) n, 0);
    }
    for_each_visit(routing, std::vector<int>((size_t) n_layer, 0), [&](const Visit & visit) {
        std::vector<int> & order = stack[(size_t) visit.i_layer];
        for (size_t distance = 0; distance < order.size(); ++distance) {
            hits[(size_t) visit.i_layer][distance] += std::binary_search(visit.experts.begin(), visit.experts.end(), order[distance]);
        }
        for (const int32_t id : visit.ids) {
            const auto at = std::find(order.begin(), order.end(), id);
            if (at == order.end()) {
                order.insert(order.begin(), id);
            } else {
                std::rotate(order.begin(), at, at + 1);
            }
        }
    });
    // best[s]: most hits of the layers so far with s slots in all; chosen[i_layer][s]: what the layer has of them.
    constexpr int64_t             kNever = -1;
    std::vector<int64_t>          best((size_t) total + 1, kNever);
    std::vector<std::vector<int>> chosen;
    best[0] = 0;
    for (int i = 0; i < n_layer; ++i) {
        const auto           n_expert = (int64_t) routing.n_expert[(size_t) i];
        const int64_t        least    = std::min({ (int64_t) routing.n_expert_used, total / n_layer, n_expert });
        std::vector<int64_t> with((size_t) total + 1, kNever);
        chosen.emplace_back((size_t) total + 1, 0);
        int64_t n_hits = 0;
        for (int64_t n = 1; n <= std::min(n_expert, total); ++n) {
            n_hits += (int64_t) hits[(size_t) i][(size_t) n - 1];
            if (n < least) {
                continue;
            }
            for (int64_t s = n; s <= total; ++s) {
                const int64_t before = best[(size_t) (s - n)];
                if (before != kNever && before + n_hits > with[(size_t) s]) {
                    with[(size_t) s]           = before + n_hits;
                    chosen.back()[(size_t) s] = (int) n;
                }
            }
        }
        best.swap(with);
    }
    std::vector<int> quotas((size_t) n_layer);
    for (int i = n_layer - 1; i >= 0; --i) {
        quotas[(size_t) i] = chosen[(size_t) i][(size_t) total];
        total -= quotas[(size_t) i];
    }
    return quotas;
}

} // namespace mkd
