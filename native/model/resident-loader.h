// model/resident-loader.h: reads resident.gguf into the resident buffer, at the storage's sequential rate.
//
// Front to back, in aligned blocks with O_DIRECT, several in flight, straight into the buffer (backend/resident-buffer.h has the file's layout):
// no copy, nothing read twice, no page left in the page cache. Reading begins with the constructor and goes on while llama.cpp parses the
// vocabulary, makes the tensors and reserves the context; finish() waits for the rest. Nothing is computed before.
//
// Threads: constructor and finish() on one thread; the read queue is the loader's own.

#pragma once

#include "base/huge-memory.h"
#include "io/read-queue.h"

#include <memory>
#include <string>

namespace mkd {

class ResidentLoader {
  public:
    static constexpr uint64_t kBlockBytes = 4u << 20;

    // dst has room for the whole file and must outlive the loader. Throws Error(IO, NOMEM).
    ResidentLoader(const std::string & path, bool direct_io, int n_lanes, const HugeMemory & dst);
    ~ResidentLoader(); // cancels what is left, waits for what is in flight

    // Returns the bytes read. Throws Error(IO).
    uint64_t finish();

  private:
    std::unique_ptr<ByteSource> source_;
    uint8_t *                   dst_;
    uint64_t                    whole_bytes_; // what aligned reads can bring
    ReadRequest                 request_;     // all of it
    std::unique_ptr<ReadQueue>  reads_;
};

} // namespace mkd
