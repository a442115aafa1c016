// Parts of sums that travel as FP8: rows of values, with a scale for each block of them.
#pragma once

#include "kernels/fp8/block.cuh"
#include "kernels/rows/sum.cuh"

namespace jax_ep::cuda {

// A part, or nothing.
struct Fp8Part {
  std::byte* values;  // [width]
  float* scales;      // [width / kFp8Block]
};

// A lane's share of a slice of a part: N neighboring values in each vector, and the scales of their blocks.
template <int N, int kVectors>
struct Fp8Slice {
  static constexpr int kLanes = kFp8Block / N;  // that hold a block
  using Values = std::conditional_t<N == 16, uint4, std::conditional_t<N == 8, uint2, uint32_t>>;
  static_assert(kLanes <= kWarp && sizeof(Values) == N);
  Values values[kVectors];
  float scales[kVectors];
};

// Converts a slice of a sum to FP8. Called by the whole warp.
template <int N, int kVectors>
__device__ Fp8Slice<N, kVectors> ConvertSlice(const float (&total)[kVectors][N], bool rounded) {
  Fp8Slice<N, kVectors> slice;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    uint32_t largest = 0;
#pragma unroll
    for (float value : total[v]) largest = max(largest, __float_as_uint(value) & 0x7fffffffu);
#pragma unroll
    for (int step = 1; step < slice.kLanes; step *= 2) {
      largest = max(largest, __shfl_xor_sync(kAllLanes, largest, step));
    }
    slice.scales[v] = ScaleOf(largest, rounded);
    const float factor = Reciprocal(slice.scales[v]);
    uint32_t words[N / 4];
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      words[i / 4] = ConvertPair(total[v][i], total[v][i + 1], factor) |
                     ConvertPair(total[v][i + 2], total[v][i + 3], factor) << 16;
    }
    memcpy(&slice.values[v], words, sizeof(words));
  }
  return slice;
}

// Stores a slice that begins at column `first` of a part.
template <int N, int kVectors>
__device__ void StoreSliceOfPart(const Fp8Part& part, int first, int width, int lane,
                                 const Fp8Slice<N, kVectors>& slice) {
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = first + (v * kWarp + lane) * N;
    if (column >= width) continue;
    *reinterpret_cast<typename Fp8Slice<N, kVectors>::Values*>(part.values + column) = slice.values[v];
    if (lane % slice.kLanes == 0) part.scales[column / kFp8Block] = slice.scales[v];
  }
}

// Returns two FP8 values. The first one is in the low bits.
__device__ inline float2 WidenFp8(uint32_t pair) {
  const __half2 halves(__nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair), __NV_E4M3));
  return __half22float2(halves);
}

// Adds a slice of a part to a sum. Products and sums are rounded one by one, as on the CPU.
template <int N, int kVectors>
__device__ void AddSlice(const Fp8Slice<N, kVectors>& slice, float (&total)[kVectors][N]) {
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    uint32_t words[N / 4];
    memcpy(words, &slice.values[v], sizeof(words));
#pragma unroll
    for (int j = 0; j < N; j += 2) {
      const float2 pair = WidenFp8(words[j / 4] >> (j % 4 * 8) & 0xffffu);
      total[v][j] = __fadd_rn(total[v][j], __fmul_rn(pair.x, slice.scales[v]));
      total[v][j + 1] = __fadd_rn(total[v][j + 1], __fmul_rn(pair.y, slice.scales[v]));
    }
  }
}

// Adds the slice that begins at column `first` of the parts of the lanes in `lanes`, in the order of the
// lanes. The loads of kParts parts are in flight at a time.
template <int kParts, int N, int kVectors>
__device__ void AddSliceOfParts(const Fp8Part& part, unsigned lanes, int first, int width, int lane,
                                float (&total)[kVectors][N]) {
  using Slice = Fp8Slice<N, kVectors>;
  for (unsigned remaining = lanes; remaining != 0;) {
    Slice slices[kParts];
    unsigned next = remaining;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const bool more = next != 0;
      const int from = more ? __ffs(static_cast<int>(next)) - 1 : 0;
      const auto shuffle = [&](const void* address) {
        return __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(address), from);
      };
      const auto* const values = reinterpret_cast<const std::byte*>(shuffle(part.values));
      const auto* const scales = reinterpret_cast<const uint32_t*>(shuffle(part.scales));
      next &= next - 1;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int column = first + (v * kWarp + lane) * N;
        const bool enabled = more && column < width;
        const auto* const vector = reinterpret_cast<const typename Slice::Values*>(values + column);
        slices[i].values[v] = LoadRow(vector, enabled);
        slices[i].scales[v] = __uint_as_float(LoadRow(scales + column / kFp8Block, enabled));
      }
    }
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      if (remaining == 0) break;
      remaining &= remaining - 1;
      AddSlice(slices[i], total);
    }
  }
}

}  // namespace jax_ep::cuda
