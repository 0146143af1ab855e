#include "model/routers.h"

#include <map>
#include <string>
#include <utility>

// llama-model.h, which cannot be included alone; exported for llama.cpp's own tests.
const std::vector<std::pair<std::string, ggml_tensor *>> & llama_internal_get_tensor_map(const llama_model * model);

namespace mkd {

namespace {

// A vector of floats in memory, or null.
const ggml_tensor * float_vector(const std::map<std::string, ggml_tensor *> & tensors, const std::string & name, int64_t n) {
    const auto found = tensors.find(name);
    const bool usable = found != tensors.end() && found->second->type == GGML_TYPE_F32 && found->second->data && found->second->ne[0] == n &&
                        ggml_nelements(found->second) == n;
    return usable ? found->second : nullptr;
}

// The weights of the norm in front of the experts.
const ggml_tensor * norm_of(const std::map<std::string, ggml_tensor *> & tensors, int layer, int64_t n_embd) {
    for (const char * name : { "ffn_norm", "post_attention_norm" }) {
        if (const ggml_tensor * norm = float_vector(tensors, "blk." + std::to_string(layer) + "." + name + ".weight", n_embd)) {
            return norm;
        }
    }
    return nullptr;
}

} // namespace

RouterTable find_routers(const llama_model * model, const PackageIndex & index) {
    std::map<std::string, ggml_tensor *> tensors;
    for (const auto & [name, tensor] : llama_internal_get_tensor_map(model)) {
        tensors[name] = tensor;
    }
    RouterTable routers(index.layers.size());
    for (size_t i = 0; i < index.layers.size(); ++i) {
        const LayerExperts & layer  = index.layers[i];
        const std::string    prefix = "blk." + std::to_string(layer.layer) + ".";
        const auto           weight = tensors.find(prefix + "ffn_gate_inp.weight");
        if (weight == tensors.end() || weight->second->ne[1] != layer.n_expert() || !weight->second->data) {
            continue;
        }
        Router &      router = routers[i];
        const int64_t n_embd = weight->second->ne[0];
        router.weight        = weight->second;
        router.bias          = float_vector(tensors, prefix + "ffn_gate_inp.bias", layer.n_expert());
        router.select        = float_vector(tensors, prefix + "exp_probs_b.bias", layer.n_expert());
        if (i == 0) {
            continue;
        }
        const ggml_tensor * here   = norm_of(tensors, layer.layer, n_embd);
        const ggml_tensor * before = norm_of(tensors, index.layers[i - 1].layer, n_embd);
        if (!here || !before) {
            continue;
        }
        for (int64_t k = 0; k < n_embd; ++k) {
            const float from = ((const float *) before->data)[k], to = ((const float *) here->data)[k];
            router.rescale.push_back(from != 0 ? to / from : 0);
        }
        bool same = true;
        for (const float scale : router.rescale) {
            same &= scale == 1;
        }
        if (same) {
            router.rescale.clear();
        }
    }
    return routers;
}

} // namespace mkd
