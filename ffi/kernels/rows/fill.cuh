// Fills of this device's memory with one byte value.
#pragma once

#include <cstddef>

#include "kernels/threads.cuh"

namespace jax_ep::cuda {

// Sets this thread's share of the bytes to `value`, in 16-byte vectors if `data` is aligned to that. `thread`
// is the index of this thread among `threads`.
__device__ inline void FillBytes(std::byte* data, int64_t bytes, unsigned char value, int64_t thread,
                                 int64_t threads) {
  const uint32_t word = value * 0x01010101u;
  const int64_t vectors = reinterpret_cast<uintptr_t>(data) % 16 == 0 ? bytes / 16 : 0;
  for (int64_t i = thread; i < vectors; i += threads) {
    reinterpret_cast<uint4*>(data)[i] = make_uint4(word, word, word, word);
  }
#pragma unroll 1
  for (int64_t i = vectors * 16 + thread; i < bytes; i += threads) data[i] = std::byte{value};
}

}  // namespace jax_ep::cuda
