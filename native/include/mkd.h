// mkd.h: the only header that bindings and tools need. Plain C.
//
// Conventions
//   Units live in names: _bytes, _us (microseconds, monotonic clock), n_ (counts), _rate (0..1).
//   Every function returns MKD_OK or a negative status unless it says otherwise; mkd_last_error() then has one line that names the
//   thing, the value seen and what was expected. The text belongs to the calling thread and lives until its next mkd_ call.
//   Handles are opaque. init pairs with free. No function throws, exits or aborts the process because of a file or an argument.
//   Structs start with struct_bytes: set it to sizeof(the struct) (mkd_*_default does), so that a stale caller is refused.
//   Expert ids and layers are 0-based and spelled as in the GGUF (layer L is blk.L).
//
// Threads
//   A session belongs to one thread at a time. mkd_session_interrupt is the one call any thread or signal handler may make meanwhile.
//   Different sessions may run in different threads at once.

#ifndef MKD_H
#define MKD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(MKD_BUILD)
#    define MKD_API __attribute__((visibility("default")))
#else
#    define MKD_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define MKD_ABI_VERSION 2
#define MKD_ALIGN_BYTES 4096

// ---------------------------------------------------------------- status

enum mkd_status {
    MKD_OK              = 0,
    MKD_ERR_ARG         = -1,  // an argument is out of range or a struct is of another version
    MKD_ERR_IO          = -2,  // a read, write or open failed (path, offset and errno in the message)
    MKD_ERR_FORMAT      = -3,  // a file is not what it should be (foreign, truncated, another version, shards that do not fit)
    MKD_ERR_CORRUPT     = -4,  // a checksum does not match
    MKD_ERR_BUDGET      = -5,  // the memory budget is too small; the message names the minimum
    MKD_ERR_NOMEM       = -6,  // the operating system refused memory
    MKD_ERR_LLAMA       = -7,  // llama.cpp refused (its own last error line is in the message)
    MKD_ERR_INTERRUPTED = -8,  // mkd_session_interrupt was called
    MKD_ERR_UNSUPPORTED = -9,  // the model or option cannot be served, with the reason
    MKD_ERR_CONTEXT     = -10, // the context (KV cache) is full
    MKD_ERR_VERSION     = -11, // another llama.cpp, ggml backend API or library than this was built for
};

MKD_API const char * mkd_status_name(enum mkd_status status);
MKD_API const char * mkd_last_error(void);

// ---------------------------------------------------------------- version

MKD_API int32_t      mkd_abi_version(void);   // MKD_ABI_VERSION of the library
MKD_API const char * mkd_version(void);       // "0.1.0"
MKD_API const char * mkd_revision(void);      // git revision it was built from, or "unknown"
MKD_API const char * mkd_llama_version(void); // llama.cpp's own version string, from the library that is loaded

// ---------------------------------------------------------------- session

typedef struct mkd_session * mkd_session_t;

enum mkd_load {
    MKD_LOAD_PAGED = 0, // a package: experts are paged from its shards
    MKD_LOAD_MMAP  = 1, // a stock GGUF by mmap: the baseline
    MKD_LOAD_NONE  = 2, // a stock GGUF read whole into memory: the ceiling
};

enum mkd_verify {
    MKD_VERIFY_FIRST  = 0, // each tensor of an expert is checked the first time it is read
    MKD_VERIFY_ALWAYS = 1,
    MKD_VERIFY_OFF    = 2,
};

enum mkd_prefetch {
    MKD_PREFETCH_OFF      = 0,
    MKD_PREFETCH_ROUTER   = 1, // experts that the next layer's router would choose for this layer's input
    MKD_PREFETCH_TEMPORAL = 2, // experts that recent tokens used
    MKD_PREFETCH_AUTO     = 3, // whichever of both is the surer. In every mode only what is expected to save more time than it costs is read
};

enum mkd_cache_policy {
    MKD_CACHE_LRU = 0,
    MKD_CACHE_LFU = 1, // with ageing
};

enum mkd_io {
    MKD_IO_AUTO  = 0, // io_uring where the kernel allows it, else pread
    MKD_IO_PREAD = 1, // a pool of threads
    MKD_IO_URING = 2, // refused (UNSUPPORTED) where it cannot be had
};

