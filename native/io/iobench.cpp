// io/iobench.cpp: see iobench.h.
//
// Each lane is a thread of its own rather than a read queue: nothing but the read lies between two reads. The lanes draw block numbers from one
// counter, so a slow lane holds up no other. Order by hashing the counter (a bijection on the next power of two, walked until it lands inside the
// file): no table, even for a file of terabytes.

#include "io/iobench.h"

#include "base/clock.h"
#include "base/error.h"
#include "base/huge-memory.h"
#include "io/slow.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace mkd {

namespace {

constexpr uint64_t kMinScratchBytes = 64ull << 20;
constexpr uint64_t kMaxScratchBytes = 1ull << 30;
constexpr uint64_t kMaxBlockBytes   = 1ull << 30;
constexpr int      kMaxLanes        = 256;
constexpr double   kBehindTolerated = 0.05; // of the time that all lanes spent

uint64_t mix(uint64_t x) { // splitmix64's finaliser
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

// ---------------------------------------------------------------- order

// A permutation of 0..n-1.
class Shuffle {
  public:
    Shuffle(uint64_t n, uint64_t seed) : n_(n), key_(mix(seed + 0x9E3779B97F4A7C15ull)) {
        while (bits_ < 63 && (1ull << bits_) < n) {
            bits_++;
        }
    }

    uint64_t operator()(uint64_t i) const {
        do {
            i = permute(i);
        } while (i >= n_);
        return i;
    }

  private:
    // Each step is a bijection on bits_ bits: adding, multiplying by an odd number, folding high bits into low ones.
    uint64_t permute(uint64_t x) const {
        const uint64_t mask  = (1ull << bits_) - 1;
        const int      shift = bits_ / 2 + 1;
        for (int round = 0; round < 3; round++) {
            x = (x + (key_ >> (round * 8))) & mask;
            x = (x * (mix(key_ + (uint64_t) round) | 1)) & mask;
            x ^= x >> shift;
        }
        return x;
    }

    uint64_t n_;
    uint64_t key_;
    int      bits_ = 0;
};

// ---------------------------------------------------------------- latencies

// Counts by latency: exact below 128 us, then 128 steps for each power of two (0.8 %).
class Histogram {
  public:
    void add(int64_t us) { counts_[index((uint64_t) std::max<int64_t>(us, 0))]++; }

    void add(const Histogram & other) {
        for (size_t i = 0; i < counts_.size(); i++) {
            counts_[i] += other.counts_[i];
        }
    }

    // The latency that this share of the reads did not exceed (0 if there were none).
    int64_t quantile(double share) const {
        uint64_t total = 0;
        for (const uint64_t count : counts_) {
            total += count;
        }
        const auto wanted = std::max<uint64_t>(1, (uint64_t) std::ceil(share * (double) total));
        uint64_t   seen   = 0;
        for (size_t i = 0; i < counts_.size(); i++) {
            seen += counts_[i];
            if (seen >= wanted) {
                return lower_bound_us(i);
            }
        }
        return 0;
    }

  private:
    static constexpr int      kBits  = 7;
    static constexpr uint64_t kSteps = 1u << kBits;

    static size_t index(uint64_t us) {
        int exponent = 0;
        while ((us >> exponent) >= 2 * kSteps) {
            exponent++;
        }
        const size_t i = (size_t) ((uint64_t) exponent * kSteps + (us >> exponent));
        return std::min(i, kCounts - 1);
    }
    static int64_t lower_bound_us(size_t i) {
        const size_t exponent = i < 2 * kSteps ? 0 : i / kSteps - 1;
        return (int64_t) ((i - exponent * kSteps) << exponent);
    }

    static constexpr size_t       kCounts = 40 * kSteps;
    std::array<uint64_t, kCounts> counts_{};
};

// ---------------------------------------------------------------- file

// The file to read. A scratch file is gone as soon as this is.
class BenchFile {
  public:
    BenchFile(const std::string & path, uint64_t scratch_bytes) : path_(path) {
        struct stat info {};
        if (stat(path.c_str(), &info) != 0) {
            io_fail("cannot be found");
        }
        if (S_ISDIR(info.st_mode)) {
            make_scratch(scratch_bytes);
        }
    }
    ~BenchFile() { remove_scratch(); }
    BenchFile(const BenchFile &)             = delete;
    BenchFile & operator=(const BenchFile &) = delete;

    const std::string & path() const { return path_; }

    void drop_cached_pages() const {
        const int fd = open(path_.c_str(), O_RDONLY | O_CLOEXEC);
        if (fd >= 0) {
            (void) posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
            close(fd);
        }
    }

    void remove_scratch() {
        if (is_scratch_) {
            (void) unlink(path_.c_str());
            is_scratch_ = false;
        }
    }

  private:
    [[noreturn]] void io_fail(const char * what) {
        const int error = errno;
        remove_scratch();
        fail(MKD_ERR_IO, "iobench: %s: %s: %s (errno %d)", path_.c_str(), what, std::generic_category().message(error).c_str(), error);
    }

    // Real, incompressible bytes on the device: holes and compressed blocks would be read from nowhere.
    void make_scratch(uint64_t bytes) {
        path_ += "/mkd-iobench-XXXXXX";
        const int fd = mkostemp(path_.data(), O_CLOEXEC);
        if (fd < 0) {
            io_fail("a scratch file cannot be made there");
        }
        is_scratch_ = true;
        std::vector<uint64_t> block((4u << 20) / sizeof(uint64_t));
        uint64_t              n_words = 0;
        for (uint64_t done = 0; done < bytes;) {
            for (uint64_t & word : block) {
                word = mix(++n_words * 0x9E3779B97F4A7C15ull);
            }
            const size_t  n   = (size_t) std::min<uint64_t>(block.size() * sizeof(uint64_t), bytes - done);
            const ssize_t got = pwrite(fd, block.data(), n, (off_t) done);
            if (got < 0 && errno != EINTR) {
                const int error = errno;
                close(fd);
                errno = error;
                io_fail("writing the scratch file failed");
            }
            done += got > 0 ? (uint64_t) got : 0;
        }
        const int error = fsync(fd) != 0 ? errno : 0;
        close(fd);
        if (error != 0) {
            errno = error;
            io_fail("fsync of the scratch file failed");
        }
    }

    std::string path_;
    bool        is_scratch_ = false;
};

// ---------------------------------------------------------------- run

struct Plan {
    ByteSource & source;
    uint64_t     block_bytes;
    uint64_t     n_blocks;
    uint64_t     max_reads; // no more than this are started
    int64_t      max_us;    // 0: no bound
    bool         sequential;
    Shuffle      shuffle;
    int          n_lanes;
};

struct Progress {
    std::atomic<uint64_t> next{0};
    std::atomic<bool>     stop{false};

    std::mutex              mutex; // guards what follows
    std::condition_variable start;
    int                     n_ready = 0;
    int64_t                 t_begin = 0;
    int64_t                 t_end   = 0;
    uint64_t                n_reads = 0;
    Histogram               latencies;
    std::exception_ptr      error;

    void stop_with(std::exception_ptr first_error) {
        std::lock_guard<std::mutex> lock(mutex);
        if (!error) {
            error = first_error;
        }
        stop.store(true);
        start.notify_all();
    }
};

void run_lane(const Plan & plan, Progress & progress, uint8_t * block) {
    int64_t t_begin;
    {
        std::unique_lock<std::mutex> lock(progress.mutex);
        if (++progress.n_ready == plan.n_lanes) {
            progress.t_begin = now_us();
            progress.start.notify_all();
        }
        progress.start.wait(lock, [&] { return progress.t_begin != 0 || progress.stop.load(); });
        t_begin = progress.t_begin;
    }
    Histogram latencies;
    uint64_t  n_reads = 0;
    int64_t   t_last  = t_begin;
    try {
        while (!progress.stop.load(std::memory_order_relaxed)) {
            const uint64_t i      = progress.next.fetch_add(1, std::memory_order_relaxed);
            const int64_t  t_read = now_us();
            if (i >= plan.max_reads || (plan.max_us > 0 && t_read - t_begin >= plan.max_us)) {
                break;
            }
            const uint64_t i_block = plan.sequential ? i % plan.n_blocks : plan.shuffle(i % plan.n_blocks);
            plan.source.read(i_block * plan.block_bytes, block, plan.block_bytes);
            t_last = now_us();
            latencies.add(t_last - t_read);
            n_reads++;
        }
    } catch (...) {
        progress.stop_with(std::current_exception());
    }
    std::lock_guard<std::mutex> lock(progress.mutex);
    progress.latencies.add(latencies);
    progress.n_reads += n_reads;
    progress.t_end = std::max(progress.t_end, t_last);
}

void check(const mkd_iobench_params & params) {
    if (!params.path || !*params.path) {
        fail(MKD_ERR_ARG, "iobench: no path");
    }
    if (params.block_bytes == 0 || params.block_bytes % MKD_ALIGN_BYTES != 0 || params.block_bytes > kMaxBlockBytes) {
        fail(MKD_ERR_ARG, "iobench: block_bytes is %llu, expected a multiple of %d up to %llu", (unsigned long long) params.block_bytes,
             MKD_ALIGN_BYTES, (unsigned long long) kMaxBlockBytes);
    }
    if (params.n_lanes < 1 || params.n_lanes > kMaxLanes) {
        fail(MKD_ERR_ARG, "iobench: n_lanes is %d, expected 1..%d", params.n_lanes, kMaxLanes);
    }
    if (params.max_us < 0 || (params.total_bytes == 0 && params.max_us == 0)) {
        fail(MKD_ERR_ARG, "iobench: total_bytes is %llu and max_us is %lld: one of them must say when to stop", (unsigned long long) params.total_bytes,
             (long long) params.max_us);
    }
}

} // namespace

mkd_iobench_result run_iobench(const mkd_iobench_params & params, std::string * note) {
    check(params);
    std::shared_ptr<Throttle> throttle;
    if (params.throttle && *params.throttle) {
        throttle = std::make_shared<Throttle>(parse_curve(params.throttle));
    }
    const uint64_t wanted  = std::clamp(params.total_bytes, kMinScratchBytes, kMaxScratchBytes);
    const uint64_t scratch = (wanted + params.block_bytes - 1) / params.block_bytes * params.block_bytes;

    BenchFile   file(params.path, scratch);
    std::string text;
    auto        source = open_file_source(file.path(), params.direct_io, &text);
    if (!source->direct()) {
        file.drop_cached_pages();
    }
    file.remove_scratch(); // it lives as long as the source
    const bool     direct   = source->direct();
    const uint64_t n_blocks = source->size_bytes() / params.block_bytes;
    if (n_blocks == 0) {
        fail(MKD_ERR_ARG, "iobench: %s has %llu bytes, less than one block of %llu", file.path().c_str(),
             (unsigned long long) source->size_bytes(), (unsigned long long) params.block_bytes);
    }
    if (throttle) {
        source = make_slow_source(std::move(source), throttle);
    }

    std::vector<std::unique_ptr<HugeMemory>> blocks; // in huge pages, as the engine's slots are
    for (int i = 0; i < params.n_lanes; i++) {
        blocks.push_back(std::make_unique<HugeMemory>(std::max(params.block_bytes, HugeMemory::kHugePageBytes), "iobench"));
    }
    const uint64_t max_reads = params.total_bytes ? (params.total_bytes + params.block_bytes - 1) / params.block_bytes : UINT64_MAX;
    const Plan     plan{*source, params.block_bytes, n_blocks, max_reads, params.max_us, params.sequential, Shuffle(n_blocks, params.seed), params.n_lanes};
    Progress       progress;
    std::vector<std::thread> lanes;
    try {
        for (const auto & block : blocks) {
            lanes.emplace_back(run_lane, std::cref(plan), std::ref(progress), block->data());
        }
    } catch (const std::system_error & error) {
        progress.stop_with(std::make_exception_ptr(Error(MKD_ERR_NOMEM, format("iobench: a thread could not be started: %s", error.what()))));
    }
    for (std::thread & lane : lanes) {
        lane.join();
    }
    if (progress.error) {
        std::rethrow_exception(progress.error);
    }

    mkd_iobench_result result{};
    result.n_reads        = progress.n_reads;
    result.bytes          = progress.n_reads * params.block_bytes;
    result.elapsed_us     = progress.t_end - progress.t_begin;
    result.bytes_per_s    = result.elapsed_us > 0 ? (double) result.bytes * 1e6 / (double) result.elapsed_us : 0;
    result.latency_us_p50 = progress.latencies.quantile(0.50);
    result.latency_us_p99 = progress.latencies.quantile(0.99);
    result.direct_io      = direct;
    if (throttle && (double) throttle->behind_us() > kBehindTolerated * (double) result.elapsed_us * params.n_lanes) {
        text += format("%sthis storage is slower than the throttle curve: reads were %.0f ms late in all", text.empty() ? "" : "; ",
                       (double) throttle->behind_us() / 1000);
    }
    if (note) {
        *note = text;
    }
    return result;
}

} // namespace mkd
