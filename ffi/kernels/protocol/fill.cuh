// What an op that failed leaves in its results: nothing that looks like rows.
#pragma once

#include "kernels/protocol/wait.cuh"

namespace jax_ep::cuda {

// Sets bytes of a result as a block: 0xff makes NaN of floats and -1 of integers.
JAX_EP_RARE void FillResult(void* data, int64_t bytes, unsigned char value = 0xff) {
  std::byte* const to = static_cast<std::byte*>(data);
  if (to == nullptr) return;
  const uint32_t word = value * 0x01010101u;
  const bool in_vectors = reinterpret_cast<uintptr_t>(to) % 16 == 0;
  const int64_t vectors = in_vectors ? bytes / 16 : 0;
  for (int64_t i = threadIdx.x; i < vectors; i += blockDim.x) {
    reinterpret_cast<uint4*>(to)[i] = make_uint4(word, word, word, word);
  }
  for (int64_t i = vectors * 16 + threadIdx.x; i < bytes; i += blockDim.x) to[i] = std::byte{value};
}

}  // namespace jax_ep::cuda
