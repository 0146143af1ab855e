// A session on a tiny package: what stays in the KV cache between prompts, where an answer ends, and that every bad argument of the C API
// is a status and a line, never an abort. Text needs a tokenizer, which the tiny package lacks: test-session-text.cpp has that part.

#include "mkd.h"
#include "tiny-package.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <string>
#include <vector>

namespace {

struct Fixture {
    TinyPackage   tiny;
    mkd_session_t session = nullptr;

    Fixture() {
        const mkd_session_params p = params();
        REQUIRE_MESSAGE(mkd_session_init(&p, &session) == MKD_OK, mkd_last_error());
    }
    ~Fixture() { mkd_session_free(session); }

    mkd_session_params params() const {
        mkd_session_params p = mkd_session_default_params();
        p.path               = tiny.package.c_str();
        p.n_ctx              = 256;
        p.n_batch            = 16;
        p.n_seq_max          = 1;
        p.n_threads          = 2;
        return p;
    }
};

std::vector<int32_t> some_ids(int n, int seed = 0) {
    std::vector<int32_t> ids;
    for (int i = 0; i < n; ++i) {
        ids.push_back((i * 37 + 11 + seed) % TinyPackage::n_vocab);
    }
    return ids;
}

struct Run {
    mkd_status           status;
    std::vector<int32_t> ids;
    mkd_generated        result;
    int                  stop_after  = -1; // callback returns false after so many tokens
    int                  interrupt_after = -1;
    mkd_session_t        session = nullptr;
};

bool on_token(int32_t id, const char *, size_t, int64_t, void * user) {
    Run & run = *(Run *) user;
    run.ids.push_back(id);
    if ((int) run.ids.size() == run.interrupt_after) {
        mkd_session_interrupt(run.session);
    }
    return (int) run.ids.size() != run.stop_after;
}

Run generate(mkd_session_t session, const std::vector<int32_t> & prompt, int n_predict, int stop_after = -1, int interrupt_after = -1, float temp = 0.0f,
             uint32_t seed = 1) {
    Run run{};
    run.stop_after        = stop_after;
    run.interrupt_after   = interrupt_after;
    run.session           = session;
    mkd_sampling sampling = mkd_sampling_default();
    sampling.temp         = temp;
    sampling.seed         = seed;
    run.status = mkd_generate(session, prompt.data(), (int32_t) prompt.size(), n_predict, &sampling, nullptr, 0, on_token, &run, &run.result);
    return run;
}

} // namespace

TEST_CASE_FIXTURE(Fixture, "session: an answer is the argmax of each decode's logits") {
    const std::vector<int32_t> prompt = some_ids(40); // three chunks of n_batch
    const Run                  run    = generate(session, prompt, 12);
    REQUIRE_MESSAGE(run.status == MKD_OK, mkd_last_error());
    CHECK(run.result.stop == MKD_STOP_LENGTH);
    CHECK(run.result.n_prompt == 40);
    CHECK(run.result.n_generated == 12);
    CHECK(mkd_memory_pos_max(session, 0) == 40 + 11 - 1); // the last token is not decoded

    REQUIRE(mkd_memory_remove(session, -1, 0, -1) == MKD_OK);
    std::vector<int64_t> itl_us(prompt.size());
    for (size_t i = 0; i < prompt.size(); i += 16) {
        REQUIRE(mkd_decode(session, prompt.data() + i, (int32_t) std::min<size_t>(16, prompt.size() - i), nullptr, nullptr, nullptr) == MKD_OK);
    }
    for (const int32_t id : run.ids) {
        const float * logits = mkd_logits(session, -1);
        REQUIRE(logits != nullptr);
        CHECK(id == (int32_t) (std::max_element(logits, logits + TinyPackage::n_vocab) - logits));
        REQUIRE(mkd_decode_each(session, &id, 1, itl_us.data()) == MKD_OK);
    }
}

