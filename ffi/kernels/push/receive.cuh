// The receiver's side of a push: what the counts say.
#pragma once

#include "kernels/push/args.cuh"

namespace jax_ep::cuda {

// What an op that failed leaves: NaN, -1, and no rows for whoever multiplies groups of them. The last block.
template <typename Args>
JAX_EP_RARE void FillRows(const Args& args) {
  const int64_t C = args.shape.capacity;
  for (int p = 0; p < args.num_payloads; ++p)
    FillResult(args.payloads[p].out, C * args.payloads[p].row_bytes);
  FillResult(args.arrived_weights, C * args.shape.weights_per_row() * sizeof(float));
}

// Likewise of a push that routes. `maps`: it makes received_rows.
template <typename Args>
JAX_EP_RARE void FillRouting(const Args& args, bool maps) {
  const Shape& shape = args.shape;
  const int64_t R = shape.num_ranks, L = shape.num_local_experts(), C = shape.capacity, K = shape.top_k;
  const auto fill = [](int32_t* numbers, int64_t count) { FillResult(numbers, count * sizeof(int32_t)); };
  fill(args.handle.topk_idx, shape.num_tokens * K);
  fill(args.handle.sent_rows, int64_t{shape.num_tokens} * shape.rows_per_token());
  fill(args.handle.rank_prefix_matrix, R * R);
  fill(args.handle.expert_counts, L);
  fill(maps ? args.handle.received_rows : nullptr, R * shape.num_tokens * K);
  fill(args.arrived_idx, C * K);
  fill(args.tokens_per_expert, L);
  fill(args.num_tokens, 1);
  fill(args.num_dropped, 1);
  FillResult(args.group_sizes, L * sizeof(int32_t), 0);
}

JAX_EP_RARE void FillResults(const PushArgs& args) {
  FillRows(args);
  if (args.routes()) FillRouting(args, args.sends_map);  // or else the handle was here before
}

// Takes back what the block has counted of its batch before it found that the op cannot be opened: another
// block may have filled the results by then.
JAX_EP_RARE void FillCounted(const PushArgs& args) {
  const Batch batch = args.batches.Find(args.shape, args.waves, blockIdx.x);
  const auto fill = [&](int32_t* rows, int64_t width) {
    FillResult(rows + batch.begin * width, (batch.end - batch.begin) * width * sizeof(int32_t));
  };
  fill(args.handle.topk_idx, args.shape.top_k);
  fill(args.handle.sent_rows, args.shape.rows_per_token());
}

// The sum over a block's threads, for all of them.
__device__ inline int BlockSum(int number) {
  __shared__ int sum;
  __syncthreads();
  if (threadIdx.x == 0) sum = 0;
  __syncthreads();
  const int of_warp = __reduce_add_sync(kAllLanes, number);
  if (threadIdx.x % kWarp == 0 && of_warp != 0) atomicAdd(&sum, of_warp);
  __syncthreads();
  return sum;
}

// Rows of rank `source` in bin `bin`, before drops; once its counts have come.
__device__ inline int CountOf(const PushArgs& args, const int32_t* own, int source, int bin) {
  if (args.is_local()) return own[bin];
  return static_cast<int>(LoadRelaxed(&args.peers.own().mail[source].counts[bin]));
}

// What the counts alone say about this rank as a receiver. One block.
__device__ inline void WriteReceiver(const PushArgs& args, const int32_t* own, const int32_t* totals,
                                     const int32_t* starts) {
  const Shape& shape = args.shape;
  const int R = shape.num_ranks, L = shape.num_local_experts(), me = args.peers.rank;
  for (int d = threadIdx.x; d < R; d += blockDim.x) {
    int rows = 0;
    for (int source = 0; source < R; ++source) {
      rows += CountOf(args, own, source, shape.num_experts + d);
      if (args.handle.rank_prefix_matrix != nullptr) args.handle.rank_prefix_matrix[source * R + d] = rows;
    }
  }
  int kept = 0;
  for (int i = threadIdx.x; i < AlignUp(L, blockDim.x); i += blockDim.x) {
    int here = 0;
    if (i < L) {
      const int rows = totals[me * L + i];
      if (args.handle.expert_counts != nullptr) args.handle.expert_counts[i] = rows;
      if (shape.has_expert_blocks()) {
        here = RowsKept(starts[i], int64_t{starts[i]} + rows, shape.EndOf(i));
        args.tokens_per_expert[i] = here;
        args.group_sizes[i] =
            shape.has_fixed_blocks() ? here : RowsKept(starts[i], starts[i + 1], shape.capacity);
      }
    }
    kept += BlockSum(here);
  }
  if (threadIdx.x != 0) return;
  const int num_rows = totals[shape.num_experts + me];
  if (!shape.has_expert_blocks()) kept = RowsKept(0, num_rows, shape.capacity);
  if (args.num_tokens != nullptr) *args.num_tokens = kept;
  *args.num_dropped = num_rows - kept;
}

// By rank: kept (row, k) pairs of each local expert, as far as the counts tell. Returns the first row of the
// one source that the capacity cuts, C if none is cut. One block, before it arrives: the counts are then
// the peers' to write again.
__device__ inline int CountWholeSources(const PushArgs& args, const int32_t* own) {
  const Shape& shape = args.shape;
  const int L = shape.num_local_experts(), me = args.peers.rank;
  int begin = 0, source = 0;
  for (; source < shape.num_ranks; ++source) {
    const int end = begin + CountOf(args, own, source, shape.num_experts + me);
    if (end > shape.capacity) break;
    begin = end;
  }
  for (int i = threadIdx.x; i < L; i += blockDim.x) {
    int pairs = 0;
    for (int s = 0; s < source; ++s) pairs += CountOf(args, own, s, me * L + i);
    args.tokens_per_expert[i] = pairs;
  }
  __syncthreads();
  return source == shape.num_ranks ? shape.capacity : begin;
}

// The rest of them, counted where the rows arrived. One block, after Leave.
__device__ inline void CountCutSource(const PushArgs& args, int begin) {
  const int64_t last = int64_t{args.shape.capacity} * args.shape.top_k;
  for (int64_t i = int64_t{begin} * args.shape.top_k + threadIdx.x; i < last; i += blockDim.x) {
    const int expert = __ldcg(&args.arrived_idx[i]);
    if (expert >= 0) atomicAdd(&args.tokens_per_expert[expert], 1);
  }
}

}  // namespace jax_ep::cuda
