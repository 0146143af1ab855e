// backend/expert-matmul.h: the experts of a layer, computed over slots.
//
// One instance per llama context. compute() takes the nodes that the scheduler gave to our device, makes their experts present and runs them on the
// inner CPU backend with the router's ids replaced by slot numbers. Two ways:
//
// * in place: every expert is in its slot. Each node runs once, as llama.cpp meant it, over a strided view of the layer's slots.
// * in steps: some must be read. Experts are computed as they arrive (those that are here first, gate and up before down has come), while the
//   others are being read. The (token, k) rows that chose them are gathered into a compact input, computed with ids [1, n_rows], and scattered. Every
//   expert is read once per layer and batch, however few slots there are, and all rows of one expert run in one call, in their original order: some
//   types use another kernel from 8 rows on, so splitting them would change bits.
//
// Both give bit for bit what ggml's CPU backend gives on the merged tensor.
//
// Threads: one at a time (the context's).

#pragma once

#include "backend/inner-backend.h"
#include "backend/layer-visit.h"
#include "backend/matmul-group.h"
#include "backend/prefetcher.h"

#include <vector>

namespace mkd {

class ExpertMatmul {
  public:
    ExpertMatmul();
    ~ExpertMatmul();
    ExpertMatmul(const ExpertMatmul &)             = delete;
    ExpertMatmul & operator=(const ExpertMatmul &) = delete;

    InnerBackend & inner() { return inner_; }

    // Throws Error(IO, CORRUPT, BUDGET, UNSUPPORTED).
    ggml_status compute(ggml_cgraph * graph);

    // Upper bound of the bytes that all buffers of one instance take for a batch of n_tokens with n_expert_used experts each.
    static uint64_t work_bytes(const PackageIndex & index, int n_tokens, int n_expert_used, int n_threads);

  private:
    ggml_status compute_group();
    ggml_status compute_in_place(LayerVisit * visit); // null: no experts in it
    ggml_status compute_in_steps(LayerVisit & visit);
    ggml_status compute_chain(const std::vector<LayerVisit::Item *> & items, int first_stage, int last_stage);
    void        find_experts();
    void        sort_rows();
    void        bind_slots(int i_part, ggml_tensor & view);
    void        choose_items(LayerVisit & visit, int * first_stage, int * last_stage);
    int         n_rows_of(int32_t expert) const { return row_start_[(size_t) expert + 1] - row_start_[(size_t) expert]; }
    // The rows in chain_rows_ of source, which is computed by this chain, or lies in memory.
    ggml_tensor chain_input(const ggml_tensor * source, const std::vector<int> & node_of, bool outside);

    InnerBackend          inner_;
    Prefetcher            prefetcher_;
    MatmulGroup           group_;
    ggml_backend_buffer_t slab_buffer_ = nullptr; // so that ggml sees slot views as CPU memory
    PagedExperts *        slab_owner_  = nullptr;

    // scratch, kept between calls
    std::vector<int32_t> experts_;   // distinct experts of the batch, ascending
    std::vector<uint8_t> used_;      // [n_expert] 1: one of them
    std::vector<int32_t> slot_of_;   // [n_expert] slot, or -1
    std::vector<int32_t> ids_;       // [n_tokens][n_expert_used]: the router's
    std::vector<int32_t> slot_ids_;  // the same as slots
    std::vector<int32_t> rows_;      // rows of the batch (token * n_expert_used + k), grouped by expert
    std::vector<int32_t> row_start_, row_next_;              // [n_expert + 1], [n_expert] into rows_
    std::vector<LayerVisit::Item *> chosen_;
    std::vector<int32_t> chain_rows_, chain_slots_, chain_experts_; // [rows of one step]
    std::vector<float>   input_;                             // the group's input, where its memory may be written meanwhile
    std::vector<float>   gathered_;
    std::vector<std::vector<float>> results_;                // [node of the group]
    std::vector<ggml_tensor>        nodes_, sources_;
    ggml_tensor                     ids_tensor_{}, experts_tensor_{};

    // which matmuls of the current layer and batch were seen: tells its first group from the following ones
    int                 pass_i_layer_ = -1;
    const ggml_tensor * pass_ids_     = nullptr;
    uint32_t            pass_parts_   = 0;
};

} // namespace mkd