TEST_CASE_FIXTURE(Fixture, "session: a prompt keeps the prefix that the cache has, and the answer does not change") {
    const Run first = generate(session, some_ids(20), 6);
    REQUIRE(first.status == MKD_OK);
    CHECK(first.result.n_cached == 0);

    const Run again = generate(session, some_ids(20), 6); // the last token is decoded again
    CHECK(again.result.n_cached == 19);
    CHECK(again.result.n_prompt == 1);

    std::vector<int32_t> longer = some_ids(20);
    longer.insert(longer.end(), again.ids.begin(), again.ids.end());
    longer.push_back(5);
    const Run chat = generate(session, longer, 6); // 5 of the 6 tokens were decoded
    CHECK(chat.result.n_cached == 25);
    CHECK(chat.result.n_prompt == 2);

    std::vector<int32_t> forked = longer;
    forked[10]                  = (forked[10] + 1) % TinyPackage::n_vocab;
    CHECK(generate(session, forked, 1).result.n_cached == 10);
    CHECK(generate(session, some_ids(8, 3), 1).result.n_cached == 0);
}

TEST_CASE_FIXTURE(Fixture, "session: positions placed by the caller are never taken for a prefix") {
    const std::vector<int32_t> ids = some_ids(8);
    std::vector<int32_t>       pos{ 0, 1, 2, 3, 4, 5, 6, 7 };
    REQUIRE(mkd_decode(session, ids.data(), 8, pos.data(), nullptr, nullptr) == MKD_OK);
    CHECK(generate(session, some_ids(12), 1).result.n_cached == 8); // as generate would have placed them

    REQUIRE(mkd_memory_remove(session, 0, 4, 6) == MKD_OK); // a hole
    CHECK(generate(session, some_ids(12), 1).result.n_cached == 0);
    REQUIRE(mkd_memory_remove(session, 0, 5, -1) == MKD_OK);
    CHECK(generate(session, some_ids(12), 1).result.n_cached == 5);
}

TEST_CASE_FIXTURE(Fixture, "session: an answer ends at n_predict, a full context, a false callback and an interrupt") {
    CHECK(generate(session, some_ids(4), 0).result.stop == MKD_STOP_LENGTH);
    const Run full = generate(session, some_ids(250), -1);
    CHECK(full.result.stop == MKD_STOP_CONTEXT);
    CHECK(full.result.n_generated == 256 - 250 + 1);
    CHECK(generate(session, some_ids(257), 1).status == MKD_ERR_CONTEXT);
    CHECK(std::string(mkd_last_error()).find("257") != std::string::npos);

    const Run refused = generate(session, some_ids(4), 20, 3);
    CHECK(refused.result.stop == MKD_STOP_INTERRUPTED);
    CHECK(refused.result.n_generated == 3);
    const Run interrupted = generate(session, some_ids(4), 20, -1, 5);
    CHECK(interrupted.status == MKD_OK);
    CHECK(interrupted.result.stop == MKD_STOP_INTERRUPTED);
    CHECK(interrupted.result.n_generated == 5);

    mkd_session_interrupt(session); // the next call stops before it decodes, the one after that runs
    const Run stopped = generate(session, some_ids(9, 1), 3);
    CHECK(stopped.result.stop == MKD_STOP_INTERRUPTED);
    CHECK(stopped.result.n_prompt == 0);
    CHECK(generate(session, some_ids(9, 1), 3).result.stop == MKD_STOP_LENGTH);
    mkd_session_interrupt(session);
    const int32_t id = 1;
    CHECK(mkd_decode(session, &id, 1, nullptr, nullptr, nullptr) == MKD_ERR_INTERRUPTED);
    CHECK(mkd_decode(session, &id, 1, nullptr, nullptr, nullptr) == MKD_OK);
}

