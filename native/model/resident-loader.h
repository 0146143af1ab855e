// model/resident-loader.h: brings the resident weights, at the storage's sequential rate.
//
// Reads resident.gguf once, front to back, in aligned blocks with O_DIRECT, several in flight; each lane copies its block's bytes to the
// tensors that they belong to. So the file's order decides, not the order in which llama.cpp made the tensors; nothing is read twice, and no page
// of the file stays in the page cache.
//
// Threads: called by the thread that loads; the lanes are its own and end with the call.

#pragma once

#include "backend/resident-buffer.h"
#include "model/gguf-stream.h"

#include <vector>

namespace mkd {

// Fills tensors (host memory) from the stream's file. Returns the bytes read. Throws Error(IO, FORMAT, NOMEM).
uint64_t load_resident(const GgufStream & stream, const std::vector<ResidentBufferType::NamedTensor> & tensors, bool direct_io, int n_lanes);

} // namespace mkd
