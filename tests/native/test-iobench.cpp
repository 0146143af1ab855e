// run_iobench: counts, stops, files, errors. What it measures depends on the machine and is not asserted.

#include "base/error.h"
#include <doctest/doctest.h>
#include "io/iobench.h"
#include "scratch-file.h"

#include <filesystem>
#include <string>

using namespace mkd;
using mkd_test::ScratchFolder;

namespace {

struct Fixture {
    ScratchFolder      folder;
    std::string        path   = folder.file("data", (1u << 20) + 100); // 256 blocks of 4096 and a rest
    mkd_iobench_params params = [] {
        mkd_iobench_params p{};
        p.struct_bytes = sizeof(p);
        p.block_bytes  = 4096;
        p.n_lanes      = 2;
        p.total_bytes  = 1u << 20;
        return p;
    }();
    std::string note = "old";

    mkd_iobench_result run() {
        params.path = path.c_str();
        return run_iobench(params, &note);
    }
    mkd_status status() {
        try {
            run();
        } catch (const Error & error) {
            return error.status();
        }
        return MKD_OK;
    }
};

} // namespace

TEST_CASE_FIXTURE(Fixture, "iobench: reads what was asked, with any number of lanes, in both orders") {
    for (const bool sequential : {false, true}) {
        for (const int n_lanes : {1, 2, 4}) {
            CAPTURE(sequential);
            CAPTURE(n_lanes);
            params.sequential = sequential;
            params.n_lanes    = n_lanes;
            const auto result = run();
            CHECK(result.n_reads == 256);
            CHECK(result.bytes == 1u << 20);
            CHECK(result.elapsed_us > 0);
            CHECK(result.bytes_per_s == doctest::Approx((double) result.bytes * 1e6 / (double) result.elapsed_us));
            CHECK(result.latency_us_p50 <= result.latency_us_p99);
            CHECK(result.latency_us_p99 <= result.elapsed_us);
            CHECK_FALSE(result.direct_io);
            CHECK(note.empty());
        }
    }
}

TEST_CASE_FIXTURE(Fixture, "iobench: says whether it was direct") {
    params.direct_io  = true;
    const auto result = run();
    CHECK(result.direct_io == note.empty());
    CHECK(result.n_reads == 256);
}

TEST_CASE_FIXTURE(Fixture, "iobench: goes round a file that is smaller than what was asked") {
    params.total_bytes = 5u << 20;
    params.block_bytes = 65536;
    CHECK(run().n_reads == 80);
}

TEST_CASE_FIXTURE(Fixture, "iobench: a rest of less than a block is read as a block") {
    params.total_bytes = 10000;
    CHECK(run().n_reads == 3);
}

TEST_CASE_FIXTURE(Fixture, "iobench: stops by time") {
    params.total_bytes = 0;
    params.max_us      = 20000;
    const auto result  = run();
    CHECK(result.n_reads > 0);
    CHECK(result.elapsed_us >= 15000);
}

TEST_CASE_FIXTURE(Fixture, "iobench: a folder gets a scratch file that is gone afterwards") {
    path               = folder.path() + "/empty";
    params.total_bytes = 1u << 20;
    std::filesystem::create_directory(path);
    CHECK(run().n_reads == 256);
    CHECK(std::filesystem::is_empty(path));
}

TEST_CASE_FIXTURE(Fixture, "iobench: a throttle slows it, and one that the storage cannot follow is reported") {
    params.throttle    = "4096:1:50000000";
    params.total_bytes = 1u << 20;
    CHECK(run().elapsed_us >= 18000); // 21 ms, less what may be given back early at the end
    params.throttle = "4096:1:900000000000000";
    run();
    CHECK(note.find("slower than the throttle curve") != std::string::npos);
}

TEST_CASE_FIXTURE(Fixture, "iobench: what makes no sense is refused") {
    SUBCASE("block 0") { params.block_bytes = 0; }
    SUBCASE("block not aligned") { params.block_bytes = 4097; }
    SUBCASE("block larger than the file") { params.block_bytes = 2u << 20; }
    SUBCASE("no lanes") { params.n_lanes = 0; }
    SUBCASE("no end") { params.total_bytes = 0; }
    SUBCASE("negative time") { params.max_us = -1; }
    SUBCASE("bad curve") { params.throttle = "fast"; }
    SUBCASE("no path") { path = ""; }
    CHECK(status() == MKD_ERR_ARG);
}

TEST_CASE_FIXTURE(Fixture, "iobench: an absent file is an I/O error") {
    path += ".absent";
    CHECK(status() == MKD_ERR_IO);
}
