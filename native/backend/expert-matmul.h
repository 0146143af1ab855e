// backend/expert-matmul.h: MUL_MAT_ID over slots.
//
// One instance per llama context. compute() takes the matmuls that the scheduler gave to our device, makes their experts present and runs
// them on the inner CPU backend with the router's ids replaced by slot numbers. Two ways:
//
// * direct: the layer's slots can hold every expert that the batch asks for. All are fetched, then each matmul runs once over a strided view
//   of the layer's slots. This is decode.
// * waves: they cannot. Experts are taken in groups that fit; the (token, k) rows that chose them are gathered into a compact src1,
//   computed with ids [1, n_rows], and scattered. Every expert is read once per layer and batch, and all rows of one expert run in one call, in their
//   original order: some types use another kernel from 8 rows on, so splitting them would change bits.
//
// Both give bit for bit what ggml's CPU backend gives on the merged tensor.
//
// Threads: one at a time (the context's).

#pragma once

#include "backend/paged-experts.h"
#include "ggml-backend.h"
#include "ggml.h"

#include <memory>
#include <vector>

namespace mkd {

class ExpertMatmul {
  public:
    ExpertMatmul();
    ~ExpertMatmul();
    ExpertMatmul(const ExpertMatmul &)             = delete;
    ExpertMatmul & operator=(const ExpertMatmul &) = delete;

    void set_n_threads(int n_threads);
    void set_abort_callback(ggml_abort_callback callback, void * data);
    void set_threadpool(ggml_threadpool_t pool); // null: ggml's own choice. Must outlive the last compute

    // Throws Error(IO, CORRUPT).
    ggml_status compute(ggml_cgraph * graph);

    // Upper bound of the bytes that all buffers of one instance take for a batch of n_tokens with n_expert_used experts each.
    static uint64_t work_bytes(const PackageIndex & index, int n_tokens, int n_expert_used, int n_threads);

  private:
    struct Group; // consecutive matmuls of one layer with the same ids

    ggml_status compute_group(const Group & group);
    ggml_status compute_direct(const Group & group, uint32_t parts);
    ggml_status compute_waves(const Group & group, uint32_t parts);
    ggml_status run(); // computes nodes_ on the inner backend
    void        find_experts(const Group & group);
    void        bind_slots(PagedExperts & experts, int i_layer, int i_part, ggml_tensor & view);

    ggml_backend_t    inner_ = nullptr;
    ggml_threadpool_t pool_  = nullptr;
    ggml_context * graph_ctx_ = nullptr; // holds inner_graph_ only
    ggml_cgraph *  inner_graph_ = nullptr;
    ggml_backend_buffer_t slab_buffer_ = nullptr; // so that ggml sees slot views as CPU memory
    PagedExperts *        slab_owner_  = nullptr;

    // scratch, kept between calls
    std::vector<int32_t> experts_;   // distinct experts of the batch, ascending
    std::vector<int32_t> slot_of_;   // [n_expert] slot, or -1
    std::vector<int32_t> slots_;     // [n experts fetched]
    std::vector<int32_t> ids_;       // [n_tokens][n_expert_used]: the router's, then slots
    std::vector<int32_t> rows_;      // rows of the batch (token * n_expert_used + k), grouped by expert
    std::vector<int32_t> row_start_, row_next_; // [n_expert + 1], [n_expert] into rows_
    std::vector<int32_t> wave_rows_, wave_ids_; // [rows of one wave]: row, slot
    std::vector<float>   gathered_, results_;
    std::vector<ggml_tensor> nodes_, views_, inputs_;
    ggml_tensor              ids_tensor_{};

    // which matmuls of the current layer and batch were seen: tells its first group from the following ones
    int                 pass_i_layer_ = -1;
    const ggml_tensor * pass_ids_     = nullptr;
    uint32_t            pass_parts_   = 0;
};

} // namespace mkd
