// Throttle: time as the curve says, on a clock of our own.

#include "base/error.h"
#include <doctest/doctest.h>
#include "io/faulty.h"
#include "io/read-queue.h"
#include "io/slow.h"
#include "scratch-file.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <map>
#include <string>
#include <thread>
#include <vector>

using namespace mkd;
using mkd_test::AlignedBlock;
using mkd_test::ScratchFolder;

namespace {

// A clock that moves only when all of n_threads sleep, to the earliest of their alarms, and wakes that one thread: the same course every time.
class FakeClock : public ThrottleClock {
  public:
    explicit FakeClock(int n_threads = 1) : n_awake_(n_threads) {}

    int64_t late_us = 0; // the kernel wakes sleepers up to this much too late, unevenly

    int64_t now_us() override {
        std::lock_guard<std::mutex> lock(mutex_);
        return now_us_;
    }
    void sleep_until(int64_t t_us) override {
        alarm(t_us + late_us * (4 - n_sleeps++ % 5) / 4);
    }
    void pass(int64_t us) { alarm(now_us() + us); } // as a real read does
    void leave() {                                  // the calling thread will not sleep any more
        std::lock_guard<std::mutex> lock(mutex_);
        n_awake_--;
        ring();
    }

    std::atomic<int64_t> n_sleeps{0};

  private:
    void alarm(int64_t t_us) {
        std::unique_lock<std::mutex> lock(mutex_);
        const auto                   mine = alarms_.emplace(std::max(t_us, now_us_), false);
        n_awake_--;
        ring();
        rung_.wait(lock, [&] { return mine->second; });
        alarms_.erase(mine);
    }
    void ring() {
        if (n_awake_ > 0 || alarms_.empty()) {
            return;
        }
        const auto first = alarms_.begin();
        now_us_          = first->first;
        first->second    = true;
        n_awake_++;
        rung_.notify_all();
    }

    std::mutex                   mutex_;
    std::condition_variable      rung_;
    std::multimap<int64_t, bool> alarms_; // when, and whether it rang
    int64_t                      now_us_ = 1000000;
    int                          n_awake_;
};

const char * kCurve = "4096:1:100000000,4096:2:200000000,4096:4:400000000,524288:1:1400000000,524288:2:2400000000,524288:4:2400000000";

struct Fixture {
    FakeClock * clock = new FakeClock;
    Throttle    throttle{parse_curve(kCurve), std::unique_ptr<FakeClock>(clock)};
};

struct Measured {
    double  bytes_per_s;
    int64_t behind_us, slept_us;
};

// n_lanes threads that read n_reads blocks each back to back, every one really taking read_us.
Measured measure(uint64_t block_bytes, int n_lanes, int n_reads, int64_t late_us, int64_t read_us = 0) {
    FakeClock *   clock = new FakeClock(n_lanes);
    Throttle      throttle(parse_curve(kCurve), std::unique_ptr<FakeClock>(clock));
    const int64_t t_begin = clock->now_us();
    clock->late_us        = late_us;
    std::vector<std::thread> lanes;
    for (int i = 0; i < n_lanes; i++) {
        lanes.emplace_back([&] {
            clock->pass(1); // all start together
            for (int i_read = 0; i_read < n_reads; i_read++) {
                Throttle::Read read;
                throttle.begin(read, block_bytes);
                if (read_us > 0) {
                    clock->pass(read_us);
                }
                throttle.finish(read);
            }
            clock->leave();
        });
    }
    for (std::thread & lane : lanes) {
        lane.join();
    }
    const double elapsed_us = (double) (clock->now_us() - t_begin - 1);
    return {(double) block_bytes * n_lanes * n_reads * 1e6 / elapsed_us, throttle.behind_us(), throttle.slept_us()};
}

std::string curve_error(const std::string & text) {
    try {
        parse_curve(text);
    } catch (const Error & error) {
        CHECK(error.status() == MKD_ERR_ARG);
        return error.what();
    }
    return "";
}

} // namespace

TEST_CASE("throttle curve: is parsed as it is written") {
    const auto curve = parse_curve("4096:2:450000000,1048576:2:2400000000");
    REQUIRE(curve.size() == 2);
    CHECK(curve[1].block_bytes == 1048576);
    CHECK(curve[1].n_lanes == 2);
    CHECK(curve[1].bytes_per_s == 2.4e9);
}