struct mkd_session_params {
    size_t       struct_bytes;
    const char * path;                // package folder (PAGED) or GGUF file (MMAP, NONE)
    int32_t      load;                // enum mkd_load
    uint64_t     memory_budget_bytes; // every byte the engine holds; 0: no bound. PAGED only
    int32_t      cache_slots;         // slots per MoE layer; 0: as many as the budget leaves (all experts without a budget)
    int32_t      n_ctx;               // 0: the model's own
    int32_t      n_batch;             // logical batch, >= 1
    int32_t      n_ubatch;            // physical batch, >= 1; no more than n_batch is used
    int32_t      n_seq_max;           // sequences, >= 1
    int32_t      n_outputs_max;       // rows of logits that one decode may ask for, >= n_seq_max; 0: n_batch
    int32_t      n_threads;           // compute threads, 0: the machine's cores
    int32_t      type_k, type_v;      // enum ggml_type of the KV cache; -1: F16
    int32_t      n_lanes;             // parallel reads; 0: from the throttle's curve, else 4
    uint64_t     io_chunk_bytes;      // of one read, a multiple of MKD_ALIGN_BYTES; 0: from the throttle's curve, else 1 MiB
    int32_t      io;                  // enum mkd_io
    int32_t      prefetch;            // enum mkd_prefetch
    int32_t      cache_policy;        // enum mkd_cache_policy
    bool         whole_experts;       // compute an expert only when all its tensors are there, instead of gate and up while down is read
    bool         direct_io;           // O_DIRECT where the file system allows it; else buffered, with a note
    bool         use_extra_bufts;     // llama.cpp's repacked weights (dies with SIGILL on AMX machines); default: false on x86, true else
    bool         swa_full;            // full-size cache for sliding-window layers
    bool         kv_unified;
    int32_t      verify;              // enum mkd_verify
    const char * lora_path;           // LoRA adapter GGUF or NULL; refused when it touches routed experts
    float        lora_scale;
    const char * throttle;            // NULL, or a curve "block_bytes:lanes:bytes_per_s,…": reads are slowed to it (io/slow)
    const char * device;              // ggml device that computes experts; NULL or "cpu"
};

// Defaults: n_ctx 4096, n_batch 2048, n_ubatch 512, one sequence, direct I/O, verify first, prefetch auto, cache LFU.
MKD_API struct mkd_session_params mkd_session_default_params(void);

// Opens the package, loads the resident weights, builds the context, and gives the rest of the budget to expert slots.
//   out   receives the handle; NULL on error
// Blocks on flash. Errors: ARG, IO, FORMAT, CORRUPT, BUDGET, NOMEM, LLAMA, UNSUPPORTED, VERSION.
MKD_API enum mkd_status mkd_session_init(const struct mkd_session_params * params, mkd_session_t * out);
MKD_API void            mkd_session_free(mkd_session_t session); // NULL is fine

// Makes a running or the next decode/generate stop with INTERRUPTED. Async-signal-safe. Cleared when that call returns.
MKD_API void mkd_session_interrupt(mkd_session_t session);

// ---------------------------------------------------------------- what was loaded

struct mkd_model_info {
    int32_t  n_layer, n_moe_layer, n_expert, n_expert_used, n_vocab, n_embd, n_ctx_train;
    int32_t  n_ctx, n_batch, n_ubatch, n_seq_max;       // as the context really has them
    uint64_t expert_payload_bytes, expert_stride_bytes; // of the largest layer; 0 for a stock GGUF
    uint64_t n_params, model_bytes;                     // as llama.cpp counts them (routed experts included)
    bool     has_encoder, add_bos;
    char     desc[128];                                 // llama.cpp's own description, as llama-bench prints it
    char     arch[64];
};

// Where the budget goes, in bytes. total = resident + kv + compute + output + slots + work + other, and total <= budget.
struct mkd_memory_info {
    uint64_t budget_bytes;     // 0: none
    uint64_t resident_bytes;   // non-routed weights
    uint64_t kv_bytes;         // KV cache
    uint64_t compute_bytes;    // llama.cpp's compute buffers
    uint64_t slots_bytes;      // expert slots
    uint64_t work_bytes;       // buffers of the expert matmul and of the readers
    uint64_t other_bytes;      // tokenizer, tables, allocator overhead: measured growth that none of the above explains
    uint64_t total_bytes;
    int32_t  slots_per_layer;  // the smallest of any layer
    int32_t  n_slots;          // all layers
    uint64_t minimum_bytes;    // a budget that this configuration accepts, hardly larger than the smallest one
};

