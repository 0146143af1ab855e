// tools/generate-command.cpp: mkd-run generate: one prompt from the command line, or many from stdin with the model kept loaded.
//
// A request is one JSON object a line; each is answered by token events and one done. An empty line, the end of input, SIGTERM or a lost reader
// ends the program. A request that cannot be served ends it too, with an error event: its sender is our own front end.

#include "tools/commands.h"
#include "tools/signals.h"

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <unistd.h>

namespace mkd_run {

namespace {

struct Request {
    std::string              prompt;
    std::vector<int32_t>     ids; // used when has_ids
    bool                     has_prompt    = false;
    bool                     has_ids       = false;
    bool                     add_special   = true;
    bool                     parse_special = true;
    int32_t                  n_predict     = -1;
    std::vector<std::string> stops;
    mkd_sampling             sampling{};
    std::string              grammar;
};

// ---------------------------------------------------------------- requests from stdin

// What a field of a request sets.
using Reader = void (*)(Request &, const Json &);

const std::pair<const char *, Reader> kFields[] = {
    { "prompt",
      [](Request & r, const Json & v) {
          r.prompt     = v.get<std::string>();
          r.has_prompt = true;
      } },
    { "ids",
      [](Request & r, const Json & v) {
          r.ids     = v.get<std::vector<int32_t>>();
          r.has_ids = true;
      } },
    { "add_special", [](Request & r, const Json & v) { r.add_special = v.get<bool>(); } },
    { "parse_special", [](Request & r, const Json & v) { r.parse_special = v.get<bool>(); } },
    { "n_predict", [](Request & r, const Json & v) { r.n_predict = v.get<int32_t>(); } },
    { "stops", [](Request & r, const Json & v) { r.stops = v.get<std::vector<std::string>>(); } },
    { "temp", [](Request & r, const Json & v) { r.sampling.temp = v.get<float>(); } },
    { "top_k", [](Request & r, const Json & v) { r.sampling.top_k = v.get<int32_t>(); } },
    { "top_p", [](Request & r, const Json & v) { r.sampling.top_p = v.get<float>(); } },
    { "min_p", [](Request & r, const Json & v) { r.sampling.min_p = v.get<float>(); } },
    { "seed", [](Request & r, const Json & v) { r.sampling.seed = (uint32_t) v.get<int64_t>(); } }, // -1: random
    { "grammar", [](Request & r, const Json & v) { r.grammar = v.get<std::string>(); } },
};

Request parse_request(const std::string & line, Request request) {
    const auto refuse = [](const std::string & why) { throw Failure(MKD_ERR_ARG, "request: " + why); };
    const Json object = Json::parse(line, nullptr, false);
    if (!object.is_object()) {
        refuse("not a JSON object: " + line.substr(0, 80));
    }
    for (const auto & [key, value] : object.items()) {
        Reader reader = nullptr;
        for (const auto & [name, candidate] : kFields) {
            reader = key == name ? candidate : reader;
        }
        if (!reader) {
            refuse("unknown field '" + key + "'");
        }
        if (value.is_null()) { // as if absent
            continue;
        }
        try {
            reader(request, value);
        } catch (const Json::exception &) {
            refuse("field '" + key + "' has a value of the wrong type: " + value.dump(-1, ' ', false, Json::error_handler_t::replace).substr(0, 80));
        }
    }
    if (request.has_ids == request.has_prompt) {
        refuse("one of 'prompt' and 'ids' is needed");
    }
    return request;
}

// The next line of stdin without its end. False: end of input.
bool read_line(std::string & line) {
    static std::string buffered;
    for (;;) {
        const size_t end = buffered.find('\n');
        if (end != std::string::npos) {
            line = buffered.substr(0, end);
            buffered.erase(0, end + 1);
            if (!line.empty() && line.back() == '\r') {
                line.pop_back();
            }
            return true;
        }
        char          block[65536];
        const ssize_t n = read(STDIN_FILENO, block, sizeof block);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            line.clear();
            line.swap(buffered); // a last line without an end
            return !line.empty();
        }
        buffered.append(block, (size_t) n);
    }
}

// ---------------------------------------------------------------- answers

struct Answer {
    mkd_session_t session   = nullptr;
    FILE *        logits    = nullptr; // --logits; null: not asked for
    int32_t       n_vocab   = 0;
    bool          is_broken = false; // the reader is gone
    bool          is_full   = false; // the logits could not be written
};

bool on_token(int32_t id, const char * text, size_t text_bytes, int64_t t_us, void * user) {
    Answer & answer = *(Answer *) user;
    const size_t n_logits = (size_t) answer.n_vocab;
    if (answer.logits && id >= 0 && fwrite(mkd_logits(answer.session, -1), sizeof(float), n_logits, answer.logits) != n_logits) {
        answer.is_full = true;
        return false;
    }
    try {
        emit("token", { { "id", id }, { "text", std::string(text, text_bytes) }, { "t_us", t_us } });
        return true;
    } catch (const std::exception &) {
        answer.is_broken = true;
        return false;
    }
}

// The file of --logits.
struct Logits {
    std::unique_ptr<FILE, int (*)(FILE *)> file{ nullptr, fclose };
    int32_t                                n_vocab = 0;

