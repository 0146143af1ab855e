// ReadQueue: order, chunks, sections, priorities, cancelling, errors, the end; with the pool and with io_uring.

#include "base/error.h"
#include <doctest/doctest.h>
#include "io/faulty.h"
#include "io/read-queue.h"
#include "scratch-file.h"

#include <atomic>
#include <cerrno>
#include <cstring>
#include <deque>
#include <random>
#include <thread>

using namespace mkd;
using mkd_test::AlignedBlock;
using mkd_test::ScratchFolder;

namespace {

constexpr size_t kBlock = 4096;

bool have_uring() {
    ReadQueue::Options options;
    return ReadQueue(options).engine() == ReadEngine::uring;
}

struct Fixture {
    ScratchFolder                folder;
    std::string                  path   = folder.file("data", 64 * kBlock);
    std::shared_ptr<FaultScript> script = std::make_shared<FaultScript>();
    std::unique_ptr<ByteSource>  faulty = make_faulty_source(open_file_source(path, false, nullptr), script);
    std::unique_ptr<ByteSource>  plain  = open_file_source(path, true, nullptr);
    AlignedBlock                 blocks{64 * kBlock};
    std::deque<ReadRequest>      requests{64};

    // Request i brings n blocks from block i on to their place in memory.
    ReadRequest & request(size_t i, ByteSource & source, size_t n = 1) {
        ReadRequest & r = requests[i];
        r.source        = &source;
        r.offset        = i * kBlock;
        r.dst           = blocks.data() + i * kBlock;
        r.bytes         = n * kBlock;
        return r;
    }

    static ReadQueue::Options pool(int n_lanes, size_t chunk_blocks = 1) {
        ReadQueue::Options options;
        options.engine      = ReadEngine::pool;
        options.n_lanes     = n_lanes;
        options.chunk_bytes = chunk_blocks * kBlock;
        return options;
    }
    static ReadQueue::Options uring(int n_lanes, size_t chunk_blocks = 1) {
        ReadQueue::Options options = pool(n_lanes, chunk_blocks);
        options.engine             = ReadEngine::automatic; // the pool where the kernel has none: the same must hold
        return options;
    }
};

mkd_status status_of(const ReadRequest & request) {
    try {
        if (request.error) {
            std::rethrow_exception(request.error);
        }
    } catch (const Error & error) {
        return error.status();
    }
    return MKD_OK;
}

} // namespace

TEST_CASE_FIXTURE(Fixture, "read queue: all requests of both engines arrive, with times in order") {
    for (const ReadQueue::Options & options : { pool(4), uring(4) }) {
        memset(blocks.data(), 0, 64 * kBlock);
        ReadQueue queue(options);
        for (size_t i = 0; i < 64; i++) {
            queue.submit(request(i, *plain));
        }
        for (size_t i = 64; i-- > 0;) {
            queue.wait(requests[i]);
            CHECK(requests[i].done());
            CHECK(requests[i].ready() == 1);
            CHECK(status_of(requests[i]) == MKD_OK);
            CHECK(requests[i].bytes_read == kBlock);
            CHECK_FALSE(requests[i].cancelled);
            CHECK(requests[i].t_queue_us <= requests[i].t_start_us);
            CHECK(requests[i].t_start_us <= requests[i].t_done_us);
        }
        CHECK(blocks.holds(0, 64 * kBlock));
        CHECK(queue.meter().bytes == 64 * kBlock);
        CHECK(queue.meter().busy_us >= 0);
    }
}

TEST_CASE_FIXTURE(Fixture, "read queue: sections become ready one by one, each checked once") {
    for (const ReadQueue::Options & options : { pool(3, 2), uring(3, 2) }) {
        std::array<std::atomic<int>, 3> checked{};
        ReadQueue                       queue(options);
        ReadRequest &                   r = request(3, *plain, 40);
        r.n_sections                      = 3;
        r.section_end                     = { 7 * kBlock, 8 * kBlock, 0 };
        r.on_section                      = [&](ReadRequest & self, int i) {
            const size_t begin = i ? self.section_end[(size_t) i - 1] : 0;
            CHECK(blocks.holds(3 * kBlock + begin, self.section_end[(size_t) i] - begin, 3 * kBlock + begin));
            checked[(size_t) i] += 1;
        };
        queue.submit(r);
        while ((r.ready() & 0b111) != 0b111) {
            const uint64_t version = queue.version();
            if ((r.ready() & 0b111) != 0b111) {
                queue.wait_change(version);
            }
        }
        queue.wait(r);
        for (const auto & n : checked) {
            CHECK(n == 1);
        }
        r.on_section = nullptr;
        r.n_sections = 1;
    }
}