struct mkd_load_info {
    int64_t  load_us;                    // from init to ready
    uint64_t resident_read_bytes;        // bytes read from resident.gguf
    uint64_t routed_requested_bytes;     // bytes of routed ranges that the loader asked for: stdio read-ahead at most
    bool     direct_io;                  // what was really used
    int32_t  io;                         // likewise: PREAD or URING
    int32_t  n_lanes;
    uint64_t io_chunk_bytes;
    char     note[256];                  // e.g. why O_DIRECT was not used; empty if nothing to say
};

MKD_API enum mkd_status mkd_session_model_info (mkd_session_t session, struct mkd_model_info  * out);
MKD_API enum mkd_status mkd_session_memory_info(mkd_session_t session, struct mkd_memory_info * out);
MKD_API enum mkd_status mkd_session_load_info  (mkd_session_t session, struct mkd_load_info   * out);

// Metadata of the model by GGUF key, as text. Returns the length, or -1 if absent; buf may be NULL.
MKD_API int32_t mkd_session_meta(mkd_session_t session, const char * key, char * buf, size_t buf_bytes);

// ---------------------------------------------------------------- tokens

// text -> ids. Returns the number of ids, or its negative if max is too small (call again), as llama_tokenize does.
MKD_API int32_t mkd_tokenize(mkd_session_t session, const char * text, int32_t text_bytes, int32_t * ids, int32_t max,
                             bool add_special, bool parse_special);
// id -> bytes (not zero-terminated, possibly a part of a UTF-8 character). Returns the length, negative if buf is too small.
MKD_API int32_t mkd_token_to_piece(mkd_session_t session, int32_t id, char * buf, int32_t buf_bytes, bool special);
MKD_API bool    mkd_token_is_eog(mkd_session_t session, int32_t id);

// ---------------------------------------------------------------- decode

// One llama_decode. ids, pos, seq_id, output: [n_tokens]; pos NULL: continue sequence 0; seq_id NULL: all 0; output NULL: last only.
// On error the positions of this batch are removed from the cache.
// Errors: ARG, IO, CORRUPT, INTERRUPTED, CONTEXT, LLAMA.
MKD_API enum mkd_status mkd_decode(mkd_session_t session, const int32_t * ids, int32_t n_tokens, const int32_t * pos,
                                   const int32_t * seq_id, const int8_t * output);
// Logits of the i-th token of the last batch (-1: the last output): [n_vocab] float32, the session's memory, valid until the next decode.
// NULL if that token had no output.
MKD_API const float * mkd_logits(mkd_session_t session, int32_t i_token);

// Removes positions [p0, p1) of seq_id (-1: all sequences; p1 -1: to the end).
MKD_API enum mkd_status mkd_memory_remove(mkd_session_t session, int32_t seq_id, int32_t p0, int32_t p1);
MKD_API int32_t         mkd_memory_pos_max(mkd_session_t session, int32_t seq_id); // -1: empty

// ---------------------------------------------------------------- generate

struct mkd_sampling {
    size_t       struct_bytes;
    uint32_t     seed;        // 0xFFFFFFFF: random; the seed used is in mkd_generated.seed
    float        temp;        // <= 0: greedy
    int32_t      top_k;       // <= 0: off
    float        top_p;       // >= 1: off
    float        min_p;       // <= 0: off
    const char * grammar;     // GBNF text or NULL
};
MKD_API struct mkd_sampling mkd_sampling_default(void); // llama.cpp's: temp 0.8, top-k 40, top-p 0.95, min-p 0.05

enum mkd_stop {
    MKD_STOP_LENGTH      = 0, // n_predict reached
    MKD_STOP_EOG         = 1, // the model ended its turn
    MKD_STOP_STRING      = 2, // a stop string appeared (it is not part of the text)
    MKD_STOP_CONTEXT     = 3, // the context is full
    MKD_STOP_INTERRUPTED = 4, // mkd_session_interrupt, or the callback returned false
};

struct mkd_generated {
    int32_t  n_prompt;      // prompt tokens decoded now (without those still in the cache)
    int32_t  n_cached;      // prompt tokens found in the KV cache
    int32_t  n_generated;
    int32_t  stop;          // enum mkd_stop
    uint32_t seed;
    int64_t  prompt_us;     // prompt decode
    int64_t  generate_us;   // from the end of the prompt to the last token: n_generated draws, one decode less
};

