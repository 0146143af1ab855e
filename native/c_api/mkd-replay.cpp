// c_api/mkd-replay.cpp: replays of mkd.h.

#include "c_api/guard.h"
#include "cache/replay.h"
#include "mkd.h"

#include <algorithm>

using mkd::fail;
using mkd::guarded;
using mkd::require;
using mkd::require_struct;

namespace {

mkd::Routing routing_of(const mkd_replay_params & params) {
    mkd::Routing routing;
    if (params.n_moe_layer < 1) {
        fail(MKD_ERR_ARG, "n_moe_layer %d is out of range; expected 1 or more", params.n_moe_layer);
    }
    routing.ids           = require(params.ids, "ids");
    routing.n_tokens      = params.n_tokens;
    routing.n_expert_used = params.n_expert_used;
    routing.n_expert.assign(require(params.n_expert, "n_expert"), params.n_expert + params.n_moe_layer);
    if (params.batch_tokens) {
        if (params.n_batch < 1 || params.n_batch > params.n_tokens) {
            fail(MKD_ERR_ARG, "n_batch %lld is out of range; expected 1..%lld, the number of tokens", (long long) params.n_batch,
                 (long long) params.n_tokens);
        }
        routing.batch_tokens.assign(params.batch_tokens, params.batch_tokens + params.n_batch);
    }
    return routing;
}

} // namespace

extern "C" {

enum mkd_status mkd_cache_replay(const struct mkd_replay_params * params, struct mkd_replay_result * out) {
    return guarded([&] {
        const mkd::Routing routing = routing_of(require_struct(params, "mkd_replay_params"));
        require(out, "out");
        const std::vector<int>  n_slots(require(params->n_slots, "n_slots"), params->n_slots + params->n_moe_layer);
        const mkd::ReplayResult result = mkd::replay(routing, n_slots, require(params->policy, "policy"));
        *out = { result.n_requests, result.n_hits, result.n_loads(), result.n_first, result.n_evictions };
    });
}

enum mkd_status mkd_cache_quotas(const struct mkd_replay_params * params, int64_t n_slots, int32_t * quotas) {
    return guarded([&] {
        const mkd::Routing routing = routing_of(require_struct(params, "mkd_replay_params"));
        require(quotas, "quotas");
        const std::vector<int> best = mkd::best_lru_quotas(routing, n_slots);
        std::copy(best.begin(), best.end(), quotas);
    });
}

} // extern "C"
