#include "tiny-package.h"

#include "ggml.h"
#include "gguf.h"

#define XXH_INLINE_ALL
#include "xxhash.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <vector>

namespace {

constexpr const char * kPackageId = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

struct Writer {
    explicit Writer(const char * arch) {
        ctx  = ggml_init({ 16u << 20, nullptr, false });
        gguf = gguf_init_empty();
        gguf_set_val_str(gguf, "general.architecture", arch);
    }
    ~Writer() {
        gguf_free(gguf);
        ggml_free(ctx);
    }
    Writer(const Writer &)             = delete;
    Writer & operator=(const Writer &) = delete;

    ggml_tensor * add(const std::string & name, ggml_type type, int64_t ne0, int64_t ne1 = 1, int64_t ne2 = 1) {
        const int64_t ne[3] = { ne0, ne1, ne2 };
        ggml_tensor * t     = ggml_new_tensor(ctx, type, ne2 > 1 ? 3 : ne1 > 1 ? 2 : 1, ne);
        ggml_set_name(t, name.c_str());
        gguf_add_tensor(gguf, t);
        return t;
    }

    ggml_context * ctx;
    gguf_context * gguf;
};

// What both files share: metadata and resident tensors.
void add_resident(Writer & w, std::mt19937 & rng) {
    using T = TinyPackage;
    const auto u32 = [&](const char * key, uint32_t v) { gguf_set_val_u32(w.gguf, (std::string("qwen2moe.") + key).c_str(), v); };
    u32("block_count", T::n_layer);
    u32("context_length", 512);
    u32("embedding_length", T::n_embd);
    u32("feed_forward_length", T::n_ff);
    u32("attention.head_count", 2);
    u32("attention.head_count_kv", 2);
    u32("expert_count", T::n_expert);
    u32("expert_used_count", T::n_expert_used);
    u32("expert_feed_forward_length", T::n_ff);
    u32("expert_shared_feed_forward_length", T::n_ff);
    u32("vocab_size", T::n_vocab);
    gguf_set_val_f32(w.gguf, "qwen2moe.attention.layer_norm_rms_epsilon", 1e-6f);
    gguf_set_val_str(w.gguf, "tokenizer.ggml.model", "none");

    std::normal_distribution<float> normal;
    const auto                      f32 = [&](const std::string & name, float scale, float mean, int64_t ne0, int64_t ne1 = 1) {
        ggml_tensor * t = w.add(name, GGML_TYPE_F32, ne0, ne1);
        for (int64_t i = 0; i < ggml_nelements(t); ++i) {
            ((float *) t->data)[i] = mean + scale * normal(rng);
        }
    };
    const float s = 1.0f / std::sqrt((float) T::n_embd);
    f32("token_embd.weight", 1.0f, 0, T::n_embd, T::n_vocab);
    f32("output.weight", s, 0, T::n_embd, T::n_vocab);
    f32("output_norm.weight", 0, 1, T::n_embd);
    for (int i = 0; i < T::n_layer; ++i) {
        const std::string p = "blk." + std::to_string(i) + ".";
        f32(p + "attn_norm.weight", 0, 1, T::n_embd);
        f32(p + "ffn_norm.weight", 0, 1, T::n_embd);
        for (const char * m : { "attn_q", "attn_k", "attn_v", "attn_output" }) {
            f32(p + m + ".weight", s, 0, T::n_embd, T::n_embd);
        }
        f32(p + "ffn_gate_inp.weight", 2 * s, 0, T::n_embd, T::n_expert);
        f32(p + "ffn_gate_inp_shexp.weight", s, 0, T::n_embd);
        f32(p + "ffn_gate_shexp.weight", s, 0, T::n_embd, T::n_ff);
        f32(p + "ffn_up_shexp.weight", s, 0, T::n_embd, T::n_ff);
        f32(p + "ffn_down_shexp.weight", s, 0, T::n_ff, T::n_embd);
    }
}

void fill_q4_0(void * data, size_t bytes, std::mt19937 & rng) {
    const uint16_t scale = ggml_fp32_to_fp16(0.03f);
    for (size_t at = 0; at + 18 <= bytes; at += 18) {
        uint8_t * block = (uint8_t *) data + at;
        memcpy(block, &scale, 2);
        for (int i = 2; i < 18; ++i) {
            block[i] = (uint8_t) ((1 + rng() % 15) | (1 + rng() % 15) << 4); // nibbles 1..15: zero mean
        }
    }
}

} // namespace

