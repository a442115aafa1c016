// The receiver's side of a push: results that follow from the counts.
#pragma once

#include "kernels/push/args.cuh"
#include "kernels/routing/receiver.cuh"

namespace jax_ep::cuda {

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
  return static_cast<int>(LoadRelaxed(&args.peers.own().mailboxes[source].counts[bin]));
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
