#include "backend/expert-matmul.h"

#include "backend/flash-buffer.h"
#include "base/clock.h"
#include "base/error.h"
#include "ggml-cpu.h"

#include <algorithm>
#include <cstring>

namespace mkd {

namespace {

constexpr size_t kMaxInnerNodes = 8;

// The CPU device's function of this name, since which library holds it differs between builds.
void * cpu_proc(ggml_backend_t cpu, const char * name) {
    return ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(ggml_backend_get_device(cpu)), name);
}

void set_strides(ggml_tensor & tensor) {
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
    set_strides(tensor);
    return tensor;
}

bool is_view(ggml_op op) {
    return op == GGML_OP_NONE || op == GGML_OP_VIEW || op == GGML_OP_RESHAPE || op == GGML_OP_PERMUTE || op == GGML_OP_TRANSPOSE;
}

int32_t id_at(const ggml_tensor * ids, int64_t k, int64_t token) {
    return *(const int32_t *) ((const char *) ids->data + (size_t) k * ids->nb[0] + (size_t) token * ids->nb[1]);
}

// Experts of a layer that are fetched, until it goes out of scope.
class Held {
  public:
    Held(PagedExperts & experts, int i_layer, const int32_t * ids, int n, uint32_t parts, bool counted, int32_t * slots)
        : experts_(experts), i_layer_(i_layer), ids_(ids), n_(n) {
        experts_.fetch(i_layer, ids, n, parts, counted, slots);
    }
    ~Held() { experts_.release(i_layer_, ids_, n_); }
    Held(const Held &)             = delete;
    Held & operator=(const Held &) = delete;

  private:
    PagedExperts &  experts_;
    int             i_layer_;
    const int32_t * ids_;
    int             n_;
};

} // namespace

struct ExpertMatmul::Group {
    PagedExperts *             experts = nullptr;
    int                        i_layer = -1;
    const ggml_tensor *        ids     = nullptr; // [n_expert_used, n_tokens] I32
    uint32_t                   parts   = 0;
    bool                       entry   = false; // the first matmuls of this layer in this batch
    std::vector<ggml_tensor *> nodes;
};

ExpertMatmul::ExpertMatmul() {
    inner_ = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr);
    if (!inner_) {
        fail(MKD_ERR_LLAMA, "ggml has no CPU backend");
    }
    ggml_init_params params = { /*.mem_size =*/ ggml_graph_overhead_custom(kMaxInnerNodes, false) + ggml_tensor_overhead(),
                                /*.mem_buffer =*/ nullptr, /*.no_alloc =*/ true };
    graph_ctx_   = ggml_init(params);
    inner_graph_ = ggml_new_graph_custom(graph_ctx_, kMaxInnerNodes, false);
}

ExpertMatmul::~ExpertMatmul() {
    ggml_backend_buffer_free(slab_buffer_);
    ggml_free(graph_ctx_);
    ggml_backend_free(inner_);
}

void ExpertMatmul::set_n_threads(int n_threads) {
    if (auto * set = (ggml_backend_set_n_threads_t) cpu_proc(inner_, "ggml_backend_set_n_threads")) {
        set(inner_, n_threads);
    }
}

void ExpertMatmul::set_abort_callback(ggml_abort_callback callback, void * data) {
    if (auto * set = (ggml_backend_set_abort_callback_t) cpu_proc(inner_, "ggml_backend_set_abort_callback")) {
        set(inner_, callback, data);
    }
}

void ExpertMatmul::set_threadpool(ggml_threadpool_t pool) {
    if (pool == pool_) {
        return;
    }
    if (auto * set = (decltype(&ggml_backend_cpu_set_threadpool)) cpu_proc(inner_, "ggml_backend_cpu_set_threadpool")) {
        set(inner_, pool);
        pool_ = pool;
    }
}

