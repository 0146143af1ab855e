// tools/mkd-run.cpp: the engine as a program: JSON lines on stdout (docs/engine-protocol.md).
//
// Uses mkd.h only. A failure is one error event, the last line, and the exit code: 2 for an argument, 5 for a budget, 128 + n for a signal, else 1.
// A mistake on the command line is one line on stderr and 2.

#include "tools/commands.h"
#include "tools/signals.h"

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace mkd_run {

SessionPtr load_model(const Options & options) {
    const mkd_session_params params = options.engine();
    mkd_session_t            handle = nullptr;
    check(mkd_session_init(&params, &handle));
    SessionPtr      session(handle);
    check(mkd_cache_set_cold(handle, options.cold));
    mkd_model_info  model;
    mkd_memory_info memory;
    mkd_load_info   load;
    check(mkd_session_model_info(handle, &model));
    check(mkd_session_memory_info(handle, &memory));
    check(mkd_session_load_info(handle, &load));
    emit_note(load.note);
    emit("loaded", { { "model", to_json(model) }, { "memory", to_json(memory) }, { "load", to_json(load) }, { "n_threads", params.n_threads },
                     { "rss_bytes", rss_bytes() } });
    return session;
}

std::vector<int32_t> tokenize(mkd_session_t session, const std::string & text, bool add_special, bool parse_special) {
    std::vector<int32_t> ids(text.size() + 8);
    int32_t n = mkd_tokenize(session, text.data(), (int32_t) text.size(), ids.data(), (int32_t) ids.size(), add_special, parse_special);
    if (n < 0 && n != INT32_MIN) {
        ids.resize((size_t) -n);
        n = mkd_tokenize(session, text.data(), (int32_t) text.size(), ids.data(), (int32_t) ids.size(), add_special, parse_special);
    }
    if (n < 0) {
        throw Failure(MKD_ERR_LLAMA, std::string("the prompt cannot be tokenized: ") + mkd_last_error());
    }
    ids.resize((size_t) n);
    return ids;
}

std::string read_file(const std::string & path) {
    FILE *      file = fopen(path.c_str(), "rb");
    std::string text;
    char        block[65536];
    if (file) {
        for (size_t n; (n = fread(block, 1, sizeof block, file)) > 0;) {
            text.append(block, n);
        }
    }
    const int error = !file || ferror(file) ? errno : 0;
    if (file) {
        fclose(file);
    }
    if (error) {
        throw Failure(MKD_ERR_IO, path + ": cannot be read: " + strerror(error));
    }
    return text;
}

namespace {

int run_iobench_command(const Options & options) {
    const mkd_iobench_params params = options.iobench();
    mkd_iobench_result       result;
    check(mkd_iobench(&params, &result));
    emit_note(result.note);
    Json fields           = to_json(result);
    fields["block_bytes"] = params.block_bytes;
    fields["n_lanes"]     = params.n_lanes;
    emit("iobench", fields);
    return kDone;
}

int run(const Options & options) {
    emit("hello", { { "version", mkd_version() }, { "revision", mkd_revision() }, { "abi_version", mkd_abi_version() },
                    { "llama_version", mkd_llama_version() }, { "target", MKD_TARGET }, { "variant", MKD_VARIANT }, { "rss_bytes", rss_bytes() } });
    switch (options.command) {
        case kGenerate: return run_generate(options);
        case kBench:    return run_bench(options);
        case kIobench:  return run_iobench_command(options);
        default:        return kDone;
    }
}

int exit_code(mkd_status status) {
    switch (status) {
        case MKD_ERR_ARG:         return kUsage;
        case MKD_ERR_BUDGET:      return kOverBudget;
        case MKD_ERR_INTERRUPTED: return kSignalled + (exit_signal() ? exit_signal() : SIGINT);
        default:                  return kFailed;
    }
}

int fail_with(mkd_status status, const char * message) {
    try {
        emit("error", { { "status", mkd_status_name(status) }, { "message", message } });
    } catch (const BrokenOutput &) {
        return kFailed;
    }
    return exit_code(status);
}

} // namespace

} // namespace mkd_run

int main(int argc, char ** argv) {
    using namespace mkd_run;
    try {
        const Options options = parse_options(argc, argv);
        if (options.help) {
            fputs(usage().c_str(), stdout);
            return kDone;
        }
        const char * debug = getenv("MKD_DEBUG");
        if (options.log || (debug && *debug && *debug != '0')) {
            setenv("MKD_LOG", "1", 1); // the engine's name for it
        }
        setenv("GGML_NO_BACKTRACE", "1", 0); // ggml's abort would print one on stdout
        install_signals();
        return run(options);
    } catch (const UsageError & error) {
        fprintf(stderr, "mkd-run: %s; see mkd-run --help\n", error.what());
        return kUsage;
    } catch (const BrokenOutput &) {
        return kFailed;
    } catch (const Failure & failure) {
        return fail_with(failure.status, failure.what());
    } catch (const std::bad_alloc &) {
        return fail_with(MKD_ERR_NOMEM, "out of memory");
    } catch (const std::exception & error) {
        return fail_with(MKD_ERR_LLAMA, error.what());
    }
}
