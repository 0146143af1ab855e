// base/llama-log.h: llama.cpp's log, kept for error messages.
//
// llama.cpp says why it refused only in its log. capture_llama_log() routes the log of llama.cpp and ggml here once per process: each thread
// keeps its last error (or else warning) line. With MKD_LOG=1 in the environment everything is also written to stderr.

#pragma once

#include <string>

namespace mkd {

void        capture_llama_log();
void        clear_llama_log();
std::string last_llama_log(); // of this thread; "no reason was logged" if there is none

} // namespace mkd