ggml_status ExpertMatmul::compute(ggml_cgraph * graph) {
    const int n_nodes = ggml_graph_n_nodes(graph);
    for (int i = 0; i < n_nodes;) {
        Group group;
        for (; i < n_nodes; ++i) {
            ggml_tensor * node = ggml_graph_node(graph, i);
            if (is_view(node->op)) {
                continue;
            }
            const FlashTensor * flash = node->op == GGML_OP_MUL_MAT_ID ? flash_tensor(node->src[0]) : nullptr;
            if (!flash) {
                fail(MKD_ERR_UNSUPPORTED, "the expert device was given %s '%s'", ggml_op_name(node->op), node->name);
            }
            const uint32_t part = 1u << flash->i_part;
            if (group.nodes.empty()) {
                group.experts = flash->experts;
                group.i_layer = flash->i_layer;
                group.ids     = node->src[2];
            } else if (flash->experts != group.experts || flash->i_layer != group.i_layer || node->src[2] != group.ids ||
                       (group.parts & part)) {
                break;
            }
            group.parts |= part;
            group.nodes.push_back(node);
        }
        if (group.nodes.empty()) {
            break;
        }
        const ggml_status status = compute_group(group);
        if (status != GGML_STATUS_SUCCESS) {
            return status;
        }
    }
    return GGML_STATUS_SUCCESS;
}

ggml_status ExpertMatmul::compute_group(const Group & group_in) {
    Group          group    = group_in;
    PagedExperts & experts  = *group.experts;
    const auto     lock     = experts.lock();
    const uint32_t all      = experts.layer(group.i_layer).all_parts();
    group.entry             = !(pass_i_layer_ == group.i_layer && pass_ids_ == group.ids && !(pass_parts_ & group.parts));
    pass_parts_             = group.entry ? group.parts : pass_parts_ | group.parts;
    pass_i_layer_           = group.i_layer;
    pass_ids_               = group.ids;

    find_experts(group);
    if (group.entry) {
        experts.route(group.i_layer, ids_.data(), (int) group.ids->ne[0], (int) group.ids->ne[1]);
    }
    const bool        direct = (int) experts_.size() <= experts.n_slots(group.i_layer);
    const ggml_status status = direct ? compute_direct(group, group.entry ? all : group.parts) : compute_waves(group, group.parts);
    if (pass_parts_ == all) {
        experts.end_pass();
    }
    return status;
}

// experts_: the distinct experts, ascending. ids_: the router's ids, contiguous [n_tokens][n_expert_used].
void ExpertMatmul::find_experts(const Group & group) {
    const int     n_expert = group.experts->layer(group.i_layer).n_expert();
    const int64_t n_used = group.ids->ne[0], n_tokens = group.ids->ne[1];
    slot_of_.assign((size_t) n_expert, -1);
    ids_.resize((size_t) (n_used * n_tokens));
    experts_.clear();
    for (int64_t t = 0; t < n_tokens; ++t) {
        for (int64_t k = 0; k < n_used; ++k) {
            const int32_t expert = id_at(group.ids, k, t);
            if (expert < 0 || expert >= n_expert) {
                fail(MKD_ERR_LLAMA, "router of layer %d chose expert %d of %d", group.experts->layer(group.i_layer).layer, expert, n_expert);
            }
            ids_[(size_t) (t * n_used + k)] = expert;
            if (slot_of_[(size_t) expert] < 0) {
                slot_of_[(size_t) expert] = 0;
                experts_.push_back(expert);
            }
        }
    }
    std::sort(experts_.begin(), experts_.end());
}

// A view [ne0, ne1, n_slots] of one part of the layer's slots.
void ExpertMatmul::bind_slots(PagedExperts & experts, int i_layer, int i_part, ggml_tensor & view) {
    if (slab_owner_ != &experts) {
        ggml_backend_buffer_free(slab_buffer_);
        slab_buffer_ = ggml_backend_cpu_buffer_from_ptr(experts.layer_slots(0), experts.slab_bytes());
        slab_owner_  = &experts;
    }
    const LayerExperts & layer = experts.layer(i_layer);
    const ExpertPart &   part  = layer.parts[(size_t) i_part];
    view        = make_tensor(part.type, part.ne0, part.ne1, experts.n_slots(i_layer), experts.layer_slots(i_layer) + part.offset_bytes);
    view.nb[2]  = layer.stride_bytes;
    view.nb[3]  = layer.stride_bytes * (size_t) view.ne[2];
    view.buffer = slab_buffer_;
}

ggml_status ExpertMatmul::run() {
    ggml_graph_clear(inner_graph_);
    for (ggml_tensor & node : nodes_) {
        ggml_graph_add_node(inner_graph_, &node);
    }
    return ggml_backend_graph_compute(inner_, inner_graph_);
}

