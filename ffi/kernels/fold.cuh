// By expert: a token's rows at one rank are summed where they lie, before any of them travels.
#pragma once

#include "kernels/slices.cuh"
#include "kernels/waves.cuh"

namespace jax_ep::cuda {

constexpr int kFoldParts = 4;  // of a row, for warps to share

struct PullArgs {
  Shape shape;
  Peers peers;
  const int32_t* rank_operand;
  HandleArrays handle;
  Summand summands[kMaxPayloads];
  int32_t num_summands;
  int32_t num_pullers;  // blocks that pull; the others fold
  bool folds;
  Waves waves;
  const float* row_weights;
  Bias biases[kMaxBiases];
  int32_t num_biases;
  const float* arrived_weights;
  float* topk_weights;
};

// Folds one part of a token's rows here, if there are several. Lane k holds that of its k-th choice.
template <typename T, int N>
__device__ void FoldPart(const PullArgs& args, int index, int64_t slot, int part, int lane) {
  const Shape& shape = args.shape;
  const Summand& summand = args.summands[index];
  const int width = static_cast<int>(summand.num_elements);
  int row = lane < shape.top_k ? args.handle.received_rows[slot * shape.top_k + lane] : -1;
  if (!IsRow(row, shape.capacity)) row = -1;
  Terms<T> terms{nullptr, 1.0f, __ballot_sync(kAllLanes, row >= 0)};
  if (__popc(terms.lanes) < 2) return;
  if (row >= 0) {
    terms.row = static_cast<const T*>(summand.rows) + int64_t{row} * width;
    if (args.row_weights != nullptr) terms.factor = args.row_weights[row];
  }
  for (int first = part * kSlice<N>; first < width; first += kFoldParts * kSlice<N>) {
    typename Sum<T>::Acc total[kVectors][N] = {};
    SumSlice<T, N>(terms, first, width, lane, total);
    StoreSlice<T, N>(static_cast<T*>(summand.partial) + slot * width, first, width, lane, total);
  }
}

// What a block folds of a wave: every num_blocks-th of its slots, from `block` on.
struct FoldShare {
  int begin;  // token
  int block, num_blocks;
  int num_slots;  // of the wave

  __device__ int num_units() const {
    return block < num_slots ? ((num_slots - 1 - block) / num_blocks + 1) * kFoldParts : 0;
  }
};

// The first wave is shared by all blocks, for there is nothing to pull yet.
__device__ inline FoldShare FindShare(const PullArgs& args, int wave) {
  const int skipped = wave == 0 ? 0 : args.num_pullers;
  const int begin = args.waves.First(args.shape, wave), end = args.waves.First(args.shape, wave + 1);
  return {begin, static_cast<int>(blockIdx.x) - skipped, static_cast<int>(gridDim.x) - skipped,
          (end - begin) * args.shape.num_ranks};
}

// Folds this block's share of all waves, its warps one part after the other. No warp waits for another: the
// one that ends the block's share of a wave tells the peers.
template <typename T>
__device__ void Fold(const PullArgs& args, uint32_t epoch) {
  __shared__ unsigned next, done[kMaxWaves];  // parts dealt out, and ended
  const int lane = threadIdx.x % kWarp;
  for (int i = threadIdx.x; i < kMaxWaves; i += blockDim.x) done[i] = 0;
  if (threadIdx.x == 0) next = 0;
  __syncthreads();
  const Dealer dealer{&next};
  const int num_waves = static_cast<int>(blockIdx.x) < args.num_pullers ? 1 : args.waves.count;
  int wave = 0, before = 0;  // units of the waves before
  FoldShare share = FindShare(args, wave);
  while (true) {
    const int unit = Dealer::Show(dealer.Take(lane));
    while (unit - before >= share.num_units()) {
      before += share.num_units();
      if (++wave == num_waves) return;
      share = FindShare(args, wave);
    }
    const int i = share.block + (unit - before) / kFoldParts * share.num_blocks;
    const int64_t slot =
        int64_t{i % args.shape.num_ranks} * args.shape.num_tokens + share.begin + i / args.shape.num_ranks;
    for (int a = 0; a < args.num_summands; ++a) {
      WithPack<T>(args.summands[a].num_elements, [&](auto pack) {
        FoldPart<T, decltype(pack)::value>(args, a, slot, (unit - before) % kFoldParts, lane);
      });
    }
    bool last = false;
    // All lanes' stores come before what the first lane counts and tells. The lanes stay together: where only
    // the first went on to tell, they were still apart in the next sums, which took 8 % longer.
    __syncwarp();
    __threadfence_block();
    if (lane == 0) last = atomicAdd(&done[wave], 1u) == share.num_units() - 1;
    if (__shfl_sync(kAllLanes, last, 0)) {
      FinishPart(args.peers, wave, min(share.num_blocks, share.num_slots), epoch);
    }
  }
}

}  // namespace jax_ep::cuda
