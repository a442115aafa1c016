// Pieces of the kernels: loads, and which tokens and rows.
#pragma once

#include <cuda_runtime.h>

#include "kernels/control.h"

// Whether what is being compiled may use what came with sm_90: bulk copies and clusters.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define JAX_EP_HAS_SM_90 1
#else
#define JAX_EP_HAS_SM_90 0
#endif

namespace jax_ep::cuda {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// Waves of tokens: `head` of them, then `tokens` a wave.
struct Waves {
  int32_t head;
  int32_t tokens;
  int32_t count;

  JAX_EP_HD int First(const Shape& shape, int wave) const {
    if (wave == 0) return 0;
    const int64_t first = head + int64_t{tokens} * (wave - 1);
    return first < shape.num_tokens ? static_cast<int>(first) : shape.num_tokens;
  }
  JAX_EP_HD int Of(int token) const { return token < head ? 0 : 1 + (token - head) / tokens; }
};

// Waves of about `tokens`, the first of `head`, or more if they were too many; multiples of `step`.
inline Waves PlanWaves(const Shape& shape, int head, int tokens, int step) {
  const int64_t least = (shape.num_tokens + kMaxWaves - 2) / (kMaxWaves - 1);
  const int64_t later = AlignUp(least > tokens ? least : tokens, step), first = AlignUp(head, step);
  const int64_t rest = shape.num_tokens > first ? shape.num_tokens - first : 0;
  return {static_cast<int32_t>(first), static_cast<int32_t>(later),
          static_cast<int32_t>(1 + (rest + later - 1) / later)};
}

// Warps of a block that work together: all of them, or those that a barrier of their own counts.
struct Team {
  int thread;   // this one's number
  int threads;  // a multiple of a warp's
  int barrier;  // 0 is that of the whole block

  __device__ void Sync() const { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }
};

__device__ inline Team WholeBlock() {
  return {static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x), 0};
}

// Deals numbers to warps, so that none waits for one that has more to do.
struct Dealer {
  unsigned* next;
  // Asks for a number. Nothing waits for it until it is shown.
  __device__ unsigned Take(int lane) const { return lane == 0 ? atomicAdd(next, 1u) : 0u; }
  __device__ static int Show(unsigned number) { return static_cast<int>(__shfl_sync(kAllLanes, number, 0)); }
};

// A 16-byte load that does not go through the first-level cache: peers wrote, or own, the memory. Nothing is
// read, and the result is undefined, unless `wanted`: with a branch around it the compiler waits for each
// load before it begins the next.
__device__ inline uint4 LoadRow(const uint4* address, bool wanted = true) {
  uint4 v;
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.s32 wanted, %5, 0;\n"
      "@wanted ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];\n"
      "}\n"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(address), "r"(static_cast<int>(wanted)));
  return v;
}

// A token's row that this lane of a warp stands for, -1 none, and the rank that holds it.
struct Place {
  int row;
  int rank;
};

__device__ inline Place FindPlace(const Shape& shape, const HandleArrays& handle, int t, int lane) {
  const int width = shape.rows_per_token();
  if (lane >= width) return {-1, 0};
  const int row = handle.sent_rows[int64_t{t} * width + lane];
  int rank = lane;
  if (shape.has_row_per_choice()) {
    const int expert = handle.topk_idx[int64_t{t} * shape.top_k + lane];
    if (!IsExpert(expert, shape.num_experts)) return {-1, 0};
    rank = shape.rank_of(expert);
  }
  return {IsRow(row, shape.capacity) ? row : -1, rank};
}

}  // namespace jax_ep::cuda
