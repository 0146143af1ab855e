#include "backend/resident-buffer.h"

#include <algorithm>

namespace mkd {

struct ResidentBufferCalls {
    // buffer

    static void free_buffer(ggml_backend_buffer_t) {} // the type owns the memory

    static ggml_status init_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor) {
        ResidentBufferType & type = *(ResidentBufferType *) buffer->buft->context;
        if (!tensor->view_src) {
            const auto place = type.places_.find(tensor->name);
            if (place == type.places_.end() || place->second.bytes != ggml_nbytes(tensor)) {
                return GGML_STATUS_FAILED; // llama.cpp checked the header that these places come from: a bug of ours
            }
            tensor->data = type.memory_.data() + place->second.offset;
            type.hidden_.emplace_back(tensor, tensor->name);
            ggml_set_name(tensor, "");
        }
        return GGML_STATUS_SUCCESS;
    }

    // buffer type

    static const char * get_name(ggml_backend_buffer_type_t) { return "MKD_Resident"; }

    static ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
        ResidentBufferType & type = *(ResidentBufferType *) buft->context;
        if (!type.loading_) {
            return ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), size);
        }
        // ggml lays the tensors out in `size` bytes and checks that they fit; init_tensor then moves them to their places in the file
        ggml_backend_buffer_t buffer = ggml_backend_cpu_buffer_from_ptr(type.memory_.data(), std::max<size_t>(size, type.memory_.bytes()));
        buffer->buft                 = buft;
        buffer->iface.free_buffer    = free_buffer;
        buffer->iface.init_tensor    = init_tensor;
        return buffer;
    }

    static size_t get_alignment(ggml_backend_buffer_type_t) { return ggml_backend_buft_get_alignment(ggml_backend_cpu_buffer_type()); }
    static bool   is_host(ggml_backend_buffer_type_t) { return true; }
};

ResidentBufferType::ResidentBufferType(const HugeMemory & memory, std::map<std::string, Place> places)
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
      },
      places_(std::move(places)), memory_(memory) {}

void ResidentBufferType::restore_names() {
    loading_ = false;
    for (const auto & [tensor, name] : hidden_) {
        ggml_set_name(tensor, name.c_str());
    }
    hidden_.clear();
    places_.clear();
}

} // namespace mkd
