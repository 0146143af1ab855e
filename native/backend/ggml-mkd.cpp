// backend/ggml-mkd.cpp: the tables that make the expert matmul a ggml device.
//
// The device is of type ACCEL, so llama.cpp adds it to every context. It claims MUL_MAT_ID whose weights lie in a flash buffer, and what is done
// row by row to their results (backend/matmul-group.h); its default buffer type is the CPU's, so inputs and outputs are never copied. The work is in expert-matmul.cpp.
//
// Errors never cross into ggml: they are kept for the thread (take_backend_error) and become GGML_STATUS_FAILED.

#include "backend/ggml-mkd.h"

#include "backend/expert-matmul.h"
#include "backend/flash-buffer.h"
#include "backend/matmul-group.h"
#include "base/error.h"
#include "ggml-backend-impl.h"
#include "ggml-cpu.h"

#include <cstring>
#include <mutex>

namespace {

thread_local std::exception_ptr t_error;
thread_local ggml_threadpool_t  t_pool = nullptr;

mkd::ExpertMatmul & matmul(ggml_backend_t backend) {
    return *(mkd::ExpertMatmul *) backend->context;
}

// ---------------------------------------------------------------- backend

const char * mkd_backend_get_name(ggml_backend_t) {
    return "MKD";
}

void mkd_backend_free(ggml_backend_t backend) {
    delete (mkd::ExpertMatmul *) backend->context;
    delete backend;
}

ggml_status mkd_backend_graph_compute(ggml_backend_t backend, ggml_cgraph * graph) {
    try {
        matmul(backend).inner().set_threadpool(t_pool);
        return matmul(backend).compute(graph);
    } catch (...) {
        t_error = std::current_exception();
        return GGML_STATUS_FAILED;
    }
}

const ggml_backend_i mkd_backend_interface = {
    /* .get_name            = */ mkd_backend_get_name,
    /* .free                = */ mkd_backend_free,
    /* .set_tensor_async    = */ nullptr,
    /* .get_tensor_async    = */ nullptr,
    /* .set_tensor_2d_async = */ nullptr,
    /* .get_tensor_2d_async = */ nullptr,
    /* .cpy_tensor_async    = */ nullptr,
    /* .synchronize         = */ nullptr,
    /* .graph_plan_create   = */ nullptr,
    /* .graph_plan_free     = */ nullptr,
    /* .graph_plan_update   = */ nullptr,
    /* .graph_plan_compute  = */ nullptr,
    /* .graph_compute       = */ mkd_backend_graph_compute,
    /* .event_record        = */ nullptr,
    /* .event_wait          = */ nullptr,
    /* .graph_optimize      = */ nullptr,
};

ggml_guid_t mkd_backend_guid() {
    static ggml_guid guid = { 0x6d, 0x6b, 0x64, 0x65, 0x70, 0x6c, 0x6f, 0x79, 0x2d, 0x65, 0x78, 0x70, 0x65, 0x72, 0x74, 0x73 };
    return &guid;
}

// ---------------------------------------------------------------- device

const char * mkd_device_get_name(ggml_backend_dev_t) {
    return "MKD";
}

const char * mkd_device_get_description(ggml_backend_dev_t) {
    return "routed experts paged from flash";
}

void mkd_device_get_memory(ggml_backend_dev_t, size_t * free, size_t * total) {
    *free  = 0;
    *total = 0;
}

enum ggml_backend_dev_type mkd_device_get_type(ggml_backend_dev_t) {
    return GGML_BACKEND_DEVICE_TYPE_ACCEL;
}

void mkd_device_get_props(ggml_backend_dev_t dev, ggml_backend_dev_props * props) {
    *props             = ggml_backend_dev_props{};
    props->name        = mkd_device_get_name(dev);
    props->description = mkd_device_get_description(dev);
    props->type        = mkd_device_get_type(dev);
}

ggml_backend_t mkd_device_init_backend(ggml_backend_dev_t dev, const char *) {
    try {
        auto * backend    = new ggml_backend{};
        backend->guid     = mkd_backend_guid();
        backend->iface    = mkd_backend_interface;
        backend->device   = dev;
        backend->context  = new mkd::ExpertMatmul();
        return backend;
    } catch (...) {
        t_error = std::current_exception();
        return nullptr;
    }
}

ggml_backend_buffer_type_t mkd_device_get_buffer_type(ggml_backend_dev_t) {
    return ggml_backend_cpu_buffer_type();
}

bool mkd_device_supports_op(ggml_backend_dev_t, const ggml_tensor * op) {
    return mkd::claims(op);
}

bool mkd_device_supports_buft(ggml_backend_dev_t, ggml_backend_buffer_type_t buft) {
    return mkd::FlashBufferType::is_flash(buft) || ggml_backend_buft_is_host(buft);
}

const ggml_backend_device_i mkd_device_interface = {
    /* .get_name             = */ mkd_device_get_name,
    /* .get_description      = */ mkd_device_get_description,
    /* .get_memory           = */ mkd_device_get_memory,
    /* .get_type             = */ mkd_device_get_type,
    /* .get_props            = */ mkd_device_get_props,
    /* .init_backend         = */ mkd_device_init_backend,
    /* .get_buffer_type      = */ mkd_device_get_buffer_type,
    /* .get_host_buffer_type = */ nullptr,
    /* .buffer_from_host_ptr = */ nullptr,
    /* .supports_op          = */ mkd_device_supports_op,
    /* .supports_buft        = */ mkd_device_supports_buft,
    /* .offload_op           = */ nullptr,
    /* .event_new            = */ nullptr,
    /* .event_free           = */ nullptr,
    /* .event_synchronize    = */ nullptr,
};

// ---------------------------------------------------------------- registry

const char * mkd_reg_get_name(ggml_backend_reg_t) {
    return "MKD";
}

size_t mkd_reg_get_device_count(ggml_backend_reg_t) {
    return 1;
}

ggml_backend_dev_t mkd_reg_get_device(ggml_backend_reg_t reg, size_t) {
    static ggml_backend_device device = { mkd_device_interface, reg, nullptr };
    return &device;
}

void mkd_set_n_threads(ggml_backend_t backend, int n_threads) {
    matmul(backend).inner().set_n_threads(n_threads);
}

void mkd_set_abort_callback(ggml_backend_t backend, ggml_abort_callback callback, void * data) {
    matmul(backend).inner().set_abort_callback(callback, data);
}

void * mkd_reg_get_proc_address(ggml_backend_reg_t, const char * name) {
    if (strcmp(name, "ggml_backend_set_n_threads") == 0) {
        return (void *) mkd_set_n_threads;
    }
    if (strcmp(name, "ggml_backend_set_abort_callback") == 0) {
        return (void *) mkd_set_abort_callback;
    }
    return nullptr;
}

const ggml_backend_reg_i mkd_reg_interface = {
    /* .get_name         = */ mkd_reg_get_name,
    /* .get_device_count = */ mkd_reg_get_device_count,
    /* .get_device       = */ mkd_reg_get_device,
    /* .get_proc_address = */ mkd_reg_get_proc_address,
};

} // namespace

ggml_backend_reg_t ggml_backend_mkd_reg(void) {
    static ggml_backend_reg reg = { /* .api_version = */ GGML_BACKEND_API_VERSION, mkd_reg_interface, nullptr };
    return &reg;
}

void ggml_backend_mkd_register(void) {
    static std::once_flag once;
    std::call_once(once, [] { ggml_backend_register(ggml_backend_mkd_reg()); });
    if (ggml_backend_reg_by_name("MKD") != ggml_backend_mkd_reg()) {
        mkd::fail(MKD_ERR_VERSION, "ggml's registry does not list the MKD backend: two copies of libggml in one process?");
    }
}

namespace mkd {

void set_expert_threadpool(ggml_threadpool_t pool) {
    t_pool = pool;
}

std::exception_ptr take_backend_error() {
    std::exception_ptr error = t_error;
    t_error                  = nullptr;
    return error;
}

} // namespace mkd
