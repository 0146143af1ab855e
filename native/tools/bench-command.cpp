// tools/bench-command.cpp: mkd-run bench: speed of prompts (pp) and of single tokens (tg), measured as llama-bench does.
//
// Each repetition starts with an empty KV cache; the expert cache is kept, unless --cold. One repetition before the counted ones warms up. Tokens come
// from a file, cyclically, and are not sampled: every run of a test routes the same way. With --paced each counted repetition is announced by a
// `ready` event and waits for a line on stdin, so that whoever measures can let a phone cool down and look at it in between.

#include "tools/commands.h"
#include "tools/signals.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>

namespace mkd_run {

namespace {

int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// One kind of test: a prompt of n_prompt tokens, or n_gen tokens one by one. The other is 0.
struct Test {
    int32_t n_prompt;
    int32_t n_gen;
};

struct Sample {
    int64_t              elapsed_ns = 0;
    int64_t              ttft_us    = 0; // pp: until the prompt's logits; tg: the first token
    std::vector<int64_t> itl_us;         // tg only
    mkd_stats            stats{};
    int64_t              n_majflt = 0;
};

std::vector<int32_t> read_tokens(const std::string & path, int32_t n_vocab) {
    const std::string bytes = read_file(path);
    if (bytes.empty() || bytes.size() % sizeof(int32_t) != 0) {
        throw Failure(MKD_ERR_FORMAT, path + ": has " + std::to_string(bytes.size()) + " bytes; expected int32 token ids, at least one");
    }
    std::vector<int32_t> ids;
    for (size_t i = 0; i < bytes.size(); i += sizeof(int32_t)) { // little endian on disk, whatever this machine is
        uint32_t id = 0;
        for (size_t k = 0; k < sizeof(int32_t); ++k) {
            id |= (uint32_t) (uint8_t) bytes[i + k] << (8 * k);
        }
        if (id >= (uint32_t) n_vocab) {
            throw Failure(MKD_ERR_ARG, path + ": id " + std::to_string((int32_t) id) + " at " + std::to_string(ids.size()) +
                                           "; the model's vocabulary has " + std::to_string(n_vocab) + " tokens");
        }
        ids.push_back((int32_t) id);
    }
    return ids;
}

class Bench {
  public:
    Bench(mkd_session_t session, const Options & options) : session_(session), options_(options) {
        check(mkd_session_model_info(session, &model_));
        tokens_ = read_tokens(options.tokens_file, model_.n_vocab);
    }

    void run(const Test & test) {
        const int32_t n = test.n_prompt + test.n_gen;
        if (n > model_.n_ctx / (model_.n_seq_max > 0 ? model_.n_seq_max : 1)) {
            throw Failure(MKD_ERR_CONTEXT, "a test of " + std::to_string(n) + " tokens does not fit into the context of " +
                                               std::to_string(model_.n_ctx) + "; raise -c");
        }
        const std::vector<int32_t> ids = test_ids(test);
        std::vector<Sample>        samples;
        if (options_.warmup) {
            measure(test, ids);
        }
        for (int32_t i = 0; i < options_.reps; ++i) {
            if (options_.paced) {
                emit("ready", { { "n_prompt", test.n_prompt }, { "n_gen", test.n_gen }, { "i_rep", i } });
                wait_for_line();
            }
            samples.push_back(measure(test, ids));
        }
        report(test, samples);
    }

  private:
    static void wait_for_line() {
        for (int c = 0; c != '\n';) {
            c = getchar();
            if (c == EOF) {
                throw Failure(MKD_ERR_INTERRUPTED, "stdin ended before the next repetition was asked for");
            }
        }
    }

    std::vector<int32_t> test_ids(const Test & test) const {
        std::vector<int32_t> ids;
        if (test.n_gen > 0) { // an empty context begins with BOS, where the model has one
            int32_t first[8];
            if (mkd_tokenize(session_, "", 0, first, 8, true, false) > 0) { // an error: no vocabulary, so no BOS either
                ids.push_back(first[0]);
            }
        }
        for (size_t i = 0; ids.size() < (size_t) (test.n_prompt + test.n_gen); ++i) {
            ids.push_back(tokens_[i % tokens_.size()]);
        }
        return ids;
    }

    Sample measure(const Test & test, const std::vector<int32_t> & ids) {
        const Working working(session_); // a signal stops the pass; while nothing runs it ends the program
        Sample        sample;
        check(mkd_memory_remove(session_, -1, 0, -1));
        check(mkd_stats_reset(session_));
        const int64_t majflt_before = majflt();
        const int64_t t_start       = now_ns();
        if (test.n_gen > 0) {
            sample.itl_us.resize(ids.size());
            check(mkd_decode_each(session_, ids.data(), (int32_t) ids.size(), sample.itl_us.data()));
        } else {
            for (size_t i = 0; i < ids.size(); i += (size_t) model_.n_batch) {
                const size_t n = std::min(ids.size() - i, (size_t) model_.n_batch);
                check(mkd_decode(session_, ids.data() + i, (int32_t) n, nullptr, nullptr, nullptr));
            }
        }
        sample.elapsed_ns = now_ns() - t_start;
        sample.n_majflt   = majflt() - majflt_before;
        sample.ttft_us    = test.n_gen > 0 ? sample.itl_us[0] : sample.elapsed_ns / 1000;
        check(mkd_stats_get(session_, &sample.stats));
        return sample;
    }

    static void report(const Test & test, const std::vector<Sample> & samples) {
        Json samples_ns = Json::array(), stats = Json::array(), itl_us = Json::array(), ttft_us = Json::array(), n_majflt = Json::array();
        for (const Sample & sample : samples) {
            samples_ns.push_back(sample.elapsed_ns);
            stats.push_back(to_json(sample.stats));
            itl_us.push_back(sample.itl_us);
            ttft_us.push_back(sample.ttft_us);
            n_majflt.push_back(sample.n_majflt);
        }
        emit("test", { { "n_prompt", test.n_prompt }, { "n_gen", test.n_gen }, { "samples_ns", samples_ns }, { "stats", stats }, { "itl_us", itl_us },
                       { "ttft_us", ttft_us }, { "rss_peak_bytes", rss_peak_bytes() }, { "majflt", n_majflt } });
    }

    mkd_session_t        session_;
    const Options &      options_;
    mkd_model_info       model_{};
    std::vector<int32_t> tokens_;
};

} // namespace

int run_bench(const Options & options) {
    const SessionPtr session = load_model(options);
    Bench            bench(session.get(), options);
    for (const int32_t n : options.n_prompt) {
        if (n > 0) { // 0: no such test, as in llama-bench
            bench.run({ n, 0 });
        }
    }
    for (const int32_t n : options.n_gen) {
        if (n > 0) {
            bench.run({ 0, n });
        }
    }
    return kDone;
}

} // namespace mkd_run
