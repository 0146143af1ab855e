#include "model/resident-loader.h"

#include "mkd.h"

#include <algorithm>

namespace mkd {

ResidentLoader::ResidentLoader(const std::string & path, bool direct_io, int n_lanes, const HugeMemory & dst)
    : source_(open_file_source(path, direct_io, nullptr)), dst_(dst.data()) {
    const uint64_t end = source_->size_bytes();
    whole_bytes_       = source_->direct() ? end / MKD_ALIGN_BYTES * MKD_ALIGN_BYTES : end; // O_DIRECT cannot ask for a ragged tail
    requests_.resize((size_t) ((whole_bytes_ + kBlockBytes - 1) / kBlockBytes));
    lanes_ = std::make_unique<Lanes>(n_lanes);
    for (size_t i = 0; i < requests_.size(); ++i) {
        ReadRequest & request = requests_[i];
        request.source        = source_.get();
        request.offset        = i * kBlockBytes;
        request.dst           = dst_ + request.offset;
        request.bytes         = (size_t) std::min(kBlockBytes, whole_bytes_ - request.offset);
        lanes_->submit(request);
    }
}

ResidentLoader::~ResidentLoader() {
    lanes_.reset();
}

uint64_t ResidentLoader::finish() {
    std::exception_ptr error;
    for (ReadRequest & request : requests_) {
        lanes_->wait(request);
        error = error ? error : request.error;
    }
    if (error) {
        std::rethrow_exception(error);
    }
    const uint64_t end = source_->size_bytes();
    if (end > whole_bytes_) {
        open_file_source(source_->path(), false, nullptr)->read(whole_bytes_, dst_ + whole_bytes_, (size_t) (end - whole_bytes_));
    }
    return end;
}

} // namespace mkd