TEST_CASE_FIXTURE(Fixture, "read queue: one lane reads in the order of submission, demand before prefetch") {
    std::vector<size_t> order; // written by the one lane, read after it finished
    script->at(0, { Fault::Kind::stall, 0 });
    {
        ReadQueue queue(pool(1));
        for (const size_t i : { 9u, 1u, 2u, 3u, 4u }) {
            request(i, *faulty).on_section = [&order, i](ReadRequest &, int) { order.push_back(i); };
        }
        queue.submit(requests[9]); // holds the lane
        script->wait_stalled(1);
        queue.submit(requests[1], ReadPriority::prefetch);
        queue.submit(requests[2], ReadPriority::prefetch);
        queue.submit(requests[3]);
        queue.submit(requests[4]);
        queue.promote(requests[2]); // behind the demands that are there
        script->release();
        for (const size_t i : { 9u, 1u, 2u, 3u, 4u }) {
            queue.wait(requests[i]);
        }
    }
    CHECK(order == std::vector<size_t>{ 9, 3, 4, 2, 1 });
}

TEST_CASE_FIXTURE(Fixture, "read queue: prefetch leaves lanes for demand") {
    script->always({ Fault::Kind::stall, 0 });
    ReadQueue queue(pool(4));
    for (size_t i = 0; i < 8; ++i) {
        queue.submit(request(i, *faulty), ReadPriority::prefetch);
    }
    script->wait_stalled(ReadQueue::kPrefetchLanes);
    queue.submit(request(20, *faulty));
    queue.submit(request(21, *faulty));
    script->wait_stalled(ReadQueue::kPrefetchLanes + 2); // both demands are being read
    CHECK(script->n_reads() == ReadQueue::kPrefetchLanes + 2);
    script->release();
    for (const size_t i : { 0u, 7u, 20u, 21u }) {
        queue.wait(requests[i]);
    }
}

TEST_CASE_FIXTURE(Fixture, "read queue: a cancelled request ends with its chunk in flight, and says what it lacks") {
    script->at(0, { Fault::Kind::stall, 0 });
    ReadQueue     queue(pool(1));
    ReadRequest & r = request(0, *faulty, 32);
    queue.submit(r, ReadPriority::prefetch);
    queue.submit(request(40, *faulty), ReadPriority::prefetch);
    script->wait_stalled(1);
    queue.cancel(r);
    CHECK_FALSE(r.done()); // the lane still writes into it
    queue.cancel(requests[40]);
    CHECK(requests[40].done());
    CHECK(requests[40].bytes_read == 0);
    script->release();
    queue.wait(r);
    CHECK(r.cancelled);
    CHECK(r.ready() == 0);
    CHECK(r.bytes_read == kBlock);
    queue.cancel(r); // too late: nothing happens
    queue.submit(request(0, *faulty, 32)); // and it can be used again
    queue.wait(r);
    CHECK_FALSE(r.cancelled);
    CHECK(blocks.holds(0, 32 * kBlock));
}

TEST_CASE_FIXTURE(Fixture, "read queue: an error ends its request and no other") {
    script->at(3, { Fault::Kind::error, EIO });
    ReadQueue queue(pool(1));
    for (size_t i = 0; i < 8; i++) {
        queue.submit(request(i * 8, *faulty, i == 3 ? 8 : 1));
    }
    for (size_t i = 0; i < 8; i++) {
        queue.wait(requests[i * 8]);
        CHECK(status_of(requests[i * 8]) == (i == 3 ? MKD_ERR_IO : MKD_OK));
        CHECK(requests[i * 8].ready() == (i == 3 ? 0 : 1));
    }
    CHECK(script->n_reads() == 8); // what was left of the failed one was not tried
}

TEST_CASE_FIXTURE(Fixture, "read queue: what on_section throws is the request's error, and the section never becomes ready") {
    for (const ReadQueue::Options & options : { pool(2), uring(2) }) {
        ReadQueue queue(options);
        request(5, *plain).on_section = [](ReadRequest &, int) { fail(MKD_ERR_CORRUPT, "no"); };
        queue.submit(requests[5]);
        queue.submit(request(6, *plain));
        queue.wait(requests[5]);
        queue.wait(requests[6]);
        CHECK(status_of(requests[5]) == MKD_ERR_CORRUPT);
        CHECK(requests[5].ready() == 0);
        CHECK(status_of(requests[6]) == MKD_OK);
        requests[5].on_section = nullptr;
    }
}

