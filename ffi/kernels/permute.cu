// The local reordering: rows along a row map, and the weighted sums back. (Permute itself is a dispatch
// within a group of one rank: dispatch.cu.)
#include "kernels/kernels.h"
#include "kernels/sum.cuh"
#include "kernels/topk.cuh"

namespace jax_ep::cuda {
namespace {

constexpr int kThreads = 256;

struct CachedPermuteArgs {
  int32_t num_rows, top_k, num_permuted;
  const int32_t* row_map;
  Payload payload;
};

// A warp for each row: its bytes to all its places.
__global__ void CachedPermuteKernel(CachedPermuteArgs args) {
  const int lane = threadIdx.x % kWarp;
  const int64_t bytes = args.payload.row_bytes;
  const int64_t num_warps = int64_t{gridDim.x} * blockDim.x / kWarp;
  for (int64_t c = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / kWarp; c < args.num_rows;
       c += num_warps) {
    const std::byte* source = args.payload.in + c * bytes;
    for (int k = 0; k < args.top_k; ++k) {
      const int row = args.row_map[c * args.top_k + k];
      if (!IsRow(row, args.num_permuted)) continue;
      std::byte* target = args.payload.out + row * bytes;
      if (bytes % 16 == 0) {
        for (int64_t i = lane; i < bytes / 16; i += kWarp) {
          reinterpret_cast<uint4*>(target)[i] = reinterpret_cast<const uint4*>(source)[i];
        }
      } else {
        for (int64_t i = lane; i < bytes; i += kWarp) target[i] = source[i];
      }
    }
  }
}

struct UnpermuteArgs {
  int32_t num_rows, top_k, num_local_experts, num_permuted;
  const int32_t* row_map;
  Summand y;
  Float out_type;
  const float* topk_weights;
  bool has_bias;
  Bias bias;
  TopkIds topk_idx;
};

template <typename T, int N>
__global__ void UnpermuteKernel(UnpermuteArgs args) {
  using Acc = typename Sum<T>::Acc;
  const int64_t width = args.y.num_elements, packs = width / N;
  const int64_t units = args.num_rows * packs;
  const int64_t num_threads = int64_t{gridDim.x} * blockDim.x;
  for (int64_t unit = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; unit < units; unit += num_threads) {
    const int64_t c = unit / packs, column = unit % packs * N;
    Acc total[N] = {};
    for (int k = 0; k < args.top_k; ++k) {
      const int64_t choice = c * args.top_k + k;
      const int row = args.row_map[choice];
      if (!IsRow(row, args.num_permuted)) continue;
      const Acc weight = args.topk_weights == nullptr ? 1.0f : args.topk_weights[choice];
      const auto pack = Pack<T, N>::Load(static_cast<const T*>(args.y.rows) + row * width + column);
      int expert = -1;
      if (args.has_bias) {
        Shape shape{};
        shape.top_k = args.top_k;
        shape.num_experts = args.num_local_experts;
        expert = RoutedAt(args.topk_idx, shape, c, k);
      }
#pragma unroll
      for (int j = 0; j < N; ++j) {
        Acc term = Widen(pack.values[j]);
        if (expert >= 0) term += LoadAs<Acc>(args.bias.type, args.bias.data, expert * width + column + j);
        total[j] = MultiplyAdd(weight, term, total[j]);
      }
    }
#pragma unroll
    for (int j = 0; j < N; ++j) StoreAs<Acc>(args.out_type, args.y.out, c * width + column + j, total[j]);
  }
}

// Calls f with a null pointer of the element type and an integral constant of elements in 16 bytes, or one.
template <typename F>
auto WithPack(Float type, int64_t width, F&& f) {
  const auto with = [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    constexpr int kFull = 16 / sizeof(T);
    return width % kFull == 0 ? f(null, std::integral_constant<int, kFull>())
                              : f(null, std::integral_constant<int, 1>());
  };
  switch (type) {
    case Float::kF16:
      return with(static_cast<__half*>(nullptr));
    case Float::kBF16:
      return with(static_cast<__nv_bfloat16*>(nullptr));
    case Float::kF32:
      return with(static_cast<float*>(nullptr));
    default:
      return with(static_cast<double*>(nullptr));
  }
}

}  // namespace

cudaError_t LaunchCachedPermute(const CachedPermuteParams& params, const Device& device,
                                cudaStream_t stream) {
  for (int p = 0; p < params.num_payloads; ++p) {
    const Payload& payload = params.payloads[p];
    const cudaError_t error =
        cudaMemsetAsync(payload.out, 0, params.num_permuted * payload.row_bytes, stream);
    if (error != cudaSuccess) return error;
    CachedPermuteKernel<<<4 * device.num_sms, kThreads, 0, stream>>>(
        {params.num_rows, params.top_k, params.num_permuted, params.row_map, payload});
  }
  return cudaPeekAtLastError();
}

cudaError_t LaunchUnpermute(const UnpermuteParams& params, const Device& device, cudaStream_t stream) {
  const UnpermuteArgs args{params.num_rows,          params.top_k,
                           params.num_local_experts, params.num_permuted,
                           params.row_map,           params.y,
                           params.out_type,          params.topk_weights,
                           params.bias != nullptr,   params.bias != nullptr ? *params.bias : Bias{},
                           params.topk_idx};
  return WithPack(params.y.type, params.y.num_elements, [&](auto* null, auto pack) {
    UnpermuteKernel<std::remove_pointer_t<decltype(null)>, decltype(pack)::value>
        <<<8 * device.num_sms, kThreads, 0, stream>>>(args);
    return cudaPeekAtLastError();
  });
}

cudaError_t PreloadPermute() {
  cudaFuncAttributes attributes;
  cudaError_t error = cudaFuncGetAttributes(&attributes, CachedPermuteKernel);
  for (Float type : {Float::kF16, Float::kBF16, Float::kF32, Float::kF64}) {
    for (int64_t width : {1, 16}) {
      if (error != cudaSuccess) return error;
      error = WithPack(type, width, [&](auto* null, auto pack) {
        return cudaFuncGetAttributes(
            &attributes, UnpermuteKernel<std::remove_pointer_t<decltype(null)>, decltype(pack)::value>);
      });
    }
  }
  return error;
}

}  // namespace jax_ep::cuda
