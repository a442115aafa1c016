// Counts a rank's tokens in chunks: the first step of dispatch and permute.
#include "kernels/device.cuh"
#include "kernels/kernels.h"
#include "kernels/topk.cuh"

namespace jax_ep::cuda {
namespace {

constexpr int kThreads = 288;

// One block a chunk. Writes the routed experts, each row's index within its chunk to token_rows (-1: no
// row), and the chunk's counts by expert, then by rank. A bin is one thread's, so no atomics decide.
__global__ void CountKernel(Shape shape, TopkIds ids, int32_t* topk_idx, int32_t* token_rows,
                            int32_t* chunk_counts) {
  extern __shared__ int16_t experts[];                // [kChunkTokens, K]
  __shared__ uint8_t pairs[kChunkTokens][kMaxRanks];  // choices of each token at each rank
  const int first = blockIdx.x * kChunkTokens;
  const int tokens = min(kChunkTokens, shape.num_tokens - first);
  const int num_choices = tokens * shape.top_k;
  const bool by_rank = shape.order == Order::kRank;
  for (int i = threadIdx.x; i < num_choices; i += blockDim.x) {
    const int expert = RoutedAt(ids, shape, first + i / shape.top_k, i % shape.top_k);
    experts[i] = static_cast<int16_t>(expert);
    topk_idx[int64_t{first} * shape.top_k + i] = expert;
    if (!by_rank) token_rows[int64_t{first} * shape.top_k + i] = -1;
  }
  for (int i = threadIdx.x; i < tokens * shape.num_ranks; i += blockDim.x) {
    pairs[i / shape.num_ranks][i % shape.num_ranks] = 0;
  }
  __syncthreads();
  for (int t = threadIdx.x; t < tokens; t += blockDim.x) {
    for (int k = 0; k < shape.top_k; ++k) {
      const int expert = experts[t * shape.top_k + k];
      if (expert >= 0) ++pairs[t][shape.rank_of(expert)];
    }
  }
  __syncthreads();
  int32_t* counts = chunk_counts + int64_t{blockIdx.x} * NumBins(shape);
  // The ranks' bins first, by the first threads, while the others begin with the experts'.
  for (int i = threadIdx.x; i < NumBins(shape); i += blockDim.x) {
    int count = 0;
    if (i < shape.num_ranks) {
      for (int t = 0; t < tokens; ++t) {
        const int here = pairs[t][i];
        if (by_rank) token_rows[int64_t{first + t} * shape.num_ranks + i] = here > 0 ? count : -1;
        count += by_rank ? here > 0 : here;
      }
      counts[shape.num_experts + i] = count;
    } else {
      const int expert = i - shape.num_ranks;
#pragma unroll 8
      for (int c = 0; c < num_choices; ++c) {
        if (experts[c] != expert) continue;
        if (!by_rank) token_rows[int64_t{first} * shape.top_k + c] = count;
        ++count;
      }
      counts[expert] = count;
    }
  }
}

}  // namespace

cudaError_t LaunchCount(const Shape& shape, const TopkIds& ids, int32_t* topk_idx, int32_t* token_rows,
                        int32_t* chunk_counts, cudaStream_t stream) {
  const size_t shared = sizeof(int16_t) * kChunkTokens * shape.top_k;
  CountKernel<<<NumChunks(shape), kThreads, shared, stream>>>(shape, ids, topk_idx, token_rows, chunk_counts);
  return cudaPeekAtLastError();
}

cudaError_t PreloadCount() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, CountKernel);
}

}  // namespace jax_ep::cuda
