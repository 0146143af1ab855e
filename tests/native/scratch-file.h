// scratch-file.h: files that live as long as a test, and the bytes in them.

#pragma once

#include "mkd.h"

#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

namespace mkd_test {

// A new folder under TMPDIR (or /tmp, or another root), removed with all it holds.
class ScratchFolder {
  public:
    explicit ScratchFolder(const std::string & root = std::filesystem::temp_directory_path().string()) : path_(root + "/mkd-tests-XXXXXX") {
        if (!mkdtemp(path_.data())) {
            throw std::runtime_error("no scratch folder in " + root);
        }
    }
    ~ScratchFolder() {
        std::error_code ignored;
        std::filesystem::remove_all(path_, ignored);
    }
    ScratchFolder(const ScratchFolder &)             = delete;
    ScratchFolder & operator=(const ScratchFolder &) = delete;

    const std::string & path() const { return path_; }

    // Writes a file whose byte at offset i is pattern_byte(i). Returns its path.
    std::string file(const std::string & name, size_t n_bytes) const;

  private:
    std::string path_;
};

// Differs between neighbours, blocks and offsets a power of two apart.
inline uint8_t pattern_byte(uint64_t offset) {
    return (uint8_t) (offset * 131 + (offset >> 8) * 29 + (offset >> 16) * 7);
}

inline std::string ScratchFolder::file(const std::string & name, size_t n_bytes) const {
    std::vector<char> bytes(n_bytes);
    for (size_t i = 0; i < n_bytes; i++) {
        bytes[i] = (char) pattern_byte(i);
    }
    const std::string path = path_ + "/" + name;
    std::ofstream(path, std::ios::binary).write(bytes.data(), (std::streamsize) n_bytes);
    return path;
}

// Memory as direct reads need it, zeroed.
class AlignedBlock {
  public:
    explicit AlignedBlock(size_t n_bytes) : n_bytes_(n_bytes), data_((uint8_t *) std::aligned_alloc(MKD_ALIGN_BYTES, n_bytes)) {
        std::fill(data_, data_ + n_bytes_, (uint8_t) 0);
    }
    ~AlignedBlock() { std::free(data_); }
    AlignedBlock(const AlignedBlock &)             = delete;
    AlignedBlock & operator=(const AlignedBlock &) = delete;

    uint8_t * data() const { return data_; }

    // Do n bytes from `from` on hold what ScratchFolder::file wrote at offset?
    bool holds(uint64_t offset, size_t n, size_t from = 0) const {
        for (size_t i = 0; i < n; i++) {
            if (data_[from + i] != pattern_byte(offset + i)) {
                return false;
            }
        }
        return true;
    }

  private:
    size_t    n_bytes_;
    uint8_t * data_;
};

} // namespace mkd_test