TEST_CASE_FIXTURE(Fixture, "session: a seed repeats an answer, and a random seed is reported") {
    const Run a = generate(session, some_ids(4), 20, -1, -1, 1.0f, 7);
    CHECK(a.result.seed == 7);
    CHECK(generate(session, some_ids(4), 20, -1, -1, 1.0f, 7).ids == a.ids);
    const Run random = generate(session, some_ids(4), 20, -1, -1, 1.0f, 0xFFFFFFFF);
    CHECK(random.result.seed != 0xFFFFFFFF);
    CHECK(generate(session, some_ids(4), 20, -1, -1, 1.0f, random.result.seed).ids == random.ids);
}

TEST_CASE_FIXTURE(Fixture, "session: bad arguments of decode and generate are refused") {
    const std::vector<int32_t> ids    = some_ids(17);
    const int32_t              bad[]  = { TinyPackage::n_vocab };
    const int32_t              seq[]  = { 1 };
    const int32_t              pos[]  = { -1 };
    mkd_generated              out;
    CHECK(mkd_decode(session, nullptr, 1, nullptr, nullptr, nullptr) == MKD_ERR_ARG);
    CHECK(mkd_decode(session, ids.data(), 0, nullptr, nullptr, nullptr) == MKD_ERR_ARG);
    CHECK(mkd_decode(session, ids.data(), 17, nullptr, nullptr, nullptr) == MKD_ERR_ARG); // llama.cpp would abort
    CHECK(mkd_decode(session, bad, 1, nullptr, nullptr, nullptr) == MKD_ERR_ARG);
    CHECK(mkd_decode(session, ids.data(), 1, nullptr, seq, nullptr) == MKD_ERR_ARG);
    CHECK(mkd_decode(session, ids.data(), 1, pos, nullptr, nullptr) == MKD_ERR_ARG);
    CHECK(mkd_memory_remove(session, 1, 0, -1) == MKD_ERR_ARG); // likewise
    CHECK(mkd_memory_remove(session, 0, -1, 3) == MKD_ERR_ARG);
    CHECK(mkd_memory_pos_max(session, 99) == -1);
    CHECK(mkd_logits(session, 5) == nullptr);
    for (const auto change : { +[](mkd_sampling & s) { s.temp = NAN; }, +[](mkd_sampling & s) { s.top_p = -1; }, +[](mkd_sampling & s) { s.min_p = 2; },
                               +[](mkd_sampling & s) { s.struct_bytes = 1; }, +[](mkd_sampling & s) { s.grammar = "root ::= \"a\""; } }) {
        mkd_sampling sampling = mkd_sampling_default();
        change(sampling);
        CHECK(mkd_generate(session, ids.data(), 4, 1, &sampling, nullptr, 0, nullptr, nullptr, &out) == MKD_ERR_ARG);
        CHECK(std::string(mkd_last_error()) != "");
    }
    const mkd_sampling sampling = mkd_sampling_default();
    CHECK(mkd_generate(session, ids.data(), 4, -2, &sampling, nullptr, 0, nullptr, nullptr, &out) == MKD_ERR_ARG);
    CHECK(mkd_generate(session, ids.data(), 4, 1, &sampling, nullptr, 1, nullptr, nullptr, &out) == MKD_ERR_ARG);
    CHECK(mkd_generate(session, ids.data(), 4, 1, nullptr, nullptr, 0, nullptr, nullptr, &out) == MKD_ERR_ARG);
    CHECK(mkd_generate(session, ids.data(), 4, 1, &sampling, nullptr, 0, nullptr, nullptr, &out) == MKD_OK); // still usable
    CHECK(mkd_tokenize(session, "a", 1, nullptr, 0, true, true) == INT32_MIN); // no vocabulary
    CHECK(mkd_token_to_piece(session, 1, nullptr, 0, true) == INT32_MIN);
    CHECK(!mkd_token_is_eog(session, 1));
}

