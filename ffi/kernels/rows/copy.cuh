// Copies of a row to several destinations, by loads and stores of a warp.
#pragma once

#include "kernels/ptx/memory.cuh"

namespace jax_ep::cuda {

constexpr int kCopyVectors = 4;  // 16-byte loads in flight per thread

__device__ inline uint4 LoadElement(const uint4* address, bool enabled) { return LoadRow(address, enabled); }
__device__ inline char LoadElement(const char* address, bool enabled) {
  return enabled ? __ldcg(address) : 0;
}

// Copies a row of 16-byte vectors (or bytes) to the `target` of each lane in `lanes`. Called by a warp.
template <int kVectors, typename Element>
__device__ void CopyRow(const Element* source, int64_t n, unsigned lanes, Element* target, int lane) {
  for (int64_t first = 0; first < n; first += kWarp * kVectors) {
    Element values[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int64_t i = first + v * kWarp + lane;
      values[v] = LoadElement(source + i, i < n);
    }
    for (unsigned remaining = lanes; remaining != 0; remaining &= remaining - 1) {
      Element* destination = reinterpret_cast<Element*>(
          __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(target), __ffs(remaining) - 1));
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int64_t i = first + v * kWarp + lane;
        if (i < n) destination[i] = values[v];
      }
    }
  }
}

// Copies a row of any size.
__device__ inline void CopyBytes(const std::byte* source, int64_t bytes, unsigned lanes, std::byte* target,
                                 int lane) {
  if (bytes % 16 == 0) {
    CopyRow<kCopyVectors>(reinterpret_cast<const uint4*>(source), bytes / 16, lanes,
                          reinterpret_cast<uint4*>(target), lane);
  } else {
    CopyRow<kCopyVectors>(reinterpret_cast<const char*>(source), bytes, lanes,
                          reinterpret_cast<char*>(target), lane);
  }
}

}  // namespace jax_ep::cuda
