// tools/options.h: the command line of mkd-run.
//
// One table (options.cpp) drives parsing and the usage text. A mistake is one line that names the option and the value, and exit code 2.

#pragma once

#include "mkd.h"

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace mkd_run {

enum Command { kInfo = 1, kGenerate = 2, kBench = 4, kIobench = 8 }; // bits: an option may belong to several

struct UsageError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct Options {
    Command command = kInfo;
    bool    help    = false;
    bool    log     = false; // llama.cpp's log on stderr

    // engine; the strings back the pointers of engine()
    mkd_session_params params = mkd_session_default_params();
    std::string        path, lora, throttle, device;

    // generate
    mkd_sampling             sampling  = mkd_sampling_default();
    std::string              grammar_file;
    int32_t                  n_predict = -1;
    std::vector<std::string> stops;
    std::string              prompt, prompt_file, logits_file;
    bool                     has_prompt = false, requests = false;

    // bench
    std::string          tokens_file;
    std::vector<int32_t> n_prompt, n_gen;
    int32_t              reps = 5;
    bool                 cold = false, warmup = true, paced = false;

    // iobench
    mkd_iobench_params io = {};
    std::string        io_path;

    mkd_session_params engine() const; // valid as long as this object
    mkd_iobench_params iobench() const;
};

// Throws UsageError.
Options parse_options(int argc, char ** argv);

std::string usage();

} // namespace mkd_run