TEST_CASE_FIXTURE(Fixture, "session: bad parameters are refused by name") {
    const auto refused = [this](const char * name, void (*change)(mkd_session_params &)) {
        mkd_session_params p = params();
        change(p);
        mkd_session_t other = (mkd_session_t) 1;
        CHECK(mkd_session_init(&p, &other) == MKD_ERR_ARG);
        CHECK(other == nullptr);
        CHECK_MESSAGE(std::string(mkd_last_error()).find(name) != std::string::npos, mkd_last_error());
    };
    refused("struct_bytes", [](mkd_session_params & p) { p.struct_bytes -= 1; });
    refused("path", [](mkd_session_params & p) { p.path = nullptr; });
    refused("load", [](mkd_session_params & p) { p.load = 3; });
    refused("n_batch", [](mkd_session_params & p) { p.n_batch = 0; });
    refused("n_ubatch", [](mkd_session_params & p) { p.n_ubatch = -1; });
    refused("n_seq_max", [](mkd_session_params & p) { p.n_seq_max = 0; });
    refused("n_batch", [](mkd_session_params & p) { p.n_batch = 2, p.n_seq_max = 4; });
    refused("n_outputs_max", [](mkd_session_params & p) { p.n_outputs_max = 1, p.n_seq_max = 2; });
    refused("type_v", [](mkd_session_params & p) { p.type_v = 9999; });
    refused("verify", [](mkd_session_params & p) { p.verify = -1; });
    refused("lora_scale", [](mkd_session_params & p) { p.lora_scale = INFINITY; });
    refused("budget", [](mkd_session_params & p) { p.load = MKD_LOAD_MMAP, p.memory_budget_bytes = 1; });
}

TEST_CASE("session: null handles and pointers are errors or nothing") {
    mkd_model_info info;
    mkd_stats      stats;
    CHECK(mkd_session_init(nullptr, nullptr) == MKD_ERR_ARG);
    CHECK(mkd_session_model_info(nullptr, &info) == MKD_ERR_ARG);
    CHECK(mkd_stats_get(nullptr, &stats) == MKD_ERR_ARG);
    CHECK(mkd_session_set_hooks(nullptr, nullptr) == MKD_ERR_ARG);
    CHECK(mkd_session_meta(nullptr, "x", nullptr, 0) == -1);
    CHECK(mkd_logits(nullptr, 0) == nullptr);
    CHECK(mkd_iobench(nullptr, nullptr) == MKD_ERR_ARG);
    CHECK(mkd_store_init(nullptr, nullptr) == MKD_ERR_ARG);
    CHECK(mkd_store_n_expert(nullptr, 0) == 0);
    mkd_session_free(nullptr);
    mkd_session_interrupt(nullptr);
    mkd_store_free(nullptr);
}

TEST_CASE_FIXTURE(Fixture, "session: the store reads and verifies experts of the package") {
    mkd_store_t store = nullptr;
    REQUIRE_MESSAGE(mkd_store_init(tiny.package.c_str(), &store) == MKD_OK, mkd_last_error());
    CHECK(mkd_store_n_expert(store, 0) == TinyPackage::n_expert);
    CHECK(mkd_store_n_expert(store, 99) == 0);
    const uint64_t stride = mkd_store_expert_stride_bytes(store, 0);
    REQUIRE(stride > 0);
    void * const dst = aligned_alloc(MKD_ALIGN_BYTES, stride);
    CHECK(mkd_store_read(store, 0, 1, dst, stride) == MKD_OK);
    CHECK(mkd_store_read(store, 0, 1, dst, stride - 1) == MKD_ERR_ARG);
    CHECK(mkd_store_read(store, 0, 1, (char *) dst + 1, stride) == MKD_ERR_ARG);
    CHECK(mkd_store_read(store, 0, TinyPackage::n_expert, dst, stride) == MKD_ERR_ARG);
    CHECK(mkd_store_read(store, 99, 0, dst, stride) == MKD_ERR_ARG);
    CHECK(mkd_store_read(store, 0, 1, nullptr, stride) == MKD_ERR_ARG);
    free(dst);
    mkd_store_free(store);
    CHECK(mkd_store_init("/nonexistent", &store) == MKD_ERR_IO);
    CHECK(store == nullptr);
}
