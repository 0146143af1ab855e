// backend/layer-visit.h: one batch's experts of one layer, from "wanted" to "computed".
//
// The matmul lists the distinct experts; the visit gets them slots, starts their reads in the order in which they will be computed (those that are
// here first, then those on their way, then the rest), and tells which can be computed now, so that the matmul never waits while there is work. With
// fewer slots than experts the rest follows as slots come free: each expert is read once however small the cache is.
//
// The owner holds PagedExperts' lock for the visit's whole life. Its end unpins everything and takes back what is still being read.

#pragma once

#include "backend/paged-experts.h"

namespace mkd {

class LayerVisit {
  public:
    struct Item {
        int      expert  = -1;
        int      slot    = -1;    // -1: none yet, or finished
        uint32_t arrived = 0;     // parts that may be computed with
        int      stage   = 0;     // the matmul's: what is computed next
        bool     done    = false;
    };

    // experts: distinct. parts: what is needed of each. counted: they count as requests in the statistics.
    LayerVisit(PagedExperts & experts, int i_layer, const std::vector<int32_t> & wanted, uint32_t parts, bool counted);
    ~LayerVisit();
    LayerVisit(const LayerVisit &)             = delete;
    LayerVisit & operator=(const LayerVisit &) = delete;

    // Takes slots for as many as possible and looks at what has arrived. Throws Error(IO, CORRUPT, BUDGET).
    void advance();
    // After an advance that gave nothing to compute: sleeps until something arrives. This is stall.
    void wait();

    std::vector<Item> & items() { return items_; }
    void                finish(Item & item); // computed: its slot may go to another
    bool                done() const { return n_done_ == items_.size(); }
    bool                all_here() const { return all_here_; } // from the start every expert was in its slot
    bool                all_arrived() const { return n_arrived_ == items_.size(); }
    bool                short_of_slots() const { return n_claimed_ < items_.size(); }

  private:
    PagedExperts &    experts_;
    const int         i_layer_;
    const uint32_t    parts_;
    std::vector<Item> items_;
    size_t            n_claimed_ = 0; // items[0..n_claimed_) have, or had, a slot
    size_t            n_arrived_ = 0; // with all their parts
    size_t            n_done_    = 0;
    bool              all_here_  = true;
    uint64_t          version_   = 0;
};

} // namespace mkd
