// How many of a rank's tokens go where.
#include <cooperative_groups.h>

#include "kernels/device.cuh"
#include "kernels/kernels.h"
#include "kernels/topk.cuh"

namespace jax_ep::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kClusterBlocks = 8;     // that can add up their counts; sm_90 and newer
constexpr int kStagedIds = 8 * 1024;  // that there is room for at a time

JAX_EP_HD inline int TokensAtATime(const Shape& shape) {
  const int tokens = kStagedIds / shape.top_k;
  return tokens < kThreads ? tokens : kThreads;
}

// Counts the staged tokens of each of `num_places` places (ranks, or nodes), which hold `size` experts each.
// A thread for each token; repeated ids do not matter. Writes which tokens they are to is_there [tokens,
// num_places], unless it is null.
__device__ void CountPlaces(const int16_t* staged, int tokens, int top_k, int num_places, int size,
                            int32_t* counts, bool* is_there) {
  const int t = threadIdx.x, lane = threadIdx.x % kWarp;
  for (int first = 0; first < num_places; first += kWarp) {
    uint32_t places = 0;  // of the token, from `first` on
#pragma unroll 8
    for (int k = 0; k < top_k && t < tokens; ++k) {
      const int expert = staged[t * top_k + k], place = expert / size - first;
      if (expert >= 0 && place >= 0 && place < kWarp) places |= 1u << place;
    }
    const int here = min(kWarp, num_places - first);
    for (int i = 0; i < here; ++i) {
      const int tokens_there = __popc(__ballot_sync(kAllLanes, places >> i & 1));
      if (lane == i && tokens_there > 0) atomicAdd(&counts[first + i], tokens_there);
    }
    if (is_there == nullptr || t >= tokens) continue;
    bool* const row = is_there + int64_t{t} * num_places + first;
    if (num_places % 4 == 0) {
      for (int i = 0; i < here; i += 4) {
        const uint32_t four = places >> i;
        *reinterpret_cast<uint32_t*>(row + i) =
            (four & 1) | (four & 2) << 7 | (four & 4) << 14 | (four & 8) << 21;
      }
    } else {
      for (int i = 0; i < here; ++i) row[i] = places >> i & 1;
    }
  }
}

// One cluster of blocks, each of which counts a part of the tokens in its shared memory: the ranks' counts,
// the nodes', then the experts'.
__global__ void __launch_bounds__(kThreads) LayoutKernel(LayoutParams params) {
  extern __shared__ __align__(16) int32_t counts[];
  const Shape shape = params.shape;
  const int R = shape.num_ranks, L = shape.num_local_experts(), num_nodes = R / params.ranks_per_node;
  const int num_counts = R + num_nodes + shape.num_experts;
  const int step = TokensAtATime(shape), K = shape.top_k;
  int16_t* const staged = reinterpret_cast<int16_t*>(counts + num_counts);  // [step, K]
  for (int i = threadIdx.x; i < num_counts; i += kThreads) counts[i] = 0;
  // The blocks take equal parts, as far as they have room.
  const int part =
      min(step, (shape.num_tokens + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x));
  for (int first = blockIdx.x * part; first < shape.num_tokens; first += gridDim.x * part) {
    const int tokens = min(part, shape.num_tokens - first);
    StageIds(params.topk_idx, shape.num_experts, int64_t{first} * K, tokens * K, staged);
    __syncthreads();
    for (int i = threadIdx.x; i < tokens * K; i += kThreads) {
      const int expert = RoutedStaged(staged, i, K);
      if (expert >= 0) atomicAdd(&counts[R + num_nodes + expert], 1);
    }
    CountPlaces(staged, tokens, K, R, L, counts, params.is_token_in_rank + int64_t{first} * R);
    CountPlaces(staged, tokens, K, num_nodes, L * params.ranks_per_node, counts + R, nullptr);
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
#pragma unroll
    for (int block = 0; block < kClusterBlocks; ++block) {
      if (block < static_cast<int>(gridDim.x)) count += cluster.map_shared_rank(counts, block)[i];
    }
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
  config.dynamicSmemBytes = sizeof(int32_t) * num_counts + sizeof(int16_t) * step * shape.top_k;
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
