// The receiver's side of a push: results that follow from the counts of all ranks, and results of a push that
// failed.
#pragma once

#include "kernels/protocol/fail.cuh"
#include "kernels/push/args.cuh"

namespace jax_ep::cuda {

// Writes this rank's counts as a receiver, except tokens_per_expert by rank. `totals` [E] are all ranks'
// choices on each expert. By expert, `starts` [L + 1] are the first rows of the blocks at this rank.
// rows_between(source, d) returns the rows that a source sends to rank d, before drops. It is called once, by
// the thread that then writes [source, d] of the handle, so it may read them there. Called by one block;
// synchronizes. Returns the rows that all ranks send to this one, before drops.
template <typename RowsBetween>
__device__ int WriteReceiver(const PushOperands& args, int rank, const int32_t* totals, const int32_t* starts,
                             RowsBetween&& rows_between) {
  constexpr int kLoads = 8;  // in flight per thread
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
    for (int first = 0; first < R; first += kLoads) {
      int rows_of[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) rows_of[i] = first + i < R ? rows_between(first + i, d) : 0;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        rows += rows_of[i];
        if (first + i < R && handle.rank_prefix_matrix != nullptr)
          handle.rank_prefix_matrix[(first + i) * R + d] = rows;
      }
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

// Fills the rows of a push that failed with NaN and -1. Called by one block.
JAX_EP_RARE void FillRows(const PushArgs& args) {
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

// Fills the results of a push that failed.
JAX_EP_RARE void FillResults(const PushArgs& args) {
  FillRows(args);
  if (args.routes()) FillRouting(args, args.sends_received_rows);  // otherwise the handle is an operand
}

// Overwrites what the block has written for its batch before it found that the op cannot be opened, because
// another block may have filled the results before that.
JAX_EP_RARE void FillCounted(const PushArgs& args) {
  const Batch batch = args.batches.Find(args.shape, args.waves, blockIdx.x);
  const auto fill = [&](int32_t* rows, int64_t width) {
    FillResult(rows + batch.begin * width, (batch.end - batch.begin) * width * sizeof(int32_t));
  };
  fill(args.handle.topk_idx, args.shape.top_k);
  fill(args.handle.sent_rows, args.shape.rows_per_token());
}

// Returns the rows of rank `source` in bin `bin`, before drops. The counts of that rank must have arrived.
__device__ inline int CountOf(const PushArgs& args, const int32_t* sent, int source, int bin) {
  if (args.is_local()) return sent[bin];
  return static_cast<int>(LoadRelaxed(&args.peers.mailbox(args.peers.rank, source).counts[bin]));
}

// Counts, by rank, the kept (row, k) pairs of each local expert from all sources whose rows fit. Returns the
// first row of the one source that the capacity cuts, or C if it cuts none. Called by one block before it
// leaves, because the peers may then overwrite the counts.
__device__ inline int CountWholeSources(const PushArgs& args, const int32_t* sent) {
  const Shape& shape = args.shape;
  const int L = shape.num_local_experts(), me = args.peers.rank;
  int begin = 0, source = 0;
  for (; source < shape.num_ranks; ++source) {
    const int end = begin + CountOf(args, sent, source, shape.num_experts + me);
    if (end > shape.capacity) break;
    begin = end;
  }
  for (int i = threadIdx.x; i < L; i += blockDim.x) {
    int pairs = 0;
    for (int s = 0; s < source; ++s) pairs += CountOf(args, sent, s, me * L + i);
    args.tokens_per_expert[i] = pairs;
  }
  __syncthreads();
  return source == shape.num_ranks ? shape.capacity : begin;
}

// Adds the pairs of the source that the capacity cuts, counted from the rows that arrived. Called by one
// block, after all ranks have left.
__device__ inline void CountCutSource(const PushArgs& args, int begin) {
  const int64_t last = int64_t{args.shape.capacity} * args.shape.top_k;
  for (int64_t i = int64_t{begin} * args.shape.top_k + threadIdx.x; i < last; i += blockDim.x) {
    const int expert = __ldcg(&args.arrived_idx[i]);
    if (expert >= 0) atomicAdd(&args.tokens_per_expert[expert], 1);
  }
}

}  // namespace jax_ep::cuda