TEST_CASE("throttle curve: what is wrong is named") {
    for (const char * text : {"", ",", "4096", "4096:1", "4096:1:1,", ":1:1", "4096::1", "4096:1:", "4096:1:1:1", "-1:1:1", "0:1:1", "4096:0:1",
                              "4096:1:0", "4096:1:1e9", "4096:1:nan", " 4096:1:1", "4096:5000:1", "4096:1:99999999999999999999", "0x10:1:1"}) {
        CAPTURE(text);
        CHECK(curve_error(text).rfind("throttle curve: ", 0) == 0);
    }
    CHECK(curve_error("4096:1:5,4096:1:6").find("given twice") != std::string::npos);
    CHECK(curve_error("4096:1:5,8192:x:6").find("'x' in '8192:x:6' is no number of lanes") != std::string::npos);
    CHECK(curve_error("").find("no point") != std::string::npos);
    CHECK(curve_error("4096:1:5,8192:2:6").find("4096 bytes with 2 lanes is missing") != std::string::npos);
}

TEST_CASE("throttle curve: bandwidth between and beyond the points") {
    const auto curve = parse_curve(kCurve);
    CHECK(curve_bandwidth(curve, 4096, 1) == doctest::Approx(1e8));
    CHECK(curve_bandwidth(curve, 524288, 2) == doctest::Approx(2.4e9));
    CHECK(curve_bandwidth(curve, 4096, 3) == doctest::Approx(3e8));
    CHECK(curve_bandwidth(curve, 524288, 3) == doctest::Approx(2.4e9));
    // 4096 = 2^12, 524288 = 2^19: 2^15.5 is half way
    CHECK(curve_bandwidth(curve, 46341, 1) == doctest::Approx(0.75e9).epsilon(1e-4));
    CHECK(curve_bandwidth(curve, 46341, 4) == doctest::Approx(1.4e9).epsilon(1e-4));
    CHECK(curve_bandwidth(curve, 1, 1) == doctest::Approx(1e8));
    CHECK(curve_bandwidth(curve, 1ull << 40, 100) == doctest::Approx(2.4e9));
    CHECK(curve_bandwidth(parse_curve("4096:2:500"), 1048576, 1) == doctest::Approx(500));
}

TEST_CASE("throttle: the rate equals the curve within 1 %, however late the kernel wakes the lanes") {
    struct Case {
        uint64_t block_bytes;
        int      n_lanes;
    };
    for (const int64_t late_us : {0, 57, 900}) {
        for (const Case & c : {Case{4096, 1}, Case{4096, 4}, Case{65536, 3}, Case{524288, 2}, Case{524288, 4}, Case{4194304, 4}}) {
            CAPTURE(late_us);
            CAPTURE(c.block_bytes);
            CAPTURE(c.n_lanes);
            const double wanted   = curve_bandwidth(parse_curve(kCurve), c.block_bytes, c.n_lanes);
            const auto   n_reads  = (int) (0.4 * wanted / (double) c.block_bytes / c.n_lanes); // 0.4 s
            const auto   measured = measure(c.block_bytes, c.n_lanes, n_reads, late_us);
            CHECK(measured.bytes_per_s == doctest::Approx(wanted).epsilon(0.01));
            CHECK(measured.behind_us == 0);
        }
    }
}

TEST_CASE("throttle: the reader's own time counts, if it is shorter") {
    // 524288 bytes at 1.4 GB/s take 374.5 us, of which the real read takes 300
    const auto measured = measure(524288, 1, 2000, 0, 300);
    CHECK(measured.bytes_per_s == doctest::Approx(1.4e9).epsilon(0.01));
    CHECK(measured.behind_us == 0);
    CHECK(measured.slept_us == doctest::Approx(2000 * 74.5).epsilon(0.02));
}

TEST_CASE("throttle: a storage slower than the curve is not sped up, and is reported") {
    const auto measured = measure(524288, 1, 100, 0, 1000);
    CHECK(measured.bytes_per_s == doctest::Approx(524288 * 1e3).epsilon(0.001));
    CHECK(measured.behind_us == doctest::Approx(100 * (1000 - 374.5)).epsilon(0.01));
    CHECK(measured.slept_us == 0);
}

TEST_CASE_FIXTURE(Fixture, "throttle: idle time earns nothing") {
    Throttle::Read read;
    for (int i = 0; i < 10; i++) {
        clock->pass(1000000);
        const int64_t t_begin = clock->now_us();
        throttle.begin(read, 524288);
        throttle.finish(read);
        CHECK(clock->now_us() - t_begin >= 374);
    }
}

TEST_CASE_FIXTURE(Fixture, "throttle: a read shares the flash only while another is in flight") {
    // A takes 10 ms alone. B of half its size joins at the start: at 2.4 GB/s each gets 1.2, so B is done after 5.83 ms, and A, with
    // 7 MB left, needs 5 ms more at 1.4 GB/s.
    Throttle::Read a, b;
    const int64_t  t_begin = clock->now_us();
    throttle.begin(a, 14000000);
    throttle.begin(b, 7000000);
    throttle.finish(b);
    CHECK(clock->now_us() - t_begin == doctest::Approx(5833).epsilon(0.001));
    throttle.finish(a);
    CHECK(clock->now_us() - t_begin == doctest::Approx(10833).epsilon(0.001));
}

