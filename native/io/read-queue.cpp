// io/read-queue.cpp: order, chunks, sections and the end of a request; and the pool. The io_uring engine is in read-queue-uring.cpp.

#include "io/read-queue.h"

#include "base/clock.h"
#include "base/error.h"
#include "io/read-queue-ring.h"

#include <algorithm>

namespace mkd {

// ---------------------------------------------------------------- life

ReadQueue::ReadQueue(const Options & options) : options_(options) {
    if (options.n_lanes < 1) {
        fail(MKD_ERR_ARG, "%d reading lanes: expected at least 1", options.n_lanes);
    }
    if (options.chunk_bytes < MKD_ALIGN_BYTES || options.chunk_bytes % MKD_ALIGN_BYTES != 0) {
        fail(MKD_ERR_ARG, "read chunks of %zu bytes: expected a multiple of %d", options.chunk_bytes, MKD_ALIGN_BYTES);
    }
    if (options.engine != ReadEngine::pool) {
        std::string reason = options.plain_files ? "" : "reads go through a throttle";
        if (reason.empty()) {
            ring_ = Ring::open((unsigned) options.n_lanes, &reason);
        }
        if (!ring_ && options.engine == ReadEngine::uring) {
            fail(MKD_ERR_UNSUPPORTED, "io_uring cannot be used: %s; use the pread engine", reason.c_str());
        }
        note_   = ring_ ? "" : "io_uring is not used: " + reason;
        engine_ = ring_ ? ReadEngine::uring : ReadEngine::pool;
    }
    start_threads();
}

ReadQueue::~ReadQueue() {
    stop();
}

void ReadQueue::start_threads() {
    const int n_threads = engine_ == ReadEngine::uring ? 1 : options_.n_lanes;
    threads_.reserve((size_t) n_threads);
    try {
        for (int i = 0; i < n_threads; ++i) {
            threads_.emplace_back([this] { engine_ == ReadEngine::uring ? run_uring() : run_pool(); });
        }
    } catch (const std::system_error & error) { // the system has no more threads
        const size_t n_started = threads_.size();
        stop();
        fail(MKD_ERR_NOMEM, "reading thread %zu of %d could not be started: %s", n_started + 1, n_threads, error.what());
    }
}

void ReadQueue::stop() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
        for (std::deque<ReadRequest *> * queue : { &demand_, &prefetch_ }) {
            while (!queue->empty()) {
                drop_queued(*queue->front());
            }
        }
    }
    work_.notify_all();
    wake();
    for (std::thread & thread : threads_) {
        thread.join();
    }
}

// ---------------------------------------------------------------- requests

void ReadQueue::submit(ReadRequest & request, ReadPriority priority) {
    request.error      = nullptr;
    request.cancelled  = false;
    request.bytes_read = 0;
    request.t_start_us = 0;
    request.t_done_us  = 0;
    request.t_queue_us = now_us();
    request.section_end[(size_t) request.n_sections - 1] = request.bytes;
    request.ready_.store(0, std::memory_order_relaxed);
    request.done_.store(false, std::memory_order_relaxed);
    {
        std::lock_guard<std::mutex> lock(mutex_);
        request.priority_           = priority;
        request.next_               = 0;
        request.n_chunks_in_flight_ = 0;
        request.n_reading_          = 0;
        for (int i = 0; i < request.n_sections; ++i) {
            request.section_left_[(size_t) i] = request.section_end[(size_t) i] - (i ? request.section_end[(size_t) i - 1] : 0);
        }
        (priority == ReadPriority::demand ? demand_ : prefetch_).push_back(&request);
    }
    engine_ == ReadEngine::pool ? work_.notify_all() : wake();
}

void ReadQueue::promote(ReadRequest & request) {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (request.done_.load(std::memory_order_relaxed) || request.priority_ == ReadPriority::demand) {
            return;
        }
        request.priority_ = ReadPriority::demand;
        n_prefetch_in_flight_ -= request.n_reading_;
        const auto queued = std::find(prefetch_.begin(), prefetch_.end(), &request);
        if (queued == prefetch_.end()) {
            return; // all of it is on its way
        }
        prefetch_.erase(queued);
        demand_.push_back(&request);
    }
    engine_ == ReadEngine::pool ? work_.notify_all() : wake();
}

void ReadQueue::cancel(ReadRequest & request) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!request.done_.load(std::memory_order_relaxed)) {
        drop_queued(request);
    }
}

void ReadQueue::wait(ReadRequest & request) {
    std::unique_lock<std::mutex> lock(mutex_);
    change_.wait(lock, [&] { return request.done_.load(std::memory_order_relaxed); });
}

void ReadQueue::wait_change(uint64_t version) {
    std::unique_lock<std::mutex> lock(mutex_);
    change_.wait(lock, [&] { return version_.load(std::memory_order_relaxed) != version; });
}

ReadMeter ReadQueue::meter() const {
    std::lock_guard<std::mutex> lock(mutex_);
    ReadMeter                   meter = meter_;
    if (n_in_flight_ > 0) {
        meter.busy_us += now_us() - busy_since_us_;
    }
    return meter;
}