TEST_CASE_FIXTURE(Fixture, "read queue: a request without bytes still runs on_section") {
    ReadQueue queue(pool(1));
    bool      ran                       = false;
    request(0, *plain, 0).on_section = [&](ReadRequest &, int) { ran = true; };
    queue.submit(requests[0]);
    queue.wait(requests[0]);
    CHECK(ran);
    CHECK(requests[0].ready() == 1);
}

TEST_CASE_FIXTURE(Fixture, "read queue: io_uring's short reads, interruptions and errors are read again") {
    if (!have_uring()) {
        MESSAGE("this kernel has no io_uring: only the pool was tested");
        return;
    }
    const int results[] = { (int) kBlock / 2, 0, -EINTR, -EAGAIN, -EIO, 1 };
    std::atomic<int>   n{ 0 };
    ReadQueue::Options options = uring(4);
    options.tamper             = [&](int result) { return n % 2 ? results[(size_t) (n++ / 2) % std::size(results)] : (n++, result); };
    ReadQueue queue(options);
    REQUIRE(queue.engine() == ReadEngine::uring);
    for (size_t i = 0; i < 64; i++) {
        queue.submit(request(i, *plain));
    }
    for (size_t i = 0; i < 64; i++) {
        queue.wait(requests[i]);
        CHECK(status_of(requests[i]) == MKD_OK);
    }
    CHECK(blocks.holds(0, 64 * kBlock));
    CHECK(n == 64);
}

TEST_CASE_FIXTURE(Fixture, "read queue: an error that persists is told with path and errno, by io_uring, too") {
    for (const ReadQueue::Options & options : { pool(2), uring(2) }) {
        ReadQueue     queue(options);
        ReadRequest & r = request(0, *plain, 2);
        r.offset        = 63 * kBlock; // the file ends in the middle
        queue.submit(r);
        queue.wait(r);
        REQUIRE(status_of(r) == MKD_ERR_IO);
        try {
            std::rethrow_exception(r.error);
        } catch (const Error & error) {
            CHECK(std::string(error.what()).find(path) != std::string::npos);
        }
    }
}

TEST_CASE_FIXTURE(Fixture, "read queue: destroying it cancels what is queued and waits for what runs") {
    script->at(0, { Fault::Kind::stall, 0 });
    std::thread helper;
    {
        ReadQueue queue(pool(1));
        for (size_t i = 0; i < 8; i++) {
            queue.submit(request(i, *faulty));
        }
        script->wait_stalled(1);
        helper = std::thread([&] { script->release(); });
    }
    helper.join();
    CHECK(status_of(requests[0]) == MKD_OK);
    for (size_t i = 0; i < 8; i++) {
        CHECK(requests[i].done());
        CHECK(requests[i].cancelled == (i > 0));
    }
}

TEST_CASE_FIXTURE(Fixture, "read queue: without lanes, or with ragged chunks, there is none") {
    CHECK_THROWS_AS(ReadQueue(pool(0)), Error);
    ReadQueue::Options options = pool(1);
    options.chunk_bytes        = 1000;
    CHECK_THROWS_AS(ReadQueue{ options }, Error);
    options             = uring(1);
    options.engine      = ReadEngine::uring;
    options.plain_files = false; // throttled
    CHECK_THROWS_AS(ReadQueue{ options }, Error);
}

TEST_CASE_FIXTURE(Fixture, "read queue: submit, promote and cancel at random end with every request done and whole or cancelled") {
    for (const ReadQueue::Options & options : { pool(3), uring(3) }) {
        std::mt19937 rng(11);
        ReadQueue    queue(options);
        for (int round = 0; round < 200; ++round) {
            std::vector<size_t> mine;
            for (size_t i = 0; i < 64; i += 8) {
                memset(blocks.data() + i * kBlock, 0, 8 * kBlock);
                queue.submit(request(i, *plain, 1 + rng() % 8), rng() % 2 ? ReadPriority::demand : ReadPriority::prefetch);
                mine.push_back(i);
            }
            for (const size_t i : mine) {
                switch (rng() % 3) {
                    case 0: queue.cancel(requests[i]); break;
                    case 1: queue.promote(requests[i]); break;
                    default: break;
                }
            }
            for (const size_t i : mine) {
                queue.wait(requests[i]);
                REQUIRE(status_of(requests[i]) == MKD_OK);
                REQUIRE(requests[i].cancelled != (requests[i].ready() == 1));
                if (!requests[i].cancelled) {
                    REQUIRE(blocks.holds(i * kBlock, requests[i].bytes, i * kBlock));
                }
            }
        }
    }
}