ggml_status ExpertMatmul::compute_direct(const Group & group, uint32_t parts) {
    PagedExperts & experts = *group.experts;
    const int      n       = (int) experts_.size();
    slots_.resize((size_t) n);
    const Held held(experts, group.i_layer, experts_.data(), n, parts, group.entry, slots_.data());
    for (int i = 0; i < n; ++i) {
        slot_of_[(size_t) experts_[(size_t) i]] = slots_[(size_t) i];
    }
    for (int32_t & id : ids_) {
        id = slot_of_[(size_t) id];
    }
    ids_tensor_ = make_tensor(GGML_TYPE_I32, group.ids->ne[0], group.ids->ne[1], 1, ids_.data());

    const size_t n_nodes = group.nodes.size();
    nodes_.resize(n_nodes);
    views_.resize(n_nodes);
    for (size_t i = 0; i < n_nodes; ++i) {
        bind_slots(experts, group.i_layer, flash_tensor(group.nodes[i]->src[0])->i_part, views_[i]);
        nodes_[i]        = *group.nodes[i];
        nodes_[i].src[0] = &views_[i];
        nodes_[i].src[2] = &ids_tensor_;
    }
    const int64_t     t_start = now_us();
    const ggml_status status  = run();
    experts.count_compute(now_us() - t_start);
    return status;
}

ggml_status ExpertMatmul::compute_waves(const Group & group, uint32_t parts) {
    PagedExperts & experts  = *group.experts;
    const int64_t  n_used   = group.ids->ne[0];
    const int64_t  n_tokens = group.ids->ne[1];
    const int      n_slots  = experts.n_slots(group.i_layer);
    const size_t   n_nodes  = group.nodes.size();

    // rows of each expert, in the order in which ggml would visit them
    row_start_.assign((size_t) experts.layer(group.i_layer).n_expert() + 1, 0);
    for (const int32_t id : ids_) {
        row_start_[(size_t) id + 1] += 1;
    }
    for (size_t e = 1; e < row_start_.size(); ++e) {
        row_start_[e] += row_start_[e - 1];
    }
    rows_.resize(ids_.size());
    row_next_.assign(row_start_.begin(), row_start_.end() - 1);
    for (size_t row = 0; row < ids_.size(); ++row) {
        rows_[(size_t) row_next_[(size_t) ids_[row]]++] = (int32_t) row;
    }
    const auto n_rows_of = [&](int32_t e) { return row_start_[(size_t) e + 1] - row_start_[(size_t) e]; };

    // experts that are here go first, before a slot of theirs is needed for another
    std::stable_partition(experts_.begin(), experts_.end(), [&](int32_t e) { return !(parts & ~experts.present(group.i_layer, e)); });

    const size_t max_rows = (size_t) n_tokens;
    for (size_t first = 0; first < experts_.size();) {
        size_t n = 0, n_rows = 0;
        while (first + n < experts_.size() && n < (size_t) n_slots) {
            const size_t more = (size_t) n_rows_of(experts_[first + n]);
            if (n > 0 && n_rows + more > max_rows) {
                break;
            }
            n_rows += more;
            ++n;
        }
        const int32_t * wave = experts_.data() + first;
        slots_.resize(n);
        const Held held(experts, group.i_layer, wave, (int) n, parts, group.entry, slots_.data());
        experts.count_waves(1);

        wave_rows_.clear();
        wave_ids_.clear();
        for (size_t i = 0; i < n; ++i) {
            const int32_t e = wave[i];
            for (int32_t r = row_start_[(size_t) e]; r < row_start_[(size_t) e + 1]; ++r) {
                wave_rows_.push_back(rows_[(size_t) r]);
                wave_ids_.push_back(slots_[i]);
            }
        }
        ids_tensor_ = make_tensor(GGML_TYPE_I32, 1, (int64_t) n_rows, 1, wave_ids_.data());

        nodes_.resize(n_nodes);
        views_.resize(n_nodes);
        inputs_.resize(n_nodes);
        size_t n_results = 0;
        for (size_t i = 0; i < n_nodes; ++i) {
            n_results += (size_t) group.nodes[i]->ne[0] * n_rows;
        }
        results_.resize(std::max(results_.size(), n_results));
        float * result = results_.data();
        for (size_t i = 0; i < n_nodes; ++i) {
            const ggml_tensor * node = group.nodes[i];
            const ggml_tensor * src1 = node->src[1];
            if (i == 0 || src1 != group.nodes[i - 1]->src[1]) {
                if (i > 0) {
                    fail(MKD_ERR_UNSUPPORTED, "layer %d: matmuls of one group have different inputs", experts.layer(group.i_layer).layer);
                }
                const size_t row_bytes = (size_t) src1->ne[0] * sizeof(float);
                gathered_.resize(std::max(gathered_.size(), (size_t) src1->ne[0] * n_rows));
                for (size_t r = 0; r < n_rows; ++r) {
                    const int64_t token = wave_rows_[r] / n_used, k = wave_rows_[r] % n_used;
                    memcpy((char *) gathered_.data() + r * row_bytes,
                           (const char *) src1->data + (size_t) (k % src1->ne[1]) * src1->nb[1] + (size_t) token * src1->nb[2], row_bytes);
                }
            }
            inputs_[i] = make_tensor(GGML_TYPE_F32, src1->ne[0], 1, (int64_t) n_rows, gathered_.data());
            bind_slots(experts, group.i_layer, flash_tensor(node->src[0])->i_part, views_[i]);
            nodes_[i]       = *node; // op_params, flags
            nodes_[i].ne[1] = 1;
            nodes_[i].ne[2] = (int64_t) n_rows;
            set_strides(nodes_[i]);
            nodes_[i].data   = result;
            nodes_[i].src[0] = &views_[i];
            nodes_[i].src[1] = &inputs_[i];
            nodes_[i].src[2] = &ids_tensor_;
            result += (size_t) node->ne[0] * n_rows;
        }
        const int64_t     t_start = now_us();
        const ggml_status status  = run();
        for (size_t i = 0; i < n_nodes && status == GGML_STATUS_SUCCESS; ++i) {
            const ggml_tensor * node      = group.nodes[i];
            const size_t        row_bytes = (size_t) node->ne[0] * sizeof(float);
            for (size_t r = 0; r < n_rows; ++r) {
                const int64_t token = wave_rows_[r] / n_used, k = wave_rows_[r] % n_used;
                memcpy((char *) node->data + (size_t) k * node->nb[1] + (size_t) token * node->nb[2],
                       (const char *) nodes_[i].data + r * row_bytes, row_bytes);
            }
        }
        experts.count_compute(now_us() - t_start);
        if (status != GGML_STATUS_SUCCESS) {
            return status;
        }
        first += n;
    }
    return GGML_STATUS_SUCCESS;
}

