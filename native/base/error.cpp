#include "base/error.h"

#include <cstdarg>
#include <cstdio>

namespace mkd {

static std::string vformat(const char * fmt, va_list args) {
    va_list again;
    va_copy(again, args);
    const int n = vsnprintf(nullptr, 0, fmt, again);
    va_end(again);
    std::string text(n > 0 ? n : 0, '\0');
    if (n > 0) {
        vsnprintf(text.data(), text.size() + 1, fmt, args);
    }
    return text;
}

std::string format(const char * fmt, ...) {
    va_list args;
    va_start(args, fmt);
    std::string text = vformat(fmt, args);
    va_end(args);
    return text;
}

void fail(mkd_status status, const char * fmt, ...) {
    va_list args;
    va_start(args, fmt);
    std::string text = vformat(fmt, args);
    va_end(args);
    throw Error(status, text);
}

} // namespace mkd