// Called on the calling thread for every token. text is whole UTF-8 characters only (maybe empty) and never part of a stop string; what is not
// UTF-8 becomes U+FFFD. t_us is the time of the draw on the monotonic clock. A token that ends the turn is not reported. Text that was held back as
// a possible stop string and turns out to be the end of the answer comes in a last call with id -1, where no token is left to bring it.
// Return false to stop. Must not call mkd_ functions on the same session.
typedef bool (*mkd_token_callback)(int32_t id, const char * text, size_t text_bytes, int64_t t_us, void * user);

// Continues sequence 0 with the prompt (ids, [n_prompt]): the longest prefix already in the KV cache is kept, the rest decoded; then samples
// up to n_predict tokens (-1: until the model stops or the context is full).
//   stops   [n_stops] UTF-8 strings
// Errors: as mkd_decode; an interruption is not an error here (stop says so).
MKD_API enum mkd_status mkd_generate(mkd_session_t session, const int32_t * prompt, int32_t n_prompt, int32_t n_predict,
                                     const struct mkd_sampling * sampling, const char * const * stops, int32_t n_stops,
                                     mkd_token_callback on_token, void * user, struct mkd_generated * out);

// Decodes ids [n_tokens] on sequence 0 one at a time (teacher forced, no sampling); itl_us [n_tokens] receives each token's time. For measuring.
MKD_API enum mkd_status mkd_decode_each(mkd_session_t session, const int32_t * ids, int32_t n_tokens, int64_t * itl_us);

// ---------------------------------------------------------------- experts

struct mkd_stats {
    uint64_t n_decode;            // physical batches that reached the expert matmul
    uint64_t n_tokens;            // their tokens
    uint64_t n_requests;          // distinct (layer, expert) requested, summed over batches
    uint64_t n_hits;              // of these: every needed tensor was in its slot
    uint64_t n_misses;            // of these: at least one tensor had to be waited for or read
    uint64_t n_evictions;
    uint64_t n_reads;             // read requests sent to storage
    uint64_t read_bytes;          // bytes brought from storage (with padding)
    uint64_t payload_bytes;       // of these: weights
    int64_t  load_us;             // summed over reads: from issue to completion
    int64_t  io_busy_us;          // time in which at least one read ran
    int64_t  stall_us;            // time the compute thread had nothing to compute and waited for reads
    int64_t  expert_compute_us;   // time in the inner device's matmul
    uint64_t n_layer_batches;     // (layer, batch) pairs; n_requests / n_layer_batches = unique experts per layer
    uint64_t n_waves;             // steps in which layers were computed whose experts were not all there
    uint64_t n_checksums;         // checksums computed
    uint64_t n_reread;            // reads repeated after a checksum mismatch
    uint64_t n_prefetch;          // experts whose prefetch began
    uint64_t n_prefetch_hits;     // of these: their layer's next batch used them (also if they were still on their way)
    uint64_t n_prefetch_useless;  // of these: complete, but their layer's next batch did without
    uint64_t n_prefetch_cancelled; // of these: given up before they were complete, for the same reason
    uint64_t prefetch_bytes;      // of read_bytes: by reads that began as prefetch
    uint64_t prefetch_waste_bytes; // of these: cancelled, or evicted before any use
};
MKD_API enum mkd_status mkd_stats_get(mkd_session_t session, struct mkd_stats * out);
MKD_API enum mkd_status mkd_stats_reset(mkd_session_t session);

// Drops every unpinned expert from the cache (the next pass reads all it needs).
MKD_API enum mkd_status mkd_cache_clear(mkd_session_t session);
// --cold: every expert is dropped after each pass.
MKD_API enum mkd_status mkd_cache_set_cold(mkd_session_t session, bool cold);

// Hooks. Called on the thread that decodes, inside the decode; must be short and must not block. NULL removes one.
//   on_route: the router's choice of a layer, ids [n_tokens][n_expert_used] in router order
//   on_load:  one expert (or some of its tensors) arrived; times are monotonic us; kind: enum mkd_load_kind
//   on_evict: an expert left its slot
enum mkd_load_kind {
    MKD_LOAD_KIND_DEMAND   = 0,
    MKD_LOAD_KIND_PREFETCH = 1, // it began as one; maybe it was asked for meanwhile
};
struct mkd_hooks {
    size_t struct_bytes;
    void (*on_route)(int32_t layer, const int32_t * ids, int32_t n_expert_used, int32_t n_tokens, void * user);
    void (*on_load) (int32_t layer, int32_t expert, uint64_t bytes, int64_t t_queue_us, int64_t t_done_us, int32_t kind, void * user);
    void (*on_evict)(int32_t layer, int32_t expert, void * user);
    void * user;
};
MKD_API enum mkd_status mkd_session_set_hooks(mkd_session_t session, const struct mkd_hooks * hooks);

