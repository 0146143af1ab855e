// io/iobench.h: how fast this storage gives blocks, as the engine would read them.
//
// n_lanes threads read blocks of one size through the engine's own ByteSource, back to back, and every read's latency is kept in a
// histogram. Random: every block of the file once, in an order given by the seed, before any comes twice. Sequential: in file order, the lanes taking
// turns. Buffered runs start with the file's pages dropped from the page cache (as far as the kernel agrees) and have no read-ahead, like the
// engine's own buffered reads; once every block was read they measure the page cache.

#pragma once

#include "mkd.h"

#include <string>

namespace mkd {

// params: as mkd_iobench in mkd.h. note (may be null) receives what a user should know: why O_DIRECT was not used, or that the storage is slower
// than the throttle curve; else it is emptied. Blocks. Throws Error(ARG, IO, NOMEM).
mkd_iobench_result run_iobench(const mkd_iobench_params & params, std::string * note);

} // namespace mkd
