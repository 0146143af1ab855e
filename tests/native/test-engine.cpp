// The engine on a tiny package: paged logits equal stock llama.cpp's bit for bit, nothing routed is read at load, and every bad
// package is an error of the right kind, never a wrong number or an abort.

#include "backend/paged-experts.h"
#include "base/error.h"
#include "model/engine.h"
#include "tiny-package.h"

#include <doctest/doctest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <set>
#include <string>
#include <vector>

using namespace mkd;

namespace {

mkd_session_params base_params(const std::string & path, mkd_load load) {
    mkd_session_params p = {};
    p.struct_bytes       = sizeof p;
    p.path               = path.c_str();
    p.load               = load;
    p.n_ctx              = 512;
    p.n_batch            = 512;
    p.n_ubatch           = 512;
    p.n_seq_max          = 1;
    p.n_threads          = 2;
    p.type_k = p.type_v = -1;
    p.direct_io         = true;
    p.lora_scale        = 1.0f;
    return p;
}

// Logits [n_prompt + n_decode][n_vocab] of a fixed token stream: one prompt batch, then one token at a time.
std::vector<float> logits_of(Engine & engine, int n_prompt, int n_decode) {
    struct Batch : llama_batch {
        Batch() : llama_batch(llama_batch_init(512, 0, 1)) {}
        ~Batch() { llama_batch_free(*this); }
    } batch;
    std::vector<float> all;
    const auto         forward = [&](int from, int n) {
        batch.n_tokens = n;
        for (int i = 0; i < n; ++i) {
            batch.token[i]     = ((from + i) * 37 + 11) % TinyPackage::n_vocab;
            batch.pos[i]       = from + i;
            batch.n_seq_id[i]  = 1;
            batch.seq_id[i][0] = 0;
            batch.logits[i]    = 1;
        }
        engine.decode(batch);
        for (int i = 0; i < n; ++i) {
            const float * row = llama_get_logits_ith(engine.ctx(), i);
            all.insert(all.end(), row, row + TinyPackage::n_vocab);
        }
    };
    llama_memory_clear(llama_get_memory(engine.ctx()), true);
    forward(0, n_prompt);
    for (int i = 0; i < n_decode; ++i) {
        forward(n_prompt + i, 1);
    }
    return all;
}

bool same_bits(const std::vector<float> & a, const std::vector<float> & b) {
    return a.size() == b.size() && memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

mkd_status status_of(const std::function<void()> & call, std::string * message = nullptr) {
    try {
        call();
    } catch (const Error & error) {
        if (message) {
            *message = error.what();
        }
        return error.status();
    }
    return MKD_OK;
}

void flip_byte(const std::string & path, uint64_t offset) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg((std::streamoff) offset);
    const int byte = file.get();
    file.seekp((std::streamoff) offset);
    file.put((char) (byte ^ 0x40));
}

std::string slurp(const std::string & path) {
    std::ifstream in(path, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(in), {});
}

void spit(const std::string & path, const std::string & text) {
    std::ofstream(path, std::ios::binary) << text;
}

} // namespace

TEST_CASE("engine: paged equals stock bit for bit at every cache size and batch width") {
    const TinyPackage tiny;
    for (const int n_ubatch : { 1, 32, 512 }) {
        mkd_session_params stock_params = base_params(tiny.gguf, MKD_LOAD_NONE);
        stock_params.n_ubatch           = n_ubatch;
        const auto stock                = Engine::open(stock_params);
        for (const int n_slots : { 2, 3, 8 }) {
            mkd_session_params paged_params = base_params(tiny.package, MKD_LOAD_PAGED);
            paged_params.n_ubatch           = n_ubatch;
            paged_params.cache_slots        = n_slots;
            paged_params.prefetch           = MKD_PREFETCH_AUTO;
            paged_params.whole_experts      = n_slots == 3;
            paged_params.io                 = n_slots == 2 ? MKD_IO_PREAD : MKD_IO_AUTO;
            paged_params.io_chunk_bytes     = n_slots == 2 ? MKD_ALIGN_BYTES : 0; // parts arrive one by one
            const auto paged                = Engine::open(paged_params);
            for (const int n_prompt : { 1, 7, 64, 300 }) {
                if (n_ubatch == 1 && n_prompt == 300) {
                    continue; // 300 batches of one: nothing that 64 do not show, and slow under sanitizers
                }
                CAPTURE(n_ubatch);
                CAPTURE(n_slots);
                CAPTURE(n_prompt);
                CHECK(same_bits(logits_of(*stock, n_prompt, 4), logits_of(*paged, n_prompt, 4)));
            }
        }
    }
}