    Logits(mkd_session_t session, const std::string & path) {
        if (path.empty()) {
            return;
        }
        mkd_model_info info;
        check(mkd_session_model_info(session, &info));
        n_vocab = info.n_vocab;
        file.reset(fopen(path.c_str(), "wb"));
        if (!file) {
            throw Failure(MKD_ERR_IO, path + ": the logits cannot be written: " + strerror(errno));
        }
    }
};

// Returns enum mkd_stop.
int32_t answer(mkd_session_t session, Request & request, const Logits & logits) {
    if (!request.has_ids) {
        request.ids = tokenize(session, request.prompt, request.add_special, request.parse_special);
    }
    if (request.ids.empty()) {
        throw Failure(MKD_ERR_ARG, "the prompt is empty: it has no tokens");
    }
    request.sampling.grammar = request.grammar.empty() ? nullptr : request.grammar.c_str();
    std::vector<const char *> stops;
    for (const std::string & stop : request.stops) {
        stops.push_back(stop.c_str());
    }
    check(mkd_stats_reset(session));
    const int64_t majflt_before = majflt();
    Answer        answer{ session, logits.file.get(), logits.n_vocab };
    mkd_generated result;
    {
        const Working working(session);
        check(mkd_generate(session, request.ids.data(), (int32_t) request.ids.size(), request.n_predict, &request.sampling, stops.data(),
                           (int32_t) stops.size(), on_token, &answer, &result));
    }
    if (answer.is_broken) {
        throw BrokenOutput();
    }
    if (logits.file && (answer.is_full || fflush(logits.file.get()) != 0)) {
        throw Failure(MKD_ERR_IO, "the logits cannot be written: " + std::string(strerror(errno)));
    }
    mkd_stats stats;
    check(mkd_stats_get(session, &stats));
    emit("done", { { "stop", stop_name(result.stop) }, { "n_prompt", result.n_prompt }, { "n_cached", result.n_cached },
                   { "n_generated", result.n_generated }, { "seed", result.seed }, { "prompt_us", result.prompt_us },
                   { "generate_us", result.generate_us }, { "stats", to_json(stats) }, { "rss_peak_bytes", rss_peak_bytes() },
                   { "majflt", majflt() - majflt_before } });
    return result.stop;
}

} // namespace

int run_generate(const Options & options) {
    Request defaults;
    defaults.n_predict = options.n_predict;
    defaults.stops     = options.stops;
    defaults.sampling  = options.sampling;
    if (!options.grammar_file.empty()) {
        defaults.grammar = read_file(options.grammar_file);
    }
    if (!options.requests) { // before the model is loaded: a missing file is known at once
        defaults.prompt = options.has_prompt ? options.prompt : read_file(options.prompt_file);
    }
    const SessionPtr session = load_model(options);
    const Logits     logits(session.get(), options.logits_file);
    if (!options.requests) {
        const int32_t stop = answer(session.get(), defaults, logits);
        return stop == MKD_STOP_INTERRUPTED ? kSignalled + (exit_signal() ? exit_signal() : SIGINT) : kDone;
    }
    std::string line;
    while (read_line(line) && !line.empty()) {
        Request request = parse_request(line, defaults);
        answer(session.get(), request, logits);
        if (is_terminated()) {
            return kSignalled + SIGTERM;
        }
    }
    return kDone;
}

} // namespace mkd_run
