// Loads of router output of either integer width, counts of a rank's tokens, and the index of each row among
// those of its bin.
#pragma once

#include "core/params.h"
#include "kernels/threads.cuh"

namespace jax_ep::cuda {

// Returns the routed expert of token t's k-th choice, -1 if unused.
__device__ inline int32_t RoutedAt(const TopkIds& ids, const Shape& shape, int64_t t, int k) {
  const int64_t i = t * shape.top_k + k;
  return ids.is_int64 ? RoutedExpert(static_cast<const int64_t*>(ids.data)[i], shape.num_experts)
                      : RoutedExpert(static_cast<const int32_t*>(ids.data)[i], shape.num_experts);
}

// Loads the routed experts of `n` choices, from choice `first` on, into shared memory. Called by the whole
// block, which must synchronize before it uses them.
__device__ inline void StageExperts(const TopkIds& ids, int num_experts, int64_t first, int n,
                                    int16_t* experts) {
  const auto stage = [&](const auto* from) {
#pragma unroll 4
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
      experts[i] = static_cast<int16_t>(RoutedExpert(from[first + i], num_experts));
    }
  };
  if (ids.is_int64) {
    stage(static_cast<const int64_t*>(ids.data));
  } else {
    stage(static_cast<const int32_t*>(ids.data));
  }
}

// Consecutive tokens to count, and the shared memory for it.
struct Chunk {
  int first;  // token
  int tokens;
  int16_t* experts;  // [tokens, K]
  int16_t* ranks;    // [tokens, K]
  int32_t* counts;   // [E + R], zero; by expert, then by rank

  JAX_EP_HD static int64_t Bytes(int tokens, int top_k) {
    return AlignUp(int64_t{2} * sizeof(int16_t) * tokens * top_k, 128);
  }
};

// Returns 16 for each of eight numbers that is equal to x, among the first `count`. `pair` is x twice.
__device__ inline int EqualBits(const uint4& eight, uint32_t pair, int count = 8) {
  const auto equal = [&](uint32_t two, int left) {
    const uint32_t mask = left >= 2 ? ~0u : left == 1 ? 0xffffu : 0u;
    return __popc(__vcmpeq2(two, pair) & mask);
  };
  return equal(eight.x, count) + equal(eight.y, count - 2) + equal(eight.z, count - 4) +
         equal(eight.w, count - 6);
}

// Counts the numbers equal to x in this thread's part of the first n. `parts` threads share the numbers,
// which start at a multiple of 16 bytes. What follows them up to the next multiple must be readable.
__device__ inline int CountEqual(const int16_t* numbers, int n, int16_t x, int part, int parts) {
  const uint32_t pair = static_cast<uint16_t>(x) * 0x10001u;
  const auto eight = [&](int i) { return *reinterpret_cast<const uint4*>(numbers + i); };
  int bits = 0, i = 8 * part;
#pragma unroll 4
  for (; i + 8 <= n; i += 8 * parts) bits += EqualBits(eight(i), pair);
  if (i < n) bits += EqualBits(eight(i), pair, n - i);
  return bits / 16;
}

// Counts a chunk. For its tokens [begin, end) it also writes the routed experts to topk_idx, and each row's
// index within the chunk to sent_rows (-1: no row). Called by the whole block. Atomics compute only totals.
// Indices come from comparisons and ballots, so results are reproducible bit for bit.
__device__ inline void CountChunk(const Shape& shape, const TopkIds& ids, const Chunk& chunk, int begin,
                                  int end, int32_t* topk_idx, int32_t* sent_rows) {
  const int K = shape.top_k, num_choices = chunk.tokens * K;
  const int64_t offset = int64_t{chunk.first} * K;
  const int first_indexed = (begin - chunk.first) * K, num_indexed = (end - begin) * K;
  const bool by_rank = !shape.has_row_per_choice();
  StageExperts(ids, shape.num_experts, offset, num_choices, chunk.experts);
  __syncthreads();
  for (int i = threadIdx.x; i < num_choices; i += blockDim.x) {
    const int expert = chunk.experts[i], rank = expert < 0 ? -1 : shape.rank_of(expert);
    if (i >= first_indexed && i < first_indexed + num_indexed) topk_idx[offset + i] = expert;
    if (expert >= 0) atomicAdd(&chunk.counts[expert], 1);
    if (by_rank) {
      chunk.ranks[i] = static_cast<int16_t>(rank);
    } else if (expert >= 0) {
      atomicAdd(&chunk.counts[shape.num_experts + rank], 1);
    }
  }
  if (!by_rank) {
    int threads_per_choice = kWarp;  // for each choice that gets an index
    while (threads_per_choice > 1 && threads_per_choice * num_indexed > static_cast<int>(blockDim.x))
      threads_per_choice /= 2;
    for (int j = threadIdx.x; j < AlignUp(num_indexed * threads_per_choice, kWarp); j += blockDim.x) {
      const int i = first_indexed + j / threads_per_choice;
      const bool is_row = j < num_indexed * threads_per_choice && chunk.experts[i] >= 0;
      int index =
          is_row ? CountEqual(chunk.experts, i, chunk.experts[i], j % threads_per_choice, threads_per_choice)
                 : 0;
      for (int step = threads_per_choice / 2; step > 0; step /= 2)
        index += __shfl_xor_sync(kAllLanes, index, step);
      if (j < num_indexed * threads_per_choice && j % threads_per_choice == 0)
        sent_rows[offset + i] = is_row ? index : -1;
    }
  }
  __syncthreads();
  if (!by_rank) return;
  const int lane = threadIdx.x % kWarp;
  for (int rank = threadIdx.x / kWarp; rank < shape.num_ranks; rank += blockDim.x / kWarp) {
    int before = 0;
    for (int first = 0; first < chunk.tokens; first += kWarp) {
      const int t = first + lane;
      bool is_sent = false;
      const int16_t* const ranks = chunk.ranks + min(t, chunk.tokens - 1) * K;
#pragma unroll 8
      for (int k = 0; k < K; ++k) is_sent |= ranks[k] == rank;
      is_sent &= t < chunk.tokens;
      const unsigned lanes = __ballot_sync(kAllLanes, is_sent);
      if (t >= begin - chunk.first && t < end - chunk.first) {
        sent_rows[int64_t{chunk.first + t} * shape.num_ranks + rank] =
            is_sent ? before + __popc(lanes & ((1u << lane) - 1)) : -1;
      }
      before += __popc(lanes);
    }
    if (lane == 0) chunk.counts[shape.num_experts + rank] = before;
  }
  __syncthreads();
}

}  // namespace jax_ep::cuda
