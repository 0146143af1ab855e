#include "model/resident-loader.h"

#include "base/error.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>

namespace mkd {

namespace {

constexpr uint64_t kBlockBytes = 4u << 20;

struct Piece { // bytes of the file and where they go
    uint64_t  offset;
    uint64_t  bytes;
    uint8_t * dst;
};

std::vector<Piece> find_pieces(const GgufStream & stream, const std::vector<ResidentBufferType::NamedTensor> & tensors) {
    std::map<std::string, const GgufStream::ResidentTensor *> by_name;
    for (const GgufStream::ResidentTensor & tensor : stream.resident_tensors()) {
        by_name.emplace(tensor.name, &tensor);
    }
    std::vector<Piece> pieces;
    for (const auto & [tensor, name] : tensors) {
        const auto it = by_name.find(name);
        if (it == by_name.end() || it->second->bytes != ggml_nbytes(tensor)) {
            fail(MKD_ERR_FORMAT, "%s: tensor '%s' is missing or of another size", stream.path().c_str(), name.c_str());
        }
        pieces.push_back({ it->second->file_offset, it->second->bytes, (uint8_t *) tensor->data });
    }
    std::sort(pieces.begin(), pieces.end(), [](const Piece & a, const Piece & b) { return a.offset < b.offset; });
    return pieces;
}

// Copies what block [offset, offset + bytes) holds to where it goes.
void scatter(const std::vector<Piece> & pieces, uint64_t offset, uint64_t bytes, const uint8_t * block) {
    auto piece = std::partition_point(pieces.begin(), pieces.end(), [&](const Piece & p) { return p.offset + p.bytes <= offset; });
    for (; piece != pieces.end() && piece->offset < offset + bytes; ++piece) {
        const uint64_t from = std::max(piece->offset, offset), to = std::min(piece->offset + piece->bytes, offset + bytes);
        memcpy(piece->dst + (from - piece->offset), block + (from - offset), (size_t) (to - from));
    }
}

} // namespace

uint64_t load_resident(const GgufStream & stream, const std::vector<ResidentBufferType::NamedTensor> & tensors, bool direct_io, int n_lanes) {
    const std::vector<Piece> pieces = find_pieces(stream, tensors);
    if (pieces.empty()) {
        return 0;
    }
    const auto     source = open_file_source(stream.path(), direct_io, nullptr);
    const uint64_t end    = source->size_bytes();
    const uint64_t whole  = source->direct() ? end / kAlignmentBytes * kAlignmentBytes : end; // O_DIRECT cannot ask for a ragged tail
    const size_t   n_bufs = (size_t) n_lanes + 1;
    void *         memory = nullptr;
    if (posix_memalign(&memory, kAlignmentBytes, kBlockBytes * n_bufs) != 0) {
        fail(MKD_ERR_NOMEM, "cannot allocate %zu bytes to read %s", (size_t) kBlockBytes * n_bufs, stream.path().c_str());
    }
    const std::unique_ptr<uint8_t, void (*)(void *)> holder((uint8_t *) memory, free);
    std::vector<ReadRequest>                         requests(n_bufs);
    std::exception_ptr                               error;
    uint64_t                                         read_bytes = 0;
    Lanes                                            lanes(n_lanes); // last: it finishes what is queued before the buffers go

    const uint64_t start = pieces.front().offset / kBlockBytes * kBlockBytes;
    size_t         n     = 0;
    for (uint64_t offset = start; offset < whole && !error; offset += kBlockBytes, ++n) {
        ReadRequest & request = requests[n % n_bufs];
        if (n >= n_bufs) {
            lanes.wait(request);
            error = request.error;
        }
        const size_t bytes = (size_t) std::min(kBlockBytes, whole - offset);
        request            = ReadRequest{};
        request.source     = source.get();
        request.offset     = offset;
        request.dst        = (uint8_t *) memory + (n % n_bufs) * kBlockBytes;
        request.bytes      = bytes;
        request.after_read = [&pieces](ReadRequest & done) { scatter(pieces, done.offset, done.bytes, (const uint8_t *) done.dst); };
        lanes.submit(request);
        read_bytes += bytes;
    }
    for (size_t i = 0; i < std::min(n, n_bufs); ++i) {
        lanes.wait(requests[i]);
        error = error ? error : requests[i].error;
    }
    if (error) {
        std::rethrow_exception(error);
    }
    if (end > whole) {
        const auto tail = open_file_source(stream.path(), false, nullptr);
        tail->read(whole, memory, (size_t) (end - whole));
        scatter(pieces, whole, end - whole, (const uint8_t *) memory);
        read_bytes += end - whole;
    }
    return read_bytes;
}

} // namespace mkd
