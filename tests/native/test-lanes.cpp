// Lanes: order, parallelism, errors, the end.

#include "base/error.h"
#include <doctest/doctest.h>
#include "io/faulty.h"
#include "io/lanes.h"
#include "scratch-file.h"

#include <cerrno>
#include <vector>

using namespace mkd;
using mkd_test::AlignedBlock;
using mkd_test::ScratchFolder;

namespace {

constexpr size_t kBlock = 4096;

struct Fixture {
    ScratchFolder                folder;
    std::shared_ptr<FaultScript> script = std::make_shared<FaultScript>();
    std::unique_ptr<ByteSource>  source = make_faulty_source(open_file_source(folder.file("data", 64 * kBlock), false, nullptr), script);
    AlignedBlock                 blocks{64 * kBlock};
    std::vector<ReadRequest>     requests{64};

    // Request i brings block i of the file to block i of the memory.
    ReadRequest & request(size_t i) {
        ReadRequest & r = requests[i];
        r.source        = source.get();
        r.offset        = i * kBlock;
        r.dst           = blocks.data() + i * kBlock;
        r.bytes         = kBlock;
        return r;
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

TEST_CASE_FIXTURE(Fixture, "lanes: all requests of several lanes arrive, with times in order") {
    Lanes lanes(4);
    CHECK(lanes.n_lanes() == 4);
    for (size_t i = 0; i < 64; i++) {
        lanes.submit(request(i));
    }
    for (size_t i = 64; i-- > 0;) {
        lanes.wait(requests[i]);
        CHECK(status_of(requests[i]) == MKD_OK);
        CHECK(requests[i].t_queue_us <= requests[i].t_start_us);
        CHECK(requests[i].t_start_us <= requests[i].t_done_us);
    }
    CHECK(blocks.holds(0, 64 * kBlock));
}

TEST_CASE_FIXTURE(Fixture, "lanes: one lane reads in the order of submission") {
    std::vector<size_t> order; // written by the one lane, read after it finished
    {
        Lanes lanes(1);
        for (size_t i = 0; i < 16; i++) {
            const size_t i_request = i * 7 % 16;
            request(i_request).after_read = [&order, i_request](ReadRequest &) { order.push_back(i_request); };
            lanes.submit(requests[i_request]);
        }
    }
    REQUIRE(order.size() == 16);
    for (size_t i = 0; i < 16; i++) {
        CHECK(order[i] == i * 7 % 16);
    }
}

TEST_CASE_FIXTURE(Fixture, "lanes: n_lanes reads run at once, and not more") {
    Lanes lanes(3);
    script->always({Fault::Kind::stall, 0});
    for (size_t i = 0; i < 5; i++) {
        lanes.submit(request(i));
    }
    script->wait_stalled(3);
    CHECK(script->n_reads() == 3);
    script->release();
    for (size_t i = 0; i < 5; i++) {
        lanes.wait(requests[i]);
    }
    CHECK(blocks.holds(0, 5 * kBlock));
}

TEST_CASE_FIXTURE(Fixture, "lanes: a failed read is its request's error and nobody else's") {
    Lanes lanes(1);
    script->at(1, {Fault::Kind::error, EIO});
    bool was_called = false;
    for (size_t i = 0; i < 3; i++) {
        request(i);
    }
    requests[1].after_read = [&](ReadRequest &) { was_called = true; };
    requests[2].after_read = [](ReadRequest &) { fail(MKD_ERR_CORRUPT, "as a checksum would"); };
    for (size_t i = 0; i < 3; i++) {
        lanes.submit(requests[i]);
    }
    for (size_t i = 0; i < 3; i++) {
        lanes.wait(requests[i]);
    }
    CHECK(status_of(requests[0]) == MKD_OK);
    CHECK(status_of(requests[1]) == MKD_ERR_IO);
    CHECK(status_of(requests[2]) == MKD_ERR_CORRUPT);
    CHECK_FALSE(was_called);

    lanes.submit(requests[1]); // a request can be used again
    lanes.wait(requests[1]);
    CHECK(status_of(requests[1]) == MKD_OK);
    CHECK(was_called);
}

TEST_CASE_FIXTURE(Fixture, "lanes: the destructor finishes what is queued") {
    script->at(0, {Fault::Kind::stall, 0});
    {
        Lanes lanes(1);
        for (size_t i = 0; i < 8; i++) {
            lanes.submit(request(i));
        }
        script->wait_stalled(1);
        script->release();
    }
    CHECK(blocks.holds(0, 8 * kBlock));
    CHECK(requests[7].done);
}

TEST_CASE_FIXTURE(Fixture, "lanes: several threads may submit and wait") {
    Lanes                    lanes(2);
    std::vector<std::thread> threads;
    for (size_t t = 0; t < 4; t++) {
        threads.emplace_back([&, t] {
            for (size_t i = t * 16; i < (t + 1) * 16; i++) {
                lanes.submit(request(i));
                lanes.wait(requests[i]);
            }
        });
    }
    for (std::thread & thread : threads) {
        thread.join();
    }
    CHECK(blocks.holds(0, 64 * kBlock));
}

TEST_CASE("lanes: fewer than one is refused") {
    CHECK_THROWS_AS(Lanes(0), Error);
}
