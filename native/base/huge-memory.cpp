#include "base/huge-memory.h"

#include "base/error.h"

#include <cerrno>
#include <cstring>
#include <sys/mman.h>

namespace mkd {

HugeMemory::HugeMemory(uint64_t bytes, const char * what) : bytes_(bytes), mapping_bytes_(bytes + kHugePageBytes) {
    mapping_ = mmap(nullptr, mapping_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapping_ == MAP_FAILED) {
        fail(MKD_ERR_NOMEM, "cannot reserve %llu bytes for %s: %s", (unsigned long long) bytes_, what, strerror(errno));
    }
    data_ = (uint8_t *) (((uintptr_t) mapping_ + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes);
    madvise(data_, bytes_, MADV_HUGEPAGE);
}

HugeMemory::~HugeMemory() {
    munmap(mapping_, mapping_bytes_);
}

} // namespace mkd
