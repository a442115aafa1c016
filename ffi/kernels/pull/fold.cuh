// Folds rows, by expert: sums a token's rows at one rank before the sum travels.
#pragma once

#include "kernels/pull/args.cuh"
#include "kernels/rows/sum.cuh"

namespace jax_ep::cuda {

constexpr int kFoldWarps = 2;  // warps that share the slices of a sum

// Folds one part of the slices of a token's rows at this rank, if there are several rows. Lane k holds the
// row of the k-th choice.
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

// A block's share of the sums of a wave: every num_blocks-th sum, from `block` on. Each sum is that of a
// global token, which is a token of any rank: `source * T + token`.
struct FoldShare {
  int begin;  // first token of the wave
  int block;  // negative: the block folds nothing
  int num_blocks;
  int num_sums;  // of the wave

  // Returns the number of sums in the share.
  __device__ int size() const {
    return block < 0 || block >= num_sums ? 0 : (num_sums - 1 - block) / num_blocks + 1;
  }
};

// Returns this block's share of a wave. All blocks share the first wave, because nothing can be pulled yet.
__device__ inline FoldShare FindShare(const PullArgs& args, int wave) {
  const int skipped = wave == 0 ? 0 : args.num_pullers;
  const int begin = args.waves.First(args.shape, wave), end = args.waves.First(args.shape, wave + 1);
  return {begin, static_cast<int>(blockIdx.x) - skipped, static_cast<int>(gridDim.x) - skipped,
          (end - begin) * args.shape.num_ranks};
}

// A warp's part of folding one global token. The load of its rows has been issued.
struct FoldTask {
  int wave;
  int part;
  int global_token;
  int row;  // in lane k the row of the k-th choice
};

// The state that the warps of a block share while they fold: the next ticket and, for each wave, the units of
// work that remain of the block's share. Every sum counts as `units_per_sum` units.
struct FoldCounts {
  unsigned next, remaining[kMaxWaves];

  // Initializes the counts. Called by the whole block; synchronizes.
  __device__ void Init(const PullArgs& args, int units_per_sum) {
    for (int i = threadIdx.x; i < args.waves.count; i += blockDim.x)
      remaining[i] = FindShare(args, i).size() * units_per_sum;
    if (threadIdx.x == 0) next = 0;
    __syncthreads();
  }
};

// Counts a warp's work on a wave. Notifies the peers when that was the last of the block's share. This is
// called for each sum, because counting once a wave would notify the peers later. All lanes take part,
// because lanes that skip the notification would diverge from the first lane during the next sums.
__device__ inline void CountFolds(const PullArgs& args, const Session& session, FoldCounts& counts, int wave,
                                  unsigned number) {
  // The stores of all lanes must come before the first lane counts them and notifies the peers.
  __syncwarp();
  __threadfence_block();
  bool last = false;
  if (threadIdx.x % kWarp == 0) last = atomicSub(&counts.remaining[wave], number) == number;
  if (__shfl_sync(kAllLanes, last, 0)) {
    const FoldShare share = FindShare(args, wave);
    session.FinishShare(wave, min(share.num_blocks, share.num_sums));
  }
}

// Hands out a block's tickets to its warps, `parts` for each sum, wave by wave.
class FoldTasks {
 public:
  __device__ FoldTasks(const PullArgs& args, FoldCounts& counts, int parts)
      : args_(args),
        tickets_{&counts.next},
        parts_(parts),
        num_waves_(static_cast<int>(blockIdx.x) < args.num_pullers ? 1 : args.waves.count),
        share_(FindShare(args, 0)) {}

  // Takes a ticket and issues the load of its rows. Returns false if no ticket is left.
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
  int wave_ = 0, before_ = 0;  // tickets of earlier waves
  FoldShare share_;
};

// Folds this block's share of all waves. Each warp takes one ticket after another, and looks up the rows of
// the next while it sums. No warp waits for another: the one that completes the block's share of a wave
// notifies the peers.
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
