// backend/paged-experts.h: the experts of one model, paged through slots.
//
// The job: for the expert matmul, "these experts of this layer, please" -> the slots that hold them. It joins the store (where bytes are), the
// lanes (who reads them), the cache (which slot) and the slab (the slots' memory), counts everything, and calls the hooks.
//
// The slab is one anonymous mapping, kAlignmentBytes aligned; layer i has a contiguous range of slots of its own stride. Shards are read
// straight into slots.
//
// Threads: lock() is held by the thread that computes, from fetch to release; several contexts of one model take turns. Everything that is not
// marked otherwise needs that lock or a quiet session.

#pragma once

#include "base/huge-memory.h"
#include "cache/expert-cache.h"
#include "mkd.h"
#include "store/expert-store.h"

#include <memory>
#include <mutex>
#include <vector>

namespace mkd {

class PagedExperts {
  public:
    PagedExperts(std::unique_ptr<ExpertStore> store, int n_lanes);
    PagedExperts(const PagedExperts &)             = delete;
    PagedExperts & operator=(const PagedExperts &) = delete;

    const PackageIndex & index() const { return store_->index(); }
    const ExpertStore &  store() const { return *store_; }

    // Position of blk.<layer> among the MoE layers; -1 if it is none.
    int                  layer_index(int layer) const;
    const LayerExperts & layer(int i_layer) const { return index().layers[(size_t) i_layer]; }

    // Makes the slots: n_slots[i_layer] each. Once. Throws Error(NOMEM).
    void allocate(const std::vector<int> & n_slots);
    bool allocated() const { return cache_ != nullptr; }

    int       n_slots(int i_layer) const { return cache_->n_slots(i_layer); }
    uint8_t * layer_slots(int i_layer) const { return slab_->data() + slab_offset_[(size_t) i_layer]; } // first slot of the layer

    std::unique_lock<std::mutex> lock() { return std::unique_lock<std::mutex>(mutex_); }

    // Pins n distinct experts of a layer (n <= n_slots) with the parts in mask, reading what is missing; slots [n] receives their slots.
    // counted: count them as requests in the statistics (once per layer and batch).
    // On error nothing stays pinned. Throws Error(IO, CORRUPT).
    void fetch(int i_layer, const int32_t * experts, int n, uint32_t parts, bool counted, int32_t * slots);
    void release(int i_layer, const int32_t * experts, int n);

    // Parts that are in a slot now.
    uint32_t present(int i_layer, int expert) const { return cache_->present(i_layer, expert); }

    // Bookkeeping of the matmul.
    void route(int i_layer, const int32_t * ids, int n_expert_used, int n_tokens); // once per layer and batch: hook, counters
    void count_waves(int n) { stats_.n_waves += (uint64_t) n; }
    void count_compute(int64_t us) { stats_.expert_compute_us += us; }

    mkd_stats stats() const;
    void      reset_stats();
    void      clear();            // drops every unpinned expert
    void      set_cold(bool cold); // drop every expert of a layer after each pass
    bool      cold() const { return cold_; }
    void      end_pass();         // called after a layer's last matmul of a batch
    void      set_hooks(const mkd_hooks & hooks) { hooks_ = hooks; }

    uint64_t slab_bytes() const { return slab_->bytes(); }

  private:
    std::unique_ptr<ExpertStore> store_;
    Lanes                        lanes_;
    std::unique_ptr<ExpertCache> cache_;
    std::vector<int>             layer_index_; // [layer] -> i_layer
    std::unique_ptr<HugeMemory>  slab_;
    std::vector<size_t>          slab_offset_;
    std::mutex                   mutex_;
    mkd_hooks                    hooks_{};
    mkd_stats                    stats_{};
    uint64_t                     checksums_base_ = 0, reread_base_ = 0;
    bool                         cold_ = false;

    struct Pending { // one expert being read
        int                                expert = -1;
        int                                n_requests = 0;
        uint32_t                           parts = 0;
        std::array<ReadRequest, kMaxParts> requests;
    };
    std::vector<Pending> pending_; // grown once to the largest layer
};

} // namespace mkd
