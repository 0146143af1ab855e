// backend/matmul-group.h: the nodes of one layer that are computed together, found in the graph that the scheduler gave us.
//
// Of a MoE layer the device claims every matmul with routed experts, and what lies between them and is done to each row alone: the per-expert
// bias, the activation. So a layer is usually one group of two stages:
//
//     stage 0   MUL_MAT_ID up, MUL_MAT_ID gate | gate_up, (ADD_ID), GLU
//     stage 1   MUL_MAT_ID down, (ADD_ID)
//
// Where llama.cpp puts something else in between (a scale, an adapter) or evaluates node by node (cb_eval), the groups are smaller.

#pragma once

#include "backend/paged-experts.h"
#include "ggml.h"

#include <vector>

namespace mkd {

struct GroupNode {
    ggml_tensor * tensor = nullptr;
    int           i_part = -1;    // of the expert; -1: no matmul
    int           stage  = 0;
    bool          output = false; // somebody outside of the group reads it
    bool          bridge = false; // a later stage reads it
};

struct MatmulGroup {
    static constexpr size_t kMaxNodes = 12;

    PagedExperts *         experts = nullptr; // null: row-wise nodes alone, to be computed as they are
    int                    i_layer = -1;
    const ggml_tensor *    ids     = nullptr; // [n_expert_used, n_tokens] I32
    uint32_t               parts   = 0;
    std::vector<uint32_t>  stage_parts;       // parts that each stage needs
    std::vector<GroupNode> nodes;

    int n_stages() const { return (int) stage_parts.size(); }
    // The node that tensor is, or is a view of; -1: it comes from outside.
    int find(const ggml_tensor * tensor) const;
    void clear();
};

// May the device claim this node? (Called while the graph is split: sources are known, memory is not.)
bool claims(const ggml_tensor * node);

// Reads the next group from node i on, moves i behind it. An empty group: the end. Throws Error(UNSUPPORTED) for a node that is not ours.
void next_group(const ggml_cgraph * graph, int & i, MatmulGroup & group);

} // namespace mkd
