// How many of a rank's tokens go where.
#include <cooperative_groups.h>

#include "kernels/device.cuh"
#include "kernels/kernels.h"
#include "kernels/topk.cuh"

namespace jax_ep::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kClusterBlocks = 8;         // that can add up their counts; sm_90 and newer
constexpr int kTokensInRank = 32 * 1024;  // (token, rank) pairs that there is room for at a time

JAX_EP_HD inline int TokensAtATime(const Shape& shape) {
  const int tokens = kTokensInRank / shape.num_ranks;
  return tokens < 512 ? tokens : 512;
}

// Adds 1 to its counter for each thread with a hit, as few adds as there are counters in a warp. The whole
// warp; `which` tells counters apart.
__device__ void AddHits(int32_t* counter, int which, bool hit) {
  const unsigned mates = __match_any_sync(kAllLanes, which);
  const int hits = __popc(mates & __ballot_sync(kAllLanes, hit));
  if (hits > 0 && static_cast<int>(threadIdx.x % kWarp) == __ffs(mates) - 1) atomicAdd(counter, hits);
}

// One cluster of blocks, each of which counts a part of the tokens in its shared memory: the ranks' counts,
// the nodes', then the experts'.
__global__ void __launch_bounds__(kThreads) LayoutKernel(LayoutParams params) {
  extern __shared__ __align__(16) int32_t counts[];
  const Shape shape = params.shape;
  const int R = shape.num_ranks, num_nodes = R / params.ranks_per_node;
  const int num_counts = R + num_nodes + shape.num_experts;
  bool* const in_rank = reinterpret_cast<bool*>(counts + num_counts);  // [step, R]
  const int step = TokensAtATime(shape);
  for (int i = threadIdx.x; i < num_counts; i += kThreads) counts[i] = 0;
  for (int first = blockIdx.x * step; first < shape.num_tokens; first += gridDim.x * step) {
    const int tokens = min(step, shape.num_tokens - first);
    for (int i = threadIdx.x; i < tokens * R; i += kThreads) in_rank[i] = false;
    __syncthreads();
    for (int i = threadIdx.x; i < tokens * shape.top_k; i += kThreads) {
      const int t = i / shape.top_k;
      const int expert = RoutedAt(params.topk_idx, shape, first + t, i % shape.top_k);
      if (expert < 0) continue;
      atomicAdd(&counts[R + num_nodes + expert], 1);
      in_rank[t * R + shape.rank_of(expert)] = true;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < AlignUp(tokens * R, kThreads); i += kThreads) {
      const bool here = i < tokens * R && in_rank[i];
      if (i < tokens * R) params.is_token_in_rank[int64_t{first} * R + i] = here;
      AddHits(&counts[i % R], i % R, here);
    }
    for (int i = threadIdx.x; i < AlignUp(tokens * num_nodes, kThreads); i += kThreads) {
      bool on_node = false;
      for (int r = 0; r < params.ranks_per_node && i < tokens * num_nodes; ++r) {
        on_node |= in_rank[i * params.ranks_per_node + r];
      }
      AddHits(&counts[R + i % num_nodes], i % num_nodes, on_node);
    }
    __syncthreads();
  }
  const auto write = [&](int i, int count) {
    if (i < R) {
      params.num_tokens_per_rank[i] = count;
    } else if (i < R + num_nodes) {
      params.num_tokens_per_node[i - R] = count;
    } else {
      params.num_tokens_per_expert[i - R - num_nodes] = count;
    }
  };
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  const auto cluster = cooperative_groups::this_cluster();
  cluster.sync();
  for (int i = blockIdx.x * kThreads + threadIdx.x; i < num_counts; i += gridDim.x * kThreads) {
    int count = 0;
    for (unsigned block = 0; block < cluster.num_blocks(); ++block)
      count += cluster.map_shared_rank(counts, block)[i];
    write(i, count);
  }
  cluster.sync();  // a block's memory is read until here
#else
  __syncthreads();
  for (int i = threadIdx.x; i < num_counts; i += kThreads) write(i, counts[i]);
#endif
}

}  // namespace

cudaError_t LaunchLayout(const LayoutParams& params, const Device& device, cudaStream_t stream) {
  const Shape& shape = params.shape;
  const int num_counts = shape.num_ranks + shape.num_ranks / params.ranks_per_node + shape.num_experts;
  const int step = TokensAtATime(shape);
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {
      device.has_clusters && shape.num_tokens > step / kClusterBlocks ? kClusterBlocks : 1u, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = cluster.val.clusterDim.x;
  config.blockDim = kThreads;
  config.dynamicSmemBytes = sizeof(int32_t) * num_counts + step * shape.num_ranks;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = device.has_clusters ? 1 : 0;
  return cudaLaunchKernelEx(&config, LayoutKernel, params);
}

cudaError_t PreloadLayout() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, LayoutKernel);
}

}  // namespace jax_ep::cuda
