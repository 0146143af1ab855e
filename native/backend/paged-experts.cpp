#include "backend/paged-experts.h"

#include "base/clock.h"
#include "base/error.h"

#include <algorithm>

namespace mkd {

PagedExperts::PagedExperts(std::unique_ptr<ExpertStore> store, int n_lanes) : store_(std::move(store)), lanes_(n_lanes) {
    for (size_t i = 0; i < index().layers.size(); ++i) {
        const size_t layer = (size_t) index().layers[i].layer;
        if (layer_index_.size() <= layer) {
            layer_index_.resize(layer + 1, -1);
        }
        layer_index_[layer] = (int) i;
    }
}

int PagedExperts::layer_index(int layer) const {
    return layer >= 0 && (size_t) layer < layer_index_.size() ? layer_index_[(size_t) layer] : -1;
}

void PagedExperts::allocate(const std::vector<int> & n_slots) {
    std::vector<ExpertCache::LayerQuota> quotas;
    int                                  n_slots_max = 0;
    uint64_t                             slab_bytes = 0;
    for (size_t i = 0; i < n_slots.size(); ++i) {
        quotas.push_back({ layer((int) i).n_expert(), n_slots[i] });
        slab_offset_.push_back(slab_bytes);
        slab_bytes += (uint64_t) n_slots[i] * layer((int) i).stride_bytes;
        n_slots_max = std::max(n_slots_max, n_slots[i]);
    }
    slab_  = std::make_unique<HugeMemory>(slab_bytes, "expert slots");
    cache_ = std::make_unique<ExpertCache>(quotas, make_lru_policy(n_slots));
    pending_.resize((size_t) n_slots_max);
}

void PagedExperts::fetch(int i_layer, const int32_t * experts, int n, uint32_t parts, bool counted, int32_t * slots) {
    const LayerExperts & geometry  = layer(i_layer);
    int                  n_pending = 0;
    int                  n_pinned  = 0;
    Error *              refused   = nullptr;

    // 1. slots for all; reads start as soon as a slot is known
    Error no_slot(MKD_ERR_BUDGET, "");
    for (; n_pinned < n; ++n_pinned) {
        const int                expert = experts[n_pinned];
        const ExpertCache::Lease lease  = cache_->acquire(i_layer, expert, parts);
        if (lease.outcome == ExpertCache::Outcome::no_slot || lease.outcome == ExpertCache::Outcome::busy) {
            no_slot = Error(MKD_ERR_BUDGET, format("layer %d: no free slot for expert %d (%d slots, %d experts asked for)", geometry.layer,
                                                   expert, n_slots(i_layer), n));
            refused = &no_slot;
            break;
        }
        if (lease.evicted >= 0) {
            stats_.n_evictions += 1;
            if (hooks_.on_evict) {
                hooks_.on_evict(geometry.layer, lease.evicted, hooks_.user);
            }
        }
        slots[n_pinned] = lease.slot;
        if (counted) {
            stats_.n_requests += 1;
            (lease.missing ? stats_.n_misses : stats_.n_hits) += 1;
        }
        if (lease.missing) {
            Pending & pending  = pending_[(size_t) n_pending++];
            pending.expert     = expert;
            pending.parts      = lease.missing;
            pending.n_requests = store_->prepare(geometry, expert, lease.missing, layer_slots(i_layer) + (size_t) lease.slot * geometry.stride_bytes,
                                                 pending.requests);
            for (int i = 0; i < pending.n_requests; ++i) {
                lanes_.submit(pending.requests[(size_t) i]);
            }
        }
    }

    // 2. wait for the reads
    const int64_t      t_wait = now_us();
    std::exception_ptr error  = refused ? std::make_exception_ptr(*refused) : nullptr;
    for (int p = 0; p < n_pending; ++p) {
        Pending & pending = pending_[(size_t) p];
        uint64_t  bytes   = 0;
        int64_t   t_queue = INT64_MAX, t_done = 0;
        bool      failed  = false;
        for (int i = 0; i < pending.n_requests; ++i) {
            ReadRequest & request = pending.requests[(size_t) i];
            lanes_.wait(request);
            if (request.error) {
                failed = true;
                error  = error ? error : request.error;
            }
            bytes += request.bytes;
            t_queue = std::min(t_queue, request.t_queue_us);
            t_done  = std::max(t_done, request.t_done_us);
            stats_.load_us += request.t_done_us - request.t_queue_us;
        }
        stats_.n_reads += (uint64_t) pending.n_requests;
        stats_.read_bytes += bytes;
        if (failed) {
            cache_->fail(i_layer, pending.expert);
            pending.parts = 0;
            continue;
        }
        for (size_t part = 0; part < geometry.parts.size(); ++part) {
            stats_.payload_bytes += pending.parts >> part & 1u ? geometry.parts[part].payload_bytes : 0;
        }
        cache_->ready(i_layer, pending.expert, pending.parts);
        if (hooks_.on_load) {
            hooks_.on_load(geometry.layer, pending.expert, bytes, t_queue, t_done, hooks_.user);
        }
    }
    if (n_pending) {
        stats_.stall_us += now_us() - t_wait;
    }
    if (!error) {
        return;
    }

    // 3. undo: release what is pinned (entries that failed are gone already)
    for (int i = 0; i < n_pinned; ++i) {
        if (cache_->state(i_layer, experts[i]) == ExpertCache::State::pinned) {
            cache_->release(i_layer, experts[i]);
        }
    }
    std::rethrow_exception(error);
}

void PagedExperts::release(int i_layer, const int32_t * experts, int n) {
    for (int i = 0; i < n; ++i) {
        cache_->release(i_layer, experts[i]);
    }
}

void PagedExperts::route(int i_layer, const int32_t * ids, int n_expert_used, int n_tokens) {
    stats_.n_layer_batches += 1;
    if (i_layer == 0) {
        stats_.n_decode += 1;
        stats_.n_tokens += (uint64_t) n_tokens;
    }
    if (hooks_.on_route) {
        hooks_.on_route(layer(i_layer).layer, ids, n_expert_used, n_tokens, hooks_.user);
    }
}

mkd_stats PagedExperts::stats() const {
    mkd_stats stats    = stats_;
    stats.n_checksums  = store_->n_checksums() - checksums_base_;
    stats.n_reread     = store_->n_reread() - reread_base_;
    return stats;
}

void PagedExperts::reset_stats() {
    stats_          = mkd_stats{};
    checksums_base_ = store_->n_checksums();
    reread_base_    = store_->n_reread();
}

void PagedExperts::clear() {
    if (cache_) {
        stats_.n_evictions += (uint64_t) cache_->clear();
    }
}

void PagedExperts::set_cold(bool cold) {
    cold_ = cold;
}

void PagedExperts::end_pass() {
    if (cold_) {
        clear();
    }
}

} // namespace mkd
