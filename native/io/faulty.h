// io/faulty.h: storage that fails on purpose, for tests only (not linked into the engine).
//
// A FaultScript says what happens at the n-th read. It acts at the level of pread(2), below FileSource, where short reads and EINTR exist
// (faulty_pread), or around a whole source (make_faulty_source), where a read either fails or brings damaged bytes. Nothing here sleeps: a stalled
// read waits until the test lets it go.

#pragma once

#include "io/byte-source.h"

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>

namespace mkd {

struct Fault {
    enum class Kind {
        none,
        error,      // errno value
        short_read, // at most value bytes (pread only)
        end,        // end of file: 0 bytes (pread only)
        flip,       // the byte at offset value of what was read has its lowest bit inverted
        stall,      // waits for release(), then reads
    };
    Kind     kind  = Kind::none;
    uint64_t value = 0;
};

// Threads: any.
class FaultScript {
  public:
    // i_read: 0-based; every call of pread or read counts, the O_DIRECT probe too. always: every read that has no fault of its own.
    void at(int64_t i_read, Fault fault);
    void always(Fault fault);

    void wait_stalled(int n_reads); // until that many reads are held
    void release();                 // lets them and all later stalls go

    int64_t n_reads() const;

    // For the stand-ins: the next read's fault. Blocks while it stalls.
    Fault next();

  private:
    mutable std::mutex       mutex_;
    std::condition_variable  changed_;
    std::map<int64_t, Fault> faults_;
    Fault                    always_;
    int64_t                  n_reads_   = 0;
    int                      n_stalled_ = 0;
    bool                     released_  = false;
};

PreadFunction faulty_pread(std::shared_ptr<FaultScript> script);

// error becomes Error(MKD_ERR_IO) with path, offset and errno, as of a file.
std::unique_ptr<ByteSource> make_faulty_source(std::unique_ptr<ByteSource> inner, std::shared_ptr<FaultScript> script);

} // namespace mkd
