// Repermute: moves rows along a row map again, either unchanged or each multiplied by the weight of its
// choice, which is the gradient of unpermute.
#include "kernels/launch/launch.h"
#include "kernels/launches.h"
#include "kernels/rows/copy.cuh"
#include "kernels/rows/fill.cuh"
#include "kernels/rows/scale.cuh"

namespace jax_ep::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kCopyBlocks = 4, kScaleBlocks = 2;  // per SM

__global__ void MarkKernel(const int32_t* row_map, int64_t num_choices, int num_permuted, uint8_t* written) {
  const int64_t choice = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (choice < num_choices && IsRow(row_map[choice], num_permuted)) written[row_map[choice]] = 1;
}

// Calls f(c, the lane's choice of row c, the choice's permuted row or -1) for each row c. Each row gets one
// warp.
template <typename F>
__device__ void ForEachRow(const RepermuteParams& params, int lane, F&& f) {
  const int64_t num_warps = int64_t{gridDim.x} * (kThreads / kWarp);
  for (int64_t c = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / kWarp; c < params.num_rows;
       c += num_warps) {
    const int64_t choice = c * params.top_k + lane;
    const int row = lane < params.top_k ? params.row_map[choice] : -1;
    f(c, choice, IsRow(row, params.num_permuted) ? row : -1);
  }
}

// Clears the rows that no choice maps to. Each row gets one warp.
__device__ void ClearUnwrittenRows(const RepermuteParams& params, int lane) {
  const int64_t num_warps = int64_t{gridDim.x} * (kThreads / kWarp), bytes = params.payload.row_bytes;
  for (int64_t row = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / kWarp; row < params.num_permuted;
       row += num_warps) {
    if (params.written[row] != 0) continue;
    FillBytes(params.payload.out + row * bytes, bytes, 0, lane, kWarp);
  }
}

__global__ void __launch_bounds__(kThreads) CopyKernel(const __grid_constant__ RepermuteParams params) {
  const int lane = threadIdx.x % kWarp;
  const int64_t bytes = params.payload.row_bytes;
  ForEachRow(params, lane, [&](int64_t c, int64_t, int row) {
    CopyBytes(params.payload.in + c * bytes, bytes, __ballot_sync(kAllLanes, row >= 0),
              params.payload.out + row * bytes, lane);
  });
  ClearUnwrittenRows(params, lane);
}

template <typename T, int N>
__global__ void __launch_bounds__(kThreads, kScaleBlocks)
    ScaleKernel(const __grid_constant__ RepermuteParams params) {
  using Acc = typename Sum<T>::Acc;
  const int lane = threadIdx.x % kWarp;
  const int width = static_cast<int>(params.payload.row_bytes / sizeof(T));
  ForEachRow(params, lane, [&](int64_t c, int64_t choice, int row) {
    const float weight = row >= 0 ? params.topk_weights[choice] : 0.0f;
    float dot = 0;  // of this lane's choice
    for (unsigned remaining = __ballot_sync(kAllLanes, row >= 0); remaining != 0;) {
      int from[kScaledRows], rows[kScaledRows];
      Acc weights[kScaledRows], dots[kScaledRows];
#pragma unroll
      for (int r = 0; r < kScaledRows; ++r) {
        from[r] = remaining == 0 ? -1 : __ffs(static_cast<int>(remaining)) - 1;
        const int broadcast_row = __shfl_sync(kAllLanes, row, max(from[r], 0));
        rows[r] = remaining == 0 ? -1 : broadcast_row;
        weights[r] = __shfl_sync(kAllLanes, weight, max(from[r], 0));
        remaining &= remaining - 1;
      }
      ScaleRow<T, N>(reinterpret_cast<const T*>(params.payload.in) + c * width, width, rows, weights,
                     static_cast<const T*>(params.factors), reinterpret_cast<T*>(params.payload.out), lane,
                     dots);
#pragma unroll
      for (int r = 0; r < kScaledRows; ++r) {
        if (lane == from[r]) dot = static_cast<float>(dots[r]);
      }
    }
    if (lane < params.top_k) params.dots[choice] = dot;
  });
  ClearUnwrittenRows(params, lane);
}

// Calls f with the kernel for a type and a row size.
template <typename F>
cudaError_t WithScale(Float type, int64_t row_bytes, F&& f) {
  return WithType(type, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    return row_bytes % 16 == 0 ? f(ScaleKernel<T, 16 / sizeof(T)>) : f(ScaleKernel<T, 1>);
  });
}

}  // namespace

cudaError_t LaunchRepermute(const RepermuteParams& params, const Device& device, cudaStream_t stream) {
  const int64_t num_choices = int64_t{params.num_rows} * params.top_k;
  cudaError_t error = cudaMemsetAsync(params.written, 0, params.num_permuted, stream);
  if (error == cudaSuccess && num_choices > 0) {
    error = Launch(MarkKernel, static_cast<unsigned>((num_choices + kThreads - 1) / kThreads), kThreads, 0,
                   stream, false, params.row_map, num_choices, params.num_permuted, params.written);
  }
  if (error != cudaSuccess) return error;
  if (params.topk_weights == nullptr) {
    return Launch(CopyKernel, kCopyBlocks * device.num_sms, kThreads, 0, stream, false, params);
  }
  return WithScale(params.type, params.payload.row_bytes, [&](auto* kernel) {
    return Launch(kernel, kScaleBlocks * device.num_sms, kThreads, 0, stream, false, params);
  });
}

cudaError_t PreloadRepermute() {
  cudaFuncAttributes attributes;
  cudaError_t error = cudaFuncGetAttributes(&attributes, MarkKernel);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, CopyKernel);
  for (Float type : {Float::kF16, Float::kBF16, Float::kF32, Float::kF64}) {
    for (int64_t row_bytes : {8, 16}) {
      if (error != cudaSuccess) return error;
      error = WithScale(type, row_bytes,
                        [&](auto* kernel) { return cudaFuncGetAttributes(&attributes, kernel); });
    }
  }
  return error;
}

}  // namespace jax_ep::cuda
