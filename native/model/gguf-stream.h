// model/gguf-stream.h: the package as one ordinary GGUF, as a stream.
//
// llama.cpp loads a model from a FILE*. This one presents a GGUF whose header is built in memory (resident.gguf's metadata and tensors, then the
// merged routed tensors blk.L.ffn_*_exps.weight), whose first data bytes come from resident.gguf, and whose routed ranges are a hole that reads
// as zeros. Nothing of the hole is ever needed (backend/flash-buffer.h hides those tensors from the loader); routed_requested_bytes says
// how much of it was touched all the same: stdio's read-ahead.
//
// Usually llama.cpp reads the header only, and model/resident-loader.h brings the weights. Where llama.cpp repacks weights on the way
// (use_extra_bufts), it reads them here: with O_DIRECT in blocks of kBlockBytes that are read ahead. The block buffers are made when first
// needed and live as long as the stream.
//
// Threads: the FILE* belongs to the loading thread; the read queue is the stream's own.

#pragma once

#include "io/read-queue.h"
#include "store/package-index.h"

#include <cstdio>
#include <memory>
#include <string>
#include <deque>
#include <vector>

namespace mkd {

class GgufStream {
  public:
    static constexpr size_t kBlockBytes = 4u << 20;
    static constexpr int    kBlocks     = 6; // window: the loader's order within a layer is not the file's
    static constexpr int    kReadAhead  = 2;

    // Throws Error(IO, FORMAT).
    GgufStream(const PackageIndex & index, bool direct_io, int n_lanes);
    ~GgufStream();
    GgufStream(const GgufStream &)             = delete;
    GgufStream & operator=(const GgufStream &) = delete;

    struct ResidentTensor {
        std::string name;
        uint64_t    stream_offset, file_offset, bytes; // in the stream, in resident.gguf
    };

    FILE *                              file() const { return file_; }
    const std::string &                 path() const { return path_; } // resident.gguf
    const std::vector<ResidentTensor> & resident_tensors() const { return tensors_; } // in file order

    uint64_t resident_read_bytes() const { return read_bytes_; }
    uint64_t routed_requested_bytes() const { return hole_bytes_; }

    // The error that made a read fail (stdio only knows "error"). Null if none.
    std::exception_ptr error() const { return error_; }

  private:
    struct Block {
        int64_t     number = -1; // of kBlockBytes in resident.gguf
        uint64_t    used   = 0;
        bool        loading = false;
        ReadRequest request;
        uint8_t *   data = nullptr;
    };

    void    build_header(const PackageIndex & index);
    ssize_t read(char * dst, size_t n);
    int     seek(int64_t * offset, int whence);
    Block & block(int64_t number);
    void    open_blocks();
    void    start(Block & block, int64_t number);
    Block * find(int64_t number);
    Block & oldest();

    static ssize_t cookie_read(void * self, char * dst, size_t n);
    static int     cookie_seek(void * self, int64_t * offset, int whence);

    std::string                 path_;
    bool                        direct_io_;
    int                         n_lanes_;
    std::unique_ptr<ByteSource> source_;           // null until the first block is needed
    std::vector<uint8_t>        header_;
    std::vector<ResidentTensor> tensors_;          // ascending
    uint64_t                    data_end_    = 0;  // of resident tensor data in the stream; the hole follows
    uint64_t                    total_bytes_ = 0;
    uint64_t                    pos_         = 0;
    uint64_t                    read_bytes_ = 0, hole_bytes_ = 0, clock_ = 0;
    std::exception_ptr          error_;
    std::unique_ptr<uint8_t, void (*)(void *)> memory_;
    std::deque<Block>           blocks_; // a request cannot be moved
    std::unique_ptr<ReadQueue>  reads_;
    FILE *                      file_ = nullptr;
};

} // namespace mkd
