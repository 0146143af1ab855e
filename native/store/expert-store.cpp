#include "store/expert-store.h"

#include "base/error.h"

#define XXH_INLINE_ALL
#include "xxhash.h"

#include <cstdlib>

namespace mkd {

std::unique_ptr<ExpertStore> ExpertStore::open(PackageIndex index, const StoreOptions & options) {
    std::unique_ptr<ExpertStore> store(new ExpertStore);
    store->index_     = std::move(index);
    store->verify_    = options.verify;
    store->direct_io_ = options.direct_io;
    for (const std::string & path : store->index_.shard_paths) {
        std::string note;
        auto        source = open_file_source(path, options.direct_io, &note);
        if (!source->direct()) {
            store->direct_io_ = false;
        }
        if (store->note_.empty()) {
            store->note_ = note;
        }
        if (options.throttle) {
            source = make_slow_source(std::move(source), options.throttle);
        }
        store->shards_.push_back(std::move(source));
    }
    for (const LayerExperts & layer : store->index_.layers) {
        store->verified_.push_back(std::make_unique<std::atomic<uint8_t>[]>((size_t) layer.n_expert()));
    }
    return store;
}

int ExpertStore::n_expert(int layer) const {
    const LayerExperts * experts = index_.find_layer(layer);
    return experts ? experts->n_expert() : 0;
}

uint64_t ExpertStore::stride_bytes(int layer) const {
    const LayerExperts * experts = index_.find_layer(layer);
    return experts ? experts->stride_bytes : 0;
}

bool ExpertStore::must_verify(const LayerExperts & layer, int expert, int i_part) const {
    if (verify_ != MKD_VERIFY_FIRST) {
        return verify_ == MKD_VERIFY_ALWAYS;
    }
    const size_t i_layer = (size_t) (&layer - index_.layers.data());
    return !(verified_[i_layer][(size_t) expert].load(std::memory_order_relaxed) & (1u << i_part));
}

void ExpertStore::verify(const LayerExperts & layer, int expert, int i_part, uint8_t * data) {
    const ExpertPart &  part  = layer.parts[(size_t) i_part];
    const ExpertPlace & place = layer.experts[(size_t) expert];
    const auto          good  = [&] {
        n_checksums_.fetch_add(1, std::memory_order_relaxed);
        return XXH3_64bits(data, part.payload_bytes) == place.xxh3[(size_t) i_part];
    };
    if (!good()) {
        n_reread_.fetch_add(1, std::memory_order_relaxed);
        shards_[(size_t) place.i_shard]->read(place.offset + part.offset_bytes, data, part.padded_bytes);
        if (!good()) {
            fail(MKD_ERR_CORRUPT, "%s: expert %d of layer %d: tensor ffn_%s_exps does not match its checksum, twice; "
                 "the file is damaged, convert or copy the package again",
                 shards_[(size_t) place.i_shard]->path().c_str(), expert, layer.layer, part_role_name(part.role));
        }
    }
    const size_t i_layer = (size_t) (&layer - index_.layers.data());
    verified_[i_layer][(size_t) expert].fetch_or((uint8_t) (1u << i_part), std::memory_order_relaxed);
}

void ExpertStore::prepare(const LayerExperts & layer, int expert, uint32_t mask, uint8_t * slot, bool whole, ReadRequest & request) {
    const ExpertPlace & place = layer.experts[(size_t) expert];
    int                 first = 0, last = (int) layer.parts.size() - 1;
    while (!(mask >> first & 1u)) {
        ++first;
    }
    while (!(mask >> last & 1u)) {
        --last;
    }
    const size_t begin = layer.parts[(size_t) first].offset_bytes;
    bool         check = false;
    request.source     = shards_[(size_t) place.i_shard].get();
    request.offset     = place.offset + begin;
    request.dst        = slot + begin;
    request.bytes      = layer.parts[(size_t) last].offset_bytes + layer.parts[(size_t) last].padded_bytes - begin;
    request.n_sections = whole ? 1 : last - first + 1;
    for (int part = first; part <= last; ++part) {
        if (!whole) {
            request.section_end[(size_t) (part - first)] = layer.parts[(size_t) part].offset_bytes + layer.parts[(size_t) part].padded_bytes - begin;
        }
        check |= must_verify(layer, expert, part);
    }
    request.on_section = nullptr;
    if (check) {
        request.on_section = [this, &layer, expert, first, last, slot, whole](ReadRequest &, int i_section) {
            for (int part = whole ? first : first + i_section; part <= (whole ? last : first + i_section); ++part) {
                if (must_verify(layer, expert, part)) {
                    verify(layer, expert, part, slot + layer.parts[(size_t) part].offset_bytes);
                }
            }
        };
    }
}

void ExpertStore::read_expert(int layer, int expert, void * dst) {
    const LayerExperts * experts = index_.find_layer(layer);
    if (!experts || expert < 0 || expert >= experts->n_expert()) {
        fail(MKD_ERR_ARG, "layer %d, expert %d: the package has no such expert", layer, expert);
    }
    if ((uintptr_t) dst % kAlignmentBytes != 0) {
        fail(MKD_ERR_ARG, "destination of an expert must be aligned to %zu bytes", kAlignmentBytes);
    }
    ReadRequest request;
    prepare(*experts, expert, experts->all_parts(), (uint8_t *) dst, true, request);
    request.source->read(request.offset, request.dst, request.bytes);
    if (request.on_section) {
        request.on_section(request, 0);
    }
}

} // namespace mkd
