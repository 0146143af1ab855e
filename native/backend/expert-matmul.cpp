#include "backend/expert-matmul.h"

#include "backend/flash-buffer.h"
#include "base/clock.h"
#include "base/error.h"
#include "ggml-cpu.h"
#include "ggml-impl.h"

#include <algorithm>
#include <cstring>

namespace mkd {

namespace {

constexpr size_t kFewRows = 64; // a step may have that many rows even where the batch has fewer tokens

size_t max_step_rows(int64_t n_tokens, int64_t n_used) {
    return (size_t) std::max(n_tokens, std::min<int64_t>(kFewRows, n_tokens * n_used));
}

int32_t id_at(const ggml_tensor * ids, int64_t k, int64_t token) {
    return *(const int32_t *) ((const char *) ids->data + (size_t) k * ids->nb[0] + (size_t) token * ids->nb[1]);
}

} // namespace

ExpertMatmul::ExpertMatmul() = default;

ExpertMatmul::~ExpertMatmul() {
    ggml_backend_buffer_free(slab_buffer_);
}

ggml_status ExpertMatmul::compute(ggml_cgraph * graph) {
    for (int i = 0;;) {
        next_group(graph, i, group_);
        if (group_.nodes.empty()) {
            return GGML_STATUS_SUCCESS;
        }
        const ggml_status status = group_.experts ? compute_group() : compute_in_place(nullptr);
        if (status != GGML_STATUS_SUCCESS) {
            return status;
        }
    }
}

ggml_status ExpertMatmul::compute_group() {
    PagedExperts & experts = *group_.experts;
    const auto     lock    = experts.lock();
    const uint32_t all     = experts.layer(group_.i_layer).all_parts();
    const bool     entry   = !(pass_i_layer_ == group_.i_layer && pass_ids_ == group_.ids && !(pass_parts_ & group_.parts));
    pass_parts_            = entry ? group_.parts : pass_parts_ | group_.parts;
    pass_i_layer_          = group_.i_layer;
    pass_ids_              = group_.ids;

    find_experts();
    if (entry) {
        prefetcher_.observe(experts, group_.i_layer, used_);
        experts.route(group_.i_layer, ids_.data(), (int) group_.ids->ne[0], (int) group_.ids->ne[1]);
    }
    // the parts of a later group, too, where they will still be here when it comes
    const bool  fits = (int) experts_.size() <= experts.n_slots(group_.i_layer);
    LayerVisit  visit(experts, group_.i_layer, experts_, entry && fits ? all : group_.parts, entry);
    visit.advance();
    if (entry) {
        prefetcher_.plan(experts, group_.i_layer, *group_.nodes[0].tensor->src[1], (int) group_.ids->ne[0], inner_);
    }
    if (visit.all_here()) {
        prefetcher_.demand_done();
    }
    const ggml_status status = visit.all_here() ? compute_in_place(&visit) : compute_in_steps(visit);
    if (status == GGML_STATUS_SUCCESS && pass_parts_ == all) {
        experts.end_pass(group_.i_layer);
    }
    return status;
}

// experts_, used_: the distinct experts. ids_: the router's ids, contiguous [n_tokens][n_expert_used].
void ExpertMatmul::find_experts() {
    const int     n_expert = group_.experts->layer(group_.i_layer).n_expert();
    const int64_t n_used = group_.ids->ne[0], n_tokens = group_.ids->ne[1];
    used_.assign((size_t) n_expert, 0);
    ids_.resize((size_t) (n_used * n_tokens));
    experts_.clear();
    for (int64_t t = 0; t < n_tokens; ++t) {
        for (int64_t k = 0; k < n_used; ++k) {
            const int32_t expert = id_at(group_.ids, k, t);
            if (expert < 0 || expert >= n_expert) {
                fail(MKD_ERR_LLAMA, "router of layer %d chose expert %d of %d", group_.experts->layer(group_.i_layer).layer, expert, n_expert);
            }
            ids_[(size_t) (t * n_used + k)] = expert;
            if (!used_[(size_t) expert]) {
                used_[(size_t) expert] = 1;
                experts_.push_back(expert);
            }
        }
    }
    std::sort(experts_.begin(), experts_.end());
}

// Rows of each expert, in the order in which ggml would visit them.
void ExpertMatmul::sort_rows() {
    row_start_.assign((size_t) group_.experts->layer(group_.i_layer).n_expert() + 1, 0);
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
}

// A view [ne0, ne1, n_slots] of one part of the layer's slots.
void ExpertMatmul::bind_slots(int i_part, ggml_tensor & view) {
    PagedExperts & experts = *group_.experts;
    if (slab_owner_ != &experts) {
        ggml_backend_buffer_free(slab_buffer_);
        slab_buffer_ = ggml_backend_cpu_buffer_from_ptr(experts.layer_slots(0), experts.slab_bytes());
        slab_owner_  = &experts;
    }
    const LayerExperts & layer = experts.layer(group_.i_layer);
    const ExpertPart &   part  = layer.parts[(size_t) i_part];
    view        = make_tensor(part.type, part.ne0, part.ne1, experts.n_slots(group_.i_layer), experts.layer_slots(group_.i_layer) + part.offset_bytes);
    view.nb[2]  = layer.stride_bytes;
    view.nb[3]  = layer.stride_bytes * (size_t) view.ne[2];
    view.buffer = slab_buffer_;
}

// ---------------------------------------------------------------- in place

ggml_status ExpertMatmul::compute_in_place(LayerVisit * visit) {
    const size_t n = group_.nodes.size();
    nodes_.resize(n);
    sources_.resize(n);
    if (visit) {
        slot_of_.assign(used_.size(), -1);
        for (const LayerVisit::Item & item : visit->items()) {
            slot_of_[(size_t) item.expert] = item.slot;
        }
        slot_ids_.resize(ids_.size());
        std::transform(ids_.begin(), ids_.end(), slot_ids_.begin(), [&](int32_t id) { return slot_of_[(size_t) id]; });
        ids_tensor_ = make_tensor(GGML_TYPE_I32, group_.ids->ne[0], group_.ids->ne[1], 1, slot_ids_.data());
    }
    for (size_t i = 0; i < n; ++i) {
        nodes_[i] = *group_.nodes[i].tensor;
        if (group_.nodes[i].i_part >= 0) {
            bind_slots(group_.nodes[i].i_part, sources_[i]);
            nodes_[i].src[0] = &sources_[i];
            nodes_[i].src[2] = &ids_tensor_;
        }
    }
    const int64_t     t_start = now_us();
    const ggml_status status  = inner_.run(nodes_);
    if (visit) {
        group_.experts->count_compute(now_us() - t_start);
        for (LayerVisit::Item & item : visit->items()) {
            visit->finish(item);
        }
    }
    return status;
}

// ---------------------------------------------------------------- in steps

ggml_status ExpertMatmul::compute_in_steps(LayerVisit & visit) {
    sort_rows();
    if (group_.n_stages() > 1) {
        // Stages of different experts interleave: what llama.cpp lets share the input's memory because it is written after the last read of it would
        // be written too early.
        const ggml_tensor * src = group_.nodes[0].tensor->src[1];
        input_.resize((size_t) ggml_nelements(src));
        for (int64_t t = 0; t < src->ne[2]; ++t) {
            for (int64_t k = 0; k < src->ne[1]; ++k) {
                memcpy(input_.data() + (t * src->ne[1] + k) * src->ne[0],
                       (const char *) src->data + (size_t) k * src->nb[1] + (size_t) t * src->nb[2], (size_t) src->ne[0] * sizeof(float));
            }
        }
    }
    results_.resize(std::max(results_.size(), group_.nodes.size()));
    bool storage_free = false;
    for (;;) {
        int first_stage = 0, last_stage = 0;
        choose_items(visit, &first_stage, &last_stage);
        if (!storage_free && visit.all_arrived()) {
            storage_free = true;
            prefetcher_.demand_done();
        }
        if (chosen_.empty()) {
            if (visit.done()) {
                return GGML_STATUS_SUCCESS;
            }
            visit.wait();
            visit.advance();
            continue;
        }
        const int64_t     t_start = now_us();
        const ggml_status status  = compute_chain(chosen_, first_stage, last_stage);
        group_.experts->count_compute(now_us() - t_start);
        group_.experts->count_waves(1);
        if (status != GGML_STATUS_SUCCESS) {
            return status;
        }
        for (LayerVisit::Item * item : chosen_) {
            item->stage = last_stage;
            if (last_stage == group_.n_stages()) {
                visit.finish(*item);
            }
        }
        visit.advance();
    }
}

// chosen_: items that can go through the same stages now, as many as a step may have.
void ExpertMatmul::choose_items(LayerVisit & visit, int * first_stage, int * last_stage) {
    const size_t max_rows = max_step_rows(group_.ids->ne[1], group_.ids->ne[0]);
    // While others wait for a slot, slots are given back in good time.
    const int    n_slots  = group_.experts->n_slots(group_.i_layer);
    const size_t max_items = visit.short_of_slots() ? (size_t) std::max(1, n_slots / 4) : SIZE_MAX;
    size_t       n_rows = 0;
    chosen_.clear();
    for (LayerVisit::Item & item : visit.items()) {
        if (item.done || item.slot < 0 || chosen_.size() == max_items) {
            continue;
        }
        int last = item.stage;
        while (last < group_.n_stages() && !(group_.stage_parts[(size_t) last] & ~item.arrived)) {
            ++last;
        }
        if (last == item.stage || (!chosen_.empty() && (item.stage != *first_stage || last != *last_stage))) {
            continue;
        }
        const auto more = (size_t) n_rows_of(item.expert);
        if (!chosen_.empty() && n_rows + more > max_rows) {
            continue;
        }
        *first_stage = item.stage;
        *last_stage  = last;
        n_rows += more;
        chosen_.push_back(&item);
    }
}

ggml_tensor ExpertMatmul::chain_input(const ggml_tensor * source, const std::vector<int> & node_of, bool outside) {
    const int64_t n_rows = (int64_t) chain_rows_.size();
    const int     i      = group_.find(source);
    if (i >= 0 && node_of[(size_t) i] >= 0) { // computed just before
        ggml_tensor input = make_tensor(GGML_TYPE_F32, source->ne[0], 1, n_rows, (char *) results_[(size_t) i].data() + source->view_offs);
        const auto  root  = (size_t) group_.nodes[(size_t) i].tensor->ne[0] * sizeof(float);
        input.nb[1] = input.nb[2] = root;
        input.nb[3]               = root * (size_t) n_rows;
        return input;
    }
    const int64_t n_used    = group_.ids->ne[0];
    const size_t  row_bytes = (size_t) source->ne[0] * sizeof(float);
    const bool    copied    = outside && group_.n_stages() > 1;
    const char *  data      = copied ? (const char *) input_.data() : (const char *) source->data;
    const size_t  nb1       = copied ? row_bytes : source->nb[1];
    const size_t  nb2       = copied ? row_bytes * (size_t) source->ne[1] : source->nb[2];
    gathered_.resize(std::max(gathered_.size(), (size_t) (source->ne[0] * n_rows)));
    for (size_t r = 0; r < chain_rows_.size(); ++r) {
        const int64_t token = chain_rows_[r] / n_used, k = chain_rows_[r] % n_used;
        memcpy((char *) gathered_.data() + r * row_bytes, data + (size_t) (k % source->ne[1]) * nb1 + (size_t) token * nb2, row_bytes);
    }
    return make_tensor(GGML_TYPE_F32, source->ne[0], 1, n_rows, gathered_.data());
}

// Stages [first_stage, last_stage) for the rows of some experts.
ggml_status ExpertMatmul::compute_chain(const std::vector<LayerVisit::Item *> & items, int first_stage, int last_stage) {
    chain_rows_.clear();
    chain_slots_.clear();
    chain_experts_.clear();
    for (const LayerVisit::Item * item : items) {
        for (int32_t r = row_start_[(size_t) item->expert]; r < row_start_[(size_t) item->expert + 1]; ++r) {
            chain_rows_.push_back(rows_[(size_t) r]);
            chain_slots_.push_back(item->slot);
            chain_experts_.push_back(item->expert);
        }
    }
    const auto n_rows = (int64_t) chain_rows_.size();
    ids_tensor_       = make_tensor(GGML_TYPE_I32, 1, n_rows, 1, chain_slots_.data());
    experts_tensor_   = make_tensor(GGML_TYPE_I32, 1, n_rows, 1, chain_experts_.data());

    nodes_.clear();
    nodes_.reserve(group_.nodes.size()); // pointers into them are kept
    sources_.resize(3 * group_.nodes.size());
    std::vector<int>    node_of(group_.nodes.size(), -1); // node of the group -> of the chain
    const ggml_tensor * gathered = nullptr;
    ggml_tensor         gathered_view{};
    for (size_t i = 0; i < group_.nodes.size(); ++i) {
        const GroupNode & entry = group_.nodes[i];
        if (entry.stage < first_stage || entry.stage >= last_stage) {
            continue;
        }
        ggml_tensor node = *entry.tensor; // op_params, flags
        node.ne[1]       = 1;
        node.ne[2]       = n_rows;
        set_contiguous(node);
        std::vector<float> & result = results_[i];
        result.resize(std::max(result.size(), (size_t) (node.ne[0] * n_rows)));
        node.data = result.data();
        if (entry.i_part >= 0) {
            const ggml_tensor * source  = entry.tensor->src[1];
            const int           inside  = group_.find(source);
            const bool          chained = inside >= 0 && node_of[(size_t) inside] >= 0;
            if (!chained && source != gathered && gathered) {
                fail(MKD_ERR_UNSUPPORTED, "layer %d: matmuls of one group have different inputs", group_.experts->layer(group_.i_layer).layer);
            }
            if (chained) {
                sources_[3 * i + 1] = chain_input(source, node_of, false);
            } else {
                gathered_view       = gathered ? gathered_view : chain_input(source, node_of, inside < 0);
                sources_[3 * i + 1] = gathered_view;
                gathered            = source;
            }
            bind_slots(entry.i_part, sources_[3 * i]);
            node.src[0] = &sources_[3 * i];
            node.src[1] = &sources_[3 * i + 1];
            node.src[2] = &ids_tensor_;
        } else {
            for (int s = 0; s < (node.op == GGML_OP_GLU ? 2 : 1); ++s) {
                if (node.src[s]) {
                    sources_[3 * i + (size_t) s] = chain_input(node.src[s], node_of, false);
                    node.src[s]                  = &sources_[3 * i + (size_t) s];
                }
            }
            if (node.op == GGML_OP_ADD_ID) {
                node.src[2] = &experts_tensor_;
            }
        }
        node_of[i] = (int) nodes_.size();
        nodes_.push_back(node);
    }
    const ggml_status status = inner_.run(nodes_);
    const int64_t     n_used = group_.ids->ne[0];
    for (size_t i = 0; i < group_.nodes.size() && status == GGML_STATUS_SUCCESS; ++i) {
        const GroupNode & entry = group_.nodes[i];
        if (node_of[i] < 0 || !(entry.output || (entry.bridge && last_stage < group_.n_stages()))) {
            continue;
        }
        const size_t row_bytes = (size_t) entry.tensor->ne[0] * sizeof(float);
        for (size_t r = 0; r < chain_rows_.size(); ++r) {
            const int64_t token = chain_rows_[r] / n_used, k = chain_rows_[r] % n_used;
            memcpy((char *) entry.tensor->data + (size_t) k * entry.tensor->nb[1] + (size_t) token * entry.tensor->nb[2],
                   (const char *) results_[i].data() + r * row_bytes, row_bytes);
        }
    }
    return status;
}

// ---------------------------------------------------------------- memory

uint64_t ExpertMatmul::work_bytes(const PackageIndex & index, int n_tokens, int n_expert_used, int n_threads) {
    ggml_init_params params = { ggml_graph_overhead_custom(1, false) + ggml_tensor_overhead(), nullptr, true };
    ggml_context *   ctx    = ggml_init(params);
    ggml_cgraph *    graph  = ggml_new_graph_custom(ctx, 1, false);
    const auto       n_rows = (uint64_t) max_step_rows(n_tokens, n_expert_used);
    uint64_t         plan = 0, input = 0, results = 0;
    int64_t          n_expert = 0;
    for (const LayerExperts & layer : index.layers) {
        uint64_t row_floats = 0, input_floats = 0; // of all results, of the widest input
        n_expert            = std::max(n_expert, (int64_t) layer.n_expert());
        for (const ExpertPart & part : layer.parts) {
            const bool down = part.role == PartRole::down;
            for (const int64_t rows : { (int64_t) n_tokens, (int64_t) n_rows }) { // as llama.cpp has them, and gathered
                const bool  gathered = rows != n_tokens;
                ggml_tensor src0 = make_tensor(part.type, part.ne0, part.ne1, layer.n_expert(), nullptr);
                ggml_tensor src1 = make_tensor(GGML_TYPE_F32, part.ne0, down && !gathered ? n_expert_used : 1, rows, nullptr);
                ggml_tensor ids  = make_tensor(GGML_TYPE_I32, gathered ? 1 : n_expert_used, rows, 1, nullptr);
                ggml_tensor node = make_tensor(GGML_TYPE_F32, part.ne1, gathered ? 1 : n_expert_used, rows, nullptr);
                node.op          = GGML_OP_MUL_MAT_ID;
                node.src[0]      = &src0;
                node.src[1]      = &src1;
                node.src[2]      = &ids;
                ggml_graph_clear(graph);
                ggml_graph_add_node(graph, &node);
                plan = std::max(plan, (uint64_t) ggml_graph_plan(graph, n_threads, nullptr).work_size);
            }
            row_floats += 2 * (uint64_t) part.ne1 + (down ? (uint64_t) part.ne0 : 0); // a bias each, and the activation
            input_floats = std::max(input_floats, (uint64_t) part.ne0);
        }
        results = std::max(results, row_floats * n_rows * sizeof(float));
        input   = std::max(input, input_floats * (n_rows + (uint64_t) n_tokens) * sizeof(float));
    }
    ggml_free(ctx);
    const uint64_t n_ids = (uint64_t) n_tokens * (uint64_t) n_expert_used;
    return plan + input + results + (n_ids * 6 + (uint64_t) n_expert * 8) * sizeof(int32_t);
}

} // namespace mkd
