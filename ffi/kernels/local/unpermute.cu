// Unpermute: the weighted sums of rows, back from expert order. Permute is a push within a group of one rank
// (permute.cu).
#include "kernels/launch/launch.h"
#include "kernels/launches.h"
#include "kernels/routing/count.cuh"
#include "kernels/rows/sum.cuh"

namespace jax_ep::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kUnpermuteBlocks = 4;  // per SM

struct UnpermuteArgs {
  int32_t num_rows, top_k, num_local_experts, num_permuted;
  const int32_t* row_map;
  Summand y;
  Float out_type;
  const float* topk_weights;
  Bias bias;
  TopkIds topk_idx;
};

// Adds the bias of each row's expert. Lane k holds the expert of the k-th choice.
template <typename Acc>
struct BiasShift {
  const Bias& bias;
  int64_t width;
  int expert;
  __device__ Acc operator()(int from, int column, Acc value) const {
    const int64_t row = __shfl_sync(kAllLanes, expert, from);
    return column < width && row >= 0 ? value + LoadAs<Acc>(bias.type, bias.data, row * width + column)
                                      : value;
  }
};

// Sums rows. Each warp takes one slice of a row at a time.
template <typename T, int N, bool kBiased>
__global__ void __launch_bounds__(kThreads) UnpermuteKernel(const __grid_constant__ UnpermuteArgs args) {
  using Acc = typename Sum<T>::Acc;
  const int lane = threadIdx.x % kWarp, width = static_cast<int>(args.y.num_elements);
  const int num_slices = (width + kSlice<N> - 1) / kSlice<N>;
  const int64_t num_warps = int64_t{gridDim.x} * (kThreads / kWarp);
  for (int64_t task = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / kWarp;
       task < int64_t{args.num_rows} * num_slices; task += num_warps) {
    const int64_t c = task / num_slices, choice = c * args.top_k + lane;
    const int first = static_cast<int>(task % num_slices) * kSlice<N>;
    const int row = lane < args.top_k ? args.row_map[choice] : -1;
    const bool kept = IsRow(row, args.num_permuted);
    SumInputs<T> inputs{nullptr, 1.0f, __ballot_sync(kAllLanes, kept)};
    if (kept) {
      inputs.row = static_cast<const T*>(args.y.rows) + int64_t{row} * width;
      if (args.topk_weights != nullptr) inputs.factor = args.topk_weights[choice];
    }
    Acc total[kSumVectors][N] = {};
    bool is_broken = row != -1 && !kept;
    if constexpr (kBiased) {
      Shape shape{};
      shape.top_k = args.top_k;
      shape.num_experts = args.num_local_experts;
      const int expert = kept ? RoutedAt(args.topk_idx, shape, c, lane) : -1;
      is_broken |= kept && expert < 0;
      SumSlice<T, N>(inputs, first, width, lane, total, BiasShift<Acc>{args.bias, width, expert});
    } else {
      SumSlice<T, N>(inputs, first, width, lane, total);
    }
    if (__any_sync(kAllLanes, is_broken)) {  // the map, or an expert, is none of this array
#pragma unroll
      for (auto& vector : total) {
        for (Acc& sum : vector) sum = static_cast<Acc>(NAN);
      }
    }
    if (args.out_type == args.y.type) {
      StoreSlice<T, N>(static_cast<T*>(args.y.out) + c * width, first, width, lane, total);
      continue;
    }
#pragma unroll
    for (int v = 0; v < kSumVectors; ++v) {
      const int column = first + (v * kWarp + lane) * N;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        if (column < width) StoreAs<Acc>(args.out_type, args.y.out, c * width + column + j, total[v][j]);
      }
    }
  }
}

// Calls f with the kernel for a type and a width.
template <typename F>
cudaError_t WithUnpermute(Float type, int64_t width, bool biased, F&& f) {
  const auto with = [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    constexpr int kFull = 16 / sizeof(T);
    if (width % kFull == 0) {
      return f(biased ? UnpermuteKernel<T, kFull, true> : UnpermuteKernel<T, kFull, false>);
    }
    return f(biased ? UnpermuteKernel<T, 1, true> : UnpermuteKernel<T, 1, false>);
  };
  return WithType(type, with);
}

}  // namespace

cudaError_t LaunchUnpermute(const UnpermuteParams& params, const Device& device, cudaStream_t stream) {
  UnpermuteArgs args{params.num_rows,
                     params.top_k,
                     params.num_local_experts,
                     params.num_permuted,
                     params.row_map,
                     params.y,
                     params.out_type,
                     params.topk_weights,
                     {},
                     {}};
  const bool biased = params.bias != nullptr;
  if (biased) {
    args.bias = *params.bias;
    args.topk_idx = params.topk_idx;
  }
  return WithUnpermute(params.y.type, params.y.num_elements, biased, [&](auto* kernel) {
    return Launch(kernel, kUnpermuteBlocks * device.num_sms, kThreads, 0, stream, false, args);
  });
}

cudaError_t PreloadUnpermute() {
  cudaFuncAttributes attributes;
  cudaError_t error = cudaSuccess;
  for (Float type : {Float::kF16, Float::kBF16, Float::kF32, Float::kF64}) {
    for (int64_t width : {1, 16}) {
      for (bool biased : {false, true}) {
        if (error != cudaSuccess) return error;
        error = WithUnpermute(type, width, biased,
                              [&](auto* kernel) { return cudaFuncGetAttributes(&attributes, kernel); });
      }
    }
  }
  return error;
}

}  // namespace jax_ep::cuda
