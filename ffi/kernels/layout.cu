// How many of a rank's tokens go where.
#include "kernels/kernels.h"
#include "kernels/topk.cuh"

namespace jax_ep::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void LayoutKernel(LayoutParams params) {
  const Shape shape = params.shape;
  const int num_nodes = shape.num_ranks / params.ranks_per_node;
  for (int t = blockIdx.x * blockDim.x + threadIdx.x; t < shape.num_tokens; t += gridDim.x * blockDim.x) {
    bool* in_rank = params.is_token_in_rank + int64_t{t} * shape.num_ranks;
    for (int r = 0; r < shape.num_ranks; ++r) in_rank[r] = false;
    for (int k = 0; k < shape.top_k; ++k) {
      const int expert = RoutedAt(params.topk_idx, shape, t, k);
      if (expert < 0) continue;
      atomicAdd(&params.num_tokens_per_expert[expert], 1);
      in_rank[shape.rank_of(expert)] = true;
    }
    for (int node = 0; node < num_nodes; ++node) {
      bool on_node = false;
      for (int r = node * params.ranks_per_node; r < (node + 1) * params.ranks_per_node; ++r) {
        if (!in_rank[r]) continue;
        atomicAdd(&params.num_tokens_per_rank[r], 1);
        on_node = true;
      }
      if (on_node) atomicAdd(&params.num_tokens_per_node[node], 1);
    }
  }
}

}  // namespace

cudaError_t LaunchLayout(const LayoutParams& params, cudaStream_t stream) {
  const Shape& shape = params.shape;
  const auto clear = [&](int32_t* counts, int64_t n) {
    return cudaMemsetAsync(counts, 0, n * sizeof(int32_t), stream);
  };
  cudaError_t error = clear(params.num_tokens_per_rank, shape.num_ranks);
  if (error == cudaSuccess)
    error = clear(params.num_tokens_per_node, shape.num_ranks / params.ranks_per_node);
  if (error == cudaSuccess) error = clear(params.num_tokens_per_expert, shape.num_experts);
  if (error != cudaSuccess) return error;
  LayoutKernel<<<(shape.num_tokens + kThreads - 1) / kThreads, kThreads, 0, stream>>>(params);
  return cudaPeekAtLastError();
}

cudaError_t PreloadLayout() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, LayoutKernel);
}

}  // namespace jax_ep::cuda
