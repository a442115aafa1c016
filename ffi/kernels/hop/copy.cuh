// Copies of bytes at any alignment, by a block.
#pragma once

#include "kernels/ptx/memory.cuh"

namespace jax_ep::cuda {

// Loads without the L1 cache, because the network writes to slots.
__device__ inline uint4 LoadWord(const uint4* word) { return LoadRow(word); }
template <typename Word>
__device__ Word LoadWord(const Word* word) {
  return *static_cast<const volatile Word*>(word);
}

template <typename Word>
__device__ void CopyWords(std::byte* to, const std::byte* from, int64_t bytes) {
  const int64_t words = bytes / static_cast<int64_t>(sizeof(Word));
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < words; i += blockDim.x) {
    reinterpret_cast<Word*>(to)[i] = LoadWord(reinterpret_cast<const Word*>(from) + i);
  }
}

__device__ inline void CopyBlock(std::byte* to, const std::byte* from, int64_t bytes) {
  const uintptr_t ends = reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from);
  int64_t done = 0;
  if (ends % sizeof(uint4) == 0) {
    CopyWords<uint4>(to, from, bytes);
    done = bytes / 16 * 16;
  } else if (ends % sizeof(uint32_t) == 0) {
    CopyWords<uint32_t>(to, from, bytes);
    done = bytes / 4 * 4;
  }
  CopyWords<unsigned char>(to + done, from + done, bytes - done);
}

}  // namespace jax_ep::cuda
