#include "backend/resident-buffer.h"

#include <sys/mman.h>

namespace mkd {

namespace {

constexpr size_t kHugePageBytes = 2u << 20;

} // namespace

struct ResidentBufferCalls {
    // buffer

    static void free_buffer(ggml_backend_buffer_t buffer) { munmap(buffer->context, buffer->size); }

    static ggml_status init_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor) {
        ResidentBufferType & type = *(ResidentBufferType *) buffer->buft->context;
        if (type.loading_ && !tensor->view_src) {
            type.tensors_.emplace_back(tensor, tensor->name);
            ggml_set_name(tensor, "");
        }
        return GGML_STATUS_SUCCESS;
    }

    // buffer type

    static const char * get_name(ggml_backend_buffer_type_t) { return "MKD_Resident"; }

    static ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
        void * memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) {
            return nullptr; // llama.cpp says that it could not allocate
        }
        if (size >= kHugePageBytes) {
            madvise(memory, size, MADV_HUGEPAGE);
        }
        ggml_backend_buffer_t buffer = ggml_backend_cpu_buffer_from_ptr(memory, size);
        buffer->buft                 = buft;
        buffer->iface.free_buffer    = free_buffer;
        buffer->iface.init_tensor    = init_tensor;
        return buffer;
    }

    static size_t get_alignment(ggml_backend_buffer_type_t) { return ggml_backend_buft_get_alignment(ggml_backend_cpu_buffer_type()); }
    static bool   is_host(ggml_backend_buffer_type_t) { return true; }
};

ResidentBufferType::ResidentBufferType()
    : buft_{
          /* .iface = */ {
              /* .get_name       = */ ResidentBufferCalls::get_name,
              /* .alloc_buffer   = */ ResidentBufferCalls::alloc_buffer,
              /* .get_alignment  = */ ResidentBufferCalls::get_alignment,
              /* .get_max_size   = */ nullptr, // unlimited
              /* .get_alloc_size = */ nullptr, // ggml_nbytes
              /* .is_host        = */ ResidentBufferCalls::is_host,
          },
          /* .device  = */ ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU),
          /* .context = */ this,
      } {}

std::vector<ResidentBufferType::NamedTensor> ResidentBufferType::restore_names() {
    loading_ = false;
    for (const auto & [tensor, name] : tensors_) {
        ggml_set_name(tensor, name.c_str());
    }
    return std::move(tensors_);
}

} // namespace mkd
