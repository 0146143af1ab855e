#include "store/package-index.h"

#include "base/error.h"
#include "base/llama-log.h"
#include "gguf.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <sys/stat.h>

namespace mkd {

namespace {

constexpr int64_t kFormatVersion = 1;
constexpr int     kMaxLayer      = 4096;
constexpr int     kMaxExpert     = 65536;

struct GgufDeleter {
    void operator()(gguf_context * ctx) const { gguf_free(ctx); }
};
using GgufPtr = std::unique_ptr<gguf_context, GgufDeleter>;

uint64_t file_bytes(const std::string & path) {
    struct stat st;
    if (stat(path.c_str(), &st) != 0) {
        fail(MKD_ERR_IO, "%s: cannot open: %s; the package is incomplete, convert or copy it again", path.c_str(), strerror(errno));
    }
    if (!S_ISREG(st.st_mode)) {
        fail(MKD_ERR_FORMAT, "%s: expected a regular file", path.c_str());
    }
    return (uint64_t) st.st_size;
}

nlohmann::json read_manifest(const std::string & dir) {
    struct stat st;
    if (stat(dir.c_str(), &st) != 0) {
        fail(MKD_ERR_IO, "%s: cannot open package: %s", dir.c_str(), strerror(errno));
    }
    const std::string path = dir + "/manifest.json";
    std::ifstream     in(path);
    if (!S_ISDIR(st.st_mode) || !in) {
        fail(MKD_ERR_FORMAT, "%s: not a package (expected a folder with manifest.json; make one with `mkdeploy convert SRC.gguf OUT.mkd`)",
             dir.c_str());
    }
    nlohmann::json manifest = nlohmann::json::parse(in, nullptr, /*allow_exceptions =*/ false);
    if (manifest.is_discarded() || !manifest.is_object()) {
        fail(MKD_ERR_FORMAT, "%s: not a JSON object", path.c_str());
    }
    return manifest;
}

template <typename T> T field(const nlohmann::json & object, const char * key, const std::string & path) {
    const auto it = object.find(key);
    try {
        if (it != object.end()) {
            return it->get<T>();
        }
    } catch (const nlohmann::json::exception &) {
        // falls through: same message as for an absent key
    }
    fail(MKD_ERR_FORMAT, "%s: key '%s' is missing or of the wrong type", path.c_str(), key);
}

void check_plain_name(const std::string & name, const std::string & path) {
    if (name.empty() || name == "." || name == ".." || name.find('/') != std::string::npos || name.find('\\') != std::string::npos ||
        name.find('\0') != std::string::npos) {
        fail(MKD_ERR_FORMAT, "%s: file name '%s' is not a plain name inside the package", path.c_str(), name.c_str());
    }
}

const char * get_str(const gguf_context * gguf, const char * key, const std::string & path) {
    const int64_t id = gguf_find_key(gguf, key);
    if (id < 0 || gguf_get_kv_type(gguf, id) != GGUF_TYPE_STRING) {
        fail(MKD_ERR_FORMAT, "%s: key '%s' is missing; not a shard of a package", path.c_str(), key);
    }
    return gguf_get_val_str(gguf, id);
}

uint32_t get_u32(const gguf_context * gguf, const char * key, const std::string & path) {
    const int64_t id = gguf_find_key(gguf, key);
    if (id < 0 || gguf_get_kv_type(gguf, id) != GGUF_TYPE_UINT32) {
        fail(MKD_ERR_FORMAT, "%s: key '%s' is missing; not a shard of a package", path.c_str(), key);
    }
    return gguf_get_val_u32(gguf, id);
}

const uint64_t * get_u64_array(const gguf_context * gguf, const char * key, size_t n, const std::string & path) {
    const int64_t id = gguf_find_key(gguf, key);
    if (id < 0 || gguf_get_kv_type(gguf, id) != GGUF_TYPE_ARRAY || gguf_get_arr_type(gguf, id) != GGUF_TYPE_UINT64 ||
        gguf_get_arr_n(gguf, id) != n) {
        fail(MKD_ERR_FORMAT, "%s: key '%s' must be an array of %zu u64, one per tensor", path.c_str(), key, n);
    }
    return (const uint64_t *) gguf_get_arr_data(gguf, id);
}

bool same_geometry(const ExpertPart & a, const ExpertPart & b) {
    return a.role == b.role && a.type == b.type && a.ne0 == b.ne0 && a.ne1 == b.ne1 && a.offset_bytes == b.offset_bytes;
}

// Adds the experts of one shard to layers.
void read_shard(const std::string & path, int i_shard, int n_shards, uint64_t size_bytes, const PackageIndex & index,
                std::map<int, LayerExperts> & layers) {
    const gguf_init_params params = { /*.no_alloc =*/ true, /*.ctx =*/ nullptr };
    clear_llama_log();
    GgufPtr gguf(gguf_init_from_file(path.c_str(), params));
    if (!gguf) {
        fail(MKD_ERR_FORMAT, "%s: not a readable GGUF (%s); convert or copy the package again", path.c_str(), last_llama_log().c_str());
    }
    const std::string kind = get_str(gguf.get(), "mkd.kind", path);
    if (kind != "experts") {
        fail(MKD_ERR_FORMAT, "%s: mkd.kind is '%s', expected 'experts'", path.c_str(), kind.c_str());
    }
    const uint32_t version = get_u32(gguf.get(), "mkd.format_version", path);
    if (version != kFormatVersion) {
        fail(MKD_ERR_FORMAT, "%s: shard format version %u, this build reads %d", path.c_str(), version, (int) kFormatVersion);
    }
    if (index.package_id != get_str(gguf.get(), "mkd.package_id", path)) {
        fail(MKD_ERR_FORMAT, "%s: shard belongs to another package (its package_id differs from manifest.json); convert or copy again",
             path.c_str());
    }
    if (index.layout != get_str(gguf.get(), "mkd.layout", path)) {
        fail(MKD_ERR_FORMAT, "%s: shard layout differs from the manifest's '%s'", path.c_str(), index.layout.c_str());
    }
    if ((int64_t) get_u32(gguf.get(), "mkd.shard.no", path) != i_shard || (int64_t) get_u32(gguf.get(), "mkd.shard.count", path) != n_shards) {
        fail(MKD_ERR_FORMAT, "%s: expected shard %d of %d", path.c_str(), i_shard + 1, n_shards);
    }
    if (gguf_get_alignment(gguf.get()) != kAlignmentBytes || gguf_get_data_offset(gguf.get()) % kAlignmentBytes != 0) {
        fail(MKD_ERR_FORMAT, "%s: experts are not aligned to %zu bytes", path.c_str(), kAlignmentBytes);
    }

    const int64_t    n_tensors = gguf_get_n_tensors(gguf.get());
    const uint64_t * xxh3      = get_u64_array(gguf.get(), "mkd.tensor.xxh3_64", (size_t) n_tensors, path);
    const uint64_t * payload   = get_u64_array(gguf.get(), "mkd.tensor.payload_bytes", (size_t) n_tensors, path);

    for (int64_t i = 0; i < n_tensors;) {
        // one expert: consecutive tensors of the same layer and expert
        LayerExperts   read;
        ExpertPlace    place;
        int            expert = -1;
        const uint64_t start  = gguf_get_data_offset(gguf.get()) + gguf_get_tensor_offset(gguf.get(), i);
        for (; i < n_tensors; ++i) {
            const char * name = gguf_get_tensor_name(gguf.get(), i);
            int          layer, e;
            PartRole     role;
            if (!parse_expert_tensor_name(name, &layer, &role, &e) || e < 0) {
                fail(MKD_ERR_FORMAT, "%s: tensor '%s' is not a routed expert", path.c_str(), name);
            }
            if (expert < 0) {
                expert     = e;
                read.layer = layer;
            } else if (e != expert || layer != read.layer) {
                break;
            }
            if ((int) read.parts.size() == kMaxParts || read.find_part(role) >= 0) {
                fail(MKD_ERR_FORMAT, "%s: tensor '%s' is one too many for its expert", path.c_str(), name);
            }
            const int64_t * ne = gguf_get_tensor_ne(gguf.get(), i);
            if (ne[2] != 1 || ne[3] != 1 || gguf_get_tensor_size(gguf.get(), i) != payload[i]) {
                fail(MKD_ERR_FORMAT, "%s: tensor '%s' has an unexpected shape or size", path.c_str(), name);
            }
            const uint64_t offset = gguf_get_data_offset(gguf.get()) + gguf_get_tensor_offset(gguf.get(), i);
            ExpertPart     part{};
            part.role          = role;
            part.type          = gguf_get_tensor_type(gguf.get(), i);
            part.ne0           = ne[0];
            part.ne1           = ne[1];
            part.payload_bytes = (size_t) payload[i];
            part.padded_bytes  = GGML_PAD(part.payload_bytes, kAlignmentBytes);
            part.offset_bytes  = (size_t) (offset - start);
            if (part.offset_bytes != read.stride_bytes || offset % kAlignmentBytes != 0 || offset > size_bytes ||
                part.padded_bytes > size_bytes - offset) {
                fail(MKD_ERR_FORMAT, "%s: tensor '%s' lies outside the file or apart from its expert (file of %llu bytes is truncated?)",
                     path.c_str(), name, (unsigned long long) size_bytes);
            }
            place.xxh3[read.parts.size()] = xxh3[i];
            read.parts.push_back(part);
            read.stride_bytes += part.padded_bytes;
            read.payload_bytes += part.payload_bytes;
        }
        place.i_shard = i_shard;
        place.offset  = start;
        LayerExperts & layer = layers[read.layer];
        if (layer.parts.empty()) {
            layer = read;
        } else if (layer.parts.size() != read.parts.size() ||
                   !std::equal(read.parts.begin(), read.parts.end(), layer.parts.begin(), same_geometry)) {
            fail(MKD_ERR_FORMAT, "%s: expert %d of layer %d differs in tensors, shape or type from the others of its layer", path.c_str(), expert,
                 read.layer);
        }
        if ((int) layer.experts.size() <= expert) {
            layer.experts.resize((size_t) expert + 1);
        }
        if (layer.experts[(size_t) expert].i_shard >= 0) {
            fail(MKD_ERR_FORMAT, "%s: expert %d of layer %d stands twice in the package", path.c_str(), expert, read.layer);
        }
        layer.experts[(size_t) expert] = place;
    }
}

void check_layer(const LayerExperts & layer, const std::string & dir) {
    const bool has_down = layer.find_part(PartRole::down) >= 0;
    const bool fused    = layer.find_part(PartRole::gate_up) >= 0;
    const bool split    = layer.find_part(PartRole::up) >= 0;
    if (!has_down || fused == split) {
        fail(MKD_ERR_FORMAT, "%s: layer %d has no complete set of expert tensors", dir.c_str(), layer.layer);
    }
    for (int e = 0; e < layer.n_expert(); ++e) {
        if (layer.experts[(size_t) e].i_shard < 0) {
            fail(MKD_ERR_FORMAT, "%s: expert %d of layer %d is in no shard", dir.c_str(), e, layer.layer);
        }
    }
}

} // namespace

const char * part_role_name(PartRole role) {
    switch (role) {
        case PartRole::up:      return "up";
        case PartRole::gate:    return "gate";
        case PartRole::gate_up: return "gate_up";
        case PartRole::down:    return "down";
    }
    return "?";
}

int LayerExperts::find_part(PartRole role) const {
    for (size_t i = 0; i < parts.size(); ++i) {
        if (parts[i].role == role) {
            return (int) i;
        }
    }
    return -1;
}

const LayerExperts * PackageIndex::find_layer(int layer) const {
    const auto it = std::lower_bound(layers.begin(), layers.end(), layer, [](const LayerExperts & l, int n) { return l.layer < n; });
    return it != layers.end() && it->layer == layer ? &*it : nullptr;
}

bool parse_expert_tensor_name(const char * name, int * layer, PartRole * role, int * expert) {
    const auto number = [](const char ** at, int max, int * out) {
        const char * p     = *at;
        long         value = 0;
        if (*p < '0' || *p > '9') {
            return false;
        }
        for (; *p >= '0' && *p <= '9'; ++p) {
            value = value * 10 + (*p - '0');
            if (value > max) {
                return false;
            }
        }
        *at  = p;
        *out = (int) value;
        return true;
    };
    const auto literal = [](const char ** at, const char * text) {
        const size_t n = strlen(text);
        if (strncmp(*at, text, n) != 0) {
            return false;
        }
        *at += n;
        return true;
    };
    const char * at = name;
    if (!literal(&at, "blk.") || !number(&at, kMaxLayer, layer) || !literal(&at, ".ffn_")) {
        return false;
    }
    const std::pair<const char *, PartRole> roles[] = {
        { "gate_up_exps", PartRole::gate_up }, { "gate_exps", PartRole::gate }, { "up_exps", PartRole::up }, { "down_exps", PartRole::down } };
    for (const auto & [text, value] : roles) {
        const char * rest = at;
        if (!literal(&rest, text)) {
            continue;
        }
        *role = value;
        if (strcmp(rest, ".weight") == 0) {
            *expert = -1;
            return true;
        }
        return literal(&rest, ".") && number(&rest, kMaxExpert, expert) && strcmp(rest, ".weight") == 0;
    }
    return false;
}

PackageIndex PackageIndex::open(const std::string & dir_in) {
    std::string dir = dir_in;
    while (dir.size() > 1 && dir.back() == '/') {
        dir.pop_back();
    }
    const nlohmann::json manifest = read_manifest(dir);
    const std::string    path     = dir + "/manifest.json";

    if (field<std::string>(manifest, "format", path) != "mkdeploy-package") {
        fail(MKD_ERR_FORMAT, "%s: not the manifest of an mkdeploy package", path.c_str());
    }
    const int64_t version = field<int64_t>(manifest, "format_version", path);
    if (version != kFormatVersion) {
        fail(MKD_ERR_FORMAT, "%s: package format version %lld, this build reads %d; convert the model again with this version", path.c_str(),
             (long long) version, (int) kFormatVersion);
    }
    PackageIndex index;
    index.dir        = dir;
    index.package_id = field<std::string>(manifest, "package_id", path);
    index.layout     = field<std::string>(manifest, "layout", path);
    if (index.layout != "plain") {
        fail(MKD_ERR_UNSUPPORTED, "%s: layout '%s' needs another device; this build computes 'plain'", path.c_str(), index.layout.c_str());
    }
    std::vector<uint64_t> shard_bytes;
    for (const auto & file : field<nlohmann::json>(manifest, "files", path)) {
        const std::string name  = field<std::string>(file, "name", path);
        const std::string kind  = field<std::string>(file, "kind", path);
        const uint64_t    bytes = field<uint64_t>(file, "bytes", path);
        check_plain_name(name, path);
        if (kind != "resident" && kind != "experts") {
            continue; // draft.gguf, predictor.gguf: read by who needs them
        }
        const std::string full   = dir + "/" + name;
        const uint64_t    actual = file_bytes(full);
        if (actual != bytes) {
            fail(MKD_ERR_FORMAT, "%s: has %llu bytes, the manifest says %llu; convert or copy the package again", full.c_str(),
                 (unsigned long long) actual, (unsigned long long) bytes);
        }
        if (kind == "experts") {
            index.shard_paths.push_back(full);
            shard_bytes.push_back(bytes);
        } else if (index.resident_path.empty()) {
            index.resident_path       = full;
            index.resident_file_bytes = bytes;
        } else {
            fail(MKD_ERR_FORMAT, "%s: names more than one resident file", path.c_str());
        }
    }
    if (index.resident_path.empty() || index.shard_paths.empty()) {
        fail(MKD_ERR_FORMAT, "%s: names no resident file or no shard", path.c_str());
    }
    std::map<int, LayerExperts> layers;
    for (size_t i = 0; i < index.shard_paths.size(); ++i) {
        read_shard(index.shard_paths[i], (int) i, (int) index.shard_paths.size(), shard_bytes[i], index, layers);
    }
    for (auto & [n, layer] : layers) {
        check_layer(layer, dir);
        index.layers.push_back(std::move(layer));
    }
    return index;
}

} // namespace mkd
