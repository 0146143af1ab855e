// io/slow.cpp: see slow.h for the model.
//
// Between two calls nothing changes but the bytes left, at constant rates: begin, finish and cancel first bring every read in flight to now,
// then change the number of reads and with it the shares. A sleeper is not told: it looks again every kMaxSleepUs, and what it oversleeps is debt.

#include "io/slow.h"

#include "base/clock.h"
#include "base/error.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <string_view>
#include <thread>

namespace mkd {

// ---------------------------------------------------------------- curve

static constexpr size_t kMaxPoints = 256;
static constexpr int    kMaxLanes  = 1024;

static uint64_t parse_number(std::string_view text, const char * what, std::string_view point, uint64_t max) {
    uint64_t     value = 0;
    const char * end   = text.data() + text.size();
    const auto [rest, error] = std::from_chars(text.data(), end, value);
    if (error != std::errc() || rest != end || value < 1 || value > max) {
        fail(MKD_ERR_ARG, "throttle curve: '%.*s' in '%.*s' is no %s: expected a whole number 1..%llu", (int) text.size(), text.data(),
             (int) point.size(), point.data(), what, (unsigned long long) max);
    }
    return value;
}

static CurvePoint parse_point(std::string_view point) {
    const size_t first = point.find(':');
    const size_t last  = point.rfind(':');
    if (first == std::string_view::npos || first == last) {
        fail(MKD_ERR_ARG, "throttle curve: '%.*s' is no point: expected block_bytes:lanes:bytes_per_s", (int) std::min<size_t>(point.size(), 80),
             point.data());
    }
    CurvePoint p{};
    p.block_bytes = parse_number(point.substr(0, first), "block size", point, 1ull << 40);
    p.n_lanes     = (int) parse_number(point.substr(first + 1, last - first - 1), "number of lanes", point, kMaxLanes);
    p.bytes_per_s = (double) parse_number(point.substr(last + 1), "bandwidth", point, 1ull << 50);
    return p;
}

static int count_points(const std::vector<CurvePoint> & curve, uint64_t block_bytes, int n_lanes) {
    return (int) std::count_if(curve.begin(), curve.end(),
                               [&](const CurvePoint & p) { return p.block_bytes == block_bytes && p.n_lanes == n_lanes; });
}

std::vector<CurvePoint> parse_curve(const std::string & text) {
    std::vector<CurvePoint> curve;
    std::string_view        rest = text;
    for (size_t comma = 0; comma != std::string_view::npos; rest.remove_prefix(std::min(rest.size(), comma + 1))) {
        comma = rest.find(',');
        curve.push_back(parse_point(rest.substr(0, comma)));
        if (curve.size() > kMaxPoints) {
            fail(MKD_ERR_ARG, "throttle curve: more than %zu points", kMaxPoints);
        }
    }
    for (const CurvePoint & block : curve) {
        for (const CurvePoint & lanes : curve) {
            const int n = count_points(curve, block.block_bytes, lanes.n_lanes);
            if (n != 1) {
                fail(MKD_ERR_ARG, "throttle curve: %llu bytes with %d lanes is %s: every block size needs every lane count, once",
                     (unsigned long long) block.block_bytes, lanes.n_lanes, n == 0 ? "missing" : "given twice");
            }
        }
    }
    return curve;
}

// Between (x0, y0) and (x1, y1); x0 == x1 for a clamped end.
static double interpolate(double x, double x0, double y0, double x1, double y1) {
    return x1 > x0 ? y0 + (y1 - y0) * (x - x0) / (x1 - x0) : y0;
}

// Bandwidth at one of the curve's own lane counts.
static double bandwidth_at_lanes(const std::vector<CurvePoint> & curve, uint64_t block_bytes, int n_lanes) {
    const CurvePoint * below = nullptr; // largest block <= block_bytes
    const CurvePoint * above = nullptr; // smallest block >= block_bytes
    for (const CurvePoint & p : curve) {
        if (p.n_lanes != n_lanes) {
            continue;
        }
        if (p.block_bytes <= block_bytes && (!below || p.block_bytes > below->block_bytes)) {
            below = &p;
        }
        if (p.block_bytes >= block_bytes && (!above || p.block_bytes < above->block_bytes)) {
            above = &p;
        }
    }
    below = below ? below : above;
    above = above ? above : below;
    return interpolate(std::log2((double) block_bytes), std::log2((double) below->block_bytes), below->bytes_per_s,
                       std::log2((double) above->block_bytes), above->bytes_per_s);
}

double curve_bandwidth(const std::vector<CurvePoint> & curve, uint64_t block_bytes, int n_lanes) {
    block_bytes = std::max<uint64_t>(block_bytes, 1);
    int below = 0; // largest lane count <= n_lanes, 0: none
    int above = 0;
    for (const CurvePoint & p : curve) {
        if (p.n_lanes <= n_lanes && p.n_lanes > below) {
            below = p.n_lanes;
        }
        if (p.n_lanes >= n_lanes && (above == 0 || p.n_lanes < above)) {
            above = p.n_lanes;
        }
    }
    below = below ? below : above;
    above = above ? above : below;
    return interpolate(n_lanes, below, bandwidth_at_lanes(curve, block_bytes, below), above, bandwidth_at_lanes(curve, block_bytes, above));
}

ReadPlan choose_reads(const std::vector<CurvePoint> & curve) {
    constexpr double kGoodEnough = 0.98;
    ReadPlan         plan;
    double           best = 0;
    for (const bool measure : { true, false }) {
        uint64_t in_flight = UINT64_MAX;
        for (size_t chunk = 512u << 10; chunk <= 4u << 20; chunk *= 2) {
            for (int lanes = 1; lanes <= kMaxPlannedLanes; ++lanes) {
                const double bandwidth = curve_bandwidth(curve, chunk, lanes);
                if (measure) {
                    best = std::max(best, bandwidth);
                } else if (bandwidth >= kGoodEnough * best && chunk * (uint64_t) lanes < in_flight) {
                    in_flight = chunk * (uint64_t) lanes;
                    plan      = { lanes, chunk };
                }
            }
        }
    }
    return plan;
}

// ---------------------------------------------------------------- clock

namespace {

class MonotonicClock : public ThrottleClock {
  public:
    int64_t now_us() override { return mkd::now_us(); }

