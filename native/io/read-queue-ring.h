// io/read-queue-ring.h: the io_uring of a ReadQueue, by system calls alone (the three of them and two mappings need no library).
//
// Threads: the queue's one reading thread, except wake().

#pragma once

#include "io/read-queue.h"

namespace mkd {

struct ReadQueue::Ring {
    // Null, with the reason, where the kernel or its policy refuses (Android's app sandbox, containers, qemu-user), or knows no IORING_OP_READ.
    static std::unique_ptr<Ring> open(unsigned n_reads, std::string * reason);
    ~Ring();

    // Queues a read whose completion carries id (not kWakeId). At most n_reads between two waits and in flight.
    void read(int fd, void * dst, size_t n, uint64_t offset, uint64_t id);
    // Hands queued reads to the kernel and, if wait, sleeps until something completed or wake() was called.
    // Returns 0, or the errno of a refusal.
    int  enter(bool wait);
    // Takes one completion. Returns false if there is none. result: bytes, or -errno.
    bool next(uint64_t & id, int & result);
    void wake(); // any thread

    static constexpr uint64_t kWakeId = UINT64_MAX;

    int        ring_fd_  = -1;
    int        event_fd_ = -1;
    uint64_t   event_value_ = 0;
    unsigned   n_queued_ = 0;
    void *     sq_ = nullptr, * cq_ = nullptr, * sqes_ = nullptr;
    size_t     sq_bytes_ = 0, cq_bytes_ = 0, sqes_bytes_ = 0;
    unsigned * sq_tail_ = nullptr, * sq_mask_ = nullptr, * sq_array_ = nullptr;
    unsigned * cq_head_ = nullptr, * cq_tail_ = nullptr, * cq_mask_ = nullptr;
    void *     cqes_ = nullptr;
};

} // namespace mkd
