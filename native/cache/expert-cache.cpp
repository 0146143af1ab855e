#include "cache/expert-cache.h"

#include "base/error.h"

namespace mkd {

ExpertCache::ExpertCache(std::vector<LayerQuota> layers, std::unique_ptr<EvictionPolicy> policy) : policy_(std::move(policy)) {
    std::vector<int> n_expert;
    for (const LayerQuota & quota : layers) {
        if (quota.n_slots < 1 || quota.n_slots > quota.n_expert) {
            mkd::fail(MKD_ERR_ARG, "expert cache: %d slots for %d experts", quota.n_slots, quota.n_expert);
        }
        Layer layer;
        layer.slots.resize((size_t) quota.n_slots);
        layer.slot_of.assign((size_t) quota.n_expert, -1);
        layers_.push_back(std::move(layer));
        n_expert.push_back(quota.n_expert);
    }
    if (!policy_) {
        policy_ = make_lru_policy(n_expert);
    }
}

ExpertCache::Slot & ExpertCache::find(int i_layer, int expert, const char * caller) {
    Layer &   layer = layers_[(size_t) i_layer];
    const int slot  = layer.slot_of[(size_t) expert];
    if (slot < 0) {
        mkd::fail(MKD_ERR_ARG, "expert cache: %s of expert %d, layer index %d, which has no slot", caller, expert, i_layer);
    }
    return layer.slots[(size_t) slot];
}

void ExpertCache::drop(Layer & layer, Slot & slot) {
    layer.slot_of[(size_t) slot.expert] = -1;
    slot                                = Slot{};
    layer.n_used -= 1;
}

// Fills candidates_ with the experts that may leave. Returns false, with *free_slot, if a slot is free.
bool ExpertCache::list_candidates(const Layer & layer, const std::vector<uint8_t> * keep, int * free_slot) {
    candidates_.clear();
    for (size_t i = 0; i < layer.slots.size(); ++i) {
        const Slot & slot = layer.slots[i];
        if (slot.expert < 0) {
            *free_slot = (int) i;
            return false;
        }
        if (slot.state() == State::ready && !(keep && (*keep)[(size_t) slot.expert])) {
            candidates_.push_back(slot.expert);
        }
    }
    return true;
}

int ExpertCache::place(int i_layer, int expert, const std::vector<uint8_t> * keep, int * evicted) {
    Layer & layer = layers_[(size_t) i_layer];
    int     slot  = -1;
    if (list_candidates(layer, keep, &slot)) {
        if (candidates_.empty()) {
            return -1;
        }
        *evicted = policy_->victim(i_layer, candidates_);
        if (*evicted < 0) {
            return -1;
        }
        slot     = layer.slot_of[(size_t) *evicted];
        drop(layer, layer.slots[(size_t) slot]);
    }
    layer.slots[(size_t) slot].expert = expert;
    layer.slot_of[(size_t) expert]    = slot;
    layer.n_used += 1;
    return slot;
}

ExpertCache::Lease ExpertCache::acquire(int i_layer, int expert, uint32_t parts) {
    Layer & layer = layers_[(size_t) i_layer];
    Lease   lease;
    lease.slot = layer.slot_of[(size_t) expert];
    if (lease.slot < 0 && (lease.slot = place(i_layer, expert, nullptr, &lease.evicted)) < 0) {
        return lease;
    }
    Slot & slot = layer.slots[(size_t) lease.slot];
    slot.n_pins += 1;
    lease.missing = parts & ~slot.parts;
    if (slot.loading) {
        lease.outcome = Outcome::joined;
        lease.missing &= slot.loading;
    } else {
        lease.outcome = lease.missing ? Outcome::load : Outcome::hit;
        slot.loading  = lease.missing;
    }
    return lease;
}

ExpertCache::Lease ExpertCache::reserve(int i_layer, int expert, uint32_t parts, const std::vector<uint8_t> & keep) {
    Layer & layer = layers_[(size_t) i_layer];
    Lease   lease;
    lease.slot = layer.slot_of[(size_t) expert];
    if (lease.slot < 0 && (lease.slot = place(i_layer, expert, &keep, &lease.evicted)) < 0) {
        return lease;
    }
    Slot & slot   = layer.slots[(size_t) lease.slot];
    lease.missing = parts & ~slot.parts & ~slot.loading;
    if (slot.loading || slot.n_pins) { // somebody is at work on it
        lease.missing = 0;
        lease.outcome = Outcome::joined;
    } else {
        lease.outcome = lease.missing ? Outcome::load : Outcome::hit;
        slot.loading  = lease.missing;
    }
    return lease;
}

void ExpertCache::ready(int i_layer, int expert, uint32_t parts) {
    Slot & slot = find(i_layer, expert, "ready");
    slot.parts |= parts;
    slot.loading &= ~parts;
}

void ExpertCache::fail(int i_layer, int expert) {
    Slot & slot  = find(i_layer, expert, "fail");
    slot.loading = 0;
    if (!slot.n_pins && !slot.parts) {
        drop(layers_[(size_t) i_layer], slot);
    }
}

void ExpertCache::release(int i_layer, int expert) {
    Slot & slot = find(i_layer, expert, "release");
    if (slot.n_pins < 1) {
        mkd::fail(MKD_ERR_ARG, "expert cache: release of expert %d, layer index %d, which is not pinned", expert, i_layer);
    }
    if (--slot.n_pins == 0 && !slot.parts && !slot.loading) {
        drop(layers_[(size_t) i_layer], slot);
    }
}

int ExpertCache::victim(int i_layer) {
    int slot = -1;
    if (!list_candidates(layers_[(size_t) i_layer], nullptr, &slot) || candidates_.empty()) {
        return -1;
    }
    return policy_->victim(i_layer, candidates_);
}

uint32_t ExpertCache::present(int i_layer, int expert) const {
    const Layer & layer = layers_[(size_t) i_layer];
    const int     slot  = layer.slot_of[(size_t) expert];
    return slot < 0 ? 0 : layer.slots[(size_t) slot].parts;
}

ExpertCache::State ExpertCache::state(int i_layer, int expert) const {
    const Layer & layer = layers_[(size_t) i_layer];
    const int     slot  = layer.slot_of[(size_t) expert];
    return slot < 0 ? State::free : layer.slots[(size_t) slot].state();
}

int ExpertCache::n_present(int i_layer) const {
    return layers_[(size_t) i_layer].n_used;
}

int ExpertCache::clear(int i_layer) {
    Layer & layer = layers_[(size_t) i_layer];
    int     n     = 0;
    for (Slot & slot : layer.slots) {
        if (slot.state() == State::ready) {
            drop(layer, slot);
            ++n;
        }
    }
    return n;
}

} // namespace mkd