TEST_CASE("engine: counters add up, and a cache that holds everything reads each expert once") {
    const TinyPackage  tiny;
    mkd_session_params params = base_params(tiny.package, MKD_LOAD_PAGED);
    const auto         engine = Engine::open(params);
    logits_of(*engine, 64, 32);
    const mkd_stats stats = engine->experts()->stats();
    CHECK(stats.n_tokens == 96);
    CHECK(stats.n_requests == stats.n_hits + stats.n_misses);
    CHECK(stats.n_evictions == 0);
    CHECK(stats.n_misses <= (uint64_t) TinyPackage::n_layer * TinyPackage::n_expert);
    CHECK(stats.n_misses > 0);
    CHECK(stats.read_bytes == stats.n_misses * engine->model_info().expert_stride_bytes);
    CHECK(stats.payload_bytes == stats.n_misses * engine->model_info().expert_payload_bytes);
    CHECK(stats.n_layer_batches == (uint64_t) TinyPackage::n_layer * 33);
    CHECK(stats.n_checksums == 3 * stats.n_misses);
    CHECK(stats.n_prefetch == 0);
    CHECK(stats.prefetch_bytes == 0);
}

TEST_CASE("engine: with fewer slots than experts every tensor of every expert is read once per batch") {
    const TinyPackage  tiny;
    mkd_session_params params = base_params(tiny.package, MKD_LOAD_PAGED);
    params.cache_slots        = 2;
    const auto engine         = Engine::open(params);
    logits_of(*engine, 300, 0);
    const mkd_stats stats = engine->experts()->stats();
    CHECK(stats.n_waves > 0);
    CHECK(stats.n_requests == (uint64_t) TinyPackage::n_layer * TinyPackage::n_expert);
    CHECK(stats.payload_bytes == stats.n_requests * engine->model_info().expert_payload_bytes);
}

TEST_CASE("engine: cold drops every expert after each pass") {
    const TinyPackage  tiny;
    mkd_session_params params = base_params(tiny.package, MKD_LOAD_PAGED);
    const auto         engine = Engine::open(params);
    const auto         warm   = logits_of(*engine, 1, 16);
    engine->experts()->set_cold(true);
    engine->experts()->clear();
    engine->experts()->reset_stats();
    CHECK(same_bits(warm, logits_of(*engine, 1, 16)));
    const mkd_stats stats = engine->experts()->stats();
    CHECK(stats.n_hits == 0);
    CHECK(stats.n_misses == (uint64_t) TinyPackage::n_layer * TinyPackage::n_expert_used * 17);
}

TEST_CASE("engine: decoding keeps its threads") {
    const auto thread_ids = [] {
        std::set<std::string> ids;
        for (const auto & entry : std::filesystem::directory_iterator("/proc/self/task")) {
            ids.insert(entry.path().filename());
        }
        return ids;
    };
    const TinyPackage  tiny;
    mkd_session_params params = base_params(tiny.package, MKD_LOAD_PAGED);
    params.n_threads          = 2;
    const auto engine         = Engine::open(params);
    logits_of(*engine, 7, 1);
    const auto before = thread_ids();
    CHECK(before.size() >= 2);
    logits_of(*engine, 64, 4);
    CHECK(thread_ids() == before);
}

TEST_CASE("engine: loading asks for no routed byte") {
    const TinyPackage  tiny;
    mkd_session_params params = base_params(tiny.package, MKD_LOAD_PAGED);
    const auto         engine = Engine::open(params);
    CHECK(engine->load_info().routed_requested_bytes == 0);
    CHECK(engine->load_info().resident_read_bytes <= std::filesystem::file_size(tiny.package + "/resident.gguf"));
    CHECK(engine->experts()->stats().read_bytes == 0);
}

