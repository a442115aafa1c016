// A receiver's counts, computed from the counts of all ranks, and its results if a push fails.
#pragma once

#include "core/params.h"
#include "kernels/protocol/fail.cuh"

namespace jax_ep::cuda {

// Writes this rank's counts as a receiver, except tokens_per_expert by rank. `totals` [E] are all ranks'
// choices on each expert. By expert, `starts` [L + 1] are the first rows of the blocks at this rank.
// rows_between(source, d) returns the rows that a source sends to rank d, before drops. Called by one block;
// synchronizes. Returns the rows that all ranks send to this one, before drops.
template <typename RowsBetween>
__device__ int WriteReceiver(const PushOperands& args, int rank, const int32_t* totals, const int32_t* starts,
                             RowsBetween&& rows_between) {
  __shared__ int kept, num_rows;
  const Shape& shape = args.shape;
  const HandleArrays& handle = args.handle;
  const int R = shape.num_ranks, L = shape.num_local_experts();
  if (threadIdx.x == 0) kept = 0;
  __syncthreads();
#pragma unroll 1
  for (int d = threadIdx.x; d < R; d += blockDim.x) {
    int rows = 0;
#pragma unroll 1
    for (int source = 0; source < R; ++source) {
      rows += rows_between(source, d);
      if (handle.rank_prefix_matrix != nullptr) handle.rank_prefix_matrix[source * R + d] = rows;
    }
    if (d == rank) num_rows = rows;
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < L; i += blockDim.x) {
    const int rows = totals[rank * L + i];
    if (handle.expert_counts != nullptr) handle.expert_counts[i] = rows;
    if (!shape.has_expert_blocks()) continue;
    const int kept_rows = RowsKept(starts[i], int64_t{starts[i]} + rows, shape.EndOf(i));
    args.tokens_per_expert[i] = kept_rows;
    args.group_sizes[i] =
        shape.has_fixed_blocks() ? kept_rows : RowsKept(starts[i], starts[i + 1], shape.capacity);
    atomicAdd(&kept, kept_rows);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    const int num_tokens = shape.has_expert_blocks() ? kept : min(num_rows, shape.capacity);
    if (args.num_tokens != nullptr) *args.num_tokens = num_tokens;
    *args.num_dropped = num_rows - num_tokens;
  }
  return num_rows;
}

// Fills the rows of a push that failed with NaN and -1. Called by one block. `Args` has the payloads.
template <typename Args>
JAX_EP_RARE void FillRows(const Args& args) {
  const int64_t C = args.shape.capacity;
  for (int p = 0; p < args.num_payloads; ++p)
    FillResult(args.payloads[p].out, C * args.payloads[p].row_bytes);
  FillResult(args.arrived_weights, C * args.shape.weights_per_row() * sizeof(float));
}

// Fills the routing of a push that failed with -1, and group_sizes with 0, so that a product that follows
// does nothing. `writes_received_rows`: the push writes received_rows. Called by one block.
JAX_EP_RARE void FillRouting(const PushOperands& args, bool writes_received_rows) {
  const Shape& shape = args.shape;
  const int64_t R = shape.num_ranks, L = shape.num_local_experts(), C = shape.capacity, K = shape.top_k;
  const auto fill = [](int32_t* numbers, int64_t count) { FillResult(numbers, count * sizeof(int32_t)); };
  fill(args.handle.topk_idx, shape.num_tokens * K);
  fill(args.handle.sent_rows, int64_t{shape.num_tokens} * shape.rows_per_token());
  fill(args.handle.rank_prefix_matrix, R * R);
  fill(args.handle.expert_counts, L);
  fill(writes_received_rows ? args.handle.received_rows : nullptr, R * shape.num_tokens * K);
  fill(args.arrived_idx, C * K);
  fill(args.tokens_per_expert, L);
  fill(args.num_tokens, 1);
  fill(args.num_dropped, 1);
  FillResult(args.group_sizes, L * sizeof(int32_t), 0);
}

}  // namespace jax_ep::cuda
