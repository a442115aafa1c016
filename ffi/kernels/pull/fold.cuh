// By expert: a token's rows at one rank are summed where they lie, before any of them travels.
#pragma once

#include "kernels/comm/waves.cuh"
#include "kernels/pull/args.cuh"
#include "kernels/rows/sum.cuh"

namespace jax_ep::cuda {

constexpr int kFoldMates = 2;  // warps that share the slices of a sum

// Folds a token's rows here, if there are several: of the slices of the sum those of one of the mates. Lane k
// holds the row of the k-th choice.
template <typename T, int N>
__device__ void FoldRows(const PullArgs& args, int index, int64_t global_token, int row, int mate, int lane) {
  constexpr int kColumns = kSlice<N, kFewRowsVectors>;
  const Summand& summand = args.summands[index];
  const int width = static_cast<int>(summand.num_elements);
  Terms<T> terms{nullptr, 1.0f, __ballot_sync(kAllLanes, row >= 0)};
  if (__popc(terms.lanes) < 2) return;
  if (row >= 0) {
    terms.row = static_cast<const T*>(summand.rows) + int64_t{row} * width;
    if (args.row_weights != nullptr) terms.factor = args.row_weights[row];
  }
  for (int first = mate * kColumns; first < width; first += kFoldMates * kColumns) {
    typename Sum<T>::Acc total[kFewRowsVectors][N] = {};
    SumSlice<T, N, kFewRows>(terms, first, width, lane, total);
    StoreSlice<T, N>(static_cast<T*>(summand.partial) + global_token * width, first, width, lane, total);
  }
}

// What a block folds of a wave: every num_blocks-th of its sums, from `block` on. A sum is that of a global
// token, which is a token of any rank: `source * T + token`.
struct FoldShare {
  int begin;  // token
  int block, num_blocks;
  int num_sums;  // of the wave

  __device__ int num_tickets() const {
    return block < num_sums ? ((num_sums - 1 - block) / num_blocks + 1) * kFoldMates : 0;
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
  int mate;
  int global_token;
  int row;  // in lane k that of the k-th choice
};

// Deals a block's tickets to one of its warps, from wave to wave.
class FoldTasks {
 public:
  __device__ FoldTasks(const PullArgs& args, unsigned* next)
      : args_(args),
        dealer_{next},
        num_waves_(static_cast<int>(blockIdx.x) < args.num_pullers ? 1 : args.waves.count),
        share_(FindShare(args, 0)) {}

  // False if there is none left.
  __device__ bool Take(FoldTask* task, int lane) {
    const Shape& shape = args_.shape;
    const int ticket = Dealer::Show(dealer_.Take(lane));
    while (ticket - before_ >= share_.num_tickets()) {
      before_ += share_.num_tickets();
      if (++wave_ == num_waves_) return false;
      share_ = FindShare(args_, wave_);
    }
    const int i = share_.block + (ticket - before_) / kFoldMates * share_.num_blocks;
    task->wave = wave_;
    task->mate = (ticket - before_) % kFoldMates;
    task->global_token = i % shape.num_ranks * shape.num_tokens + share_.begin + i / shape.num_ranks;
    const int64_t choices = int64_t{task->global_token} * shape.top_k;
    task->row = lane < shape.top_k ? args_.handle.received_rows[choices + lane] : -1;
    return true;
  }

 private:
  const PullArgs& args_;
  Dealer dealer_;
  int num_waves_;
  int wave_ = 0, before_ = 0;  // tickets of the waves before
  FoldShare share_;
};

// Folds this block's share of all waves, its warps one ticket after the other, and the next one's rows are
// looked up meanwhile. No warp waits for another: the one that ends the block's share of a wave tells the
// peers.
template <typename T>
__device__ void Fold(const PullArgs& args, uint32_t epoch) {
  __shared__ unsigned next, done[kMaxWaves];  // tickets taken; and those whose work is done, of each wave
  const int lane = threadIdx.x % kWarp;
  for (int i = threadIdx.x; i < kMaxWaves; i += blockDim.x) done[i] = 0;
  if (threadIdx.x == 0) next = 0;
  __syncthreads();
  FoldTasks tasks(args, &next);
  FoldTask task, following;
  for (bool more = tasks.Take(&following, lane); more;) {
    task = following;
    more = tasks.Take(&following, lane);
    const int row = IsRow(task.row, args.shape.capacity) ? task.row : -1;
    for (int a = 0; a < args.num_summands; ++a) {
      WithVector<T>(args.summands[a].num_elements, [&](auto vector) {
        FoldRows<T, decltype(vector)::value>(args, a, task.global_token, row, task.mate, lane);
      });
    }
    bool last = false;
    // All lanes' stores come before what the first lane counts and tells. The lanes stay together: where only
    // the first went on to tell, they were still apart in the next sums, which took 8 % longer.
    __syncwarp();
    __threadfence_block();
    const FoldShare share = FindShare(args, task.wave);
    if (lane == 0) last = atomicAdd(&done[task.wave], 1u) == share.num_tickets() - 1;
    if (__shfl_sync(kAllLanes, last, 0)) {
      FinishShare(args.peers, task.wave, min(share.num_blocks, share.num_sums), epoch);
    }
  }
}

}  // namespace jax_ep::cuda
