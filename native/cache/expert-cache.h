// cache/expert-cache.h: which expert sits in which slot.
//
// Pure bookkeeping: it owns no bytes and reads none. Each MoE layer has its own slots (n_slots, at least 1), so a budget below one token's working
// set cannot make one layer push out all others (one LRU over all layers would then hit 0 %). The caller acquires an expert, brings the parts that
// are missing, says ready, computes, releases. The number of slots is a hard bound: with every slot of the layer pinned or loading, acquire returns
// no slot; it never grows.
//
// An entry's states, and the calls that move between them (the tests walk every arrow):
//
//     free    --acquire/reserve--> loading   (a slot was free, or its entry was evicted: ready --acquire of another--> free)
//     loading --ready----->  pinned | ready  (the last part asked for has arrived; pinned if acquire asked, ready if only reserve did)
//     loading --fail------>  free | pinned   (a read failed or was given up: those parts are worth nothing; parts that were there stay)
//     pinned  --release--->  ready           (last pin gone; may be evicted) or free (and nothing of it is there)
//     ready   --acquire--->  pinned          (every part asked for is there: a hit)
//     ready   --acquire--->  loading         (some part is missing)
//     ready   --drop/clear-> free
//
// An entry that is loading can be acquired (joined): it is pinned at once, and its missing parts are those on their way.
//
// Threads: one at a time (PagedExperts' lock).

#pragma once

#include "cache/eviction-policy.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace mkd {

class ExpertCache {
  public:
    struct LayerQuota {
        int n_expert;
        int n_slots; // 1..n_expert
    };

    enum class Outcome : uint8_t {
        hit,     // all parts are in the slot
        load,    // the caller must bring `missing`, then call ready (or fail)
        joined,  // somebody is bringing `missing` already (parts that are not on their way are not in it)
        no_slot, // every slot is pinned or loading, or the policy lets none leave; nothing was changed
    };

    struct Lease {
        Outcome  outcome = Outcome::no_slot;
        int      slot    = -1; // within the layer
        uint32_t missing = 0;
        int      evicted = -1; // expert that left this slot
    };

    enum class State : uint8_t { free, loading, pinned, ready };

    // policy: null for LRU.
    ExpertCache(std::vector<LayerQuota> layers, std::unique_ptr<EvictionPolicy> policy);

    int n_layers() const { return (int) layers_.size(); }
    int n_slots(int i_layer) const { return (int) layers_[(size_t) i_layer].slots.size(); }

    // The router has chosen: for the policy, once per layer and batch, before acquire.
    void routed(int i_layer, const int32_t * ids, int n_expert_used, int n_tokens) { policy_->routed(i_layer, ids, n_expert_used, n_tokens); }

    // Asks for parts (a bit mask, not 0) of an expert and pins it.
    Lease acquire(int i_layer, int expert, uint32_t parts);
    // The same for a prefetch: no pin. An expert with keep[expert] != 0 is not evicted for it. hit and joined: nothing to do.
    Lease reserve(int i_layer, int expert, uint32_t parts, const std::vector<uint8_t> & keep);
    void  ready(int i_layer, int expert, uint32_t parts);
    void  fail(int i_layer, int expert); // whatever is on its way
    void  release(int i_layer, int expert);

    // The expert that the next load into this layer would push out; -1: a slot is free, or no entry may leave.
    int victim(int i_layer);

    uint32_t present(int i_layer, int expert) const; // parts that are in a slot
    State    state(int i_layer, int expert) const;
    int      n_present(int i_layer) const; // experts that have a slot

    // Drops entries that are ready. Returns their number.
    int clear(int i_layer);

  private:
    struct Slot {
        int      expert  = -1;
        uint32_t parts   = 0; // present
        uint32_t loading = 0; // on their way
        int      n_pins  = 0;

        State state() const {
            return expert < 0 ? State::free : loading ? State::loading : n_pins ? State::pinned : State::ready;
        }
    };
    struct Layer {
        std::vector<Slot> slots;
        std::vector<int>  slot_of; // [n_expert], -1: absent
        int               n_used = 0;
    };

    Slot & find(int i_layer, int expert, const char * caller);
    void   drop(Layer & layer, Slot & slot);
    // A slot for an expert that has none; -1: no slot.
    int    place(int i_layer, int expert, const std::vector<uint8_t> * keep, int * evicted);
    bool   list_candidates(const Layer & layer, const std::vector<uint8_t> * keep, int * free_slot);

    std::vector<Layer>              layers_;
    std::unique_ptr<EvictionPolicy> policy_;
    std::vector<int>                candidates_; // scratch
};

} // namespace mkd
