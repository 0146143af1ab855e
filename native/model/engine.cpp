// model/engine.cpp: package or GGUF -> llama model, context, expert slots.
//
// Order for a package: index -> store -> device registered -> model loaded from the virtual stream -> context -> what is left of the
// budget becomes slots. The slots come last because only then everything else is known; llama.cpp computes nothing before.

#include "model/engine.h"

#include "backend/expert-matmul.h"
#include "backend/flash-buffer.h"
#include "backend/ggml-mkd.h"
#include "backend/resident-buffer.h"
#include "base/clock.h"
#include "base/process.h"
#include "ggml-cpu.h"
#include "gguf.h"
#include "llama-ext.h"
#include "model/gguf-stream.h"
#include "base/llama-log.h"
#include "model/memory-plan.h"
#include "model/resident-loader.h"
#include "model/routers.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <sys/stat.h>
#include <thread>
#include <vector>

#if defined(__GLIBC__)
#    include <malloc.h>
#endif

namespace mkd {

namespace {

constexpr uint64_t kReserveBytes      = 4u << 20; // what llama.cpp and the allocator take while decoding
constexpr uint64_t kReservePerVocab   = 32;       // candidate lists of the samplers, per vocabulary entry

struct ModelDeleter {
    void operator()(llama_model * model) const { llama_model_free(model); }
};
struct ContextDeleter {
    void operator()(llama_context * ctx) const { llama_free(ctx); }
};
struct PoolDeleter {
    void operator()(ggml_threadpool * pool) const { ggml_threadpool_free(pool); }
};
struct LoraDeleter {
    void operator()(llama_adapter_lora * adapter) const { llama_adapter_lora_free(adapter); }
};

void trim_heap() {
#if defined(__GLIBC__)
    malloc_trim(0);
#endif
}

void check_libraries() {
    static std::once_flag once;
    std::call_once(once, [] {
        capture_llama_log();
        llama_backend_init();
    });
    // the backend's tables are those of one release's internal header
    const std::string llama = std::string(llama_version()).substr(0, strlen(MKD_LLAMA_VERSION)), ggml = ggml_version();
    if (llama != MKD_LLAMA_VERSION || ggml != MKD_GGML_VERSION) {
        fail(MKD_ERR_VERSION, "built for llama.cpp %s with ggml %s, but %s with %s is loaded; run `make native`", MKD_LLAMA_VERSION,
             MKD_GGML_VERSION, llama_version(), ggml.c_str());
    }
    // Other copies of libggml-base may be in the process (llama_cpp's Python module loads one more); ours must be the one of llama.cpp.
    const void * seen = symbol_seen_from((const void *) llama_version, "ggml_backend_register");
    if (seen && seen != (const void *) ggml_backend_register) {
        fail(MKD_ERR_VERSION, "llama.cpp uses another copy of libggml-base than this engine, and would never see its device; "
             "load llama.cpp from llama_cpp/lib only");
    }
}

void check_stock_file(const char * path) {
    struct stat st;
    if (stat(path, &st) != 0) {
        fail(MKD_ERR_IO, "%s: cannot open: %s", path, strerror(errno));
    }
    if (S_ISDIR(st.st_mode)) {
        fail(MKD_ERR_FORMAT, "%s: is a folder, expected a GGUF file", path);
    }
    FILE * file     = fopen(path, "rb");
    char   magic[4] = {};
    if (!file || fread(magic, 1, 4, file) != 4 || memcmp(magic, "GGUF", 4) != 0) {
        if (file) {
            fclose(file);
        }
        fail(MKD_ERR_FORMAT, "%s: not a GGUF file", path);
    }
    fclose(file);
}

std::string routed_pattern(const PackageIndex & index) {
    std::string layers;
    for (const LayerExperts & layer : index.layers) {
        layers += (layers.empty() ? "" : "|") + std::to_string(layer.layer);
    }
    return "^blk\\.(" + layers + ")\\.ffn_(gate|up|down|gate_up)_exps\\.weight$";
}

std::map<std::string, ResidentBufferType::Place> resident_places(const GgufStream & stream) {
    std::map<std::string, ResidentBufferType::Place> places;
    for (const GgufStream::ResidentTensor & tensor : stream.resident_tensors()) {
        places[tensor.name] = { tensor.file_offset, tensor.bytes };
    }
    return places;
}

int32_t meta_int(const llama_model * model, const std::string & key, int32_t missing) {
    char text[64];
    return llama_model_meta_val_str(model, key.c_str(), text, sizeof text) > 0 ? (int32_t) strtol(text, nullptr, 10) : missing;
}

// A LoRA on routed experts would need its own pages: refused. On anything else llama.cpp applies it.
void check_lora(const char * path) {
    gguf_init_params params = { /*.no_alloc =*/ true, /*.ctx =*/ nullptr };
    gguf_context *   lora   = gguf_init_from_file(path, params);
    if (!lora) {
        fail(MKD_ERR_FORMAT, "%s: not a readable LoRA GGUF", path);
    }
    std::unique_ptr<gguf_context, void (*)(gguf_context *)> holder(lora, gguf_free);
    for (int64_t i = 0; i < gguf_get_n_tensors(lora); ++i) {
        const char * name = gguf_get_tensor_name(lora, i);
        if (strstr(name, "_exps.")) {
            fail(MKD_ERR_UNSUPPORTED, "%s: changes routed experts (tensor '%s'), which are paged from flash; merge it into the model before converting",
                 path, name);
        }
    }
}

class LlamaEngine final : public Engine {
  public:
    explicit LlamaEngine(const mkd_session_params & params) : params_(params) {
        const int64_t  t_start = now_us();
        const uint64_t before  = rss_anon_bytes();
        check_libraries();
        clear_llama_log();
        if (params.device && strcmp(params.device, "cpu") != 0) {
            fail(MKD_ERR_UNSUPPORTED, "device '%s': this build computes experts on 'cpu'", params.device);
        }
        n_threads_ = params.n_threads > 0 ? params.n_threads : std::max(1, (int) std::thread::hardware_concurrency());
        if (params.load == MKD_LOAD_PAGED) {
            open_package();
        } else {
            open_stock();
        }
        check_writes_text();
        open_context(); // meanwhile the resident weights arrive
        if (resident_loader_) {
            load_info_.resident_read_bytes += resident_loader_->finish();
            resident_loader_.reset();
        }
        fill_model_info();
        apply_lora();
        if (experts_) {
            experts_->set_routers(find_routers(model_.get(), experts_->index()));
            give_slots(before);
        } else {
            measure_stock(before);
        }
        load_info_.load_us = now_us() - t_start;
    }

