// backend/paged-experts.h: the experts of one model, paged through slots.
//
// It joins the store (where bytes are), the read queue (who brings them), the cache (which slot) and the slab (the slots' memory), counts
// everything, and calls the hooks. A layer's experts are asked for through a LayerVisit; prefetches come in between.
//
// The slab is one anonymous mapping, kAlignmentBytes aligned; layer i has a contiguous range of slots of its own stride. Shards are read
// straight into slots. A slot whose bytes are on their way belongs to the read queue until harvest() has seen the end of that read; only
// harvest() frees or publishes it.
//
// Threads: lock() is held by the thread that computes, for a whole group of matmuls; several contexts of one model take turns. Everything that is
// not marked otherwise needs that lock or a quiet session.

#pragma once

#include "backend/router-table.h"
#include "base/huge-memory.h"
#include "cache/expert-cache.h"
#include "mkd.h"
#include "store/expert-store.h"

#include <memory>
#include <mutex>
#include <vector>

namespace mkd {

enum class PrefetchMode : uint8_t { off, router, temporal, automatic };

struct PagingOptions {
    ReadQueue::Options reads;
    std::string        policy        = "lfu"; // cache/eviction-policy.h
    PrefetchMode       prefetch      = PrefetchMode::automatic;
    bool               whole_experts = false; // an expert is computed only when all of its tensors are there
};

class PagedExperts {
  public:
    PagedExperts(std::unique_ptr<ExpertStore> store, const PagingOptions & options);
    ~PagedExperts();
    PagedExperts(const PagedExperts &)             = delete;
    PagedExperts & operator=(const PagedExperts &) = delete;

    const PackageIndex & index() const { return store_->index(); }
    const ExpertStore &  store() const { return *store_; }
    const ReadQueue &    reads() const { return reads_; }

    // Position of blk.<layer> among the MoE layers; -1 if it is none.
    int                  layer_index(int layer) const;
    const LayerExperts & layer(int i_layer) const { return index().layers[(size_t) i_layer]; }
    int                  n_layers() const { return (int) index().layers.size(); }

    // Makes the slots: n_slots[i_layer] each. Once. Throws Error(NOMEM).
    void allocate(const std::vector<int> & n_slots);
    bool allocated() const { return cache_ != nullptr; }

    int       n_slots(int i_layer) const { return cache_->n_slots(i_layer); }
    uint8_t * layer_slots(int i_layer) const { return slab_->data() + slab_offset_[(size_t) i_layer]; } // first slot of the layer
    bool      all_present(int i_layer) const { return cache_->n_present(i_layer) == layer(i_layer).n_expert(); }

    std::unique_lock<std::mutex> lock() { return std::unique_lock<std::mutex>(mutex_); }

    // -------- for LayerVisit

    // Pins an expert and starts reading what is missing of the parts. Returns its slot, or -1 while none is free.
    int claim(int i_layer, int expert, uint32_t parts);
    // Parts of a pinned expert that may be computed with. A load of these parts that was given up meanwhile is started again. Throws its error.
    uint32_t arrived(int i_layer, int expert, uint32_t parts);
    void     release(int i_layer, int expert);
    // After an error: no more bytes of this expert, please. Returns once the read queue has let go of its slot.
    void     abandon(int i_layer, int expert);

    void     forget_failures() { failures_.clear(); } // a visit ended early: nobody will ask

    uint64_t version() const { return reads_.version(); } // before harvest()
    void     harvest();                                   // takes note of all that was read
    void     wait(uint64_t version) { reads_.wait_change(version); }
    bool     anything_in_flight() const { return !loads_.empty(); }
    uint32_t present(int i_layer, int expert) const { return cache_->present(i_layer, expert); }
    bool     loading(int i_layer, int expert) const { return cache_->state(i_layer, expert) == ExpertCache::State::loading; }

    // -------- prefetch

    // Begins to read an expert that is not there, at low priority, into a free slot or one whose expert is not in keep [n_expert].
    // Returns false if there is no such slot.
    bool prefetch(int i_layer, int expert, const std::vector<uint8_t> & keep);
    // The layer's experts were chosen (used [n_expert]): counts what its prefetches were good for, and cancels the useless ones.
    void settle_prefetches(int i_layer, const std::vector<uint8_t> & used);
    PrefetchMode   prefetch_mode() const { return options_.prefetch; }
    void           set_routers(RouterTable routers) { routers_ = std::move(routers); }
    const Router & router(int i_layer) const { return routers_[(size_t) i_layer]; }
    int            n_free(int i_layer) const { return cache_->n_slots(i_layer) - cache_->n_present(i_layer); }
    int  victim(int i_layer) { return cache_->victim(i_layer); } // whom the next load pushes out, -1: nobody

    // -------- bookkeeping of the matmul

    void count_requests(int n_hits, int n_misses);
    void route(int i_layer, const int32_t * ids, int n_expert_used, int n_tokens); // once per layer and batch: policy, hook, counters
    void count_waves(int n) { stats_.n_waves += (uint64_t) n; }
    void count_compute(int64_t us) { stats_.expert_compute_us += us; }
    void count_stall(int64_t us) { stats_.stall_us += us; }

    mkd_stats stats() const;
    void      reset_stats();
    void      clear();             // drops every unpinned expert, and what is on its way
    void      set_cold(bool cold); // drop every expert of a layer after its pass
    bool      cold() const { return cold_; }
    void      end_pass(int i_layer); // called after a layer's last matmul of a batch
    void      set_hooks(const mkd_hooks & hooks) { hooks_ = hooks; }

    uint64_t slab_bytes() const { return slab_->bytes(); }

  private:
    // One expert on its way into its slot.
    struct Load {
        ReadRequest request;
        int         i_layer = -1, expert = -1;
        uint32_t    parts     = 0;     // asked for
        uint32_t    published = 0;     // of these: told to the cache
        int         first_part = 0;    // section i of the request is part first_part + i
        bool        prefetch  = false; // it began as one
        bool        wanted    = false; // and was asked for
        bool        given_up  = false; // cancelled
    };

    Load *   find_load(int i_layer, int expert);
    void     start(int i_layer, int expert, int slot, uint32_t missing, ReadPriority priority);
    void     publish(Load & load);  // tells the cache about parts that arrived
    void     finish(Load & load);   // its request is done
    void     count_eviction(int i_layer, int expert);
    uint32_t arrived_parts(const Load & load) const;

    std::unique_ptr<ExpertStore> store_;
    PagingOptions                options_;
    std::unique_ptr<ExpertCache> cache_;
    RouterTable                  routers_; // [i_layer]
    std::vector<int>             layer_index_; // [layer] -> i_layer
    std::unique_ptr<HugeMemory>  slab_;
    std::vector<size_t>          slab_offset_;
    std::mutex                   mutex_;
    mkd_hooks                    hooks_{};
    mkd_stats                    stats_{};
    uint64_t                     checksums_base_ = 0, reread_base_ = 0;
    int64_t                      busy_base_us_ = 0;
    bool                         cold_ = false;

    std::vector<std::unique_ptr<Load>> loads_; // in flight, in the order of submission
    std::vector<std::unique_ptr<Load>> spare_;
    // a demand load that failed, until its visitor asks
    struct Failure {
        int                i_layer, expert;
        std::exception_ptr error;
    };
    std::vector<Failure> failures_;
    std::vector<std::vector<uint8_t>> prefetched_; // [i_layer][expert] 1: brought by a prefetch; 2: and its layer has since done without

    ReadQueue reads_; // last: it is destroyed first, and lets go of the slots
};

} // namespace mkd
