// io/read-queue-uring.cpp: the io_uring engine of a ReadQueue. See io_uring(7), io_uring_setup(2), io_uring_enter(2).

#include "base/error.h"
#include "io/read-queue-ring.h"

#include <cerrno>
#include <chrono>
#include <cstring>
#include <system_error>
#include <utility>

#if defined(__linux__) && __has_include(<linux/io_uring.h>)
#    include <linux/io_uring.h>
#    include <sys/eventfd.h>
#    include <sys/mman.h>
#    include <sys/syscall.h>
#    include <unistd.h>
#    define MKD_HAVE_URING 1
#else
#    define MKD_HAVE_URING 0
#endif

namespace mkd {

#if MKD_HAVE_URING

namespace {

unsigned load_acquire(const unsigned * p) {
    return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
void store_release(unsigned * p, unsigned value) {
    __atomic_store_n(p, value, __ATOMIC_RELEASE);
}

std::string errno_text(int error) {
    return std::generic_category().message(error) + " (errno " + std::to_string(error) + ")";
}

bool knows_read(int ring_fd) {
    constexpr unsigned n_ops = 64;
    alignas(io_uring_probe) unsigned char memory[sizeof(io_uring_probe) + n_ops * sizeof(io_uring_probe_op)] = {};
    auto * probe = (io_uring_probe *) memory;
    if (syscall(SYS_io_uring_register, ring_fd, IORING_REGISTER_PROBE, probe, n_ops) != 0) {
        return false;
    }
    return probe->last_op >= IORING_OP_READ && (probe->ops[IORING_OP_READ].flags & IO_URING_OP_SUPPORTED);
}

} // namespace

std::unique_ptr<ReadQueue::Ring> ReadQueue::Ring::open(unsigned n_reads, std::string * reason) {
    std::unique_ptr<Ring> ring(new Ring);
    io_uring_params       params{};
    const auto            refuse = [&](const char * what) {
        *reason = std::string(what) + ": " + errno_text(errno);
        return nullptr;
    };
    ring->ring_fd_ = (int) syscall(SYS_io_uring_setup, n_reads + 1, &params); // one more for the wake-up
    if (ring->ring_fd_ < 0) {
        return refuse("the kernel refuses io_uring_setup");
    }
    if (!knows_read(ring->ring_fd_)) {
        *reason = "the kernel's io_uring has no IORING_OP_READ";
        return nullptr;
    }
    ring->sq_bytes_   = params.sq_off.array + params.sq_entries * sizeof(unsigned);
    ring->cq_bytes_   = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
    ring->sqes_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
    const auto map    = [&](size_t bytes, off_t what) {
        void * p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring->ring_fd_, what);
        return p == MAP_FAILED ? nullptr : p;
    };
    ring->sq_   = map(ring->sq_bytes_, IORING_OFF_SQ_RING);
    ring->cq_   = map(ring->cq_bytes_, IORING_OFF_CQ_RING);
    ring->sqes_ = map(ring->sqes_bytes_, IORING_OFF_SQES);
    if (!ring->sq_ || !ring->cq_ || !ring->sqes_) {
        return refuse("the rings cannot be mapped");
    }
    ring->event_fd_ = eventfd(0, EFD_CLOEXEC);
    if (ring->event_fd_ < 0) {
        return refuse("no eventfd");
    }
    auto * sq       = (char *) ring->sq_;
    auto * cq       = (char *) ring->cq_;
    ring->sq_tail_  = (unsigned *) (sq + params.sq_off.tail);
    ring->sq_mask_  = (unsigned *) (sq + params.sq_off.ring_mask);
    ring->sq_array_ = (unsigned *) (sq + params.sq_off.array);
    ring->cq_head_  = (unsigned *) (cq + params.cq_off.head);
    ring->cq_tail_  = (unsigned *) (cq + params.cq_off.tail);
    ring->cq_mask_  = (unsigned *) (cq + params.cq_off.ring_mask);
    ring->cqes_     = cq + params.cq_off.cqes;
    ring->read(ring->event_fd_, &ring->event_value_, sizeof ring->event_value_, 0, kWakeId);
    return ring;
}

ReadQueue::Ring::~Ring() {
    if (ring_fd_ >= 0) {
        close(ring_fd_); // the kernel ends the read of the eventfd with it
    }
    for (const auto & [p, bytes] : { std::pair<void *, size_t>{ sq_, sq_bytes_ }, { cq_, cq_bytes_ }, { sqes_, sqes_bytes_ } }) {
        if (p) {
            munmap(p, bytes);
        }
    }
    if (event_fd_ >= 0) {
        close(event_fd_);
    }
}

void ReadQueue::Ring::read(int fd, void * dst, size_t n, uint64_t offset, uint64_t id) {
    const unsigned tail = *sq_tail_; // only we write it
    const unsigned i    = tail & *sq_mask_;
    auto &         sqe  = ((io_uring_sqe *) sqes_)[i];
    memset(&sqe, 0, sizeof sqe);
    sqe.opcode    = IORING_OP_READ;
    sqe.fd        = fd;
    sqe.addr      = (uint64_t) (uintptr_t) dst;
    sqe.len       = (unsigned) n;
    sqe.off       = offset;
    sqe.user_data = id;
    sq_array_[i]  = i;
    store_release(sq_tail_, tail + 1);
    n_queued_ += 1;
}

int ReadQueue::Ring::enter(bool wait) {
    const long n = syscall(SYS_io_uring_enter, ring_fd_, n_queued_, wait ? 1u : 0u, wait ? IORING_ENTER_GETEVENTS : 0u, nullptr, 0);
    if (n < 0) {
        return errno;
    }
    n_queued_ -= (unsigned) n;
    return 0;
}

bool ReadQueue::Ring::next(uint64_t & id, int & result) {
    const unsigned head = *cq_head_; // only we write it
    if (head == load_acquire(cq_tail_)) {
        return false;
    }
    const auto & cqe = ((const io_uring_cqe *) cqes_)[head & *cq_mask_];
    id               = cqe.user_data;
    result           = cqe.res;
    store_release(cq_head_, head + 1);
    if (id == kWakeId) {
        read(event_fd_, &event_value_, sizeof event_value_, 0, kWakeId);
    }
    return true;
}

void ReadQueue::Ring::wake() {
    const uint64_t one = 1;
    (void) !write(event_fd_, &one, sizeof one);
}

#else

std::unique_ptr<ReadQueue::Ring> ReadQueue::Ring::open(unsigned, std::string * reason) {
    *reason = "built without <linux/io_uring.h>";
    return nullptr;
}
ReadQueue::Ring::~Ring() = default;
void ReadQueue::Ring::read(int, void *, size_t, uint64_t, uint64_t) {}
int  ReadQueue::Ring::enter(bool) { return ENOSYS; }
bool ReadQueue::Ring::next(uint64_t &, int &) { return false; }
void ReadQueue::Ring::wake() {}

#endif

void ReadQueue::wake() {
    if (!ring_) {
        return;
    }
    bool sleeps;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        sleeps       = ring_sleeps_;
        ring_sleeps_ = false;
    }
    if (sleeps) {
        ring_->wake();
    }
}

