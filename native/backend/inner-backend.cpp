#include "backend/inner-backend.h"

#include "base/error.h"
#include "ggml-cpu.h"

namespace mkd {

namespace {

// The CPU device's function of this name, since which library holds it differs between builds.
void * cpu_proc(ggml_backend_t cpu, const char * name) {
    return ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(ggml_backend_get_device(cpu)), name);
}

} // namespace

void set_contiguous(ggml_tensor & tensor) {
    tensor.nb[0] = ggml_type_size(tensor.type);
    tensor.nb[1] = ggml_row_size(tensor.type, tensor.ne[0]);
    tensor.nb[2] = tensor.nb[1] * (size_t) tensor.ne[1];
    tensor.nb[3] = tensor.nb[2] * (size_t) tensor.ne[2];
}

ggml_tensor make_tensor(ggml_type type, int64_t ne0, int64_t ne1, int64_t ne2, void * data) {
    ggml_tensor tensor{};
    tensor.type  = type;
    tensor.ne[0] = ne0;
    tensor.ne[1] = ne1;
    tensor.ne[2] = ne2;
    tensor.ne[3] = 1;
    tensor.data  = data;
    set_contiguous(tensor);
    return tensor;
}

InnerBackend::InnerBackend() {
    cpu_ = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr);
    if (!cpu_) {
        fail(MKD_ERR_LLAMA, "ggml has no CPU backend");
    }
    ggml_init_params params = { /*.mem_size =*/ ggml_graph_overhead_custom(kMaxNodes, false) + ggml_tensor_overhead(),
                                /*.mem_buffer =*/ nullptr, /*.no_alloc =*/ true };
    ctx_   = ggml_init(params);
    graph_ = ggml_new_graph_custom(ctx_, kMaxNodes, false);
}

InnerBackend::~InnerBackend() {
    ggml_free(ctx_);
    ggml_backend_free(cpu_);
}

void InnerBackend::set_n_threads(int n_threads) {
    if (auto * set = (ggml_backend_set_n_threads_t) cpu_proc(cpu_, "ggml_backend_set_n_threads")) {
        set(cpu_, n_threads);
    }
}

void InnerBackend::set_abort_callback(ggml_abort_callback callback, void * data) {
    if (auto * set = (ggml_backend_set_abort_callback_t) cpu_proc(cpu_, "ggml_backend_set_abort_callback")) {
        set(cpu_, callback, data);
    }
}

void InnerBackend::set_threadpool(ggml_threadpool_t pool) {
    if (pool == pool_) {
        return;
    }
    if (auto * set = (decltype(&ggml_backend_cpu_set_threadpool)) cpu_proc(cpu_, "ggml_backend_cpu_set_threadpool")) {
        set(cpu_, pool);
        pool_ = pool;
    }
}

ggml_status InnerBackend::run(std::vector<ggml_tensor> & nodes) {
    ggml_graph_clear(graph_);
    for (ggml_tensor & node : nodes) {
        ggml_graph_add_node(graph_, &node);
    }
    return ggml_backend_graph_compute(cpu_, graph_);
}

} // namespace mkd
