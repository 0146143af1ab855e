// io/file-source.cpp: reads of one regular file with pread(2).
//
// The choice: blocking pread on the caller's thread; io/read-queue gives the parallelism, and reads by fd() with io_uring where it can. O_DIRECT
// where the file system takes it, because experts that pass through the page cache push out exactly the memory that the budget protects.
//
// Guarantees: read() brings every byte or throws; a short read is continued (in direct mode from the last aligned byte), EINTR is repeated.
// Whether O_DIRECT works is found out by doing it: some file systems take the flag and refuse the read.

#include "base/error.h"
#include "io/byte-source.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <new>
#include <system_error>
#include <utility>

namespace mkd {

namespace {

constexpr size_t kAlign = MKD_ALIGN_BYTES;

static_assert(sizeof(off_t) == 8, "offsets of large files need a 64-bit off_t");

class FileDescriptor {
  public:
    explicit FileDescriptor(int fd) : fd_(fd) {}
    FileDescriptor(FileDescriptor && other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    ~FileDescriptor() {
        if (fd_ >= 0) {
            close(fd_);
        }
    }
    FileDescriptor & operator=(FileDescriptor &&) = delete;

    int  get() const { return fd_; }
    bool is_open() const { return fd_ >= 0; }

  private:
    int fd_;
};

std::string errno_text(int error) {
    return std::generic_category().message(error) + " (errno " + std::to_string(error) + ")";
}

// O_NONBLOCK: opening a pipe must not wait for its writer. It means nothing to a regular file.
FileDescriptor open_retrying(const std::string & path) {
    int fd;
    do {
        fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    } while (fd < 0 && errno == EINTR);
    return FileDescriptor(fd);
}

// The name of the file system that fd lies in, for a message.
std::string file_system_name(int fd) {
    struct statfs info {};
    if (fstatfs(fd, &info) != 0) {
        return "an unknown file system";
    }
    const auto type = (uint32_t) info.f_type;
    switch (type) { // linux/magic.h and the file systems that it lacks
        case 0x0000EF53: return "ext4";
        case 0xF2F52010: return "f2fs";
        case 0x58465342: return "xfs";
        case 0x9123683E: return "btrfs";
        case 0x01021994: return "tmpfs";
        case 0x858458F6: return "ramfs";
        case 0x794C7630: return "overlayfs";
        case 0x65735546: return "fuse";
        case 0x5DCA2DF5: return "sdcardfs";
        case 0xE0F5E1E2: return "erofs";
        case 0x73717368: return "squashfs";
        case 0x2011BAB0: return "exfat";
        case 0x00004D44: return "vfat";
        case 0x01021997: return "9p";
        case 0x00006969: return "nfs";
        case 0x2FC12FC1: return "zfs";
        case 0x00009FA0: return "proc";
        default: return format("the file system of type 0x%x", type);
    }
}

struct FreeDeleter {
    void operator()(void * p) const { std::free(p); }
};

class FileSource : public ByteSource {
  public:
    FileSource(FileDescriptor fd, std::string path, uint64_t size_bytes, bool direct, bool plain, PreadFunction pread_call)
        : fd_(std::move(fd)), path_(std::move(path)), size_bytes_(size_bytes), direct_(direct), plain_(plain), pread_(std::move(pread_call)) {}

    uint64_t            size_bytes() const override { return size_bytes_; }
    const std::string & path() const override { return path_; }
    bool                direct() const override { return direct_; }
    int                 fd() const override { return plain_ ? fd_.get() : -1; }

