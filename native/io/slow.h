// io/slow.h: a source slowed down to a measured flash.
//
// A curve gives bandwidth by block size and number of reads in flight. All sources that share a Throttle share one flash: the reads in
// flight (between begin and finish) share the curve's bandwidth equally, so a read alone or one of n that never stop takes exactly
// bytes * n / bandwidth(block, n). While reads come and go, each one's share changes with their number, as on the real thing.
//
// A thread wakes up later than it asked. That time is a debt: later reads are that much shorter (up to kMaxDebtUs in all), so that the mean rate
// is the curve's even where a read is shorter than the kernel's timer can sleep. Idle time earns nothing. A source that is itself slower than the
// curve is never sped up: behind_us() tells how much it was late, so that a caller can refuse the emulation.
//
// Threads: everything here may be called from any thread, several at once. No thread spins.

#pragma once

#include "io/byte-source.h"

#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace mkd {

struct CurvePoint {
    uint64_t block_bytes;
    int      n_lanes;
    double   bytes_per_s; // of all lanes together
};

// Parses "block_bytes:lanes:bytes_per_s,…", whole numbers > 0, every block size with every lane count (android/profiles give these).
// Throws Error(MKD_ERR_ARG).
std::vector<CurvePoint> parse_curve(const std::string & text);

// Bandwidth for a block size and lane count: linear between the nearest measured points in log2(block) and in lanes, clamped at the ends.
// The curve is not empty and, as parse_curve guarantees, a full grid.
double curve_bandwidth(const std::vector<CurvePoint> & curve, uint64_t block_bytes, int n_lanes);

// How to read such a storage: the fewest bytes in flight whose bandwidth is within 2 % of the best that up to kMaxPlannedLanes reads of
// 512 KiB to 4 MiB give (smaller ones keep a demand waiting for less, but 512 KiB is where flash comes into its own).
struct ReadPlan {
    int    n_lanes     = 4; // without a curve: measured on NVMe and virtual disks, any storage is saturated by it
    size_t chunk_bytes = 1u << 20;
};
constexpr int kMaxPlannedLanes = 8;
ReadPlan      choose_reads(const std::vector<CurvePoint> & curve);

// The time and the sleep of a Throttle: the monotonic clock, or a test's own.
class ThrottleClock {
  public:
    virtual ~ThrottleClock() = default;

    virtual int64_t now_us()                 = 0;
    virtual void    sleep_until(int64_t t_us) = 0;
};

std::unique_ptr<ThrottleClock> make_monotonic_clock();

class Throttle {
  public:
    static constexpr double kMaxDebtUs  = 10000;
    static constexpr double kMaxSleepUs = 2000; // at a time: shares may grow meanwhile

    // One read in flight. Its owner keeps it in place from begin to finish or cancel.
    struct Read {
        uint64_t bytes        = 0;
        double   bytes_left   = 0; // that the flash still has to bring
        double   bytes_per_us = 0; // its share
        double   t_done_us    = 0; // when it was done; valid once bytes_left is 0
    };

    // Throws Error(MKD_ERR_ARG) for an empty curve. clock: null for the monotonic one.
    explicit Throttle(std::vector<CurvePoint> curve, std::unique_ptr<ThrottleClock> clock = nullptr);
    Throttle(const Throttle &)             = delete;
    Throttle & operator=(const Throttle &) = delete;

    // Around a real read: begin registers it, finish sleeps until the flash would have brought it, cancel forgets it (it failed).
    void begin(Read & read, uint64_t bytes);
    void finish(Read & read);
    void cancel(Read & read);

    int64_t behind_us() const; // how late the real source was, summed over reads
    int64_t slept_us() const;

  private:
    double now();
    void   advance(double t_us); // brings all reads to t_us
    void   share();              // after in_flight_ changed
    void   remove(Read & read);

    const std::vector<CurvePoint>  curve_;
    std::unique_ptr<ThrottleClock> clock_;
    mutable std::mutex             mutex_; // guards all below and the reads
    std::vector<Read *>            in_flight_;
    double                         t_us_      = 0; // the moment that the reads' bytes_left describe
    double                         debt_us_   = 0; // woken too late, not yet given back
    double                         behind_us_ = 0;
    double                         slept_us_  = 0;
};

std::unique_ptr<ByteSource> make_slow_source(std::unique_ptr<ByteSource> inner, std::shared_ptr<Throttle> throttle);

} // namespace mkd
