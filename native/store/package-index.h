// store/package-index.h: where every routed expert of a package lies.
//
// The job: read manifest.json and the headers of the shards, check that they belong together, and answer "layer L, expert E: which file, which
// offset, which tensors". Everything in the files is untrusted: counts, names, offsets, types and sizes are checked against each other and
// against the file sizes here, so that no later stage needs to. No weights are read.
//
// Format: docs/package-format.md. Immutable after open(); any thread may read it.

#pragma once

#include "ggml.h"

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace mkd {

constexpr int    kMaxParts       = 3;    // tensors of one expert
constexpr size_t kAlignmentBytes = 4096; // of experts in shards and of slots

enum class PartRole : uint8_t { up = 0, gate = 1, gate_up = 2, down = 3 };

const char * part_role_name(PartRole role); // "up", as in blk.L.ffn_up_exps.weight

// One tensor of an expert. The same for all experts of a layer.
struct ExpertPart {
    PartRole  role;
    ggml_type type;
    int64_t   ne0, ne1;      // GGUF order
    size_t    offset_bytes;  // from the expert's first byte
    size_t    payload_bytes; // ne1 rows
    size_t    padded_bytes;  // payload rounded up to kAlignmentBytes
};

struct ExpertPlace {
    int                             i_shard = -1; // -1: not there
    uint64_t                        offset  = 0;  // in the shard's file, multiple of kAlignmentBytes
    std::array<uint64_t, kMaxParts> xxh3{};       // XXH3-64 of each part's payload
};

struct LayerExperts {
    int                      layer = 0; // blk.N
    std::vector<ExpertPart>  parts;     // in file order: up, gate, down | gate_up, down | up, down
    size_t                   payload_bytes = 0;
    size_t                   stride_bytes  = 0;
    std::vector<ExpertPlace> experts;

    int      n_expert() const { return (int) experts.size(); }
    uint32_t all_parts() const { return (1u << parts.size()) - 1; }
    int      find_part(PartRole role) const; // index into parts, -1 if the layer has none
};

struct PackageIndex {
    std::string              dir;
    std::string              package_id;
    std::string              layout;
    std::string              resident_path;
    uint64_t                 resident_file_bytes = 0;
    std::vector<std::string> shard_paths;
    std::vector<LayerExperts> layers; // ascending by layer

    const LayerExperts * find_layer(int layer) const; // null: not a MoE layer

    // Throws Error(IO, FORMAT).
    static PackageIndex open(const std::string & dir);
};

// Parses "blk.<layer>.ffn_<role>_exps.<expert>.weight" (expert) or "blk.<layer>.ffn_<role>_exps.weight" (merged, expert = -1).
// Returns false for any other name.
bool parse_expert_tensor_name(const char * name, int * layer, PartRole * role, int * expert);

} // namespace mkd
