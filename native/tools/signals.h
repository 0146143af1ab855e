// tools/signals.h: what SIGINT, SIGTERM and a lost reader do.
//
// While a session works (a Working object lives), SIGINT and SIGTERM stop what it does: the work returns "interrupted". When idle they end the
// program at once, with 130 and 143 as a shell reports such an end. After a SIGTERM the program ends once the running work has returned. SIGPIPE is
// ignored: write(2) reports it.
//
// An interrupt that arrives in the few instructions between the end of an answer and the end of Working stops the next one; nobody is worse off.

#pragma once

#include "mkd.h"

namespace mkd_run {

void install_signals();

class Working {
  public:
    explicit Working(mkd_session_t session);
    ~Working();
    Working(const Working &)             = delete;
    Working & operator=(const Working &) = delete;
};

int  exit_signal();   // the last of SIGINT, SIGTERM that came while working; 0: none
bool is_terminated(); // SIGTERM came

} // namespace mkd_run