    llama_model *           model() const override { return model_.get(); }
    llama_context *         ctx() const override { return ctx_.get(); }
    const llama_vocab *     vocab() const override { return llama_model_get_vocab(model_.get()); }
    const mkd_model_info &  model_info() const override { return model_info_; }
    const mkd_memory_info & memory_info() const override { return memory_info_; }
    const mkd_load_info &   load_info() const override { return load_info_; }
    PagedExperts *          experts() const override { return experts_.get(); }

    void decode(llama_batch batch) override;

  private:
    void open_package();
    void open_stock();
    void check_budget_holds_weights() const;
    void check_writes_text();
    void open_context();
    void attach_threadpool();
    void fill_model_info();
    void apply_lora();
    void give_slots(uint64_t rss_before);
    void measure_stock(uint64_t rss_before);

    llama_model_params model_params() const {
        llama_model_params mp = llama_model_default_params();
        mp.devices            = const_cast<ggml_backend_dev_t *>(no_devices_); // everything on the CPU, whatever else ggml found
        mp.n_gpu_layers       = 0;
        mp.lazy_mode          = LLAMA_LAZY_MODE_OFF;
        mp.check_tensors      = false;
        mp.load_mtp           = false;
        mp.use_extra_bufts    = params_.use_extra_bufts;
        return mp;
    }

