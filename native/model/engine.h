// model/engine.h: a loaded model that can decode.
//
// Owns everything of one session in the order in which it must die: llama context, llama model, paged experts (store, cache, slots).
// Opens a package (experts paged) or a stock GGUF (the baseline: same code path, no paging), so that both are measured by one loop.
//
// Threads: one at a time, except interrupt().

#pragma once

#include "base/error.h"
#include "llama.h"
#include "mkd.h"

#include <atomic>
#include <memory>
#include <string>

namespace mkd {

class PagedExperts;

class Engine {
  public:
    // Throws Error.
    static std::unique_ptr<Engine> open(const mkd_session_params & params);
    virtual ~Engine() = default;

    virtual llama_model *       model() const = 0;
    virtual llama_context *     ctx() const   = 0;
    virtual const llama_vocab * vocab() const = 0;

    virtual const mkd_model_info &  model_info() const  = 0;
    virtual const mkd_memory_info & memory_info() const = 0;
    virtual const mkd_load_info &   load_info() const   = 0;

    // llama_decode with errors as exceptions: an Error of the expert backend wins over llama.cpp's own status. On error the batch's positions
    // are removed. An interruption throws Error(MKD_ERR_INTERRUPTED) and clears the flag.
    virtual void decode(llama_batch batch) = 0;

    // Stops a running decode (llama.cpp's abort callback reads the flag). Any thread, async-signal-safe.
    void interrupt() { interrupted_.store(true); }
    bool interrupted() const { return interrupted_.load(); }
    void clear_interrupt() { interrupted_.store(false); }

    virtual PagedExperts * experts() const = 0; // null for a stock GGUF

  protected:
    std::atomic<bool> interrupted_{false};
};

} // namespace mkd
