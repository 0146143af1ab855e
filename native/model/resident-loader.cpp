#include "model/resident-loader.h"

#include "mkd.h"

namespace mkd {

ResidentLoader::ResidentLoader(const std::string & path, bool direct_io, int n_lanes, const HugeMemory & dst)
    : source_(open_file_source(path, direct_io, nullptr)), dst_(dst.data()) {
    const uint64_t end = source_->size_bytes();
    whole_bytes_       = source_->direct() ? end / MKD_ALIGN_BYTES * MKD_ALIGN_BYTES : end; // O_DIRECT cannot ask for a ragged tail
    request_.source    = source_.get();
    request_.dst       = dst_;
    request_.bytes     = (size_t) whole_bytes_;
    ReadQueue::Options options;
    options.n_lanes     = n_lanes;
    options.chunk_bytes = kBlockBytes;
    reads_              = std::make_unique<ReadQueue>(options);
    reads_->submit(request_);
}

ResidentLoader::~ResidentLoader() {
    reads_.reset();
}

uint64_t ResidentLoader::finish() {
    reads_->wait(request_);
    if (request_.error) {
        std::rethrow_exception(request_.error);
    }
    const uint64_t end = source_->size_bytes();
    if (end > whole_bytes_) {
        open_file_source(source_->path(), false, nullptr)->read(whole_bytes_, dst_ + whole_bytes_, (size_t) (end - whole_bytes_));
    }
    return end;
}

} // namespace mkd
