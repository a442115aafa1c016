// Counts a rank's tokens in chunks: the first step of dispatch and permute.
#include "kernels/device.cuh"
#include "kernels/kernels.h"
#include "kernels/topk.cuh"

namespace jax_ep::cuda {
namespace {

constexpr int kThreads = 256;
static_assert(kChunkTokens == 2 * kWarp, "a warp ranks the tokens of a chunk by two ballots");

// How many of the first n numbers equal x.
__device__ int CountEqual(const int16_t* numbers, int n, int16_t x) {
  const uint32_t twice = static_cast<uint16_t>(x) * 0x10001u;
  int bits = 0;  // 16 for each
  for (int i = 0; i + 8 <= n; i += 8) {
    const uint4 eight = *reinterpret_cast<const uint4*>(numbers + i);
    bits += __popc(__vcmpeq2(eight.x, twice)) + __popc(__vcmpeq2(eight.y, twice)) +
            __popc(__vcmpeq2(eight.z, twice)) + __popc(__vcmpeq2(eight.w, twice));
  }
  int count = bits / 16;
  for (int i = n / 8 * 8; i < n; ++i) count += numbers[i] == x;
  return count;
}

// One block a chunk. Writes the routed experts, each row's index within its chunk to token_rows (-1: no
// row), and the chunk's counts by expert, then by rank. Atomics count, but they decide no row's place.
__global__ void CountKernel(Shape shape, TopkIds ids, int32_t* topk_idx, int32_t* token_rows,
                            int32_t* chunk_counts) {
  // The chunk's experts [kChunkTokens, K] and their ranks, then its counts [E + R].
  extern __shared__ __align__(16) int16_t experts[];
  int16_t* const ranks = experts + kChunkTokens * shape.top_k;
  int32_t* const counts = reinterpret_cast<int32_t*>(ranks + kChunkTokens * shape.top_k);
  const int first = blockIdx.x * kChunkTokens;
  const int tokens = min(kChunkTokens, shape.num_tokens - first);
  const int num_choices = tokens * shape.top_k;
  const bool by_rank = shape.order == Order::kRank;
  for (int i = threadIdx.x; i < NumBins(shape); i += blockDim.x) counts[i] = 0;
  for (int i = threadIdx.x; i < num_choices; i += blockDim.x) {
    const int expert = RoutedAt(ids, shape, first + i / shape.top_k, i % shape.top_k);
    experts[i] = static_cast<int16_t>(expert);
    ranks[i] = static_cast<int16_t>(expert < 0 ? -1 : shape.rank_of(expert));
    topk_idx[int64_t{first} * shape.top_k + i] = expert;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < num_choices; i += blockDim.x) {
    const int expert = experts[i];
    if (expert >= 0) atomicAdd(&counts[expert], 1);
    if (by_rank) continue;
    if (expert >= 0) atomicAdd(&counts[shape.num_experts + ranks[i]], 1);
    token_rows[int64_t{first} * shape.top_k + i] =
        expert < 0 ? -1 : CountEqual(experts, i, static_cast<int16_t>(expert));
  }
  if (by_rank) {
    const int lane = threadIdx.x % kWarp;
    for (int rank = threadIdx.x / kWarp; rank < shape.num_ranks; rank += blockDim.x / kWarp) {
      int before = 0;
      for (int t = lane; t < kChunkTokens; t += kWarp) {
        bool here = false;
        for (int k = 0; k < shape.top_k && t < tokens; ++k) here |= ranks[t * shape.top_k + k] == rank;
        const unsigned lanes = __ballot_sync(kAllLanes, here);
        const int index = before + __popc(lanes & ((1u << lane) - 1));
        if (t < tokens) token_rows[int64_t{first + t} * shape.num_ranks + rank] = here ? index : -1;
        before += __popc(lanes);
      }
      if (lane == 0) counts[shape.num_experts + rank] = before;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < NumBins(shape); i += blockDim.x) {
    chunk_counts[int64_t{blockIdx.x} * NumBins(shape) + i] = counts[i];
  }
}

}  // namespace

cudaError_t LaunchCount(const Shape& shape, const TopkIds& ids, int32_t* topk_idx, int32_t* token_rows,
                        int32_t* chunk_counts, cudaStream_t stream) {
  const size_t shared = sizeof(int16_t) * 2 * kChunkTokens * shape.top_k + sizeof(int32_t) * NumBins(shape);
  CountKernel<<<NumChunks(shape), kThreads, shared, stream>>>(shape, ids, topk_idx, token_rows, chunk_counts);
  return cudaPeekAtLastError();
}

cudaError_t PreloadCount() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, CountKernel);
}

}  // namespace jax_ep::cuda
