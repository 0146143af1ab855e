// base/process.h: what the operating system says of this process.

#pragma once

#include <cstdint>

namespace mkd {

// Anonymous resident memory in bytes (RssAnon of /proc/self/status; VmRSS where the kernel does not split it). 0 if unknown.
uint64_t rss_anon_bytes();

// How many different files whose name contains `part` are mapped: more than one libggml-base means two registries.
int n_loaded_libraries(const char * part);

} // namespace mkd
