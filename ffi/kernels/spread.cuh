// By expert: each token came once; from there to its other rows of this rank.
#pragma once

#include "kernels/send.cuh"
#include "kernels/sum.cuh"

namespace jax_ep::cuda {

constexpr int kBatch = 4;  // columns whose loads are in flight at a time

// A token's rows at this rank: lane k holds that of its k-th choice, -1 none.
struct Spread {
  int row;
  unsigned lanes;  // that hold a row; the first one's has come
};

__device__ inline Spread FindSpread(const int32_t* row_map, const Shape& shape, int64_t slot, int lane) {
  const int row = lane < shape.top_k ? __ldcg(&row_map[slot * shape.top_k + lane]) : -1;
  return {row, __ballot_sync(kAllLanes, IsRow(row, shape.capacity))};
}

// Each row becomes its weight times the token's, which lies in the first of them; and the weight's gradient
// the dot product of the token's row with the factors.
template <typename T, int N>
__device__ void ScaleRows(const MoveArgs& args, int p, const Spread& spread, int lane) {
  using Acc = typename Sum<T>::Acc;
  const int width = static_cast<int>(args.payloads[p].row_bytes / sizeof(T));
  T* const out = reinterpret_cast<T*>(args.payloads[p].out);
  const T* const token = out + int64_t{__shfl_sync(kAllLanes, spread.row, __ffs(spread.lanes) - 1)} * width;
  // The first row last: the others are made of it.
  for (unsigned left = spread.lanes; left != 0;) {
    const int from = 31 - __clz(left);
    left &= ~(1u << from);
    const int64_t row = __shfl_sync(kAllLanes, spread.row, from);
    const T* const factor = static_cast<const T*>(args.factors[p]) + row * width;
    T* const target = out + row * width;
    const Acc weight = args.row_weights[row];
    Acc dot{0};
    for (int begin = lane * N; begin < width; begin += kBatch * kWarp * N) {
      Pack<T, N> tokens[kBatch], factors[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int column = begin + i * kWarp * N;
        tokens[i] = Pack<T, N>::Load(token + column, column < width);
        factors[i] = Pack<T, N>::Load(factor + column, column < width);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int column = begin + i * kWarp * N;
        if (column >= width) break;
        Acc scaled[N];
#pragma unroll
        for (int j = 0; j < N; ++j) {
          const Acc value = tokens[i][j];
          dot += static_cast<Acc>(factors[i][j]) * value;
          scaled[j] = weight * value;
        }
        Pack<T, N>::Store(target + column, scaled);
      }
    }
    for (int step = kWarp / 2; step > 0; step /= 2) dot += __shfl_xor_sync(kAllLanes, dot, step);
    if (lane == 0) {
      float& gradient = args.recv_topk_weights[row];
      gradient = static_cast<float>(p == 0 ? dot : static_cast<Acc>(gradient) + dot);
    }
  }
}

template <typename T>
__device__ void ScaleArray(const MoveArgs& args, int p, const Spread& spread, int lane) {
  if (args.payloads[p].row_bytes % 16 == 0) {
    ScaleRows<T, 16 / sizeof(T)>(args, p, spread, lane);
  } else {
    ScaleRows<T, 1>(args, p, spread, lane);
  }
}

// The tokens of one wave, of all ranks, a warp for each. `block` is one of `num_blocks` that share them.
// `Scale` is the type of rows to be scaled, or void.
template <typename Scale>
__device__ void SpreadWave(const MoveArgs& args, int wave, int block, int num_blocks) {
  const Shape& shape = args.shape;
  const int lane = threadIdx.x % kWarp;
  const int begin = args.waves.First(shape, wave), end = args.waves.First(shape, wave + 1);
  const int num_slots = (end - begin) * shape.num_ranks, num_warps = num_blocks * (blockDim.x / kWarp);
  for (int i = block * (blockDim.x / kWarp) + threadIdx.x / kWarp; i < num_slots; i += num_warps) {
    const int64_t slot = int64_t{i % shape.num_ranks} * shape.num_tokens + begin + i / shape.num_ranks;
    const Spread spread = FindSpread(args.handle.row_map, shape, slot, lane);
    if (spread.lanes == 0) continue;
    for (int p = 0; p < args.num_payloads; ++p) {
      if constexpr (std::is_void_v<Scale>) {
        const unsigned others = spread.lanes & (spread.lanes - 1);
        if (others == 0) continue;
        const int64_t bytes = args.payloads[p].row_bytes;
        const int64_t first = __shfl_sync(kAllLanes, spread.row, __ffs(spread.lanes) - 1);
        std::byte* const out = args.payloads[p].out;
        CopyBytes(out + first * bytes, bytes, others, out + spread.row * bytes, lane);
      } else {
        ScaleArray<Scale>(args, p, spread, lane);
      }
    }
  }
}

// All waves, each when its rows have come. The blocks that send join in for the last one.
template <typename Scale>
__device__ bool SpreadRows(const MoveArgs& args, Op op, uint32_t epoch) {
  const uint32_t (*moved)[kMaxRanks] = args.peers.control[args.peers.rank]->moved;
  const int block = blockIdx.x, last = args.waves.count - 1;
  for (int wave = block < args.num_senders ? last : 0; wave <= last; ++wave) {
    if (!WaitForAll(args.peers, op, Phase::kMove, moved[wave], epoch)) return false;
    const int first_block = wave == last ? 0 : args.num_senders;
    SpreadWave<Scale>(args, wave, block - first_block, gridDim.x - first_block);
  }
  return true;
}

}  // namespace jax_ep::cuda
