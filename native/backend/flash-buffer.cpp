#include "backend/flash-buffer.h"

#include "backend/ggml-mkd.h"
#include "base/error.h"

#include <cstring>

namespace mkd {

struct FlashBufferCalls {
    // buffer

    static void free_buffer(ggml_backend_buffer_t) {}

    static void * get_base(ggml_backend_buffer_t) {
        return (void *) (uintptr_t) kAlignmentBytes; // ggml wants an address; nothing lies there
    }

    static ggml_status init_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor) {
        FlashBufferType & type = *(FlashBufferType *) buffer->context;
        if (tensor->view_src) {
            return GGML_STATUS_SUCCESS;
        }
        int      layer = -1, expert = -1;
        PartRole role;
        auto     flash = std::make_unique<FlashTensor>();
        if (parse_expert_tensor_name(tensor->name, &layer, &role, &expert) && expert < 0) {
            flash->i_layer = type.experts_.layer_index(layer);
        }
        if (flash->i_layer >= 0) {
            const LayerExperts & experts = type.experts_.layer(flash->i_layer);
            flash->i_part                = experts.find_part(role);
            if (flash->i_part >= 0) {
                const ExpertPart & part = experts.parts[(size_t) flash->i_part];
                if (part.type != tensor->type || part.ne0 != tensor->ne[0] || part.ne1 != tensor->ne[1] ||
                    experts.n_expert() != tensor->ne[2] || tensor->ne[3] != 1) {
                    flash->i_part = -1;
                }
            }
        }
        if (flash->i_part < 0) {
            type.problem_ = format("tensor '%s' [%lld, %lld, %lld] is not what the package's shards hold", tensor->name,
                                   (long long) tensor->ne[0], (long long) tensor->ne[1], (long long) tensor->ne[2]);
            return GGML_STATUS_FAILED;
        }
        flash->experts = &type.experts_;
        flash->tensor  = tensor;
        flash->name    = tensor->name;
        tensor->extra  = flash.get();
        ggml_set_name(tensor, "");
        type.tensors_.push_back(std::move(flash));
        return GGML_STATUS_SUCCESS;
    }

    static void memset_tensor(ggml_backend_buffer_t, ggml_tensor *, uint8_t, size_t, size_t) {}
    static void set_tensor(ggml_backend_buffer_t, ggml_tensor *, const void *, size_t, size_t) {}
    static void get_tensor(ggml_backend_buffer_t, const ggml_tensor *, void * data, size_t, size_t size) { memset(data, 0, size); }
    static void clear(ggml_backend_buffer_t, uint8_t) {}

    // buffer type

    static const char * get_name(ggml_backend_buffer_type_t) { return "MKD_Flash"; }

    static ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
        const ggml_backend_buffer_i iface = {
            /* .free_buffer     = */ free_buffer,
            /* .get_base        = */ get_base,
            /* .init_tensor     = */ init_tensor,
            /* .memset_tensor   = */ memset_tensor,
            /* .set_tensor      = */ set_tensor,
            /* .get_tensor      = */ get_tensor,
            /* .set_tensor_2d   = */ nullptr,
            /* .get_tensor_2d   = */ nullptr,
            /* .cpy_tensor      = */ nullptr,
            /* .clear           = */ clear,
            /* .reset           = */ nullptr,
        };
        return ggml_backend_buffer_init(buft, iface, buft->context, size);
    }

    static size_t get_alignment(ggml_backend_buffer_type_t) { return 64; }
    static bool   is_host(ggml_backend_buffer_type_t) { return false; }
};

FlashBufferType::FlashBufferType(PagedExperts & experts)
    : buft_{
          /* .iface = */ {
              /* .get_name       = */ FlashBufferCalls::get_name,
              /* .alloc_buffer   = */ FlashBufferCalls::alloc_buffer,
              /* .get_alignment  = */ FlashBufferCalls::get_alignment,
              /* .get_max_size   = */ nullptr, // unlimited
              /* .get_alloc_size = */ nullptr, // ggml_nbytes
              /* .is_host        = */ FlashBufferCalls::is_host,
          },
          /* .device  = */ ggml_backend_reg_dev_get(ggml_backend_mkd_reg(), 0),
          /* .context = */ this,
      },
      experts_(experts) {}

size_t FlashBufferType::restore_names() {
    for (const auto & flash : tensors_) {
        ggml_set_name(flash->tensor, flash->name.c_str());
    }
    return tensors_.size();
}

bool FlashBufferType::is_flash(ggml_backend_buffer_type_t buft) {
    return buft && buft->iface.get_name == FlashBufferCalls::get_name;
}

const FlashTensor * flash_tensor(const ggml_tensor * tensor) {
    return tensor && tensor->buffer && FlashBufferType::is_flash(tensor->buffer->buft) ? (const FlashTensor *) tensor->extra : nullptr;
}

} // namespace mkd
