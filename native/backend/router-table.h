// backend/router-table.h: the routers of a model, for predicting with them.
//
// Threads: written while the model loads, read afterwards.

#pragma once

#include "ggml.h"

#include <vector>

namespace mkd {

struct Router {
    const ggml_tensor * weight = nullptr; // [n_embd, n_expert]; null: unknown, cannot be asked
    const ggml_tensor * bias   = nullptr; // F32 [n_expert] or null
    const ggml_tensor * select = nullptr; // F32 [n_expert] added to sigmoid(logits) for the choice (DeepSeek-V3), or null
    std::vector<float>  rescale;          // [n_embd] from the previous MoE layer's input to this one's; empty: 1
};

using RouterTable = std::vector<Router>; // [i_layer]

} // namespace mkd
