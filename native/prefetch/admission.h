// prefetch/admission.h: which predicted experts are worth reading ahead.
//
// Pure arithmetic over what was measured. Between the last demand read of one layer and the first of the next the storage would be idle: the
// window. A prefetch in it costs nothing if the expert is then used, and takes time off the next layer's wait:
//
//     gain = p * min(t_load, what is left of the window)
//     cost = (1 - p) * t_late + p_victim * t_load
//
//   p         share of predictions of this kind and rank that came true, of experts that were not in the cache
//   window    mean and two mean absolute deviations of what was seen: a sure read that begins too early only comes before its own demand
//   t_load    bytes of the expert / measured rate of the storage
//   t_late    what a useless read delays the demand that overtakes it: the chunks in flight, where the prefetch does not end within the window
//   p_victim  how often the expert that would be pushed out was used in its layer's next batch; 0 where a slot is free
//
// It is admitted while gain > cost. All of these are running means, decode and larger batches apart; nothing is assumed of the device.
//
// Threads: one at a time.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace mkd {

enum class Predictor : uint8_t { router, temporal };

struct Prediction {
    int       expert = -1;
    Predictor source = Predictor::router;
    int       rank   = 0; // 0: the surest of its source
};

class PrefetchAdmission {
  public:
    static constexpr int kRanks = 16; // higher ranks count as the last one

    // What came true.
    void saw_prediction(const Prediction & prediction, bool used);
    void saw_victim(bool used);
    // The storage's total so far (ReadMeter).
    void saw_reads(uint64_t bytes, int64_t busy_us);
    // The storage was not needed for so long before this batch's first demand read.
    void saw_window(bool decode, double us);

    // Of predictions, surest first, those worth it. stride_bytes: of one expert. chunk_bytes: what may be in flight when a demand comes.
    // n_free: slots that hold nothing.
    std::vector<Prediction> admit(std::vector<Prediction> predictions, bool decode, uint64_t stride_bytes, uint64_t chunk_bytes, int n_free) const;

    double p(const Prediction & prediction) const;
    double p_victim() const { return p_victim_; }
    double window_us(bool decode) const { // it may be longer than usual
        return window_us_[decode ? 0 : 1] + kDeviations * deviation_us_[decode ? 0 : 1];
    }
    double bytes_per_us() const { return busy_us_ > 0 ? bytes_ / busy_us_ : 0; } // 0: not known yet

  private:
    static constexpr double kPredictionWeight = 0.02; // of a new sample in the running mean
    static constexpr double kVictimWeight     = 0.01;
    static constexpr double kWindowWeight     = 0.05;
    static constexpr double kDeviations       = 2;    // mean absolute ones
    static constexpr double kRateMemoryUs     = 2e6;  // busy time after which a measurement has lost half its weight

    struct Precisions {
        std::array<double, kRanks> mean;
    };
    static Precisions start(double p) {
        Precisions precisions{};
        precisions.mean.fill(p);
        return precisions;
    }
    // before anything was seen: optimistic enough to try
    std::array<Precisions, 2> precision_{ start(0.5), start(0.25) };
    std::array<double, 2>     window_us_{ 0, 0 }, deviation_us_{ 0, 0 };
    double                    p_victim_ = 0.1;
    double                    bytes_ = 0, busy_us_ = 0;
    uint64_t                  bytes_seen_ = 0;
    int64_t                   busy_seen_us_ = 0;
};

} // namespace mkd
