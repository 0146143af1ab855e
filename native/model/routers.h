// model/routers.h: finds the tensors that choose the experts, in a loaded model.

#pragma once

#include "backend/router-table.h"
#include "llama.h"
#include "store/package-index.h"

namespace mkd {

// One router per MoE layer of the package. What cannot be used for predicting (unknown names, types that cannot be read here) is left out: a
// prediction is never needed for a correct result. The tensors stay the model's.
RouterTable find_routers(const llama_model * model, const PackageIndex & index);

} // namespace mkd
