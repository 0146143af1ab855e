#ifndef _GNU_SOURCE
#    define _GNU_SOURCE 1 // fopencookie
#endif

#include "model/gguf-stream.h"

#include "base/error.h"
#include "base/llama-log.h"
#include "ggml.h"
#include "gguf.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

namespace mkd {

namespace {

constexpr size_t kStdioBufferBytes = 64u << 10;

} // namespace

GgufStream::GgufStream(const PackageIndex & index, bool direct_io, int n_lanes)
    : path_(index.resident_path), direct_io_(direct_io), n_lanes_(n_lanes), memory_(nullptr, free) {
    build_header(index);

#if defined(__BIONIC__)
    // funopen64 is what Android's libc has instead of fopencookie.
    file_ = funopen64(
        this, [](void * self, char * dst, int n) { return (int) cookie_read(self, dst, (size_t) n); }, nullptr,
        [](void * self, fpos64_t offset, int whence) {
            int64_t to = offset;
            return cookie_seek(self, &to, whence) == 0 ? (fpos64_t) to : (fpos64_t) -1;
        },
        nullptr);
#else
    static_assert(sizeof(off_t) == sizeof(int64_t), "64-bit file offsets are needed"); // off64_t with glibc, off_t with musl
    cookie_io_functions_t calls = {};
    calls.read                  = cookie_read;
    calls.seek                  = cookie_seek;
    file_                       = fopencookie(this, "rb", calls);
#endif
    if (!file_) {
        fail(MKD_ERR_NOMEM, "cannot open a stream over %s: %s", path_.c_str(), strerror(errno));
    }
    setvbuf(file_, nullptr, _IOFBF, kStdioBufferBytes);
}

GgufStream::~GgufStream() {
    if (file_) {
        fclose(file_);
    }
    for (Block & block : blocks_) {
        if (block.loading) {
            reads_->wait(block.request);
        }
    }
}

void GgufStream::open_blocks() {
    source_       = open_file_source(path_, direct_io_, nullptr);
    void * memory = nullptr;
    if (posix_memalign(&memory, kAlignmentBytes, kBlockBytes * kBlocks) != 0) {
        fail(MKD_ERR_NOMEM, "cannot allocate %zu bytes to read %s", kBlockBytes * kBlocks, path_.c_str());
    }
    memory_.reset((uint8_t *) memory);
    blocks_.resize(kBlocks);
    for (int i = 0; i < kBlocks; ++i) {
        blocks_[(size_t) i].data = memory_.get() + (size_t) i * kBlockBytes;
    }
    ReadQueue::Options options;
    options.n_lanes     = std::max(1, std::min(n_lanes_, kReadAhead));
    options.chunk_bytes = kBlockBytes;
    reads_              = std::make_unique<ReadQueue>(options);
}

void GgufStream::build_header(const PackageIndex & index) {
    ggml_context *   meta_raw = nullptr;
    gguf_init_params params   = { /*.no_alloc =*/ true, /*.ctx =*/ &meta_raw };
    clear_llama_log();
    gguf_context *   resident = gguf_init_from_file(path_.c_str(), params);
    if (!resident) {
        fail(MKD_ERR_FORMAT, "%s: not a readable GGUF (%s); convert or copy the package again", path_.c_str(),
             last_llama_log().c_str());
    }
    std::unique_ptr<gguf_context, void (*)(gguf_context *)> resident_ptr(resident, gguf_free);
    std::unique_ptr<ggml_context, void (*)(ggml_context *)> meta(meta_raw, ggml_free);

    const int64_t id = gguf_find_key(resident, "mkd.package_id");
    if (id < 0 || gguf_get_kv_type(resident, id) != GGUF_TYPE_STRING || index.package_id != gguf_get_val_str(resident, id)) {
        fail(MKD_ERR_FORMAT, "%s: belongs to another package (its mkd.package_id differs from manifest.json); convert or copy again",
             path_.c_str());
    }

    std::unique_ptr<gguf_context, void (*)(gguf_context *)> merged(gguf_init_empty(), gguf_free);
    gguf_set_kv(merged.get(), resident);
    for (const char * key : { "mkd.format_version", "mkd.kind", "mkd.package_id", "mkd.tensor_names" }) {
        gguf_remove_key(merged.get(), key);
    }
    // ggml's writer lays tensors out at the default alignment whatever the key says, so the key must not say anything else
    gguf_remove_key(merged.get(), "general.alignment");
    int64_t i = 0;
    for (ggml_tensor * tensor = ggml_get_first_tensor(meta.get()); tensor; tensor = ggml_get_next_tensor(meta.get(), tensor), ++i) {
        int      layer, expert;
        PartRole role;
        if (parse_expert_tensor_name(tensor->name, &layer, &role, &expert) && index.find_layer(layer)) {
            fail(MKD_ERR_FORMAT, "%s: tensor '%s' is resident and in the shards", path_.c_str(), tensor->name);
        }
        gguf_add_tensor(merged.get(), tensor);
        const ResidentTensor place = { tensor->name, gguf_get_tensor_offset(merged.get(), i),
                                       gguf_get_data_offset(resident) + gguf_get_tensor_offset(resident, i), gguf_get_tensor_size(resident, i) };
        if (place.file_offset > index.resident_file_bytes || place.bytes > index.resident_file_bytes - place.file_offset) {
            fail(MKD_ERR_FORMAT, "%s: tensor '%s' ends behind the file's %llu bytes; the file is truncated", path_.c_str(), tensor->name,
                 (unsigned long long) index.resident_file_bytes);
        }
        tensors_.push_back(place);
    }

    size_t n_routed = 0;
    for (const LayerExperts & layer : index.layers) {
        n_routed += layer.parts.size();
    }
    ggml_init_params routed_params = { ggml_tensor_overhead() * (n_routed + 1), nullptr, true };
    std::unique_ptr<ggml_context, void (*)(ggml_context *)> routed(ggml_init(routed_params), ggml_free);
    uint64_t hole = 0;
    for (const LayerExperts & layer : index.layers) {
        for (const ExpertPart & part : layer.parts) {
            ggml_tensor * tensor = ggml_new_tensor_3d(routed.get(), part.type, part.ne0, part.ne1, layer.n_expert());
            ggml_format_name(tensor, "blk.%d.ffn_%s_exps.weight", layer.layer, part_role_name(part.role));
            gguf_add_tensor(merged.get(), tensor);
            hole += GGML_PAD(ggml_nbytes(tensor), GGUF_DEFAULT_ALIGNMENT);
        }
    }
    header_.resize(gguf_get_meta_size(merged.get()));
    gguf_get_meta_data(merged.get(), header_.data());
    for (ResidentTensor & tensor : tensors_) {
        tensor.stream_offset += header_.size();
    }
    data_end_    = tensors_.empty() ? header_.size() : GGML_PAD(tensors_.back().stream_offset + tensors_.back().bytes, GGUF_DEFAULT_ALIGNMENT);
    total_bytes_ = data_end_ + hole;
}

GgufStream::Block * GgufStream::find(int64_t number) {
    for (Block & block : blocks_) {
        if (block.number == number) {
            return &block;
        }
    }
    return nullptr;
}

GgufStream::Block & GgufStream::oldest() {
    return *std::min_element(blocks_.begin(), blocks_.end(), [](const Block & a, const Block & b) { return a.used < b.used; });
}

void GgufStream::start(Block & block, int64_t number) {
    if (block.loading) {
        reads_->wait(block.request);
    }
    const uint64_t offset = (uint64_t) number * kBlockBytes;
    const uint64_t end    = source_->size_bytes();
    const uint64_t whole  = end / kAlignmentBytes * kAlignmentBytes; // O_DIRECT cannot ask for the ragged tail
    block.number          = number;
    block.used            = ++clock_;
    block.loading         = true;
    block.request.on_section = nullptr;
    block.request.source  = source_.get();
    block.request.offset  = offset;
    block.request.dst     = block.data;
    block.request.bytes   = (size_t) std::min<uint64_t>(kBlockBytes, source_->direct() ? (offset < whole ? whole - offset : 0) : end - offset);
    read_bytes_ += block.request.bytes;
    if (source_->direct() && offset + kBlockBytes > end && end > whole) {
        // the last bytes of a file whose size is no multiple of the alignment
        const std::string path = source_->path();
        const size_t      tail = (size_t) (end - whole);
        read_bytes_ += tail;
        block.request.on_section = [path, whole, tail, offset](ReadRequest & request, int) {
            open_file_source(path, false, nullptr)->read(whole, request.dst + (whole - offset), tail);
        };
    }
    reads_->submit(block.request);
}

GgufStream::Block & GgufStream::block(int64_t number) {
    Block * wanted = find(number);
    if (!wanted) {
        wanted = &oldest();
        start(*wanted, number);
    }
    wanted->used = ++clock_;
    const int64_t n_blocks = (int64_t) ((source_->size_bytes() + kBlockBytes - 1) / kBlockBytes);
    for (int64_t ahead = number + 1; ahead <= number + kReadAhead && ahead < n_blocks; ++ahead) {
        if (!find(ahead)) {
            Block & victim = oldest();
            if (&victim == wanted) {
                break;
            }
            start(victim, ahead);
        }
    }
    if (wanted->loading) {
        reads_->wait(wanted->request);
        wanted->loading = false;
        if (wanted->request.error) {
            wanted->number = -1;
            std::rethrow_exception(wanted->request.error);
        }
    }
    return *wanted;
}

ssize_t GgufStream::read(char * dst, size_t n) {
    if (pos_ >= total_bytes_) {
        return 0;
    }
    if (pos_ < header_.size()) {
        n = (size_t) std::min<uint64_t>(n, header_.size() - pos_);
        memcpy(dst, header_.data() + pos_, n);
    } else if (pos_ < data_end_) {
        const ResidentTensor & tensor = *(std::upper_bound(tensors_.begin(), tensors_.end(), pos_,
                                                           [](uint64_t at, const ResidentTensor & t) { return at < t.stream_offset; }) - 1);
        const uint64_t         within = pos_ - tensor.stream_offset;
        if (within >= tensor.bytes) { // padding up to the next tensor
            const uint64_t next = &tensor == &tensors_.back() ? data_end_ : (&tensor + 1)->stream_offset;
            n                   = (size_t) std::min<uint64_t>(n, next - pos_);
            memset(dst, 0, n);
        } else {
            if (!source_) {
                open_blocks();
            }
            const uint64_t at = tensor.file_offset + within;
            n                 = (size_t) std::min<uint64_t>(n, tensor.bytes - within);
            n                 = (size_t) std::min<uint64_t>(n, kBlockBytes - at % kBlockBytes);
            memcpy(dst, block((int64_t) (at / kBlockBytes)).data + at % kBlockBytes, n);
        }
    } else {
        n = (size_t) std::min<uint64_t>(n, total_bytes_ - pos_);
        memset(dst, 0, n);
        hole_bytes_ += n;
    }
    pos_ += n;
    return (ssize_t) n;
}

int GgufStream::seek(int64_t * offset, int whence) {
    const int64_t base = whence == SEEK_SET ? 0 : whence == SEEK_CUR ? (int64_t) pos_ : (int64_t) total_bytes_;
    const int64_t to   = base + *offset;
    if (to < 0) {
        errno = EINVAL;
        return -1;
    }
    pos_    = (uint64_t) to;
    *offset = to;
    return 0;
}

ssize_t GgufStream::cookie_read(void * self, char * dst, size_t n) {
    GgufStream & stream = *(GgufStream *) self;
    try {
        return stream.read(dst, n);
    } catch (...) {
        stream.error_ = std::current_exception();
        errno         = EIO;
        return -1;
    }
}

int GgufStream::cookie_seek(void * self, int64_t * offset, int whence) {
    return ((GgufStream *) self)->seek(offset, whence);
}

} // namespace mkd