// ---------------------------------------------------------------- store

typedef struct mkd_store * mkd_store_t;

// Opens a package's shards only (no model). Errors: IO, FORMAT.
MKD_API enum mkd_status mkd_store_init(const char * package, mkd_store_t * out);
MKD_API void            mkd_store_free(mkd_store_t store);
MKD_API int32_t         mkd_store_n_expert(mkd_store_t store, int32_t layer);          // 0: not a MoE layer
MKD_API uint64_t        mkd_store_expert_stride_bytes(mkd_store_t store, int32_t layer);
// Reads one expert into dst and verifies it.
//   layer, expert   0-based
//   dst, dst_bytes  caller's memory, MKD_ALIGN_BYTES aligned, >= the stride; valid only after MKD_OK
// Any thread. Blocks on flash. Errors: ARG, IO, CORRUPT.
MKD_API enum mkd_status mkd_store_read(mkd_store_t store, int32_t layer, int32_t expert, void * dst, uint64_t dst_bytes);

// ---------------------------------------------------------------- iobench

struct mkd_iobench_params {
    size_t       struct_bytes;
    const char * path;           // a file, or a folder in which a scratch file is made and removed
    uint64_t     block_bytes;    // multiple of 4096
    int32_t      n_lanes;
    bool         direct_io;
    bool         sequential;     // else random blocks
    uint64_t     total_bytes;    // stop after this much ...
    int64_t      max_us;         // ... or this long
    const char * throttle;       // as in mkd_session_params
    uint32_t     seed;
};
struct mkd_iobench_result {
    uint64_t bytes;
    uint64_t n_reads;
    int64_t  elapsed_us;
    double   bytes_per_s;
    int64_t  latency_us_p50, latency_us_p99;
    bool     direct_io;          // what was really used
    char     note[256];          // e.g. why O_DIRECT was not used, or that the storage is slower than the throttle; empty if nothing to say
};
MKD_API enum mkd_status mkd_iobench(const struct mkd_iobench_params * params, struct mkd_iobench_result * out);

// ---------------------------------------------------------------- replay

// Scores cache policies on a recorded routing, with the engine's own cache and policies: nothing is loaded. Any thread; does not touch storage.
struct mkd_replay_params {
    size_t          struct_bytes;
    const int32_t * ids;           // [n_tokens][n_moe_layer][n_expert_used], in router order
    int64_t         n_tokens;      // >= 1
    int32_t         n_moe_layer;   // >= 1
    int32_t         n_expert_used; // >= 1
    const int32_t * n_expert;      // [n_moe_layer], >= n_expert_used each
    const int32_t * batch_tokens;  // [n_batch] tokens of each batch, n_tokens together; NULL: one each, as in decode
    int64_t         n_batch;
    const int32_t * n_slots;       // [n_moe_layer], 1..n_expert each; policies with one pool have their sum
    const char *    policy;        // lru, lfu, belady: each layer its slots; lru-global, lru-protected, belady-global: one pool
};
struct mkd_replay_result {
    uint64_t n_requests;  // distinct (layer, expert) of each batch
    uint64_t n_hits;
    uint64_t n_loads;     // n_requests - n_hits
    uint64_t n_first;     // of these: the expert's first request, which no policy hits
    uint64_t n_evictions;
};
// Errors: ARG.
MKD_API enum mkd_status mkd_cache_replay(const struct mkd_replay_params * params, struct mkd_replay_result * out);
// The quotas with which LRU hits most in this routing.
//   params    n_slots and policy are not read
//   n_slots   in all, n_moe_layer..sum of n_expert
//   quotas    [n_moe_layer] receives each layer's: at least min(n_expert_used, n_slots / n_moe_layer)
// Errors: ARG.
MKD_API enum mkd_status mkd_cache_quotas(const struct mkd_replay_params * params, int64_t n_slots, int32_t * quotas);

#ifdef __cplusplus
}
#endif

#endif // MKD_H
