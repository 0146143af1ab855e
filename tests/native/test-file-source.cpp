// FileSource: every byte or an error, whatever pread does.

#include "base/error.h"
#include <doctest/doctest.h>
#include "io/faulty.h"
#include "scratch-file.h"

#include <sys/stat.h>

#include <cerrno>
#include <string>

using namespace mkd;
using mkd_test::AlignedBlock;
using mkd_test::ScratchFolder;
using Kind = Fault::Kind;

namespace {

// The message of the Error that the call throws; its status must be as given.
template <typename Call> std::string error_of(mkd_status status, Call call) {
    try {
        call();
    } catch (const Error & error) {
        CHECK(error.status() == status);
        return error.what();
    }
    FAIL("nothing was thrown");
    return "";
}

bool contains(const std::string & text, const std::string & part) {
    const bool found = text.find(part) != std::string::npos;
    if (!found) {
        MESSAGE("'" << text << "' does not contain '" << part << "'");
    }
    return found;
}

// A file of 64 KiB, opened with scripted faults.
struct Fixture {
    ScratchFolder                folder;
    std::string                  path   = folder.file("data", 65536);
    std::shared_ptr<FaultScript> script = std::make_shared<FaultScript>();
    AlignedBlock                 block{65536};

    std::unique_ptr<ByteSource> open(bool direct, std::string * note = nullptr) { return open_file_source(path, direct, note, faulty_pread(script)); }
};

} // namespace

TEST_CASE_FIXTURE(Fixture, "file source: reads exactly the range, at any offset, buffered") {
    const auto source = open(false);
    CHECK_FALSE(source->direct());
    CHECK(source->size_bytes() == 65536);
    CHECK(source->path() == path);
    source->read(12345, block.data(), 777);
    CHECK(block.holds(12345, 777));
    CHECK(block.data()[777] == 0);
    source->read(65536, block.data(), 0);
}

TEST_CASE_FIXTURE(Fixture, "file source: reads aligned ranges directly where the file system allows it") {
    std::string note = "old";
    const auto  source = open(true, &note);
    CHECK(source->direct() == note.empty());
    source->read(8192, block.data(), 12288);
    CHECK(block.holds(8192, 12288));
}

TEST_CASE_FIXTURE(Fixture, "file source: short reads and EINTR are continued") {
    for (const bool direct : {false, true}) {
        CAPTURE(direct);
        const auto    source = open(direct);
        const int64_t first  = script->n_reads();
        script->at(first + 0, {Kind::short_read, 5000}); // in direct mode: 4096 of them count
        script->at(first + 1, {Kind::error, EINTR});
        script->at(first + 2, {Kind::error, EINTR});
        script->at(first + 3, {Kind::short_read, 4096});
        source->read(4096, block.data(), 61440);
        CHECK(block.holds(4096, 61440));
        CHECK(script->n_reads() == first + 5);
    }
}

TEST_CASE_FIXTURE(Fixture, "file source: one byte at a time still brings all") {
    script->always({Kind::short_read, 1});
    open(false)->read(100, block.data(), 300);
    CHECK(block.holds(100, 300));
    CHECK(script->n_reads() == 300);
}

TEST_CASE_FIXTURE(Fixture, "file source: an error names path, offset and errno") {
    const auto source = open(false);
    script->at(0, {Kind::short_read, 100});
    script->at(1, {Kind::error, EIO});
    const std::string text = error_of(MKD_ERR_IO, [&] { source->read(4096, block.data(), 4096); });
    CHECK(contains(text, path));
    CHECK(contains(text, "offset 4196"));
    CHECK(contains(text, "errno 5"));
    source->read(4096, block.data(), 4096); // the source lives on
    CHECK(block.holds(4096, 4096));
}

TEST_CASE_FIXTURE(Fixture, "file source: the end of the file inside the range is an error") {
    const auto source = open(false);
    CHECK(contains(error_of(MKD_ERR_IO, [&] { source->read(65530, block.data(), 7); }), "beyond the end"));
    CHECK(contains(error_of(MKD_ERR_IO, [&] { source->read(UINT64_MAX - 2, block.data(), 7); }), "beyond the end"));
    CHECK(script->n_reads() == 0);
    REQUIRE(truncate(path.c_str(), 10000) == 0); // it shrinks under us
    CHECK(contains(error_of(MKD_ERR_IO, [&] { source->read(8192, block.data(), 4096); }), "ends at offset 10000"));
}

