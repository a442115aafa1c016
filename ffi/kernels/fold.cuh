// By expert: a token's rows at one rank are summed where they lie, before any of them travels.
#pragma once

#include "kernels/slices.cuh"

namespace jax_ep::cuda {

constexpr int kFoldParts = 4;  // of a row, for warps to share
constexpr int kMaxBiases = 8;

struct CombineArgs {
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
  const float* recv_topk_weights;
  float* topk_weights;
};

// Folds one part of a token's rows here, if there are several. Lane k holds that of its k-th choice.
template <typename T, int N>
__device__ void FoldPart(const CombineArgs& args, int index, int64_t slot, int part, int lane) {
  const Shape& shape = args.shape;
  const Summand& summand = args.summands[index];
  const int width = static_cast<int>(summand.num_elements);
  int row = lane < shape.top_k ? args.handle.row_map[slot * shape.top_k + lane] : -1;
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

// The tokens of one wave, of all ranks. `block` is one of `num_blocks` that share them.
template <typename T, int N>
__device__ void FoldArray(const CombineArgs& args, int index, int wave, int block, int num_blocks,
                          unsigned* next) {
  const Shape& shape = args.shape;
  const int lane = threadIdx.x % kWarp;
  const int begin = args.waves.First(shape, wave), end = args.waves.First(shape, wave + 1);
  const int num_slots = (end - begin) * shape.num_ranks;
  __syncthreads();
  if (threadIdx.x == 0) *next = 0;
  __syncthreads();
  const Dealer dealer{next};
  while (true) {
    const int unit = Dealer::Show(dealer.Take(lane));
    const int i = block + unit / kFoldParts * num_blocks;
    if (i >= num_slots) break;
    const int64_t slot = int64_t{i % shape.num_ranks} * shape.num_tokens + begin + i / shape.num_ranks;
    FoldPart<T, N>(args, index, slot, unit % kFoldParts, lane);
  }
}

// Folds the waves that are this block's: the first one all blocks share, for there is nothing to pull yet.
template <typename T>
__device__ void Fold(const CombineArgs& args, uint32_t epoch, unsigned* next) {
  const int block = blockIdx.x, num_blocks = gridDim.x;
  for (int wave = 0; wave < (block < args.num_pullers ? 1 : args.waves.count); ++wave) {
    const int first_block = wave == 0 ? 0 : args.num_pullers;
    for (int i = 0; i < args.num_summands; ++i) {
      WithPack<T>(args.summands[i].num_elements, [&](auto pack) {
        FoldArray<T, decltype(pack)::value>(args, i, wave, block - first_block, num_blocks - first_block,
                                            next);
      });
    }
    FinishPart(args.peers, wave, num_blocks - first_block, epoch);
  }
}

}  // namespace jax_ep::cuda
