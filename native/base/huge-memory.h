// base/huge-memory.h: anonymous memory that asks for huge pages.
//
// What direct reads write to: they pin every page of their destination, and of huge pages there are 512 times fewer (3.0 instead of 1.5 GB/s on one
// disk here). Where the kernel has no huge pages, it is plain memory. Aligned to kHugePageBytes, zeroed, not touched before its first use.

#pragma once

#include <cstdint>

namespace mkd {

class HugeMemory {
  public:
    static constexpr uint64_t kHugePageBytes = 2u << 20;

    // Throws Error(NOMEM). what: for the message, e.g. "expert slots". bytes > 0.
    HugeMemory(uint64_t bytes, const char * what);
    ~HugeMemory();
    HugeMemory(const HugeMemory &)             = delete;
    HugeMemory & operator=(const HugeMemory &) = delete;

    uint8_t * data() const { return data_; }
    uint64_t  bytes() const { return bytes_; }

  private:
    uint8_t * data_;
    uint64_t  bytes_;
    void *    mapping_; // a little larger, so that data_ can be aligned
    uint64_t  mapping_bytes_;
};

} // namespace mkd
