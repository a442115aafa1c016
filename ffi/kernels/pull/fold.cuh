// By expert: a token's rows at one rank are summed where they lie, before any of them travels.
#pragma once

#include "kernels/pull/args.cuh"
#include "kernels/rows/sum.cuh"

namespace jax_ep::cuda {

constexpr int kFoldWarps = 2;  // warps that share the slices of a sum

// Folds a token's rows here, if there are several: of the slices of the sum those of one of the mates. Lane k
// holds the row of the k-th choice.
template <typename T, int N>
__device__ void FoldRows(const PullArgs& args, int index, int64_t global_token, int row, int part, int lane) {
  constexpr int kColumns = kSlice<N, kFewRowsVectors>;
  const Summand& summand = args.summands[index];
  const int width = static_cast<int>(summand.num_elements);
  SumInputs<T> inputs{nullptr, 1.0f, __ballot_sync(kAllLanes, row >= 0)};
  if (__popc(inputs.lanes) < 2) return;
  if (row >= 0) {
    inputs.row = static_cast<const T*>(summand.rows) + int64_t{row} * width;
    if (args.row_weights != nullptr) inputs.factor = args.row_weights[row];
  }
  for (int first = part * kColumns; first < width; first += kFoldWarps * kColumns) {
    typename Sum<T>::Acc total[kFewRowsVectors][N] = {};
    SumSlice<T, N, kFewRows>(inputs, first, width, lane, total);
    StoreSlice<T, N>(static_cast<T*>(summand.partial) + global_token * width, first, width, lane, total);
  }
}

// What a block folds of a wave: every num_blocks-th of its sums, from `block` on. A sum is that of a global
// token, which is a token of any rank: `source * T + token`.
struct FoldShare {
  int begin;  // token
  int block;  // negative: it folds nothing
  int num_blocks;
  int num_sums;  // of the wave

  // How many of them.
  __device__ int size() const {
    return block < 0 || block >= num_sums ? 0 : (num_sums - 1 - block) / num_blocks + 1;
  }
};

// The first wave is shared by all blocks, for there is nothing to pull yet.
__device__ inline FoldShare FindShare(const PullArgs& args, int wave) {
  const int skipped = wave == 0 ? 0 : args.num_pullers;
  const int begin = args.waves.First(args.shape, wave), end = args.waves.First(args.shape, wave + 1);
  return {begin, static_cast<int>(blockIdx.x) - skipped, static_cast<int>(gridDim.x) - skipped,
          (end - begin) * args.shape.num_ranks};
}

// A warp's part of folding one global token, whose rows here it has begun to look up.
struct FoldTask {
  int wave;
  int part;
  int global_token;
  int row;  // in lane k that of the k-th choice
};

// What a block's warps share of its folds: tickets taken; and of each wave how much of the block's share is
// left, where every sum counts as many as it is told.
struct FoldCounts {
  unsigned next, remaining[kMaxWaves];

  // By the whole block.
  __device__ void Init(const PullArgs& args, int units_per_sum) {
    for (int i = threadIdx.x; i < args.waves.count; i += blockDim.x)
      remaining[i] = FindShare(args, i).size() * units_per_sum;
    if (threadIdx.x == 0) next = 0;
    __syncthreads();
  }
};

// Counts what a warp has done of a wave, and tells the peers if that was the last of the block's share. Sum
// by sum: counted wave by wave, peers are told later, and a combine took 5 to 40 % longer. The lanes stay
// together: where only the first went on to tell, they were still apart in the next sums, which took 8 %
// longer.
__device__ inline void CountFolds(const PullArgs& args, const Session& session, FoldCounts& counts, int wave,
                                  unsigned number) {
  // All lanes' stores come before what the first lane counts and tells.
  __syncwarp();
  __threadfence_block();
  bool last = false;
  if (threadIdx.x % kWarp == 0) last = atomicSub(&counts.remaining[wave], number) == number;
  if (__shfl_sync(kAllLanes, last, 0)) {
    const FoldShare share = FindShare(args, wave);
    session.FinishShare(wave, min(share.num_blocks, share.num_sums));
  }
}

// Deals a block's tickets, `mates` for a sum, to one of its warps, from wave to wave.
class FoldTasks {
 public:
  __device__ FoldTasks(const PullArgs& args, FoldCounts& counts, int parts)
      : args_(args),
        tickets_{&counts.next},
        parts_(parts),
        num_waves_(static_cast<int>(blockIdx.x) < args.num_pullers ? 1 : args.waves.count),
        share_(FindShare(args, 0)) {}

  // False if there is none left.
  __device__ bool Take(FoldTask* task, int lane) {
    const Shape& shape = args_.shape;
    const int ticket = TicketCounter::Broadcast(tickets_.Request(lane));
    while (ticket - before_ >= share_.size() * parts_) {
      before_ += share_.size() * parts_;
      if (++wave_ == num_waves_) return false;
      share_ = FindShare(args_, wave_);
    }
    const int i = share_.block + (ticket - before_) / parts_ * share_.num_blocks;
    task->wave = wave_;
    task->part = (ticket - before_) % parts_;
    task->global_token = i % shape.num_ranks * shape.num_tokens + share_.begin + i / shape.num_ranks;
    const int64_t choices = int64_t{task->global_token} * shape.top_k;
    task->row = lane < shape.top_k ? args_.handle.received_rows[choices + lane] : -1;
    return true;
  }

 private:
  const PullArgs& args_;
  TicketCounter tickets_;
  int parts_;
  int num_waves_;
  int wave_ = 0, before_ = 0;  // tickets of the waves before
  FoldShare share_;
};

// Folds this block's share of all waves, its warps one ticket after the other, and the next one's rows are
// looked up meanwhile. No warp waits for another: the one that ends the block's share of a wave tells the
// peers.
template <typename T>
__device__ void Fold(const PullArgs& args, const Session& session) {
  __shared__ FoldCounts counts;
  const int lane = threadIdx.x % kWarp;
  counts.Init(args, kFoldWarps);
  FoldTasks tasks(args, counts, kFoldWarps);
  FoldTask task, following;
  for (bool more = tasks.Take(&following, lane); more;) {
    task = following;
    more = tasks.Take(&following, lane);
    const int row = IsRow(task.row, args.shape.capacity) ? task.row : -1;
    for (int a = 0; a < args.num_summands; ++a) {
      WithVector<T>(args.summands[a].num_elements, [&](auto vector) {
        FoldRows<T, decltype(vector)::value>(args, a, task.global_token, row, task.part, lane);
      });
    }
    CountFolds(args, session, counts, task.wave, 1);
  }
}

}  // namespace jax_ep::cuda
