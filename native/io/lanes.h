// io/lanes.h: a few threads that read for the thread that computes.
//
// A request is owned by its submitter, who keeps it (and dst) alive until wait() returned for it. Requests start in the order of
// submission. n_lanes reads run at once. A request that fails stops no other.
//
// Threads: submit and wait may be called from any thread. after_read runs on a lane; what it and the read wrote is visible after wait().

#pragma once

#include "io/byte-source.h"

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace mkd {

struct ReadRequest {
    // set by the submitter
    ByteSource *                         source = nullptr;
    uint64_t                             offset = 0;
    void *                               dst    = nullptr;
    size_t                               bytes  = 0;
    std::function<void(ReadRequest &)>   after_read; // optional, e.g. to verify; may throw: that becomes the request's error

    // set by the lanes; read them after wait()
    int64_t            t_queue_us = 0;
    int64_t            t_start_us = 0;
    int64_t            t_done_us  = 0; // after after_read
    std::exception_ptr error;
    bool               done = false; // guarded by Lanes
};

class Lanes {
  public:
    explicit Lanes(int n_lanes); // >= 1. Throws Error(ARG, NOMEM)
    ~Lanes();                    // finishes what is queued
    Lanes(const Lanes &)             = delete;
    Lanes & operator=(const Lanes &) = delete;

    int n_lanes() const { return (int) threads_.size(); }

    void submit(ReadRequest & request);
    // Blocks until the request is done (at once if it is). It must have been submitted. Does not throw the request's error: the caller looks at it.
    void wait(ReadRequest & request);

  private:
    void run();
    void finish(); // does what is queued, then joins the threads

    std::mutex                mutex_;
    std::condition_variable   work_; // a request was queued, or stop
    std::condition_variable   done_; // some request finished
    std::deque<ReadRequest *> queue_;
    bool                      stop_ = false;
    std::vector<std::thread>  threads_;
};

} // namespace mkd
