// io/byte-source.h: bytes of one file, however they are brought.
//
// The job: read exactly n bytes at an offset, or say why not. Implementations: a file (O_DIRECT or buffered), and a wrapper that slows
// another source down to a phone's flash (io/slow). EINTR and short reads are looped on; end of file inside the range is an error.

#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace mkd {

class ByteSource {
  public:
    virtual ~ByteSource() = default;

    // Reads exactly n bytes at offset into dst. With direct() true, offset, n and dst must be multiples of MKD_ALIGN_BYTES, and a tail of the
    // file that is shorter than that cannot be read. Any thread, several at once. Blocks.
    // Throws Error(MKD_ERR_IO) with path, offset and errno; Error(MKD_ERR_ARG) when the alignment is wrong.
    virtual void read(uint64_t offset, void * dst, size_t n) = 0;

    virtual uint64_t            size_bytes() const = 0; // when it was opened
    virtual const std::string & path() const       = 0;
    virtual bool                direct() const     = 0; // reads bypass the page cache
    virtual int                 fd() const { return -1; } // of a file that is read as it is; -1: only read() gives its bytes
};

// pread(2), or a stand-in for it that fails on purpose (io/faulty): the same arguments, result and errno. Called from any thread.
using PreadFunction = std::function<ssize_t(int fd, void * dst, size_t n, off_t offset)>;

// Opens a regular file for reading. want_direct: O_DIRECT if the file system takes it (probed with one aligned read at offset 0), else
// buffered, and *note (may be null) says why; it is emptied when there is nothing to say. pread_call: empty for pread(2).
// Throws Error(MKD_ERR_IO).
std::unique_ptr<ByteSource> open_file_source(const std::string & path, bool want_direct, std::string * note, PreadFunction pread_call = {});

} // namespace mkd
