#include "cache/expert-cache.h"

#include "base/error.h"

namespace mkd {

ExpertCache::ExpertCache(std::vector<LayerQuota> layers, std::unique_ptr<EvictionPolicy> policy) : policy_(std::move(policy)) {
    for (const LayerQuota & quota : layers) {
        if (quota.n_slots < 1 || quota.n_slots > quota.n_expert) {
            mkd::fail(MKD_ERR_ARG, "expert cache: %d slots for %d experts", quota.n_slots, quota.n_expert);
        }
        Layer layer;
        layer.slots.resize((size_t) quota.n_slots);
        layer.slot_of.assign((size_t) quota.n_expert, -1);
        layers_.push_back(std::move(layer));
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

ExpertCache::Lease ExpertCache::acquire(int i_layer, int expert, uint32_t parts) {
    std::lock_guard<std::mutex> lock(mutex_);
    Layer &                     layer = layers_[(size_t) i_layer];
    Lease                       lease;
    lease.slot = layer.slot_of[(size_t) expert];
    if (lease.slot < 0) {
        candidates_.clear();
        for (int i = 0; i < (int) layer.slots.size(); ++i) {
            if (layer.slots[(size_t) i].state == State::free) {
                lease.slot = i;
                break;
            }
            if (layer.slots[(size_t) i].state == State::ready) {
                candidates_.push_back(i);
            }
        }
        if (lease.slot < 0) {
            if (candidates_.empty()) {
                lease.outcome = Outcome::no_slot;
                return lease;
            }
            lease.slot    = policy_->victim(i_layer, candidates_);
            lease.evicted = layer.slots[(size_t) lease.slot].expert;
            layer.slot_of[(size_t) lease.evicted] = -1;
        }
        layer.slots[(size_t) lease.slot] = Slot{};
        layer.slots[(size_t) lease.slot].expert = expert;
        layer.slot_of[(size_t) expert]          = lease.slot;
    }
    Slot & slot   = layer.slots[(size_t) lease.slot];
    lease.missing = parts & ~slot.parts;
    if (slot.state == State::loading || (slot.state == State::pinned && lease.missing)) {
        lease.outcome = Outcome::busy; // somebody computes with it or brings it: wait for that
        return lease;
    }
    lease.outcome = lease.missing ? Outcome::load : Outcome::hit;
    slot.state    = lease.missing ? State::loading : State::pinned;
    slot.n_pins += 1;
    policy_->touched(i_layer, lease.slot);
    return lease;
}

void ExpertCache::ready(int i_layer, int expert, uint32_t parts) {
    std::lock_guard<std::mutex> lock(mutex_);
    Slot &                      slot = find(i_layer, expert, "ready");
    slot.parts |= parts;
    slot.state = State::pinned;
}

void ExpertCache::fail(int i_layer, int expert) {
    std::lock_guard<std::mutex> lock(mutex_);
    Slot &                      slot            = find(i_layer, expert, "fail");
    layers_[(size_t) i_layer].slot_of[(size_t) expert] = -1;
    slot = Slot{};
}

void ExpertCache::release(int i_layer, int expert) {
    std::lock_guard<std::mutex> lock(mutex_);
    Slot &                      slot = find(i_layer, expert, "release");
    if (slot.state != State::pinned || slot.n_pins < 1) {
        mkd::fail(MKD_ERR_ARG, "expert cache: release of expert %d, layer index %d, which is not pinned", expert, i_layer);
    }
    if (--slot.n_pins == 0) {
        slot.state = State::ready;
    }
}

uint32_t ExpertCache::present(int i_layer, int expert) const {
    std::lock_guard<std::mutex> lock(mutex_);
    const Layer &               layer = layers_[(size_t) i_layer];
    const int                   slot  = layer.slot_of[(size_t) expert];
    return slot < 0 ? 0 : layer.slots[(size_t) slot].parts;
}

ExpertCache::State ExpertCache::state(int i_layer, int expert) const {
    std::lock_guard<std::mutex> lock(mutex_);
    const Layer &               layer = layers_[(size_t) i_layer];
    const int                   slot  = layer.slot_of[(size_t) expert];
    return slot < 0 ? State::free : layer.slots[(size_t) slot].state;
}

int ExpertCache::clear() {
    std::lock_guard<std::mutex> lock(mutex_);
    int                         n = 0;
    for (Layer & layer : layers_) {
        for (Slot & slot : layer.slots) {
            if (slot.state == State::ready) {
                layer.slot_of[(size_t) slot.expert] = -1;
                slot = Slot{};
                ++n;
            }
        }
    }
    return n;
}

} // namespace mkd