TinyPackage::TinyPackage(unsigned seed) {
    namespace fs = std::filesystem;
    char name[]  = "/tmp/mkd-test-XXXXXX";
    dir          = mkdtemp(name);
    gguf         = dir + "/model.gguf";
    package      = dir + "/model.mkd";
    shard        = package + "/experts-00001-of-00001.gguf";
    manifest     = package + "/manifest.json";
    fs::create_directory(package);

    struct Role {
        const char * name;
        int64_t      ne0, ne1;
    };
    const Role roles[] = { { "up", n_embd, n_ff }, { "gate", n_embd, n_ff }, { "down", n_ff, n_embd } };

    std::mt19937 rng(seed);
    Writer       stock("qwen2moe");
    add_resident(stock, rng);
    std::vector<ggml_tensor *> merged;
    for (int i = 0; i < n_layer; ++i) {
        for (const Role & role : roles) {
            ggml_tensor * t = stock.add("blk." + std::to_string(i) + ".ffn_" + role.name + "_exps.weight", GGML_TYPE_Q4_0, role.ne0, role.ne1, n_expert);
            fill_q4_0(t->data, ggml_nbytes(t), rng);
            merged.push_back(t);
        }
    }
    gguf_write_to_file(stock.gguf, gguf.c_str(), false);

    std::mt19937 again(seed);
    Writer       resident("qwen2moe");
    add_resident(resident, again);
    gguf_set_val_str(resident.gguf, "mkd.package_id", kPackageId);
    gguf_set_val_str(resident.gguf, "mkd.kind", "resident");
    gguf_set_val_u32(resident.gguf, "mkd.format_version", 1);
    gguf_write_to_file(resident.gguf, (package + "/resident.gguf").c_str(), false);

    // The shard, byte by byte: ggml's writer knows no alignment but 32.
    struct Tensor {
        std::string  name;
        int64_t      ne0, ne1;
        const char * data;
        uint64_t     bytes;
    };
    std::vector<Tensor>   tensors;
    std::vector<uint64_t> payload, xxh3;
    for (int i = 0; i < n_layer; ++i) {
        for (int e = 0; e < n_expert; ++e) {
            for (int r = 0; r < 3; ++r) {
                const ggml_tensor * from = merged[(size_t) (i * 3 + r)];
                tensors.push_back({ "blk." + std::to_string(i) + ".ffn_" + roles[r].name + "_exps." + std::to_string(e) + ".weight", roles[r].ne0,
                                    roles[r].ne1, (const char *) from->data + (size_t) e * from->nb[2], from->nb[2] });
                payload.push_back(from->nb[2]);
                xxh3.push_back(XXH3_64bits(tensors.back().data, from->nb[2]));
            }
        }
    }
    std::string bytes = "GGUF";
    const auto  raw   = [&](auto value) { bytes.append((const char *) &value, sizeof value); };
    const auto  text  = [&](const std::string & value) { raw((uint64_t) value.size()); bytes += value; };
    const auto  u32   = [&](const char * key, uint32_t value) { text(key); raw((uint32_t) GGUF_TYPE_UINT32); raw(value); };
    const auto  str   = [&](const char * key, const std::string & value) { text(key); raw((uint32_t) GGUF_TYPE_STRING); text(value); };
    const auto  u64s  = [&](const char * key, const std::vector<uint64_t> & values) {
        text(key);
        raw((uint32_t) GGUF_TYPE_ARRAY);
        raw((uint32_t) GGUF_TYPE_UINT64);
        raw((uint64_t) values.size());
        for (const uint64_t value : values) {
            raw(value);
        }
    };
    const auto pad = [&] { bytes.resize((bytes.size() + 4095) / 4096 * 4096); };
    raw((uint32_t) 3);
    raw((uint64_t) tensors.size());
    raw((uint64_t) 10);
    str("general.architecture", "mkd-experts");
    u32("general.alignment", 4096);
    u32("mkd.format_version", 1);
    str("mkd.kind", "experts");
    str("mkd.package_id", kPackageId);
    str("mkd.layout", "plain");
    u32("mkd.shard.no", 0);
    u32("mkd.shard.count", 1);
    u64s("mkd.tensor.payload_bytes", payload);
    u64s("mkd.tensor.xxh3_64", xxh3);
    uint64_t offset = 0;
    for (const Tensor & tensor : tensors) {
        text(tensor.name);
        raw((uint32_t) 2);
        raw(tensor.ne0);
        raw(tensor.ne1);
        raw((uint32_t) GGML_TYPE_Q4_0);
        raw(offset);
        offset += (tensor.bytes + 4095) / 4096 * 4096;
    }
    pad();
    for (const Tensor & tensor : tensors) {
        bytes.append(tensor.data, tensor.bytes);
        pad();
    }
    std::ofstream(shard, std::ios::binary) << bytes;

    std::ofstream out(manifest);
    out << "{\"format\":\"mkdeploy-package\",\"format_version\":1,\"layout\":\"plain\",\"package_id\":\"" << kPackageId << "\",\"files\":["
        << "{\"name\":\"resident.gguf\",\"kind\":\"resident\",\"bytes\":" << fs::file_size(package + "/resident.gguf") << ",\"sha256\":\"\"},"
        << "{\"name\":\"experts-00001-of-00001.gguf\",\"kind\":\"experts\",\"bytes\":" << fs::file_size(shard) << ",\"sha256\":\"\"}]}";
}

TinyPackage::~TinyPackage() {
    std::error_code ignored;
    std::filesystem::remove_all(dir, ignored);
}
