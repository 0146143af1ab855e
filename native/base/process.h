// base/process.h: what the operating system says of this process.

#pragma once

#include <cstdint>

namespace mkd {

// Anonymous resident memory in bytes (RssAnon of /proc/self/status; VmRSS where the kernel does not split it). 0 if unknown.
uint64_t rss_anon_bytes();

// The address of `symbol` as the shared library that holds `inside` sees it; null if it is linked statically or has no such symbol.
const void * symbol_seen_from(const void * inside, const char * symbol);

} // namespace mkd