    void read(uint64_t offset, void * dst, size_t n) override {
        if (direct_ && (offset % kAlign != 0 || n % kAlign != 0 || (uintptr_t) dst % kAlign != 0)) {
            fail(MKD_ERR_ARG, "%s: a direct read of %zu bytes at offset %llu into %p is not aligned to %zu bytes", path_.c_str(), n,
                 (unsigned long long) offset, dst, kAlign);
        }
        if (n > size_bytes_ || offset > size_bytes_ - n) {
            fail(MKD_ERR_IO, "%s: %zu bytes at offset %llu lie beyond the end of the file (%llu bytes)", path_.c_str(), n,
                 (unsigned long long) offset, (unsigned long long) size_bytes_);
        }
        size_t done       = 0;
        int    n_no_gain = 0; // direct reads shorter than the alignment in a row
        while (done < n) {
            const ssize_t got = pread_(fd_.get(), (uint8_t *) dst + done, n - done, (off_t) (offset + done));
            if (got < 0 && errno == EINTR) {
                continue;
            }
            if (got < 0) {
                const int error = errno;
                fail(MKD_ERR_IO, "%s: reading %zu bytes at offset %llu failed: %s", path_.c_str(), n - done,
                     (unsigned long long) (offset + done), errno_text(error).c_str());
            }
            // In direct mode the next call must start at an aligned byte again.
            const size_t gain = direct_ ? (size_t) got - (size_t) got % kAlign : (size_t) got;
            n_no_gain         = gain > 0 ? 0 : n_no_gain + 1;
            if (got == 0 || n_no_gain > 3) {
                fail(MKD_ERR_IO, "%s: the file ends at offset %llu, %zu bytes short (it had %llu bytes when it was opened)", path_.c_str(),
                     (unsigned long long) (offset + done + (size_t) got), n - done - (size_t) got, (unsigned long long) size_bytes_);
            }
            done += gain;
        }
    }

  private:
    FileDescriptor fd_;
    std::string    path_;
    uint64_t       size_bytes_;
    bool           direct_;
    bool           plain_; // read by pread(2) itself
    PreadFunction  pread_;
};

// Switches fd to O_DIRECT and reads its first block. Returns 0, or the errno of what was refused; fd is then buffered as before.
int try_direct(int fd, const PreadFunction & pread_call) {
    std::unique_ptr<void, FreeDeleter> block(std::aligned_alloc(kAlign, kAlign));
    if (!block) {
        throw std::bad_alloc();
    }
    const int flags = fcntl(fd, F_GETFL);
    if (flags < 0 || fcntl(fd, F_SETFL, flags | O_DIRECT) != 0) {
        return errno;
    }
    ssize_t got;
    do {
        got = pread_call(fd, block.get(), kAlign, 0);
    } while (got < 0 && errno == EINTR);
    if (got >= 0) {
        return 0;
    }
    const int error = errno;
    (void) fcntl(fd, F_SETFL, flags);
    return error;
}

} // namespace

std::unique_ptr<ByteSource> open_file_source(const std::string & path, bool want_direct, std::string * note, PreadFunction pread_call) {
    if (note) {
        note->clear();
    }
    const bool plain = !pread_call;
    if (plain) {
        pread_call = [](int fd, void * dst, size_t n, off_t offset) { return pread(fd, dst, n, offset); };
    }
    FileDescriptor fd = open_retrying(path);
    if (!fd.is_open()) {
        const int error = errno;
        fail(MKD_ERR_IO, "%s: cannot be opened: %s", path.c_str(), errno_text(error).c_str());
    }
    struct stat info {};
    if (fstat(fd.get(), &info) != 0) {
        const int error = errno;
        fail(MKD_ERR_IO, "%s: fstat failed: %s", path.c_str(), errno_text(error).c_str());
    }
    if (!S_ISREG(info.st_mode)) {
        fail(MKD_ERR_IO, "%s: is %s, expected a regular file", path.c_str(), S_ISDIR(info.st_mode) ? "a folder" : "not a file");
    }
    const auto size_bytes = (uint64_t) info.st_size;

    bool direct = false;
    if (want_direct) {
        const int error = try_direct(fd.get(), pread_call);
        direct          = error == 0;
        if (!direct && note) {
            *note = "O_DIRECT refused by " + file_system_name(fd.get()) + ": " + errno_text(error) + "; reads are buffered";
        }
    }
    if (!direct) {
        // Experts are visited in no order: read-ahead would fetch bytes that nobody asked for. Only advice: its failure changes nothing else.
        (void) posix_fadvise(fd.get(), 0, 0, POSIX_FADV_RANDOM);
    }
    return std::make_unique<FileSource>(std::move(fd), path, size_bytes, direct, plain, std::move(pread_call));
}

} // namespace mkd
