#include "backend/paged-experts.h"

#include "base/clock.h"
#include "base/error.h"

#include <algorithm>

namespace mkd {

PagedExperts::PagedExperts(std::unique_ptr<ExpertStore> store, const PagingOptions & options)
    : store_(std::move(store)), options_(options), reads_(options.reads) {
    for (size_t i = 0; i < index().layers.size(); ++i) {
        const size_t layer = (size_t) index().layers[i].layer;
        if (layer_index_.size() <= layer) {
            layer_index_.resize(layer + 1, -1);
        }
        layer_index_[layer] = (int) i;
        routers_.emplace_back();
        prefetched_.emplace_back((size_t) index().layers[i].n_expert(), 0);
    }
}

PagedExperts::~PagedExperts() {
    for (const auto & load : loads_) {
        reads_.cancel(load->request);
    }
    for (const auto & load : loads_) {
        reads_.wait(load->request);
    }
}

int PagedExperts::layer_index(int layer) const {
    return layer >= 0 && (size_t) layer < layer_index_.size() ? layer_index_[(size_t) layer] : -1;
}

void PagedExperts::allocate(const std::vector<int> & n_slots) {
    std::vector<ExpertCache::LayerQuota> quotas;
    std::vector<int>                     n_expert;
    uint64_t                             slab_bytes = 0;
    for (size_t i = 0; i < n_slots.size(); ++i) {
        quotas.push_back({ layer((int) i).n_expert(), n_slots[i] });
        n_expert.push_back(layer((int) i).n_expert());
        slab_offset_.push_back(slab_bytes);
        slab_bytes += (uint64_t) n_slots[i] * layer((int) i).stride_bytes;
    }
    auto policy = make_policy(options_.policy, n_expert);
    if (!policy) {
        fail(MKD_ERR_ARG, "cache policy '%s': expected lru or lfu", options_.policy.c_str());
    }
    slab_  = std::make_unique<HugeMemory>(slab_bytes, "expert slots");
    cache_ = std::make_unique<ExpertCache>(quotas, std::move(policy));
}

// ---------------------------------------------------------------- loads

PagedExperts::Load * PagedExperts::find_load(int i_layer, int expert) {
    for (const auto & load : loads_) {
        if (load->i_layer == i_layer && load->expert == expert) {
            return load.get();
        }
    }
    return nullptr;
}

void PagedExperts::start(int i_layer, int expert, int slot, uint32_t missing, ReadPriority priority) {
    if (spare_.empty()) {
        spare_.push_back(std::make_unique<Load>());
    }
    loads_.push_back(std::move(spare_.back()));
    spare_.pop_back();
    const LayerExperts & geometry = layer(i_layer);
    Load &               load     = *loads_.back();
    load.i_layer                  = i_layer;
    load.expert                   = expert;
    load.parts                    = missing;
    load.published                = 0;
    load.prefetch                 = priority == ReadPriority::prefetch;
    load.wanted                   = !load.prefetch;
    load.given_up                 = false;
    load.first_part               = 0;
    while (!(missing >> load.first_part & 1u)) {
        load.first_part += 1;
    }
    store_->prepare(geometry, expert, missing, layer_slots(i_layer) + (size_t) slot * geometry.stride_bytes, options_.whole_experts, load.request);
    reads_.submit(load.request, priority);
}

uint32_t PagedExperts::arrived_parts(const Load & load) const {
    const uint32_t ready = load.request.ready();
    return load.request.n_sections == 1 ? (ready ? load.parts : 0) : (ready << load.first_part) & load.parts;
}

void PagedExperts::publish(Load & load) {
    const uint32_t fresh = arrived_parts(load) & ~load.published;
    if (fresh) {
        cache_->ready(load.i_layer, load.expert, fresh);
        load.published |= fresh;
    }
}

void PagedExperts::finish(Load & load) {
    const LayerExperts & geometry = layer(load.i_layer);
    const ReadRequest &  request  = load.request;
    publish(load);
    if (load.published != load.parts) {
        cache_->fail(load.i_layer, load.expert);
    }
    stats_.n_reads += request.t_start_us != 0;
    stats_.read_bytes += request.bytes_read;
    if (request.t_start_us) {
        stats_.load_us += request.t_done_us - request.t_start_us;
    }
    for (size_t part = 0; part < geometry.parts.size(); ++part) {
        stats_.payload_bytes += load.published >> part & 1u ? geometry.parts[part].payload_bytes : 0;
    }
    if (load.prefetch) {
        stats_.prefetch_bytes += request.bytes_read;
        if (!load.wanted && load.given_up) {
            stats_.prefetch_waste_bytes += request.bytes_read;
        }
        prefetched_[(size_t) load.i_layer][(size_t) load.expert] = !load.wanted && load.published == load.parts;
    }
    if (request.error && load.wanted) {
        failures_.push_back({ load.i_layer, load.expert, request.error });
    }
    if (hooks_.on_load && load.published == load.parts) {
        hooks_.on_load(geometry.layer, load.expert, request.bytes_read, request.t_queue_us, request.t_done_us,
                       load.prefetch ? MKD_LOAD_KIND_PREFETCH : MKD_LOAD_KIND_DEMAND, hooks_.user);
    }
}

void PagedExperts::harvest() {
    for (size_t i = 0; i < loads_.size();) {
        Load & load = *loads_[i];
        if (!load.request.done()) {
            publish(load);
            ++i;
            continue;
        }
        finish(load);
        spare_.push_back(std::move(loads_[i]));
        loads_.erase(loads_.begin() + (std::ptrdiff_t) i);
    }
}

void PagedExperts::count_eviction(int i_layer, int expert) {
    if (expert < 0) {
        return;
    }
    stats_.n_evictions += 1;
    uint8_t & unused = prefetched_[(size_t) i_layer][(size_t) expert];
    if (unused) { // it was brought for nothing
        stats_.prefetch_waste_bytes += layer(i_layer).stride_bytes;
        unused = 0;
    }
    if (hooks_.on_evict) {
        hooks_.on_evict(layer(i_layer).layer, expert, hooks_.user);
    }
}

// ---------------------------------------------------------------- demand

int PagedExperts::claim(int i_layer, int expert, uint32_t parts) {
    const ExpertCache::Lease lease = cache_->acquire(i_layer, expert, parts);
    if (lease.outcome == ExpertCache::Outcome::no_slot) {
        return -1;
    }
    count_eviction(i_layer, lease.evicted);
    if (lease.outcome == ExpertCache::Outcome::load) {
        start(i_layer, expert, lease.slot, lease.missing, ReadPriority::demand);
    } else if (lease.outcome == ExpertCache::Outcome::joined) {
        if (Load * load = find_load(i_layer, expert); load && !load->given_up) {
            reads_.promote(load->request);
        }
    }
    return lease.slot;
}

uint32_t PagedExperts::arrived(int i_layer, int expert, uint32_t parts) {
    for (size_t i = 0; i < failures_.size(); ++i) {
        if (failures_[i].i_layer == i_layer && failures_[i].expert == expert) {
            const std::exception_ptr error = failures_[i].error;
            failures_.erase(failures_.begin() + (std::ptrdiff_t) i);
            std::rethrow_exception(error);
        }
    }
    const uint32_t present = cache_->present(i_layer, expert) & parts;
    if (present != parts && cache_->state(i_layer, expert) == ExpertCache::State::pinned) { // its load came to nothing
        const ExpertCache::Lease lease = cache_->acquire(i_layer, expert, parts);
        cache_->release(i_layer, expert);
        start(i_layer, expert, lease.slot, lease.missing, ReadPriority::demand);
    }
    return present;
}

void PagedExperts::release(int i_layer, int expert) {
    cache_->release(i_layer, expert);
}

void PagedExperts::abandon(int i_layer, int expert) {
    if (Load * load = find_load(i_layer, expert)) {
        load->given_up = true;
        load->wanted   = false; // nobody is left to be told
        reads_.cancel(load->request);
        reads_.wait(load->request);
    }
}

// ---------------------------------------------------------------- prefetch

bool PagedExperts::prefetch(int i_layer, int expert, const std::vector<uint8_t> & keep) {
    const ExpertCache::Lease lease = cache_->reserve(i_layer, expert, layer(i_layer).all_parts(), keep);
    if (lease.outcome != ExpertCache::Outcome::load) {
        return lease.outcome != ExpertCache::Outcome::no_slot;
    }
    count_eviction(i_layer, lease.evicted);
    start(i_layer, expert, lease.slot, lease.missing, ReadPriority::prefetch);
    stats_.n_prefetch += 1;
    return true;
}

void PagedExperts::settle_prefetches(int i_layer, const std::vector<uint8_t> & used) {
    for (const auto & load : loads_) {
        if (load->i_layer != i_layer || !load->prefetch || load->wanted || load->given_up) {
            continue;
        }
        if (used[(size_t) load->expert]) {
            load->wanted = true;
            stats_.n_prefetch_hits += 1;
        } else {
            load->given_up = true;
            stats_.n_prefetch_cancelled += 1;
            reads_.cancel(load->request);
        }
    }
    std::vector<uint8_t> & unused = prefetched_[(size_t) i_layer];
    for (size_t e = 0; e < unused.size(); ++e) {
        if (!unused[e]) {
            continue;
        }
        if (used[e]) {
            stats_.n_prefetch_hits += unused[e] == 1;
            unused[e] = 0;
        } else if (unused[e] == 1) {
            stats_.n_prefetch_useless += 1; // so far: it stays until it is evicted
            unused[e] = 2;
        }
    }
}

// ---------------------------------------------------------------- bookkeeping

void PagedExperts::count_requests(int n_hits, int n_misses) {
    stats_.n_requests += (uint64_t) (n_hits + n_misses);
    stats_.n_hits += (uint64_t) n_hits;
    stats_.n_misses += (uint64_t) n_misses;
}

void PagedExperts::route(int i_layer, const int32_t * ids, int n_expert_used, int n_tokens) {
    cache_->routed(i_layer, ids, n_expert_used, n_tokens);
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
    mkd_stats stats   = stats_;
    stats.n_checksums = store_->n_checksums() - checksums_base_;
    stats.n_reread    = store_->n_reread() - reread_base_;
    stats.io_busy_us  = reads_.meter().busy_us - busy_base_us_;
    return stats;
}

void PagedExperts::reset_stats() {
    stats_          = mkd_stats{};
    checksums_base_ = store_->n_checksums();
    reread_base_    = store_->n_reread();
    busy_base_us_   = reads_.meter().busy_us;
}

void PagedExperts::clear() {
    if (!cache_) {
        return;
    }
    for (const auto & load : loads_) {
        load->given_up = true;
        reads_.cancel(load->request);
    }
    for (const auto & load : loads_) {
        reads_.wait(load->request);
    }
    harvest();
    for (int i_layer = 0; i_layer < n_layers(); ++i_layer) {
        stats_.n_evictions += (uint64_t) cache_->clear(i_layer);
        std::fill(prefetched_[(size_t) i_layer].begin(), prefetched_[(size_t) i_layer].end(), 0);
    }
}

void PagedExperts::set_cold(bool cold) {
    cold_ = cold;
}

void PagedExperts::end_pass(int i_layer) {
    if (cold_) {
        stats_.n_evictions += (uint64_t) cache_->clear(i_layer);
        std::fill(prefetched_[(size_t) i_layer].begin(), prefetched_[(size_t) i_layer].end(), 0);
    }
}

} // namespace mkd
