#include "base/llama-log.h"

#include "llama.h"

#include <cstdlib>
#include <mutex>

namespace mkd {

namespace {

thread_local std::string   t_line;
thread_local ggml_log_level t_level = GGML_LOG_LEVEL_NONE;

void on_log(ggml_log_level level, const char * text, void * echo) {
    if (echo) {
        fputs(text, stderr);
    }
    // the first error says why; later ones only that it failed
    if ((level == GGML_LOG_LEVEL_ERROR && t_level != GGML_LOG_LEVEL_ERROR) || (level == GGML_LOG_LEVEL_WARN && t_level != GGML_LOG_LEVEL_ERROR)) {
        t_level = level;
        t_line  = text;
        while (!t_line.empty() && (t_line.back() == '\n' || t_line.back() == ' ')) {
            t_line.pop_back();
        }
        for (char & c : t_line) {
            c = c == '\n' ? ' ' : c;
        }
    }
}

} // namespace

void capture_llama_log() {
    static std::once_flag once;
    std::call_once(once, [] {
        const char * echo = getenv("MKD_LOG");
        llama_log_set(on_log, echo && *echo && *echo != '0' ? (void *) 1 : nullptr);
    });
}

void clear_llama_log() {
    t_line.clear();
    t_level = GGML_LOG_LEVEL_NONE;
}

std::string last_llama_log() {
    return t_line.empty() ? "no reason was logged" : t_line;
}

} // namespace mkd
