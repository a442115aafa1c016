// Products of tiles in float32, without tensor cores, which would round the operands to tf32.
#pragma once

#include <type_traits>

#include "kernels/products/any/multiply.cuh"

namespace jax_ep::cuda {

// Each thread computes four blocks of 4 x 4 elements of the block's tile. The 32 lanes of a warp cover 4 x 8
// such blocks, so a warp computes 32 x 64 elements, and reads both operands from shared memory without bank
// conflicts.
constexpr int kFloatDepth = 16;  // slice of the sum
constexpr int kQuad = 4;
constexpr int kWarpRows = 32, kWarpColumns = 64;
// The padding spreads the columns of an operand that is transposed on its way over the banks.
constexpr int kFloatStride = kTileM + kQuad;
constexpr int kFloatSlice = kFloatDepth * kFloatStride;
constexpr int kFloatSharedBytes = 2 * 2 * kFloatSlice * static_cast<int>(sizeof(float));
static_assert(kTileM == kTileN && kThreads == kTileM / kWarpRows * (kTileN / kWarpColumns) * kWarp);

// The part of an operand that a thread copies to shared memory, slice by slice, as [depth, width]. The
// operand is stored so if kDepthFirst, and otherwise as [width, depth]. Its elements are copied one by one,
// because rows need not be aligned, and zeros take the place of elements outside the matrix.
template <bool kDepthFirst>
class FloatLoader {
 public:
  __device__ FloatLoader(const Matrix<float>& from, int first) : stride_(from.stride) {
    const int thread = threadIdx.x;
    if constexpr (kDepthFirst) {
      k_ = thread / kTileM, x_ = thread % kTileM;
      source_ = from.data + k_ * stride_ + first + x_;
      width_left_ = from.columns - first - x_;
      depth_left_ = from.rows - k_;
    } else {
      // Eight lanes copy 32 contiguous bytes, and a warp writes to 32 banks.
      k_ = thread % kLanesOfRow, x_ = thread / kLanesOfRow;
      source_ = from.data + (first + x_) * stride_ + k_;
      width_left_ = from.rows - first - x_;
      depth_left_ = from.columns - k_;
    }
  }

  // Starts to copy the next slice.
  __device__ void Load(float* to) {
#pragma unroll
    for (int k = 0; k < kFloatDepth; k += kDepthStep) {
#pragma unroll
      for (int x = 0; x < kTileM; x += kWidthStep) {
        float* destination = to + (k_ + k) * kFloatStride + x_ + x;
        if (k < depth_left_ && x < width_left_) {
          const float* source = source_ + (kDepthFirst ? k * stride_ : x * stride_ + k);
          __pipeline_memcpy_async(destination, source, sizeof(float));
        } else {
          *destination = 0.0f;
        }
      }
    }
    source_ += kDepthFirst ? kFloatDepth * stride_ : kFloatDepth;
    depth_left_ -= kFloatDepth;
  }

 private:
  static constexpr int kLanesOfRow = 8;
  static constexpr int kDepthStep = kDepthFirst ? kThreads / kTileM : kLanesOfRow;
  static constexpr int kWidthStep = kDepthFirst ? kTileM : kThreads / kLanesOfRow;

  const float* source_;
  int64_t stride_;
  int k_, x_;                    // the thread's first element of a slice
  int width_left_, depth_left_;  // elements from it to the end of the matrix
};

// Does what MultiplyTile does, with products and sums in float32. Called by the whole block.
template <bool kATransposed, bool kBTransposed>
__device__ void MultiplyFloatTile(const Matrix<float>& a, const Matrix<float>& b, int depth, int m0, int n0,
                                  float* out, int64_t out_stride, int out_rows, int out_columns) {
  extern __shared__ __align__(128) std::byte shared[];
  float* const slices = reinterpret_cast<float*>(shared);
  FloatLoader<kATransposed> load_a(a, m0);
  FloatLoader<!kBTransposed> load_b(b, n0);
  const auto load = [&](int stage) {
    load_a.Load(slices + stage * 2 * kFloatSlice);
    load_b.Load(slices + stage * 2 * kFloatSlice + kFloatSlice);
    __pipeline_commit();
  };

  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  constexpr int kLanesN = kWarpColumns / 2 / kQuad;
  const int m = warp / (kTileN / kWarpColumns) * kWarpRows + lane / kLanesN * kQuad;
  const int n = warp % (kTileN / kWarpColumns) * kWarpColumns + lane % kLanesN * kQuad;
  float sums[2 * kQuad][2 * kQuad] = {};
  if (depth > 0) load(0);
  for (int stage = 0, left = depth; left > 0; left -= kFloatDepth, stage ^= 1) {
    __pipeline_wait_prior(0);
    __syncthreads();  // this slice has arrived, and the other one is no longer read
    if (left > kFloatDepth) load(stage ^ 1);
    const float* slice_a = slices + stage * 2 * kFloatSlice + m;
    const float* slice_b = slices + stage * 2 * kFloatSlice + kFloatSlice + n;
#pragma unroll
    for (int k = 0; k < kFloatDepth; ++k) {
      float left_values[2 * kQuad], right_values[2 * kQuad];
      const auto read = [k](float* to, const float* from, int distance) {
        *reinterpret_cast<float4*>(to) = *reinterpret_cast<const float4*>(from + k * kFloatStride);
        *reinterpret_cast<float4*>(to + kQuad) =
            *reinterpret_cast<const float4*>(from + k * kFloatStride + distance);
      };
      read(left_values, slice_a, kWarpRows / 2);
      read(right_values, slice_b, kWarpColumns / 2);
#pragma unroll
      for (int i = 0; i < 2 * kQuad; ++i) {
#pragma unroll
        for (int j = 0; j < 2 * kQuad; ++j) {
          sums[i][j] = __fmaf_rn(left_values[i], right_values[j], sums[i][j]);
        }
      }
    }
  }

  const bool aligned = out_stride % kQuad == 0 && reinterpret_cast<uintptr_t>(out) % sizeof(float4) == 0;
#pragma unroll
  for (int i = 0; i < 2 * kQuad; ++i) {
    const int row = m0 + m + i % kQuad + i / kQuad * (kWarpRows / 2);
    if (row >= out_rows) continue;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int column = n0 + n + half * (kWarpColumns / 2), count = out_columns - column;
      float* const to = out + row * out_stride + column;
      const float* const from = sums[i] + half * kQuad;
      if (aligned && count >= kQuad) {
        *reinterpret_cast<float4*>(to) = make_float4(from[0], from[1], from[2], from[3]);
      } else {
#pragma unroll
        for (int j = 0; j < kQuad; ++j) {
          if (j < count) to[j] = from[j];
        }
      }
    }
  }
}

}  // namespace jax_ep::cuda
