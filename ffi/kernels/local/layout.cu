// Layout: counts a rank's tokens by their destinations.
#include <cooperative_groups.h>

#include <cstring>
#include <type_traits>
#include <utility>

#include "kernels/launch/launch.h"
#include "kernels/launches.h"
#include "kernels/threads.cuh"

namespace jax_ep::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kClusterBlocks = 8;  // add up their counts through distributed shared memory; sm_90 and newer
constexpr int kFewChoices = 8;     // per token; they have their own kernel, which needs fewer registers

// Loads the routed experts of token t; all are -1 if there is no such token.
template <int kMaxChoices>
__device__ void LoadToken(const LayoutParams& params, int t, int (&experts)[kMaxChoices]) {
  const Shape& shape = params.shape;
  const auto load = [&](const auto* ids) {
    using Id = std::decay_t<decltype(*ids)>;
    constexpr int kPerVector = 16 / sizeof(Id);
    const int num = t < shape.num_tokens ? shape.top_k : 0;
    const Id* const from = ids + int64_t{t} * shape.top_k;
    const bool in_vectors = shape.top_k % kPerVector == 0;
#pragma unroll
    for (int first = 0; first < kMaxChoices; first += kPerVector) {
      Id loaded[kPerVector] = {};
      if (in_vectors && first < num) {
        const uint4 vector = *reinterpret_cast<const uint4*>(from + first);
        memcpy(loaded, &vector, sizeof(loaded));
      }
#pragma unroll
      for (int i = 0; i < kPerVector; ++i) {
        const int k = first + i;
        if (!in_vectors && k < num) loaded[i] = from[k];
        experts[k] = k < num ? RoutedExpert(loaded[i], shape.num_experts) : -1;
      }
    }
  };
  if (params.topk_idx.is_int64) {
    load(static_cast<const int64_t*>(params.topk_idx.data));
  } else {
    load(static_cast<const int32_t*>(params.topk_idx.data));
  }
}

// Counts each thread's token at each of its destinations (ranks or domains), which hold `size` experts each.
// If is_token_in_rank [num_destinations] is not null, also writes the token's destinations to it. Called by
// whole warps.
template <int kMaxChoices>
__device__ void CountDestinations(const int (&experts)[kMaxChoices], int num_destinations, int size,
                                  int32_t* counts, bool* is_token_in_rank) {
  const int lane = threadIdx.x % kWarp;
  // The upper half of an expert's product with this is its destination. A division would take longer.
  const uint32_t inverse = 0xffffffffu / size + 1;
  for (int first = 0; first < num_destinations; first += kWarp) {
    uint32_t destinations = 0;  // bits of the token's destinations, from `first` on
#pragma unroll
    for (int expert : experts) {
      const int destination = (size == 1 ? expert : __umulhi(expert, inverse)) - first;
      if (expert >= 0 && destination >= 0 && destination < kWarp) destinations |= 1u << destination;
    }
    const int count = min(kWarp, num_destinations - first);
    for (int i = 0; i < count; ++i) {
      const int tokens = __popc(__ballot_sync(kAllLanes, destinations >> i & 1));
      if (lane == i && tokens > 0) atomicAdd(&counts[first + i], tokens);
    }
    if (is_token_in_rank == nullptr) continue;
    if (num_destinations % 4 == 0) {
      for (int i = 0; i < count; i += 4) {
        // Spreads four bits over four bytes.
        *reinterpret_cast<uint32_t*>(is_token_in_rank + first + i) =
            (destinations >> i & 0xf) * 0x204081u & 0x01010101u;
      }
    } else {
      for (int i = 0; i < count; ++i) is_token_in_rank[first + i] = destinations >> i & 1;
    }
  }
}

// Counts the tokens in one cluster of blocks. Each block counts a part of them in its shared memory: by rank,
// by domain and by expert. The first block adds up the counts.
template <int kMaxChoices>
__global__ void __launch_bounds__(kThreads) LayoutKernel(const __grid_constant__ LayoutParams params) {
  extern __shared__ int32_t counts[];
  const Shape& shape = params.shape;
  const int R = shape.num_ranks, L = shape.num_local_experts(), num_domains = R / params.ranks_per_domain;
  const int num_counts = R + num_domains + shape.num_experts;
  for (int i = threadIdx.x; i < num_counts; i += kThreads) counts[i] = 0;
#if JAX_EP_HAS_SM_90
  const auto cluster = cooperative_groups::this_cluster();
  auto arrived = cluster.barrier_arrive();
#endif
  const int step = gridDim.x * kThreads;
  int t = blockIdx.x * kThreads + threadIdx.x, experts[kMaxChoices];
  LoadToken(params, t, experts);
#if JAX_EP_HAS_SM_90
  cluster.barrier_wait(std::move(arrived));
#else
  __syncthreads();
#endif
  for (; t - threadIdx.x % kWarp < shape.num_tokens; t += step) {
#pragma unroll
    for (int expert : experts) {
      if (expert >= 0) atomicAdd(&counts[R + num_domains + expert], 1);
    }
    bool* const goes_to = t < shape.num_tokens ? params.is_token_in_rank + int64_t{t} * R : nullptr;
    CountDestinations(experts, R, L, counts, goes_to);
    CountDestinations(experts, num_domains, L * params.ranks_per_domain, counts + R, nullptr);
    LoadToken(params, t + step, experts);
  }
  __syncthreads();
#if JAX_EP_HAS_SM_90
  if (blockIdx.x > 0) {
    int32_t* const sums = cluster.map_shared_rank(counts, 0);
    for (int i = threadIdx.x; i < num_counts; i += kThreads) {
      if (counts[i] != 0) atomicAdd(&sums[i], counts[i]);
    }
  }
  arrived = cluster.barrier_arrive();
  if (blockIdx.x > 0) return;
  cluster.barrier_wait(std::move(arrived));
#endif
  for (int i = threadIdx.x; i < num_counts; i += kThreads) {
    if (i < R) {
      params.num_tokens_per_rank[i] = counts[i];
    } else if (i < R + num_domains) {
      params.num_tokens_per_domain[i - R] = counts[i];
    } else {
      params.num_tokens_per_expert[i - R - num_domains] = counts[i];
    }
  }
}

// Calls f with the kernel for tokens with `top_k` choices.
template <typename F>
cudaError_t WithLayoutKernel(int top_k, F&& f) {
  return top_k <= kFewChoices ? f(LayoutKernel<kFewChoices>) : f(LayoutKernel<kMaxRowsPerToken>);
}

}  // namespace

cudaError_t LaunchLayout(const LayoutParams& params, const Device& device, cudaStream_t stream) {
  const Shape& shape = params.shape;
  const int num_counts = shape.num_ranks + shape.num_ranks / params.ranks_per_domain + shape.num_experts;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {device.has_clusters && shape.num_tokens > kThreads ? kClusterBlocks : 1u, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = cluster.val.clusterDim.x;
  config.blockDim = kThreads;
  config.dynamicSmemBytes = sizeof(int32_t) * num_counts;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = config.gridDim.x > 1 ? 1 : 0;
  return WithLayoutKernel(shape.top_k, [&](auto* kernel) { return LaunchAs(config, kernel, params); });
}

cudaError_t PreloadLayout() {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, LayoutKernel<kFewChoices>);
  return error == cudaSuccess ? cudaFuncGetAttributes(&attributes, LayoutKernel<kMaxRowsPerToken>) : error;
}

}  // namespace jax_ep::cuda