uint64_t ExpertMatmul::work_bytes(const PackageIndex & index, int n_tokens, int n_expert_used, int n_threads) {
    ggml_init_params params = { ggml_graph_overhead_custom(1, false) + ggml_tensor_overhead(), nullptr, true };
    ggml_context *   ctx    = ggml_init(params);
    ggml_cgraph *    graph  = ggml_new_graph_custom(ctx, 1, false);
    uint64_t         plan = 0, gathered = 0, results = 0;
    int64_t          n_expert = 0;
    for (const LayerExperts & layer : index.layers) {
        uint64_t entry_results = 0;
        n_expert               = std::max(n_expert, (int64_t) layer.n_expert());
        for (const ExpertPart & part : layer.parts) {
            const bool  down = part.role == PartRole::down;
            ggml_tensor src0 = make_tensor(part.type, part.ne0, part.ne1, layer.n_expert(), nullptr);
            ggml_tensor src1 = make_tensor(GGML_TYPE_F32, part.ne0, down ? n_expert_used : 1, n_tokens, nullptr);
            ggml_tensor ids  = make_tensor(GGML_TYPE_I32, n_expert_used, n_tokens, 1, nullptr);
            ggml_tensor node = make_tensor(GGML_TYPE_F32, part.ne1, n_expert_used, n_tokens, nullptr);
            node.op          = GGML_OP_MUL_MAT_ID;
            node.src[0]      = &src0;
            node.src[1]      = &src1;
            node.src[2]      = &ids;
            ggml_graph_clear(graph);
            ggml_graph_add_node(graph, &node);
            plan     = std::max(plan, (uint64_t) ggml_graph_plan(graph, n_threads, nullptr).work_size);
            gathered = std::max(gathered, (uint64_t) part.ne0 * (uint64_t) n_tokens * sizeof(float));
            (down ? results : entry_results) = down ? std::max(results, (uint64_t) part.ne1 * (uint64_t) n_tokens * sizeof(float))
                                                    : entry_results + (uint64_t) part.ne1 * (uint64_t) n_tokens * sizeof(float);
        }
        results = std::max(results, entry_results);
    }
    ggml_free(ctx);
    const uint64_t n_ids = (uint64_t) n_tokens * (uint64_t) n_expert_used;
    return plan + gathered + results + (n_ids * 4 + (uint64_t) n_expert * 6) * sizeof(int32_t);
}

} // namespace mkd
