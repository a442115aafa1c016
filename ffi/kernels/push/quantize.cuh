// The sender's side of a push whose rows become FP8 on the way: values are the first payload, scales the
// second, and both are made of the row that the first one's `in` points to.
#pragma once

#include "kernels/push/args.cuh"
#include "kernels/rows/quantize.cuh"

namespace jax_ep::cuda {

// Where a token goes: lane i of a warp holds its i-th row, -1 none, and the rank that takes it.
struct Destinations {
  int row;
  int rank;
  unsigned payload_lanes;  // lanes whose rows the token's bytes are sent to
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

// The place in a row of a lane's vector of a block. Of two neighbouring blocks the lanes take their vectors
// in another order: what a warp loads from shared memory at a time then lies in all of its banks.
template <typename T, int kVectors>
__device__ int VectorIndex(int block, int v, int lane) {
  constexpr int kLanes = Quantized<T, kVectors>::kLanes;
  const int rotation = kVectors > 1 ? block % 2 * kLanes : 0;
  return block * (kVectors * kLanes) + lane % kLanes + v * kLanes + (v % 2 == 0 ? rotation : -rotation);
}

// Makes FP8 of `size` elements, a multiple of kFp8Block: kSets times as many blocks at a time as a warp holds
// with kVectors a lane. Calls take(block, quantized) for each, as a whole warp: block is -1 where the lane
// has none. The values of all blocks before may be stored where `elements` begin: those have been read.
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

// Sends token t by loads and stores. One warp.
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

// Makes FP8 of what a stage of shared memory holds: the values take its front, from where bulk copies may
// then send them. One warp. Several vectors a lane: a block's largest number and its scale are found by fewer
// lanes, which takes half of the instructions.
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

// The scales of `size` elements from `first` on, to all rows of their token. One warp.
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
