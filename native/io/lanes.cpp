// io/lanes.cpp: see lanes.h. One queue, one mutex, two conditions.

#include "io/lanes.h"

#include "base/clock.h"
#include "base/error.h"

namespace mkd {

Lanes::Lanes(int n_lanes) {
    if (n_lanes < 1) {
        fail(MKD_ERR_ARG, "%d reading lanes: expected at least 1", n_lanes);
    }
    threads_.reserve((size_t) n_lanes);
    try {
        for (int i = 0; i < n_lanes; i++) {
            threads_.emplace_back([this] { run(); });
        }
    } catch (const std::system_error & error) { // the system has no more threads
        finish();
        fail(MKD_ERR_NOMEM, "reading lane %zu of %d could not be started: %s", threads_.size() + 1, n_lanes, error.what());
    }
}

Lanes::~Lanes() {
    finish();
}

void Lanes::finish() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
    }
    work_.notify_all();
    for (std::thread & thread : threads_) {
        thread.join();
    }
}

void Lanes::submit(ReadRequest & request) {
    request.error      = nullptr;
    request.t_start_us = 0;
    request.t_done_us  = 0;
    request.t_queue_us = now_us();
    {
        std::lock_guard<std::mutex> lock(mutex_);
        request.done = false;
        queue_.push_back(&request);
    }
    work_.notify_one();
}

void Lanes::wait(ReadRequest & request) {
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [&] { return request.done; });
}

void Lanes::run() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        work_.wait(lock, [&] { return stop_ || !queue_.empty(); });
        if (queue_.empty()) {
            return; // stop_, and nothing is left
        }
        ReadRequest & request = *queue_.front();
        queue_.pop_front();
        lock.unlock();

        request.t_start_us = now_us();
        try {
            request.source->read(request.offset, request.dst, request.bytes);
            if (request.after_read) {
                request.after_read(request);
            }
        } catch (...) {
            request.error = std::current_exception();
        }
        request.t_done_us = now_us();

        lock.lock();
        request.done = true; // its owner may destroy it as soon as the mutex is free
        done_.notify_all();
    }
}

} // namespace mkd
