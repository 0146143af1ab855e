#include "prefetch/admission.h"

#include <algorithm>
#include <cmath>

namespace mkd {

double PrefetchAdmission::p(const Prediction & prediction) const {
    return precision_[(size_t) prediction.source].mean[(size_t) std::min(prediction.rank, kRanks - 1)];
}

void PrefetchAdmission::saw_prediction(const Prediction & prediction, bool used) {
    double & mean = precision_[(size_t) prediction.source].mean[(size_t) std::min(prediction.rank, kRanks - 1)];
    mean += kPredictionWeight * ((used ? 1 : 0) - mean);
}

void PrefetchAdmission::saw_victim(bool used) {
    p_victim_ += kVictimWeight * ((used ? 1 : 0) - p_victim_);
}

void PrefetchAdmission::saw_reads(uint64_t bytes, int64_t busy_us) {
    if (bytes < bytes_seen_ || busy_us <= busy_seen_us_) {
        return;
    }
    const auto   more_us = (double) (busy_us - busy_seen_us_);
    const double keep    = std::exp2(-more_us / kRateMemoryUs);
    bytes_               = bytes_ * keep + (double) (bytes - bytes_seen_);
    busy_us_             = busy_us_ * keep + more_us;
    bytes_seen_          = bytes;
    busy_seen_us_        = busy_us;
}

void PrefetchAdmission::saw_window(bool decode, double us) {
    double & mean      = window_us_[decode ? 0 : 1];
    double & deviation = deviation_us_[decode ? 0 : 1];
    if (mean <= 0) {
        mean = us;
    }
    deviation += kWindowWeight * (std::abs(us - mean) - deviation);
    mean += kWindowWeight * (us - mean);
}

std::vector<Prediction> PrefetchAdmission::admit(std::vector<Prediction> predictions, bool decode, uint64_t stride_bytes, uint64_t chunk_bytes,
                                                 int n_free) const {
    const double rate = bytes_per_us();
    if (rate <= 0) {
        return {};
    }
    std::stable_sort(predictions.begin(), predictions.end(), [&](const Prediction & a, const Prediction & b) { return p(a) > p(b); });
    const double            t_load = (double) stride_bytes / rate;
    double                  left   = window_us(decode);
    std::vector<Prediction> admitted;
    for (const Prediction & prediction : predictions) {
        const bool   twice  = std::any_of(admitted.begin(), admitted.end(), [&](const Prediction & a) { return a.expert == prediction.expert; });
        const double chance = p(prediction);
        const double t_late = left < t_load ? std::min((double) chunk_bytes, (double) stride_bytes) / rate : 0;
        const double gain   = chance * std::min(t_load, left);
        const double cost   = (1 - chance) * t_late + ((int) admitted.size() < n_free ? 0 : p_victim_ * t_load);
        if (twice) {
            continue;
        }
        if (left <= 0 || gain <= cost) {
            break;
        }
        admitted.push_back(prediction);
        left -= t_load;
    }
    return admitted;
}

} // namespace mkd
