// The sender's side of a push whose rows become FP8 on the way: values are the first payload, scales the
// second, and both are made of the row that the first one's `in` points to.
#pragma once

#include "kernels/push/args.cuh"
#include "kernels/rows/quantize.cuh"

namespace jax_ep::cuda {

// Where a token goes: lane i of a warp holds its i-th row, -1 none, and the rank that takes it.
struct Rows {
  int row;
  int receiver;
  unsigned carried;  // lanes whose rows the token's bytes are sent to
};

// Calls f with a null pointer of the type of rows that become FP8.
template <typename F>
__device__ void WithRowType(const PushArgs& args, F&& f) {
  if (args.quantized_type == Float::kBF16) {
    f(static_cast<__nv_bfloat16*>(nullptr));
  } else if (args.quantized_type == Float::kF16) {
    f(static_cast<__half*>(nullptr));
  } else {
    f(static_cast<float*>(nullptr));
  }
}

// Makes FP8 of `size` elements, a multiple of kFp8Block. Calls store(i, values, scale) with each vector's
// place among them, as a whole warp: i is -1 where the lane has none. The values of all vectors before the
// one of place i may be stored where `elements` begin: those have been read.
template <typename T, typename Store>
__device__ void QuantizeElements(const T* elements, int size, bool rounded, int lane, Store&& store) {
  constexpr int kElements = Quantized<T>::kElements, kVectors = 4;  // loads in flight a thread
  using Bits = std::conditional_t<kElements == 8, uint2, uint32_t>;
  const uint4* const vectors = reinterpret_cast<const uint4*>(elements);
  const int n = size / kElements;
  for (int begin = 0; begin < n; begin += kVectors * kWarp) {
    uint4 loaded[kVectors];
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int i = begin + j * kWarp + lane;
      loaded[j] = i < n ? vectors[i] : uint4{};
    }
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int i = begin + j * kWarp + lane;
      const auto q = QuantizeVector<T>({loaded[j]}, rounded);
      Bits bits;
      memcpy(&bits, q.values, sizeof(bits));
      store(i < n ? i : -1, bits, q.scale);
    }
  }
}

// The lane that tells of a block's scale.
template <typename T>
__device__ bool HasScale(int i) {
  return i >= 0 && i % Quantized<T>::kLanes == 0;
}

// Sends token t by loads and stores. One warp.
__device__ inline void QuantizeToRows(const PushArgs& args, int t, const Rows& rows,
                                      const Published* published, int lane) {
  const int64_t size = args.payloads[0].row_bytes;
  const bool rounded = args.quantize == Quantize::kFp8Rounded;
  WithRowType(args, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    const T* const row = reinterpret_cast<const T*>(args.payloads[0].in) + t * size;
    QuantizeElements(row, static_cast<int>(size), rounded, lane, [&](int i, auto bits, float scale) {
      for (unsigned left = rows.carried; left != 0; left &= left - 1) {
        const int from = __ffs(left) - 1;
        const int64_t to = __shfl_sync(kAllLanes, rows.row, from);
        const Published& there = published[__shfl_sync(kAllLanes, rows.receiver, from)];
        if (i >= 0) {
          reinterpret_cast<decltype(bits)*>(static_cast<std::byte*>(there.buffers[0]) + to * size)[i] = bits;
        }
        if (HasScale<T>(i)) {
          static_cast<float*>(there.buffers[1])[to * (size / kFp8Block) + i / Quantized<T>::kLanes] = scale;
        }
      }
    });
  });
}

// Makes FP8 of what a stage of shared memory holds: the values take its front, from where bulk copies may
// then send them. One warp.
__device__ inline void QuantizeStaged(const PushArgs& args, std::byte* staged, int size, float* scales,
                                      int lane) {
  const bool rounded = args.quantize == Quantize::kFp8Rounded;
  WithRowType(args, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    QuantizeElements(reinterpret_cast<const T*>(staged), size, rounded, lane,
                     [&](int i, auto bits, float scale) {
                       if (i >= 0) reinterpret_cast<decltype(bits)*>(staged)[i] = bits;
                       if (HasScale<T>(i)) scales[i / Quantized<T>::kLanes] = scale;
                     });
  });
  FenceBulkShared();
  __syncwarp();
}

// The scales of `size` elements from `first` on, to all rows of their token. One warp.
__device__ inline void SendScales(const PushArgs& args, int64_t first, int size, const Rows& rows,
                                  const Published* published, const float* scales, int lane) {
  for (unsigned left = rows.carried; left != 0; left &= left - 1) {
    const int from = __ffs(left) - 1;
    const int64_t row = __shfl_sync(kAllLanes, rows.row, from);
    float* const to = static_cast<float*>(published[__shfl_sync(kAllLanes, rows.receiver, from)].buffers[1]) +
                      (row * args.payloads[0].row_bytes + first) / kFp8Block;
    for (int i = lane; i < size / kFp8Block; i += kWarp) to[i] = scales[i];
  }
}

}  // namespace jax_ep::cuda
