// io/faulty.cpp: see faulty.h.

#include "io/faulty.h"

#include "base/error.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

namespace mkd {

void FaultScript::at(int64_t i_read, Fault fault) {
    std::lock_guard<std::mutex> lock(mutex_);
    faults_[i_read] = fault;
}

void FaultScript::always(Fault fault) {
    std::lock_guard<std::mutex> lock(mutex_);
    always_ = fault;
}

void FaultScript::wait_stalled(int n_reads) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return n_stalled_ >= n_reads; });
}

void FaultScript::release() {
    std::lock_guard<std::mutex> lock(mutex_);
    released_ = true;
    changed_.notify_all();
}

int64_t FaultScript::n_reads() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return n_reads_;
}

Fault FaultScript::next() {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto                   found = faults_.find(n_reads_++);
    const Fault                  fault = found != faults_.end() ? found->second : always_;
    if (fault.kind == Fault::Kind::stall && !released_) {
        n_stalled_++;
        changed_.notify_all();
        changed_.wait(lock, [&] { return released_; });
        n_stalled_--;
    }
    return fault;
}

static void flip(void * dst, size_t n, uint64_t offset) {
    if (offset < n) {
        ((uint8_t *) dst)[offset] ^= 1;
    }
}

PreadFunction faulty_pread(std::shared_ptr<FaultScript> script) {
    return [script](int fd, void * dst, size_t n, off_t offset) -> ssize_t {
        const Fault fault = script->next();
        if (fault.kind == Fault::Kind::error) {
            errno = (int) fault.value;
            return -1;
        }
        if (fault.kind == Fault::Kind::end) {
            return 0;
        }
        // A direct read must ask for a whole block even if it is to bring less of it.
        const ssize_t got = pread(fd, dst, n, offset);
        if (got > 0 && fault.kind == Fault::Kind::short_read) {
            return std::min<ssize_t>(got, (ssize_t) fault.value);
        }
        if (got > 0 && fault.kind == Fault::Kind::flip) {
            flip(dst, (size_t) got, fault.value);
        }
        return got;
    };
}

namespace {

class FaultySource : public ByteSource {
  public:
    FaultySource(std::unique_ptr<ByteSource> inner, std::shared_ptr<FaultScript> script) : inner_(std::move(inner)), script_(std::move(script)) {}

    void read(uint64_t offset, void * dst, size_t n) override {
        const Fault fault = script_->next();
        if (fault.kind == Fault::Kind::error) {
            fail(MKD_ERR_IO, "%s: reading %zu bytes at offset %llu failed: %s (errno %d)", path().c_str(), n, (unsigned long long) offset,
                 std::generic_category().message((int) fault.value).c_str(), (int) fault.value);
        }
        inner_->read(offset, dst, n);
        if (fault.kind == Fault::Kind::flip) {
            flip(dst, n, fault.value);
        }
    }

    uint64_t            size_bytes() const override { return inner_->size_bytes(); }
    const std::string & path() const override { return inner_->path(); }
    bool                direct() const override { return inner_->direct(); }

  private:
    std::unique_ptr<ByteSource>  inner_;
    std::shared_ptr<FaultScript> script_;
};

} // namespace

std::unique_ptr<ByteSource> make_faulty_source(std::unique_ptr<ByteSource> inner, std::shared_ptr<FaultScript> script) {
    return std::make_unique<FaultySource>(std::move(inner), std::move(script));
}

} // namespace mkd
