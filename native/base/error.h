// base/error.h: how a stage reports that something went wrong.
//
// Inside the core a failure is an Error exception that carries an mkd_status and one line of text (what, where, what was expected).
// The C API and the ggml backend are the two borders where it becomes a status value; nothing is thrown across them.

#pragma once

#include "mkd.h"

#include <stdexcept>
#include <string>

namespace mkd {

class Error : public std::runtime_error {
  public:
    Error(mkd_status status, const std::string & message) : std::runtime_error(message), status_(status) {}
    mkd_status status() const { return status_; }

  private:
    mkd_status status_;
};

// printf into a std::string.
std::string format(const char * fmt, ...) __attribute__((format(printf, 1, 2)));

// Throws Error(status, format(fmt, ...)).
[[noreturn]] void fail(mkd_status status, const char * fmt, ...) __attribute__((format(printf, 2, 3)));

} // namespace mkd
