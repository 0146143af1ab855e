// tools/commands.h: the commands of mkd-run, one file each. They return the exit code and throw Failure, BrokenOutput.

#pragma once

#include "tools/events.h"
#include "tools/options.h"

#include <memory>
#include <string>
#include <vector>

namespace mkd_run {

enum ExitCode { kDone = 0, kFailed = 1, kUsage = 2, kOverBudget = 5, kSignalled = 128 }; // the last: plus the signal's number

int run_generate(const Options & options);
int run_bench(const Options & options);

struct SessionDeleter {
    void operator()(mkd_session_t session) const { mkd_session_free(session); }
};
using SessionPtr = std::unique_ptr<mkd_session, SessionDeleter>;

// Opens the session and reports it: note, loaded.
SessionPtr load_model(const Options & options);

std::vector<int32_t> tokenize(mkd_session_t session, const std::string & text, bool add_special, bool parse_special);
std::string          read_file(const std::string & path); // throws Failure(IO)

} // namespace mkd_run
