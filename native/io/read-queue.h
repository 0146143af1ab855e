// io/read-queue.h: reads in the background, the urgent ones first.
//
// A request is one contiguous range of a file. It is cut into chunks; a few lanes bring them, in file order, straight to their place. Chunks of
// demand requests go before all chunks of prefetch requests, in the order of submission within each kind; while demand reads run, prefetch gets
// the lanes that are left, at most kPrefetchLanes. So a demand read waits for at most one chunk on each of those.
// A request has sections (byte ranges, in order): each becomes ready on its own, as soon as its last byte is there and on_section accepted it.
//
// Who owns what: a request and its destination belong to the queue from submit until done() is true; nobody else writes them, frees them or gives
// the destination to another. cancel() asks for an early end; the owner still waits for done().
//
// Two engines do the same work: pool (n_lanes threads in pread(2)) and uring (one thread, n_lanes reads in flight in io_uring(7)). uring needs
// plain files and a kernel that allows it; automatic takes it where it can be had. Whatever does not come back complete from io_uring is read
// again by ByteSource::read, which knows about EINTR, short reads and errors.
//
// Threads: every call from any thread. on_section runs on a thread of the queue; what it and the read wrote is visible once ready() shows it.

#pragma once

#include "io/byte-source.h"

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace mkd {

enum class ReadEngine : uint8_t { automatic, pool, uring };
enum class ReadPriority : uint8_t { demand, prefetch };

class ReadRequest {
  public:
    static constexpr int kMaxSections = 3;

    // set by the submitter
    ByteSource *                                source = nullptr;
    uint64_t                                    offset = 0;
    uint8_t *                                   dst    = nullptr;
    size_t                                      bytes  = 0;
    int                                         n_sections = 1;
    std::array<size_t, kMaxSections>            section_end{}; // ascending; the last one is bytes (set by submit)
    std::function<void(ReadRequest &, int i_section)> on_section; // optional, e.g. to verify; may throw: that becomes the request's error

    uint32_t ready() const { return ready_.load(std::memory_order_acquire); } // bit i: section i may be used
    bool     done() const { return done_.load(std::memory_order_acquire); }

    // valid once done
    std::exception_ptr error;
    bool               cancelled  = false; // not every byte was brought
    uint64_t           bytes_read = 0;
    int64_t            t_queue_us = 0;
    int64_t            t_start_us = 0; // first chunk issued; 0: none was
    int64_t            t_done_us  = 0; // after the last on_section

  private:
    friend class ReadQueue;
    std::atomic<uint32_t> ready_{0};
    std::atomic<bool>     done_{true};
    // guarded by the queue's mutex
    ReadPriority                     priority_ = ReadPriority::demand;
    size_t                           next_     = 0; // first byte that no lane has taken
    int                              n_chunks_in_flight_ = 0; // taken, not yet accepted or refused by on_section
    int                              n_reading_          = 0; // of these: being read
    std::array<size_t, kMaxSections> section_left_{};
};

// How fast the storage was, to tell from two snapshots: bytes brought per time in which at least one read ran.
struct ReadMeter {
    uint64_t bytes   = 0;
    int64_t  busy_us = 0;
};

class ReadQueue {
  public:
    static constexpr int kPrefetchLanes = 2;

    struct Options {
        int        n_lanes     = 4;        // >= 1
        size_t     chunk_bytes = 1u << 20; // multiple of MKD_ALIGN_BYTES
        ReadEngine engine      = ReadEngine::automatic;
        bool       plain_files = true;     // all sources are files as they are (ByteSource::fd)

        // Test hook: sees each result of io_uring (bytes, or -errno) and may change it. The read really happened.
        std::function<int(int result)> tamper;
    };

    // Throws Error(ARG, NOMEM); Error(UNSUPPORTED) when uring was asked for and cannot be had.
    explicit ReadQueue(const Options & options);
    ~ReadQueue(); // what no lane has taken is cancelled; what runs is waited for
    ReadQueue(const ReadQueue &)             = delete;
    ReadQueue & operator=(const ReadQueue &) = delete;

    ReadEngine         engine() const { return engine_; } // never automatic
    const std::string & note() const { return note_; }    // why io_uring is not used; empty if it is, or was not wanted
    int                n_lanes() const { return options_.n_lanes; }
    size_t             chunk_bytes() const { return options_.chunk_bytes; }

    void submit(ReadRequest & request, ReadPriority priority = ReadPriority::demand);
    void promote(ReadRequest & request); // a prefetch is wanted now; does nothing if it is done or a demand already
    void cancel(ReadRequest & request);  // takes no further chunk
    void wait(ReadRequest & request);    // until done()

    // For a loop over several requests: version() before looking at them, then wait_change(version) returns when any section or request of this
    // queue became ready or done since.
    uint64_t version() const { return version_.load(std::memory_order_acquire); }
    void     wait_change(uint64_t version);

    ReadMeter meter() const;

  private:
    struct Chunk {
        ReadRequest * request = nullptr;
        size_t        begin   = 0; // of the request
        size_t        bytes   = 0;
    };

    void run_pool();
    void run_uring();
    void start_threads();
    void stop();

    bool take_chunk(Chunk & chunk);                              // locked
    void finish_chunk(const Chunk & chunk, std::exception_ptr error);
    void finish_if_idle(ReadRequest & request);                  // locked
    bool has_chunk() const;                                      // locked
    void drop_queued(ReadRequest & request);                     // locked
    void changed();                                              // locked
    void wake();

    Options                   options_;
    ReadEngine                engine_ = ReadEngine::pool;
    std::string               note_;
    mutable std::mutex        mutex_;
    std::condition_variable   work_;
    std::condition_variable   change_;
    std::deque<ReadRequest *> demand_, prefetch_; // requests with bytes that no lane has taken
    int                       n_in_flight_          = 0;
    int                       n_prefetch_in_flight_ = 0;
    bool                      stop_                 = false;
    std::atomic<uint64_t>     version_{0};
    ReadMeter                 meter_;
    int64_t                   busy_since_us_ = 0;
    std::vector<std::thread>  threads_;

    struct Ring;
    std::unique_ptr<Ring> ring_;
    bool                  ring_sleeps_ = false; // guarded by mutex_
};

} // namespace mkd