    const mkd_session_params & params_; // valid while opening only
    ggml_backend_dev_t         no_devices_[1] = { nullptr };
    int                        n_threads_     = 1;
    mkd_model_info             model_info_{};
    mkd_memory_info            memory_info_{};
    mkd_load_info              load_info_{};

    // destroyed in reverse order: adapter, context, model, then what the model's tensors point to
    std::unique_ptr<PagedExperts>                         experts_;
    std::unique_ptr<FlashBufferType>                      flash_;
    std::unique_ptr<HugeMemory>                           resident_memory_;
    std::unique_ptr<ResidentBufferType>                   resident_;
    std::unique_ptr<llama_model, ModelDeleter>            model_;
    std::unique_ptr<ggml_threadpool, PoolDeleter>         pool_; // outlives the context; null where ggml uses OpenMP
    std::unique_ptr<llama_context, ContextDeleter>        ctx_;
    std::unique_ptr<llama_adapter_lora, LoraDeleter>      lora_;

    std::unique_ptr<ResidentLoader> resident_loader_; // while opening only
};

void LlamaEngine::open_package() {
    PackageIndex index   = PackageIndex::open(params_.path);
    StoreOptions options;
    ReadPlan     plan;
    options.direct_io = params_.direct_io;
    options.verify    = (mkd_verify) params_.verify;
    if (params_.throttle && *params_.throttle) {
        const std::vector<CurvePoint> curve = parse_curve(params_.throttle);
        plan                                = choose_reads(curve);
        options.throttle                    = std::make_shared<Throttle>(curve);
    }
    PagingOptions paging;
    paging.reads.n_lanes     = params_.n_lanes > 0 ? params_.n_lanes : plan.n_lanes;
    paging.reads.chunk_bytes = params_.io_chunk_bytes > 0 ? (size_t) params_.io_chunk_bytes : plan.chunk_bytes;
    paging.reads.engine      = (ReadEngine) params_.io;
    paging.reads.plain_files = !options.throttle;
    paging.policy            = params_.cache_policy == MKD_CACHE_LRU ? "lru" : "lfu";
    paging.prefetch          = (PrefetchMode) params_.prefetch;
    paging.whole_experts     = params_.whole_experts;
    experts_                 = std::make_unique<PagedExperts>(ExpertStore::open(std::move(index), options), paging);
    const ReadQueue & reads   = experts_->reads();
    const int         n_lanes = reads.n_lanes();
    load_info_.direct_io      = experts_->store().direct_io();
    load_info_.io             = reads.engine() == ReadEngine::uring ? MKD_IO_URING : MKD_IO_PREAD;
    load_info_.n_lanes        = n_lanes;
    load_info_.io_chunk_bytes = reads.chunk_bytes();
    const std::string & note = experts_->store().note().empty() ? reads.note() : experts_->store().note();
    snprintf(load_info_.note, sizeof load_info_.note, "%s", options.throttle ? experts_->store().note().c_str() : note.c_str());

    check_budget_holds_weights();
    if (!params_.use_extra_bufts) { // else llama.cpp repacks weights on the way, and reads them from the stream
        resident_memory_ = std::make_unique<HugeMemory>(experts_->index().resident_file_bytes, "resident weights");
        resident_loader_ = std::make_unique<ResidentLoader>(experts_->index().resident_path, params_.direct_io, n_lanes, *resident_memory_);
    }
    ggml_backend_mkd_register();
    flash_ = std::make_unique<FlashBufferType>(*experts_);
    GgufStream stream(experts_->index(), params_.direct_io, n_lanes);
    if (resident_memory_) {
        resident_ = std::make_unique<ResidentBufferType>(*resident_memory_, resident_places(stream));
    }

    // the first pattern that matches decides
    const std::string                      pattern     = routed_pattern(experts_->index());
    const llama_model_tensor_buft_override overrides[] = {
        { pattern.c_str(), flash_->buft() },
        { resident_ ? "." : nullptr, resident_ ? resident_->buft() : nullptr },
        { nullptr, nullptr },
    };
    llama_model_params                      mp          = model_params();
    mp.load_mode             = LLAMA_LOAD_MODE_NONE;
    mp.tensor_buft_overrides = overrides;

    model_.reset(llama_model_load_from_file_ptr(stream.file(), mp));
    if (stream.error()) {
        std::rethrow_exception(stream.error());
    }
    const std::string & path = experts_->index().resident_path;
    if (!flash_->problem().empty()) {
        fail(MKD_ERR_FORMAT, "%s: %s", path.c_str(), flash_->problem().c_str());
    }
    if (!model_) {
        fail(MKD_ERR_LLAMA, "%s: llama.cpp cannot load it: %s", path.c_str(), last_llama_log().c_str());
    }
    size_t n_routed = 0;
    for (const LayerExperts & layer : experts_->index().layers) {
        n_routed += layer.parts.size();
    }
    const size_t n_bound = flash_->restore_names();
    if (n_bound != n_routed) {
        fail(MKD_ERR_FORMAT, "%s: the model has %zu routed tensors, the shards hold %zu", path.c_str(), n_bound, n_routed);
    }
    if (resident_) {
        resident_->restore_names();
    }
    load_info_.resident_read_bytes    = stream.resident_read_bytes();
    load_info_.routed_requested_bytes = stream.routed_requested_bytes();
}

// A budget that cannot hold the weights alone is refused before any of them is read; the rest is known later (memory-plan.h).
void LlamaEngine::check_budget_holds_weights() const {
    const uint64_t budget = params_.memory_budget_bytes, resident = experts_->index().resident_file_bytes;
    if (budget > 0 && budget < resident) {
        fail(MKD_ERR_BUDGET, "memory budget %.1f MiB is too small: the resident weights of %s alone take %.1f MiB; raise --memory",
             (double) budget / (1 << 20), params_.path, (double) resident / (1 << 20) + 0.1);
    }
}

void LlamaEngine::open_stock() {
    check_stock_file(params_.path);
    llama_model_params mp = model_params();
    mp.load_mode          = params_.load == MKD_LOAD_MMAP ? LLAMA_LOAD_MODE_MMAP : LLAMA_LOAD_MODE_NONE;
    model_.reset(llama_model_load_from_file(params_.path, mp));
    if (!model_) {
        fail(MKD_ERR_LLAMA, "%s: llama.cpp cannot load it: %s", params_.path, last_llama_log().c_str());
    }
}

void LlamaEngine::check_writes_text() {
    if (!llama_model_has_decoder(model_.get()) || llama_model_has_encoder(model_.get())) {
        fail(MKD_ERR_UNSUPPORTED, "%s: is an encoder or embedding model; only models that write text token by token are served", params_.path);
    }
}

void LlamaEngine::open_context() {
    llama_context_params cp = llama_context_default_params();
    cp.n_ctx                = (uint32_t) params_.n_ctx;
    cp.n_batch              = (uint32_t) params_.n_batch;
    cp.n_ubatch             = (uint32_t) std::min(params_.n_ubatch, params_.n_batch);
    cp.n_seq_max            = (uint32_t) params_.n_seq_max;
    cp.n_outputs_max        = (uint32_t) params_.n_outputs_max;
    cp.n_threads            = n_threads_;
    cp.n_threads_batch      = n_threads_;
    cp.type_k               = params_.type_k < 0 ? GGML_TYPE_F16 : (ggml_type) params_.type_k;
    cp.type_v               = params_.type_v < 0 ? GGML_TYPE_F16 : (ggml_type) params_.type_v;
    cp.swa_full             = params_.swa_full;
    cp.kv_unified           = params_.kv_unified;
    cp.no_perf              = true;
    cp.abort_callback       = [](void * self) { return ((LlamaEngine *) self)->interrupted(); };
    cp.abort_callback_data  = this;
    ctx_.reset(llama_init_from_model(model_.get(), cp));
    if (!ctx_) {
        if (const std::exception_ptr error = take_backend_error()) {
            std::rethrow_exception(error);
        }
        fail(MKD_ERR_LLAMA, "llama.cpp cannot create the context (n_ctx %d, n_ubatch %d, KV %s/%s): %s", params_.n_ctx, params_.n_ubatch,
             ggml_type_name(cp.type_k), ggml_type_name(cp.type_v), last_llama_log().c_str());
    }
    attach_threadpool();
    // the abort callback counts for the expert device too only once it exists
    llama_set_abort_callback(ctx_.get(), cp.abort_callback, cp.abort_callback_data);
}

// Without OpenMP ggml starts and ends its threads for every graph, and a MoE layer is several graphs, unless it is given threads that stay.
void LlamaEngine::attach_threadpool() {
    ggml_backend_reg_t cpu      = ggml_backend_dev_backend_reg(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU));
    auto * const       features = (ggml_backend_get_features_t) ggml_backend_reg_get_proc_address(cpu, "ggml_backend_get_features");
    auto * const       make     = (decltype(&ggml_threadpool_new)) ggml_backend_reg_get_proc_address(cpu, "ggml_threadpool_new");
    if (!features || !make) {
        return;
    }
    for (const ggml_backend_feature * feature = features(cpu); feature->name; ++feature) {
        if (strcmp(feature->name, "OPENMP") == 0) {
            return;
        }
    }
    ggml_threadpool_params params = ggml_threadpool_params_default(n_threads_);
    pool_.reset(make(&params));
    if (!pool_) {
        fail(MKD_ERR_NOMEM, "%d compute threads could not be started", n_threads_);
    }
    llama_attach_threadpool(ctx_.get(), pool_.get(), nullptr);
}

void LlamaEngine::fill_model_info() {
    mkd_model_info & info = model_info_;
    llama_model_meta_val_str(model_.get(), "general.architecture", info.arch, sizeof info.arch);
    llama_model_desc(model_.get(), info.desc, sizeof info.desc);
    info.n_layer       = llama_model_n_layer(model_.get());
    info.n_expert      = meta_int(model_.get(), std::string(info.arch) + ".expert_count", 0);
    info.n_expert_used = meta_int(model_.get(), std::string(info.arch) + ".expert_used_count", 0);
    info.n_vocab       = llama_vocab_n_tokens(vocab());
    info.n_embd        = llama_model_n_embd(model_.get());
    info.n_ctx_train   = llama_model_n_ctx_train(model_.get());
    info.n_ctx         = (int32_t) llama_n_ctx(ctx_.get());
    info.n_batch       = (int32_t) llama_n_batch(ctx_.get());
    info.n_ubatch      = (int32_t) llama_n_ubatch(ctx_.get());
    info.n_seq_max     = (int32_t) llama_n_seq_max(ctx_.get());
    info.n_params      = llama_model_n_params(model_.get());
    info.model_bytes   = llama_model_size(model_.get());
    info.has_encoder   = llama_model_has_encoder(model_.get());
    info.add_bos       = llama_vocab_get_add_bos(vocab());
    if (experts_) {
        info.n_moe_layer = (int32_t) experts_->index().layers.size();
        for (const LayerExperts & layer : experts_->index().layers) {
            info.expert_payload_bytes = std::max(info.expert_payload_bytes, (uint64_t) layer.payload_bytes);
            info.expert_stride_bytes  = std::max(info.expert_stride_bytes, (uint64_t) layer.stride_bytes);
            if (layer.n_expert() != info.n_expert) {
                fail(MKD_ERR_FORMAT, "%s: layer %d has %d experts, the metadata says %d", experts_->index().dir.c_str(), layer.layer,
                     layer.n_expert(), info.n_expert);
            }
        }
        if (info.n_expert_used < 1 || info.n_expert_used > info.n_expert) {
            fail(MKD_ERR_FORMAT, "%s: expert_used_count %d of %d experts", experts_->index().dir.c_str(), info.n_expert_used, info.n_expert);
        }
    }
}

void LlamaEngine::apply_lora() {
    if (!params_.lora_path || !*params_.lora_path) {
        return;
    }
    check_lora(params_.lora_path);
    lora_.reset(llama_adapter_lora_init(model_.get(), params_.lora_path));
    llama_adapter_lora * adapters[] = { lora_.get() };
    float                scales[]   = { params_.lora_scale };
    if (!lora_ || llama_set_adapters_lora(ctx_.get(), adapters, 1, scales) != 0) {
        fail(MKD_ERR_LLAMA, "%s: llama.cpp cannot apply the LoRA: %s", params_.lora_path, last_llama_log().c_str());
    }
}

void LlamaEngine::give_slots(uint64_t rss_before) {
    FixedMemory fixed{};
    for (const auto & [buft, bytes] : llama_get_memory_breakdown(ctx_.get())) {
        if (!FlashBufferType::is_flash(buft)) {
            fixed.resident_bytes += bytes.model;
            fixed.kv_bytes += bytes.context;
            fixed.compute_bytes += bytes.compute;
        }
    }
    trim_heap();
    const uint64_t growth    = rss_anon_bytes() - std::min(rss_before, rss_anon_bytes());
    const uint64_t explained = fixed.resident_bytes + fixed.kv_bytes; // touched by now; the compute buffers are not
    fixed.other_bytes = (growth > explained ? growth - explained : 0) + kReserveBytes + kReservePerVocab * (uint64_t) model_info_.n_vocab;
    fixed.work_bytes  = ExpertMatmul::work_bytes(experts_->index(), model_info_.n_ubatch, model_info_.n_expert_used, n_threads_);

    const MemoryPlan plan = plan_memory(experts_->index(), fixed, model_info_.n_expert_used, params_.memory_budget_bytes, params_.cache_slots);
    memory_info_          = plan.info;
    experts_->allocate(plan.n_slots);
}

void LlamaEngine::measure_stock(uint64_t rss_before) {
    for (const auto & [buft, bytes] : llama_get_memory_breakdown(ctx_.get())) {
        memory_info_.resident_bytes += bytes.model;
        memory_info_.kv_bytes += bytes.context;
        memory_info_.compute_bytes += bytes.compute;
    }
    const uint64_t growth    = rss_anon_bytes() - std::min(rss_before, rss_anon_bytes());
    const uint64_t explained = (params_.load == MKD_LOAD_NONE ? memory_info_.resident_bytes : 0) + memory_info_.kv_bytes;
    memory_info_.other_bytes = growth > explained ? growth - explained : 0;
    memory_info_.total_bytes = memory_info_.resident_bytes + memory_info_.kv_bytes + memory_info_.compute_bytes + memory_info_.other_bytes;
}

void LlamaEngine::decode(llama_batch batch) {
    llama_memory_t               memory = llama_get_memory(ctx_.get());
    std::map<llama_seq_id, llama_pos> pos_max; // before the batch
    for (int32_t i = 0; i < batch.n_tokens; ++i) {
        const llama_seq_id seq = batch.seq_id ? batch.seq_id[i][0] : 0;
        if (pos_max.find(seq) == pos_max.end()) {
            pos_max[seq] = llama_memory_seq_pos_max(memory, seq);
        }
    }
    clear_llama_log();
    take_backend_error();
    set_expert_threadpool(pool_.get());
    const int rc = llama_decode(ctx_.get(), batch);
    if (rc == 0) {
        return;
    }
    for (const auto & [seq, pos] : pos_max) {
        llama_memory_seq_rm(memory, seq, pos + 1, -1);
    }
    if (const std::exception_ptr error = take_backend_error()) {
        std::rethrow_exception(error);
    }
    if (rc == 2) {
        clear_interrupt();
        fail(MKD_ERR_INTERRUPTED, "interrupted");
    }
    if (rc == 1) {
        fail(MKD_ERR_CONTEXT, "the context of %d tokens is full; raise -c", model_info_.n_ctx);
    }
    fail(rc == -1 ? MKD_ERR_ARG : MKD_ERR_LLAMA, "llama_decode returned %d: %s", rc, last_llama_log().c_str());
}

} // namespace

std::unique_ptr<Engine> Engine::open(const mkd_session_params & params) {
    return std::make_unique<LlamaEngine>(params);
}

} // namespace mkd
