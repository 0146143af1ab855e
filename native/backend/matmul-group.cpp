#include "backend/matmul-group.h"

#include "backend/flash-buffer.h"
#include "base/error.h"
#include "ggml-impl.h" // use counts

#include <algorithm>

namespace mkd {

namespace {

constexpr int kMaxDepth = 8; // row-wise nodes and views between two matmuls

bool is_view(ggml_op op) {
    return op == GGML_OP_NONE || op == GGML_OP_VIEW || op == GGML_OP_RESHAPE || op == GGML_OP_PERMUTE || op == GGML_OP_TRANSPOSE;
}

const ggml_tensor * viewed(const ggml_tensor * tensor) {
    return tensor && tensor->view_src ? tensor->view_src : tensor;
}

// Operations that treat every row alone: the same numbers whatever rows stand beside it.
bool is_row_wise(ggml_op op) {
    return op == GGML_OP_GLU || op == GGML_OP_UNARY || op == GGML_OP_SQR || op == GGML_OP_ADD_ID;
}

// A view that keeps whole rows together: [ne0 <= row][n_expert_used][n_tokens] with the rows of what it views.
bool keeps_rows(const ggml_tensor * tensor) {
    const ggml_tensor * root = viewed(tensor);
    return tensor == root || (tensor->ne[1] == root->ne[1] && tensor->ne[2] == root->ne[2] && tensor->nb[0] == root->nb[0] &&
                              tensor->nb[1] == root->nb[1] && tensor->nb[2] == root->nb[2]);
}

bool from_experts(const ggml_tensor * tensor, int depth) {
    const ggml_tensor * root = viewed(tensor);
    if (!root || depth > kMaxDepth || !keeps_rows(tensor) || root->type != GGML_TYPE_F32) {
        return false;
    }
    if (root->op == GGML_OP_MUL_MAT_ID) {
        return flash_tensor(root->src[0]) != nullptr;
    }
    return is_row_wise(root->op) && from_experts(root->src[0], depth + 1) &&
           (root->op != GGML_OP_GLU || !root->src[1] || from_experts(root->src[1], depth + 1));
}

int uses_inside(const ggml_cgraph * graph, int first, int last, const ggml_tensor * tensor) {
    int n = 0;
    for (int i = first; i < last; ++i) {
        for (const ggml_tensor * src : graph->nodes[i]->src) {
            n += src == tensor;
        }
    }
    return n;
}

// Somebody behind node `last` reads the node, or one of the views of it that lie in the group.
bool is_read_outside(const ggml_cgraph * graph, int first, int last, const ggml_tensor * tensor) {
    for (int i = first; i < last; ++i) {
        const ggml_tensor * node = graph->nodes[i];
        if ((node == tensor || (is_view(node->op) && viewed(node) == tensor)) &&
            ((node->flags & GGML_TENSOR_FLAG_OUTPUT) ||
             ggml_node_get_use_count(graph, i) != uses_inside(graph, first, last, node))) {
            return true;
        }
    }
    return false;
}

} // namespace

int MatmulGroup::find(const ggml_tensor * tensor) const {
    const ggml_tensor * root = viewed(tensor);
    for (size_t i = 0; i < nodes.size(); ++i) {
        if (nodes[i].tensor == root) {
            return (int) i;
        }
    }
    return -1;
}

void MatmulGroup::clear() {
    experts = nullptr;
    i_layer = -1;
    ids     = nullptr;
    parts   = 0;
    stage_parts.clear();
    nodes.clear();
}

bool claims(const ggml_tensor * node) {
    if (is_view(node->op)) {
        return true;
    }
    if (node->op == GGML_OP_MUL_MAT_ID) {
        return flash_tensor(node->src[0]) != nullptr && node->src[1]->type == GGML_TYPE_F32 && node->src[2]->type == GGML_TYPE_I32;
    }
    return is_row_wise(node->op) && node->type == GGML_TYPE_F32 && !node->view_src && from_experts(node, 0);
}

void next_group(const ggml_cgraph * graph, int & i, MatmulGroup & group) {
    group.clear();
    const int first = i;
    for (; i < graph->n_nodes && group.nodes.size() < MatmulGroup::kMaxNodes; ++i) {
        ggml_tensor * node = graph->nodes[i];
        if (is_view(node->op)) {
            continue;
        }
        GroupNode           entry;
        const FlashTensor * flash = node->op == GGML_OP_MUL_MAT_ID ? flash_tensor(node->src[0]) : nullptr;
        entry.tensor              = node;
        if (flash) {
            const uint32_t part = 1u << flash->i_part;
            if (!group.nodes.empty() && (flash->experts != group.experts || flash->i_layer != group.i_layer || node->src[2] != group.ids ||
                                         (group.parts & part))) {
                break;
            }
            const int source = group.find(node->src[1]);
            group.experts    = flash->experts;
            group.i_layer    = flash->i_layer;
            group.ids        = node->src[2];
            group.parts |= part;
            entry.i_part = flash->i_part;
            entry.stage  = source < 0 ? 0 : group.nodes[(size_t) source].stage + 1;
            group.stage_parts.resize(std::max(group.stage_parts.size(), (size_t) entry.stage + 1), 0);
            group.stage_parts[(size_t) entry.stage] |= part;
        } else if (is_row_wise(node->op)) {
            const int a = group.find(node->src[0]);
            const int b = node->op == GGML_OP_GLU && node->src[1] ? group.find(node->src[1]) : a;
            if (a < 0 || b < 0) {
                if (!group.nodes.empty()) {
                    break;
                }
                group.nodes.push_back(entry); // its matmul was computed by an earlier call
                ++i;
                return;
            }
            entry.stage = std::max(group.nodes[(size_t) a].stage, group.nodes[(size_t) b].stage);
        } else {
            fail(MKD_ERR_UNSUPPORTED, "the expert device was given %s '%s'", ggml_op_name(node->op), node->name);
        }
        group.nodes.push_back(entry);
    }
    for (GroupNode & entry : group.nodes) {
        entry.output = is_read_outside(graph, first, i, entry.tensor);
        for (const GroupNode & other : group.nodes) {
            for (const ggml_tensor * src : other.tensor->src) {
                entry.bridge |= other.stage > entry.stage && src && viewed(src) == entry.tensor;
            }
        }
    }
}

} // namespace mkd
