#include "backend/layer-visit.h"

#include "base/clock.h"
#include "base/error.h"

#include <algorithm>

namespace mkd {

LayerVisit::LayerVisit(PagedExperts & experts, int i_layer, const std::vector<int32_t> & wanted, uint32_t parts, bool counted)
    : experts_(experts), i_layer_(i_layer), parts_(parts), items_(wanted.size()) {
    experts_.harvest();
    for (size_t i = 0; i < wanted.size(); ++i) {
        items_[i].expert = wanted[i];
    }
    const auto here = [&](const Item & item) { return (experts_.present(i_layer_, item.expert) & parts_) == parts_; };
    const auto rest = std::stable_partition(items_.begin(), items_.end(), here);
    std::stable_partition(rest, items_.end(), [&](const Item & item) { return experts_.loading(i_layer_, item.expert); });
    const auto n_hits = (int) (rest - items_.begin());
    all_here_         = rest == items_.end();
    if (counted) {
        experts_.count_requests(n_hits, (int) items_.size() - n_hits);
    }
}

LayerVisit::~LayerVisit() {
    for (size_t i = 0; i < n_claimed_; ++i) {
        if (!items_[i].done) {
            experts_.abandon(i_layer_, items_[i].expert);
            experts_.release(i_layer_, items_[i].expert);
        }
    }
    if (!done()) {
        experts_.harvest();
        experts_.forget_failures();
    }
}

void LayerVisit::advance() {
    version_ = experts_.version();
    experts_.harvest();
    for (; n_claimed_ < items_.size(); ++n_claimed_) {
        Item & item = items_[n_claimed_];
        item.slot   = experts_.claim(i_layer_, item.expert, parts_);
        if (item.slot < 0) {
            break;
        }
    }
    bool pinned = false; // by us: one of them will be computed, and leave its slot
    for (size_t i = 0; i < n_claimed_; ++i) {
        Item & item = items_[i];
        if (!item.done) {
            pinned = true;
            if (item.arrived != parts_) {
                item.arrived = experts_.arrived(i_layer_, item.expert, parts_);
                n_arrived_ += item.arrived == parts_;
            }
        }
    }
    if (!pinned && !done() && !experts_.anything_in_flight()) {
        fail(MKD_ERR_BUDGET, "layer %d: no free slot for expert %d (%d slots)", experts_.layer(i_layer_).layer, items_[n_claimed_].expert,
             experts_.n_slots(i_layer_));
    }
}

void LayerVisit::wait() {
    const int64_t t_start = now_us();
    experts_.wait(version_);
    experts_.count_stall(now_us() - t_start);
}

void LayerVisit::finish(Item & item) {
    item.done = true;
    item.slot = -1;
    n_done_ += 1;
    experts_.release(i_layer_, item.expert);
}

} // namespace mkd
