// Balance: places redundant experts. One block does it.
#include "core/balance.h"
#include "kernels/launch/launch.h"
#include "kernels/launches.h"
#include "kernels/threads.cuh"

namespace jax_ep::cuda {
namespace {

constexpr int kMaxThreads = 1024;

// The threads of the block as the Threads of core/balance.h.
struct Block {
  static constexpr int32_t kLanes = kWarp;

  __device__ int32_t thread() const { return threadIdx.x; }
  __device__ int32_t num_threads() const { return blockDim.x; }
  __device__ int32_t warp() const { return threadIdx.x / kWarp; }
  __device__ int32_t num_warps() const { return blockDim.x / kWarp; }
  __device__ int32_t lane() const { return threadIdx.x % kWarp; }
  __device__ void Sync() const { __syncthreads(); }
  __device__ void SyncWarp() const { __syncwarp(); }
  __device__ static int32_t CountBits(uint32_t bits) { return __popc(bits); }

  template <typename Value>
  __device__ Value Sum(Value value, int32_t period) const {
    for (int lanes = kWarp / 2; lanes >= period; lanes /= 2) {
      value += __shfl_xor_sync(kAllLanes, value, lanes);
    }
    return value;
  }

  __device__ uint32_t PrefixSum(uint32_t value) const {
#pragma unroll
    for (int lanes = 1; lanes < kWarp; lanes *= 2) {
      const uint32_t before = __shfl_up_sync(kAllLanes, value, lanes);
      if (lane() >= lanes) value += before;
    }
    return value;
  }

  template <int kNumber>
  __device__ void Max(Candidate (&candidates)[kNumber]) const {
    int32_t values[kNumber];
#pragma unroll
    for (int i = 0; i < kNumber; ++i) values[i] = WarpMax(candidates[i].value);
    uint32_t indices[kNumber];
#pragma unroll
    for (int i = 0; i < kNumber; ++i) {
      // Without any candidate all indices are -1, which is the largest unsigned number.
      const bool is_best = candidates[i].value == values[i];
      indices[i] = WarpMin(is_best ? static_cast<uint32_t>(candidates[i].index) : UINT32_MAX);
    }
#pragma unroll
    for (int i = 0; i < kNumber; ++i) candidates[i] = {values[i], static_cast<int32_t>(indices[i])};
  }
};

// Returns the threads of the block. A small block starts earlier and has cheaper barriers.
int NumThreads(const BalanceParams& params) {
  return int64_t{params.num_ranks} * params.num_experts <= 4096 ? kMaxThreads / 2 : kMaxThreads;
}

__global__ void __launch_bounds__(kMaxThreads) BalanceKernel(const __grid_constant__ BalanceParams params) {
  extern __shared__ int32_t words[];
  BalanceState state;
  state.Assign(params, words);
  Balancer<Block>(params, state, Block()).Run();
}

}  // namespace

cudaError_t LaunchBalance(const BalanceParams& params, const Device& device, cudaStream_t stream) {
  // This must be the same for all shapes, because another thread may be about to launch the same kernel.
  const cudaError_t error =
      cudaFuncSetAttribute(BalanceKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, device.shared_bytes);
  if (error != cudaSuccess) return error;
  return Launch(BalanceKernel, 1, NumThreads(params), BalanceStateBytes(params), stream, false, params);
}

cudaError_t PreloadBalance() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, BalanceKernel);
}

}  // namespace jax_ep::cuda