TEST_CASE_FIXTURE(Fixture, "throttle: a cancelled read gives its share back") {
    Throttle::Read a, b;
    const int64_t  t_begin = clock->now_us();
    throttle.begin(a, 14000000);
    throttle.begin(b, 14000000);
    throttle.cancel(b);
    throttle.finish(a);
    CHECK(clock->now_us() - t_begin == doctest::Approx(10000).epsilon(0.001));
}

TEST_CASE_FIXTURE(Fixture, "throttle: nobody spins") {
    Throttle::Read read;
    throttle.begin(read, 140000000); // 100 ms
    throttle.finish(read);
    CHECK(clock->n_sleeps <= 51);
}

TEST_CASE_FIXTURE(Fixture, "throttle: oversleeping beyond the bound is reported, not given back") {
    clock->late_us = 1000000; // the first sleep has all of it
    Throttle::Read read;
    throttle.begin(read, 524288);
    throttle.finish(read);
    CHECK(throttle.behind_us() == doctest::Approx(990000).epsilon(0.001));
    clock->late_us        = 0;
    const int64_t t_begin = clock->now_us();
    for (int i = 0; i < 1000; i++) {
        throttle.begin(read, 524288);
        throttle.finish(read);
    }
    CHECK(clock->now_us() - t_begin == doctest::Approx(374491 - 10000).epsilon(0.001));
}

TEST_CASE("throttle: an empty curve is refused") {
    CHECK_THROWS_AS(Throttle(std::vector<CurvePoint>{}), Error);
}

TEST_CASE("slow source: passes bytes and errors through and frees the flash after an error") {
    ScratchFolder    folder;
    AlignedBlock     block(65536);
    FakeClock *      clock    = new FakeClock;
    auto             script   = std::make_shared<FaultScript>();
    auto             throttle = std::make_shared<Throttle>(parse_curve("4096:1:65536000"), std::unique_ptr<FakeClock>(clock));
    const auto       source   = make_slow_source(make_faulty_source(open_file_source(folder.file("data", 65536), false, nullptr), script), throttle);
    script->at(0, {Fault::Kind::error, EIO});
    CHECK_THROWS_AS(source->read(0, block.data(), 65536), Error);
    const int64_t t_begin = clock->now_us();
    source->read(0, block.data(), 65536);
    CHECK(clock->now_us() - t_begin == 1000); // the failed read no longer shares
    CHECK(block.holds(0, 65536));
    CHECK(source->size_bytes() == 65536);
    CHECK_FALSE(source->direct());
}

TEST_CASE("throttle: how to read follows from the curve") {
    // more lanes give nothing from 2 on, larger blocks little from 1 MiB on
    const ReadPlan plan = choose_reads(parse_curve("524288:1:500,524288:2:700,524288:4:700,1048576:1:600,1048576:2:990,1048576:4:990,"
                                                   "4194304:1:900,4194304:2:1000,4194304:4:1000"));
    CHECK(plan.n_lanes == 2);
    CHECK(plan.chunk_bytes == 1u << 20);
    const ReadPlan flat = choose_reads(parse_curve("4096:1:100"));
    CHECK(flat.n_lanes == 1);
    CHECK(flat.chunk_bytes == 512u << 10);
}

TEST_CASE("slow source: lanes on the real clock") {
    ScratchFolder folder;
    AlignedBlock  blocks(16 * 4096);
    auto          throttle = std::make_shared<Throttle>(parse_curve("4096:1:100000000,4096:4:400000000"));
    const auto    source   = make_slow_source(open_file_source(folder.file("data", 16 * 4096), false, nullptr), throttle);
    std::vector<ReadRequest> requests(16);
    ReadQueue::Options options;
    options.chunk_bytes = 64 << 10;
    options.plain_files = false;
    ReadQueue lanes(options);
    CHECK(lanes.engine() == ReadEngine::pool);
    for (size_t i = 0; i < 16; i++) {
        requests[i].source = source.get();
        requests[i].offset = i * 4096;
        requests[i].dst    = blocks.data() + i * 4096;
        requests[i].bytes  = 4096;
        lanes.submit(requests[i]);
    }
    for (ReadRequest & request : requests) {
        lanes.wait(request);
        CHECK_FALSE(request.error);
    }
    CHECK(blocks.holds(0, 16 * 4096));
}
