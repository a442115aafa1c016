// Sums of a combine of few tokens, and how they travel.
#pragma once

#include "kernels/few_tokens/chunk.cuh"
#include "kernels/few_tokens/partition.cuh"
#include "kernels/fp8/parts.cuh"

namespace jax_ep::cuda {

// The arguments of the kernel. Passed by value as its parameter.
struct FewTokensPullArgs : PullOperands {
  Peers peers;
  FewTokensPartition few_tokens;
  Summand summand;
  Bias biases[kMaxBiases];
};

// Returns the factor that the sum in a slot still has to be multiplied by. If a rank has only one row of a
// token, it sends the row without its weight, so that the product is not rounded. FP8 sums have no factor.
__device__ inline float& SlotFactor(std::byte* slot) { return *reinterpret_cast<float*>(slot); }

template <typename T>
__device__ T* SlotRow(std::byte* slot) {
  return reinterpret_cast<T*>(slot + kSlotHeadBytes);
}
__device__ inline Fp8Part SlotPart(std::byte* slot, int width) {
  std::byte* const values = slot + kSlotHeadBytes;
  return {values, reinterpret_cast<float*>(values + width)};
}

// A slice of a sum as a chunk of lines, rounded to T, with its factor.
template <typename T, int N>
struct RowChunk {
  static constexpr int kLines = kChunkLines;
  static_assert(kSumVectors == kChunkVectors && kSlice<N> * sizeof(T) == kChunkRowBytes);

  __device__ static ChunkWords<kLines> Pack(const float (&total)[kSumVectors][N], float factor) {
    ChunkWords<kLines> chunk;
#pragma unroll
    for (int v = 0; v < kSumVectors; ++v) {
      const auto rounded = Vector<T, N>::Rounded(total[v]);
      memcpy(&chunk.words[4 * v], &rounded.bits, sizeof(rounded.bits));
    }
    chunk.words[4 * kSumVectors] = __float_as_uint(factor);
    return chunk;
  }
  __device__ static void Add(const ChunkWords<kLines>& chunk, float (&total)[kSumVectors][N]) {
    const float factor = __uint_as_float(chunk.words[4 * kSumVectors]);
#pragma unroll
    for (int v = 0; v < kSumVectors; ++v) {
      Vector<T, N> vector;
      memcpy(&vector.bits, &chunk.words[4 * v], sizeof(vector.bits));
#pragma unroll
      for (int j = 0; j < N; ++j) {
        total[v][j] = MultiplyAdd(factor, static_cast<float>(vector[j]), total[v][j]);
      }
    }
  }
};

// A slice of a sum as a chunk of lines, in FP8. Of the lanes that hold a block, lane v has the scale of the
// one in vector v.
template <int N>
struct Fp8Chunk {
  using Slice = Fp8Slice<N, kSumVectors>;
  static constexpr int kValueWords = sizeof(Slice::values) / 4, kLines = (kValueWords + 1 + 2) / 3;
  static_assert(kSumVectors <= Slice::kLanes);

  __device__ static ChunkWords<kLines> Pack(const Slice& slice) {
    ChunkWords<kLines> chunk{};
    memcpy(chunk.words, slice.values, sizeof(slice.values));
#pragma unroll
    for (int v = 0; v < kSumVectors; ++v) {
      if (threadIdx.x % Slice::kLanes == v) chunk.words[kValueWords] = __float_as_uint(slice.scales[v]);
    }
    return chunk;
  }
  __device__ static void Add(const ChunkWords<kLines>& chunk, float (&total)[kSumVectors][N]) {
    Slice slice;
    memcpy(slice.values, chunk.words, sizeof(slice.values));
    const float scale = __uint_as_float(chunk.words[kValueWords]);
#pragma unroll
    for (int v = 0; v < kSumVectors; ++v) slice.scales[v] = __shfl_sync(kAllLanes, scale, v, Slice::kLanes);
    AddSlice(slice, total);
  }
};

template <typename T, int N, bool kFp8>
using SumChunk = std::conditional_t<kFp8, Fp8Chunk<N>, RowChunk<T, N>>;

}  // namespace jax_ep::cuda