    void sleep_until(int64_t t_us) override {
        std::this_thread::sleep_until(std::chrono::steady_clock::time_point(std::chrono::microseconds(t_us)));
    }
};

} // namespace

std::unique_ptr<ThrottleClock> make_monotonic_clock() {
    return std::make_unique<MonotonicClock>();
}

// ---------------------------------------------------------------- throttle

Throttle::Throttle(std::vector<CurvePoint> curve, std::unique_ptr<ThrottleClock> clock)
    : curve_(std::move(curve)), clock_(clock ? std::move(clock) : make_monotonic_clock()) {
    if (curve_.empty()) {
        fail(MKD_ERR_ARG, "throttle curve: no points");
    }
    t_us_ = now();
}

double Throttle::now() {
    return (double) clock_->now_us();
}

void Throttle::advance(double t_us) {
    const double elapsed = t_us - t_us_;
    if (elapsed <= 0) {
        return;
    }
    for (Read * read : in_flight_) {
        if (read->bytes_left <= 0) {
            continue;
        }
        const double bytes = read->bytes_per_us * elapsed;
        if (bytes >= read->bytes_left) {
            read->t_done_us  = t_us_ + read->bytes_left / read->bytes_per_us;
            read->bytes_left = 0;
        } else {
            read->bytes_left -= bytes;
        }
    }
    t_us_ = t_us;
}

void Throttle::share() {
    const int n = (int) in_flight_.size();
    for (Read * read : in_flight_) {
        read->bytes_per_us = curve_bandwidth(curve_, read->bytes, n) / n / 1e6;
    }
}

void Throttle::remove(Read & read) {
    in_flight_.erase(std::find(in_flight_.begin(), in_flight_.end(), &read));
    share();
}

void Throttle::begin(Read & read, uint64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    advance(now());
    read = {bytes, (double) bytes, 0, t_us_};
    in_flight_.push_back(&read);
    share();
}

void Throttle::finish(Read & read) {
    std::unique_lock<std::mutex> lock(mutex_);
    const double                 t_begin = now();
    advance(t_begin);
    // When the read is done if nothing changes. Done before we came here: the real source was slower than the flash.
    auto due = [&] { return read.bytes_left > 0 ? t_us_ + read.bytes_left / read.bytes_per_us : read.t_done_us; };
    if (due() <= t_begin) {
        behind_us_ += t_begin - due();
    } else {
        while (t_us_ < due() - debt_us_) {
            const auto t_wake = (int64_t) std::ceil(std::min(due() - debt_us_, t_us_ + kMaxSleepUs));
            lock.unlock();
            clock_->sleep_until(t_wake);
            lock.lock();
            advance(now());
        }
        slept_us_ += t_us_ - t_begin;
        // Woken too late: more debt. Gone early: less of it; never below zero, since every sleeper looks at the debt again under the mutex.
        const double debt = debt_us_ + t_us_ - due();
        debt_us_          = std::min(debt, kMaxDebtUs);
        behind_us_ += debt - debt_us_;
    }
    remove(read);
}

void Throttle::cancel(Read & read) {
    std::lock_guard<std::mutex> lock(mutex_);
    advance(now());
    remove(read);
}

int64_t Throttle::behind_us() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return (int64_t) behind_us_;
}

int64_t Throttle::slept_us() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return (int64_t) slept_us_;
}

// ---------------------------------------------------------------- source

namespace {

class SlowSource : public ByteSource {
  public:
    SlowSource(std::unique_ptr<ByteSource> inner, std::shared_ptr<Throttle> throttle) : inner_(std::move(inner)), throttle_(std::move(throttle)) {}

    void read(uint64_t offset, void * dst, size_t n) override {
        Throttle::Read ticket;
        throttle_->begin(ticket, n);
        try {
            inner_->read(offset, dst, n);
        } catch (...) {
            throttle_->cancel(ticket);
            throw;
        }
        throttle_->finish(ticket);
    }

    uint64_t            size_bytes() const override { return inner_->size_bytes(); }
    const std::string & path() const override { return inner_->path(); }
    bool                direct() const override { return inner_->direct(); }

  private:
    std::unique_ptr<ByteSource> inner_;
    std::shared_ptr<Throttle>   throttle_;
};

} // namespace

std::unique_ptr<ByteSource> make_slow_source(std::unique_ptr<ByteSource> inner, std::shared_ptr<Throttle> throttle) {
    return std::make_unique<SlowSource>(std::move(inner), std::move(throttle));
}

} // namespace mkd
