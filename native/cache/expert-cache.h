// cache/expert-cache.h: which expert sits in which slot.
//
// Pure bookkeeping: it owns no bytes and reads none. Each MoE layer has its own slots (n_slots, at least 1). The caller acquires an expert,
// brings the parts that are missing, says ready, computes, releases. The number of slots is a hard bound: with every slot of the layer
// pinned, acquire returns no slot; it never grows.
//
// An entry's states, and the call that moves between them (the tests walk every arrow):
//
//     free    --acquire-->  loading       (a slot was free, or its entry was evicted: ready --acquire of another--> free)
//     loading --ready----->  pinned       (all parts asked for have arrived)
//     loading --fail------>  free         (a read failed: the bytes are worth nothing)
//     pinned  --release--->  ready        (last pin gone; may be evicted)
//     ready   --acquire--->  pinned       (every part asked for is there: a hit)
//     ready   --acquire--->  loading      (some part is missing)
//     ready   --drop/clear-> free
//
// Threads: all calls may come from any thread; one mutex, held for bookkeeping only. The thread whose acquire returned missing parts is the
// only one who may call ready or fail for that entry; another thread that acquires a loading entry gets `busy` and must try again.

#pragma once

#include "cache/eviction-policy.h"

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace mkd {

class ExpertCache {
  public:
    struct LayerQuota {
        int n_expert;
        int n_slots; // 1..n_expert
    };

    enum class Outcome : uint8_t {
        hit,     // all parts are in the slot; pinned
        load,    // the caller must bring `missing`, then call ready (or fail); pinned
        no_slot, // every slot is pinned or loading
        busy,    // another thread is loading this expert
    };

    struct Lease {
        Outcome  outcome = Outcome::no_slot;
        int      slot    = -1; // within the layer
        uint32_t missing = 0;  // parts to bring, subset of what was asked for
        int      evicted = -1; // expert that left this slot
    };

    enum class State : uint8_t { free, loading, pinned, ready };

    ExpertCache(std::vector<LayerQuota> layers, std::unique_ptr<EvictionPolicy> policy);

    int n_layers() const { return (int) layers_.size(); }
    int n_slots(int i_layer) const { return (int) layers_[(size_t) i_layer].slots.size(); }

    // Asks for parts (a bit mask, not 0) of an expert and pins it.
    Lease acquire(int i_layer, int expert, uint32_t parts);
    void  ready(int i_layer, int expert, uint32_t parts);
    void  fail(int i_layer, int expert);
    void  release(int i_layer, int expert);

    // Which parts are in a slot now (0: none). A hint: another thread may change it.
    uint32_t present(int i_layer, int expert) const;
    State    state(int i_layer, int expert) const;

    // Drops everything that is not pinned or loading. Returns the number of experts dropped.
    int clear();

  private:
    struct Slot {
        int      expert = -1;
        State    state  = State::free;
        uint32_t parts  = 0;
        int      n_pins = 0;
    };
    struct Layer {
        std::vector<Slot> slots;
        std::vector<int>  slot_of; // [n_expert], -1: absent
    };

    Slot & find(int i_layer, int expert, const char * caller);

    mutable std::mutex              mutex_;
    std::vector<Layer>              layers_;
    std::unique_ptr<EvictionPolicy> policy_;
    std::vector<int>                candidates_; // scratch
};

} // namespace mkd