TEST_CASE("engine: a damaged expert stops the run with its name, never with wrong numbers") {
    const TinyPackage tiny;
    flip_byte(tiny.shard, std::filesystem::file_size(tiny.shard) - 4096 + 100); // in the last tensor: layer 2, expert 7, down
    mkd_session_params params = base_params(tiny.package, MKD_LOAD_PAGED);
    const auto         engine = Engine::open(params);
    std::string        message;
    CHECK(status_of([&] { logits_of(*engine, 300, 0); }, &message) == MKD_ERR_CORRUPT);
    CHECK(message.find("expert 7 of layer 2") != std::string::npos);
    CHECK(message.find("ffn_down_exps") != std::string::npos);
    CHECK(engine->experts()->stats().n_reread == 1);
    // the session lives: the positions of the failed batch are gone, and the error comes again
    CHECK(llama_memory_seq_pos_max(llama_get_memory(engine->ctx()), 0) == -1);
    CHECK(status_of([&] { logits_of(*engine, 300, 0); }) == MKD_ERR_CORRUPT);
}

TEST_CASE("engine: a budget below one token's experts names the minimum, and that minimum works") {
    const TinyPackage  tiny;
    mkd_session_params params  = base_params(tiny.package, MKD_LOAD_PAGED);
    params.memory_budget_bytes = 1 << 20;
    std::string message;
    CHECK(status_of([&] { Engine::open(params); }, &message) == MKD_ERR_BUDGET);
    CHECK(message.find("needs at least") != std::string::npos);
    params.memory_budget_bytes = 64u << 20;
    const auto engine          = Engine::open(params);
    CHECK(engine->memory_info().total_bytes <= params.memory_budget_bytes);
    CHECK(engine->memory_info().minimum_bytes <= engine->memory_info().total_bytes);
}

TEST_CASE("engine: an interruption ends the decode and leaves a usable session") {
    const TinyPackage  tiny;
    mkd_session_params params = base_params(tiny.package, MKD_LOAD_PAGED);
    const auto         engine = Engine::open(params);
    const auto         before = logits_of(*engine, 7, 2);
    engine->interrupt();
    CHECK(status_of([&] { logits_of(*engine, 7, 0); }) == MKD_ERR_INTERRUPTED);
    CHECK(same_bits(before, logits_of(*engine, 7, 2)));
}

TEST_CASE("engine: packages that are not right are refused by kind") {
    const auto refused = [](const std::function<void(const TinyPackage &)> & damage, const char * expected) {
        const TinyPackage tiny;
        damage(tiny);
        mkd_session_params params = base_params(tiny.package, MKD_LOAD_PAGED);
        std::string        message;
        const mkd_status   status = status_of([&] { Engine::open(params); }, &message);
        CAPTURE(message);
        CHECK((status == MKD_ERR_FORMAT || status == MKD_ERR_IO));
        CHECK(message.find(expected) != std::string::npos);
    };
    namespace fs = std::filesystem;
    refused([](const TinyPackage & t) { fs::remove(t.shard); }, "incomplete");
    refused([](const TinyPackage & t) { fs::resize_file(t.shard, fs::file_size(t.shard) - 4096); }, "the manifest says");
    refused([](const TinyPackage & t) { fs::remove(t.manifest); }, "not a package");
    refused([](const TinyPackage & t) { spit(t.manifest, "{"); }, "not a JSON object");
    refused(
        [](const TinyPackage & t) {
            std::string text = slurp(t.manifest);
            text.replace(text.find("\"format_version\":1"), 18, "\"format_version\":2");
            spit(t.manifest, text);
        },
        "format version 2");
    refused(
        [](const TinyPackage & t) {
            std::string text = slurp(t.manifest);
            text.replace(text.find("\"package_id\":\"0"), 15, "\"package_id\":\"f");
            spit(t.manifest, text);
        },
        "another package");
    refused(
        [](const TinyPackage & t) {
            std::string text = slurp(t.manifest);
            text.replace(text.find("resident.gguf"), 13, "../model.gguf");
            spit(t.manifest, text);
        },
        "plain name");
    refused([](const TinyPackage & t) { fs::rename(t.gguf, t.shard); }, "the manifest says");
}

TEST_CASE("engine: stock files that are not GGUFs are refused before llama.cpp sees them") {
    const TinyPackage tiny;
    for (const mkd_load load : { MKD_LOAD_MMAP, MKD_LOAD_NONE }) {
        CHECK(status_of([&] { Engine::open(base_params(tiny.dir + "/absent.gguf", load)); }) == MKD_ERR_IO);
        CHECK(status_of([&] { Engine::open(base_params(tiny.manifest, load)); }) == MKD_ERR_FORMAT);
        CHECK(status_of([&] { Engine::open(base_params(tiny.package, load)); }) == MKD_ERR_FORMAT);
    }
}