// Chunks in flight sit in `slots`; a completion's id is the slot.
void ReadQueue::run_uring() {
    std::vector<Chunk> slots((size_t) options_.n_lanes);
    const auto         read_again = [](const Chunk & chunk) -> std::exception_ptr {
        try {
            const ReadRequest & request = *chunk.request;
            request.source->read(request.offset + chunk.begin, request.dst + chunk.begin, chunk.bytes);
            return nullptr;
        } catch (...) {
            return std::current_exception();
        }
    };
    for (;;) {
        bool idle;
        {
            std::unique_lock<std::mutex> lock(mutex_);
            for (Chunk chunk; take_chunk(chunk);) {
                size_t i = 0;
                while (slots[i].request) {
                    ++i;
                }
                slots[i] = chunk;
                const ReadRequest & request = *chunk.request;
                ring_->read(request.source->fd(), request.dst + chunk.begin, chunk.bytes, request.offset + chunk.begin, i);
            }
            idle = n_in_flight_ == 0;
            if (idle && stop_) {
                return;
            }
            ring_sleeps_ = true;
        }
        const int error = ring_->enter(true);
        {
            std::lock_guard<std::mutex> lock(mutex_);
            ring_sleeps_ = false;
        }
        if (error && error != EINTR) { // EAGAIN, EBUSY, ENOMEM: the kernel has no room now. What it has taken still completes
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        uint64_t id;
        int      result;
        while (ring_->next(id, result)) {
            if (id == Ring::kWakeId) {
                continue;
            }
            const Chunk chunk = slots[(size_t) id];
            slots[(size_t) id] = Chunk{};
            if (options_.tamper) {
                result = options_.tamper(result);
            }
            finish_chunk(chunk, result == (int) chunk.bytes ? nullptr : read_again(chunk));
        }
    }
}

} // namespace mkd
