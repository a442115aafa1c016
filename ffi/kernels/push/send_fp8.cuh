// The sender's side of a push that converts rows to FP8. The values are the first payload and the scales the
// second. Both are computed from the row at the first payload's `in`.
#pragma once

#include "kernels/fp8/block.cuh"
#include "kernels/push/args.cuh"

namespace jax_ep::cuda {

// The destinations of a token. Lane i of a warp holds the i-th row, -1 if none, and the rank that receives
// it.
struct Destinations {
  int row;
  int rank;
  unsigned payload_lanes;  // lanes to whose rows the token's payload is sent
};

// Calls f with a null pointer to the type of the rows that become FP8.
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

// Returns the position in a row of vector v of this lane of a block. Lanes load their vectors in a different
// order in every other block, so that the loads of a warp from shared memory use all banks.
template <typename T, int kVectors>
__device__ int VectorIndex(int block, int v, int lane) {
  constexpr int kLanes = Quantized<T, kVectors>::kLanes;
  const int rotation = kVectors > 1 ? block % 2 * kLanes : 0;
  return block * (kVectors * kLanes) + lane % kLanes + v * kLanes + (v % 2 == 0 ? rotation : -rotation);
}

// Converts `size` elements, a multiple of kFp8Block, to FP8. kSets sets of blocks are loaded at a time; a set
// is what a warp holds with kVectors vectors per lane. The whole warp calls take(block, quantized) for each
// set; `block` is -1 if the lane has none. take() may store the values of this and earlier blocks at the
// front of `elements`, because those have been read.
template <typename T, int kSets, int kVectors, typename Take>
__device__ void QuantizeElements(const T* elements, int size, bool rounded, int lane, Take&& take) {
  constexpr int kLanes = Quantized<T, kVectors>::kLanes, kBlocks = kWarp / kLanes;
  const uint4* const vectors = reinterpret_cast<const uint4*>(elements);
  const int num_blocks = size / kFp8Block;
  for (int first = 0; first < num_blocks; first += kSets * kBlocks) {
    uint4 loaded[kSets][kVectors];
#pragma unroll
    for (int s = 0; s < kSets; ++s) {
      const int block = first + s * kBlocks + lane / kLanes;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        loaded[s][v] = block < num_blocks ? vectors[VectorIndex<T, kVectors>(block, v, lane)] : uint4{};
      }
    }
    __syncwarp();
#pragma unroll
    for (int s = 0; s < kSets; ++s) {
      const int block = first + s * kBlocks + lane / kLanes;
      take(block < num_blocks ? block : -1, QuantizeBlock<T>(loaded[s], rounded));
    }
  }
}

// Converts token t and sends it by loads and stores. Called by one warp.
__device__ inline void SendQuantized(const PushArgs& args, int t, const Destinations& destinations,
                                     const Published* published, int lane) {
  const int64_t size = args.payloads[0].row_bytes;
  const bool rounded = args.quantize == Quantize::kFp8Rounded;
  WithRowType(args, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    using Block = Quantized<T>;
    const T* const row = reinterpret_cast<const T*>(args.payloads[0].in) + t * size;
    QuantizeElements<T, 4, 1>(
        row, static_cast<int>(size), rounded, lane, [&](int block, const Block& quantized) {
          for (unsigned remaining = destinations.payload_lanes; remaining != 0; remaining &= remaining - 1) {
            const int from = __ffs(remaining) - 1;
            const int64_t to = __shfl_sync(kAllLanes, destinations.row, from);
            const Published& receiver = published[__shfl_sync(kAllLanes, destinations.rank, from)];
            if (block < 0) continue;
            auto* const values = static_cast<std::byte*>(receiver.buffers[0]) + to * size;
            reinterpret_cast<typename Block::Values*>(values)[VectorIndex<T, 1>(block, 0, lane)] =
                quantized.values[0];
            float* const scales = static_cast<float*>(receiver.buffers[1]) + to * (size / kFp8Block);
            if (lane % Block::kLanes == 0) scales[block] = quantized.scale;
          }
        });
  });
}

// Converts the contents of a stage to FP8 in place: the values go to the front of the stage, from where bulk
// copies can send them. Called by one warp. With several vectors per lane, fewer lanes have to reduce a
// block's largest magnitude and compute its scale, which halves the number of instructions.
__device__ inline void QuantizeStaged(const PushArgs& args, std::byte* staged, int size, float* scales,
                                      int lane) {
  constexpr int kVectors = 4;
  const bool rounded = args.quantize == Quantize::kFp8Rounded;
  WithRowType(args, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    using Block = Quantized<T, kVectors>;
    QuantizeElements<T, 1, kVectors>(
        reinterpret_cast<const T*>(staged), size, rounded, lane, [&](int block, const Block& quantized) {
          if (block < 0) return;
          auto* const values = reinterpret_cast<typename Block::Values*>(staged);
#pragma unroll
          for (int v = 0; v < kVectors; ++v)
            values[VectorIndex<T, kVectors>(block, v, lane)] = quantized.values[v];
          if (lane % Block::kLanes == 0) scales[block] = quantized.scale;
        });
  });
  FenceBulkShared();
  __syncwarp();
}

// Sends the scales of `size` elements, from element `first` on, to all rows of the token. Called by one warp.
__device__ inline void SendScales(const PushArgs& args, int64_t first, int size,
                                  const Destinations& destinations, const Published* published,
                                  const float* scales, int lane) {
  for (unsigned remaining = destinations.payload_lanes; remaining != 0; remaining &= remaining - 1) {
    const int from = __ffs(remaining) - 1;
    const int64_t row = __shfl_sync(kAllLanes, destinations.row, from);
    float* const to =
        static_cast<float*>(published[__shfl_sync(kAllLanes, destinations.rank, from)].buffers[1]) +
        (row * args.payloads[0].row_bytes + first) / kFp8Block;
    for (int i = lane; i < size / kFp8Block; i += kWarp) to[i] = scales[i];
  }
}

}  // namespace jax_ep::cuda
