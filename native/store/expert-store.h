// store/expert-store.h: brings experts from their shards.
//
// The job: turn (layer, expert, which of its tensors) into read requests straight into a slot, and check what arrives against the shard's
// checksums. It keeps no copies: that is the cache's job. A tensor that fails its checksum is read once more (a flipped bit in transit), then
// reported with layer, expert and file.
//
// Threads: prepare and read_expert from any thread, several at once. Checksums run on the thread that read.

#pragma once

#include "io/byte-source.h"
#include "io/read-queue.h"
#include "io/slow.h"
#include "mkd.h"
#include "store/package-index.h"

#include <atomic>
#include <memory>
#include <string>
#include <vector>

namespace mkd {

struct StoreOptions {
    bool                      direct_io = true;
    mkd_verify                verify    = MKD_VERIFY_FIRST;
    std::shared_ptr<Throttle> throttle; // null: as fast as the storage is
};

class ExpertStore {
  public:
    // Throws Error(IO, FORMAT).
    static std::unique_ptr<ExpertStore> open(PackageIndex index, const StoreOptions & options);

    const PackageIndex & index() const { return index_; }
    bool                 direct_io() const { return direct_io_; }
    const std::string &  note() const { return note_; } // why reads are buffered; empty if there is nothing to say

    int      n_expert(int layer) const;
    uint64_t stride_bytes(int layer) const;

    // Fills a request that brings the parts in mask (bit i: part i of the layer; parts in between are brought, too) into slot, which has room for
    // the stride and is aligned to kAlignmentBytes. Its sections are those parts, in order; whole: they are one section, ready when all is there.
    void prepare(const LayerExperts & layer, int expert, uint32_t mask, uint8_t * slot, bool whole, ReadRequest & request);

    // Reads one whole expert, here and now. Throws Error(ARG, IO, CORRUPT).
    void read_expert(int layer, int expert, void * dst);

    uint64_t n_checksums() const { return n_checksums_.load(std::memory_order_relaxed); }
    uint64_t n_reread() const { return n_reread_.load(std::memory_order_relaxed); }

  private:
    ExpertStore() = default;
    void verify(const LayerExperts & layer, int expert, int i_part, uint8_t * data);
    bool must_verify(const LayerExperts & layer, int expert, int i_part) const;

    PackageIndex                                     index_;
    std::vector<std::unique_ptr<ByteSource>>         shards_;
    mkd_verify                                       verify_    = MKD_VERIFY_FIRST;
    bool                                             direct_io_ = false;
    std::string                                      note_;
    std::vector<std::unique_ptr<std::atomic<uint8_t>[]>> verified_; // [i_layer][expert]: bit i: part i was found good
    std::atomic<uint64_t>                            n_checksums_{0};
    std::atomic<uint64_t>                            n_reread_{0};
};

} // namespace mkd
