// Counts a rank's tokens chunk by chunk: the first step of dispatch and permute.
#include "kernels/launch/launch.h"
#include "kernels/launches.h"
#include "kernels/routing/count.cuh"

namespace jax_ep::cuda {
namespace {

constexpr int kThreads = 256;

// Counts one chunk per block.
__global__ void CountKernel(Shape shape, TopkIds ids, int32_t* topk_idx, int32_t* sent_rows,
                            int32_t* chunk_counts) {
  extern __shared__ __align__(16) std::byte shared[];
  int32_t* const counts = reinterpret_cast<int32_t*>(shared + Chunk::Bytes(kChunkTokens, shape.top_k));
  for (int i = threadIdx.x; i < NumBins(shape); i += blockDim.x) counts[i] = 0;
  const int first = blockIdx.x * kChunkTokens;
  const int tokens = min(kChunkTokens, shape.num_tokens - first);
  int16_t* const experts = reinterpret_cast<int16_t*>(shared);
  const Chunk chunk{first, tokens, experts, experts + kChunkTokens * shape.top_k, counts};
  CountChunk(shape, ids, chunk, first, first + tokens, topk_idx, sent_rows);
  for (int i = threadIdx.x; i < NumBins(shape); i += blockDim.x) {
    chunk_counts[int64_t{blockIdx.x} * NumBins(shape) + i] = counts[i];
  }
}

}  // namespace

cudaError_t LaunchCount(const Shape& shape, const TopkIds& ids, int32_t* topk_idx, int32_t* sent_rows,
                        int32_t* chunk_counts, cudaStream_t stream) {
  const size_t shared = Chunk::Bytes(kChunkTokens, shape.top_k) + sizeof(int32_t) * NumBins(shape);
  return Launch(CountKernel, NumChunks(shape), kThreads, shared, stream, false, shape, ids, topk_idx,
                sent_rows, chunk_counts);
}

cudaError_t PreloadCount() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, CountKernel);
}

}  // namespace jax_ep::cuda
