// c_api/params.h: defaults and ranges of mkd_session_params.

#pragma once

#include "mkd.h"

namespace mkd {

mkd_session_params default_session_params();

// Throws Error(ARG) that names the field, the value and what is expected: llama.cpp would abort on some of them.
void check_session_params(const mkd_session_params & params);

} // namespace mkd