void ReadQueue::changed() {
    version_.fetch_add(1, std::memory_order_release);
    change_.notify_all();
}

void ReadQueue::finish_if_idle(ReadRequest & request) {
    if (request.n_chunks_in_flight_ == 0 && request.next_ == request.bytes) {
        request.t_done_us = now_us();
        request.done_.store(true, std::memory_order_release); // its owner may destroy it as soon as the mutex is free
        changed();
    }
}

// The rest of the request is not read: its end comes with the last chunk in flight, or now.
void ReadQueue::drop_queued(ReadRequest & request) {
    std::deque<ReadRequest *> & queue  = request.priority_ == ReadPriority::demand ? demand_ : prefetch_;
    const auto                  queued = std::find(queue.begin(), queue.end(), &request);
    if (queued == queue.end()) {
        return;
    }
    queue.erase(queued);
    request.cancelled = true;
    request.next_     = request.bytes;
    finish_if_idle(request);
}

// ---------------------------------------------------------------- chunks

bool ReadQueue::has_chunk() const {
    return n_in_flight_ < options_.n_lanes && (!demand_.empty() || (!prefetch_.empty() && n_prefetch_in_flight_ < kPrefetchLanes));
}

bool ReadQueue::take_chunk(Chunk & chunk) {
    if (!has_chunk()) {
        return false;
    }
    std::deque<ReadRequest *> & queue   = demand_.empty() ? prefetch_ : demand_;
    ReadRequest &               request = *queue.front();
    const size_t                left    = request.bytes - request.next_;
    // no crumb at the end: the last chunk takes it along
    chunk.request = &request;
    chunk.begin   = request.next_;
    chunk.bytes   = left < options_.chunk_bytes + options_.chunk_bytes / 2 ? left : options_.chunk_bytes;
    const int64_t t = now_us();
    if (request.t_start_us == 0) {
        request.t_start_us = t;
    }
    request.next_ += chunk.bytes;
    request.n_chunks_in_flight_ += 1;
    request.n_reading_ += 1;
    if (request.next_ == request.bytes) {
        queue.pop_front();
    }
    if (n_in_flight_++ == 0) {
        busy_since_us_ = t;
    }
    n_prefetch_in_flight_ += request.priority_ == ReadPriority::prefetch;
    return true;
}

void ReadQueue::finish_chunk(const Chunk & chunk, std::exception_ptr error) {
    ReadRequest & request = *chunk.request;
    uint32_t      arrived = 0; // sections whose last byte this chunk brought
    {
        std::lock_guard<std::mutex> lock(mutex_);
        request.n_reading_ -= 1;
        n_prefetch_in_flight_ -= request.priority_ == ReadPriority::prefetch;
        if (--n_in_flight_ == 0) {
            meter_.busy_us += now_us() - busy_since_us_;
        }
        if (!error) {
            meter_.bytes += chunk.bytes;
            request.bytes_read += chunk.bytes;
            size_t begin = 0;
            for (int i = 0; i < request.n_sections; ++i) {
                const size_t end  = request.section_end[(size_t) i];
                const size_t low  = std::max(begin, chunk.begin);
                const size_t high = std::min(end, chunk.begin + chunk.bytes);
                if (low < high) {
                    request.section_left_[(size_t) i] -= high - low;
                    arrived |= request.section_left_[(size_t) i] == 0 ? 1u << i : 0;
                } else if (request.bytes == 0) {
                    arrived |= 1u << i; // there is nothing to read, only on_section to run
                }
                begin = end;
            }
        }
    }
    // A lane is free: another may go on while this one verifies. The chunk still counts as in flight for its request, which therefore stays alive.
    if (engine_ == ReadEngine::pool) {
        work_.notify_one();
    }
    uint32_t accepted = arrived;
    if (request.on_section) {
        for (int i = 0; i < request.n_sections; ++i) {
            if (arrived >> i & 1u) {
                try {
                    request.on_section(request, i);
                } catch (...) {
                    error = std::current_exception();
                    accepted &= ~(1u << i);
                }
            }
        }
    }
    std::lock_guard<std::mutex> lock(mutex_);
    request.n_chunks_in_flight_ -= 1;
    if (accepted) {
        request.ready_.fetch_or(accepted, std::memory_order_release);
        changed();
    }
    if (error) {
        request.error = request.error ? request.error : error;
        drop_queued(request);
    }
    finish_if_idle(request);
}

// ---------------------------------------------------------------- pool

void ReadQueue::run_pool() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        work_.wait(lock, [&] { return stop_ || has_chunk(); });
        Chunk chunk;
        if (!take_chunk(chunk)) {
            return; // stop_, and nothing is left
        }
        lock.unlock();
        std::exception_ptr error;
        try {
            const ReadRequest & request = *chunk.request;
            request.source->read(request.offset + chunk.begin, request.dst + chunk.begin, chunk.bytes);
        } catch (...) {
            error = std::current_exception();
        }
        finish_chunk(chunk, error);
        lock.lock();
    }
}

} // namespace mkd