TEST_CASE_FIXTURE(Fixture, "file source: a direct read that never gets a whole block ends in an error") {
    std::string note;
    const auto  source = open(true, &note);
    if (!source->direct()) {
        MESSAGE("not direct here: " << note);
        return;
    }
    script->always({Kind::short_read, 100});
    CHECK(contains(error_of(MKD_ERR_IO, [&] { source->read(4096, block.data(), 8192); }), "short"));
}

TEST_CASE_FIXTURE(Fixture, "file source: a misaligned direct read is refused before it reaches the kernel") {
    const auto source = open(true);
    if (!source->direct()) {
        return;
    }
    const int64_t before = script->n_reads();
    CHECK(contains(error_of(MKD_ERR_ARG, [&] { source->read(512, block.data(), 4096); }), "aligned"));
    error_of(MKD_ERR_ARG, [&] { source->read(0, block.data(), 100); });
    error_of(MKD_ERR_ARG, [&] { source->read(0, block.data() + 16, 4096); });
    CHECK(script->n_reads() == before);
}

TEST_CASE_FIXTURE(Fixture, "file source: a refused probe falls back to buffered reads and says why") {
    std::string note;
    script->at(0, {Kind::error, EINTR}); // is not a refusal
    script->at(1, {Kind::error, EINVAL});
    const auto source = open(true, &note);
    CHECK_FALSE(source->direct());
    CHECK(contains(note, "O_DIRECT refused by "));
    CHECK(contains(note, "errno 22"));
    CHECK(contains(note, "reads are buffered"));
    source->read(3, block.data(), 10);
    CHECK(block.holds(3, 10));
}

TEST_CASE("file source: O_DIRECT refused by the file system itself falls back too") {
    std::string note;
    const auto  source = open_file_source("/proc/version", true, &note);
    CHECK_FALSE(source->direct());
    CHECK(contains(note, "refused by proc"));
    CHECK_NOTHROW(open_file_source("/proc/version", true, nullptr));
}

TEST_CASE("file source: tmpfs is read, directly or with a note") {
    if (access("/dev/shm", W_OK) != 0) {
        return;
    }
    ScratchFolder folder("/dev/shm");
    AlignedBlock  block(4096);
    std::string   note;
    const auto    source = open_file_source(folder.file("data", 8192), true, &note);
    CHECK(source->direct() == note.empty());
    if (!source->direct()) {
        CHECK(contains(note, "tmpfs"));
    }
    source->read(4096, block.data(), 4096);
    CHECK(block.holds(4096, 4096));
}

TEST_CASE("file source: what is no regular file is refused") {
    ScratchFolder     folder;
    const std::string pipe = folder.path() + "/pipe";
    REQUIRE(mkfifo(pipe.c_str(), 0600) == 0);
    CHECK(contains(error_of(MKD_ERR_IO, [&] { open_file_source(folder.path(), false, nullptr); }), "is a folder"));
    CHECK(contains(error_of(MKD_ERR_IO, [&] { open_file_source(pipe, true, nullptr); }), "expected a regular file"));
    CHECK(contains(error_of(MKD_ERR_IO, [&] { open_file_source("/dev/null", true, nullptr); }), "expected a regular file"));
    CHECK(contains(error_of(MKD_ERR_IO, [&] { open_file_source(folder.path() + "/absent", true, nullptr); }), "errno 2"));
}

TEST_CASE_FIXTURE(Fixture, "faulty source: errors and flipped bytes come where the script says") {
    const auto source = make_faulty_source(open_file_source(path, false, nullptr), script);
    script->at(0, {Kind::error, EIO});
    script->at(1, {Kind::flip, 7});
    CHECK(contains(error_of(MKD_ERR_IO, [&] { source->read(0, block.data(), 100); }), "errno 5"));
    source->read(0, block.data(), 100);
    CHECK(block.data()[7] == (mkd_test::pattern_byte(7) ^ 1));
    source->read(0, block.data(), 100);
    CHECK(block.holds(0, 100));
}
