// tools/events.h: JSON lines on stdout, and mkd.h's structs as JSON.
//
// Every line is written whole with write(2), past stdio: a signal that ends the program loses nothing and repeats nothing. When the reader is gone
// (EPIPE) BrokenOutput says so and the program ends: there is nobody left to work for.

#pragma once

#include "mkd.h"
#include "nlohmann/json.hpp"

#include <stdexcept>
#include <string>

namespace mkd_run {

using Json = nlohmann::ordered_json; // fields in the order in which they are documented

// A call of the C API that failed: its status and last error.
struct Failure : std::runtime_error {
    mkd_status status;
    Failure(mkd_status failed, const std::string & message) : std::runtime_error(message), status(failed) {}
};

struct BrokenOutput : std::exception {};

void check(mkd_status status); // throws Failure

// Writes {"event": name, ...fields}. Text that is not UTF-8 (a path) gets U+FFFD. Throws BrokenOutput.
void emit(const char * name, const Json & fields = Json::object());
void emit_note(const char * text); // nothing if it is empty

Json to_json(const mkd_model_info & info);
Json to_json(const mkd_memory_info & info);
Json to_json(const mkd_load_info & info);
Json to_json(const mkd_stats & stats);
Json to_json(const mkd_iobench_result & result);

const char * stop_name(int32_t stop);

// Of this process. 0 if unknown.
uint64_t rss_bytes();      // VmRSS
uint64_t rss_peak_bytes(); // VmHWM
int64_t  majflt();         // major page faults so far

} // namespace mkd_run
