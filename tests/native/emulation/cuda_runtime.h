// What the protocol's headers need of CUDA, for the host: see machine.h. Found before CUDA's own.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "machine.h"

#define __device__
#define __global__
#define __host__
#define __noinline__ __attribute__((noinline))
#define __forceinline__ inline
#define __shared__ static thread_local

#define threadIdx (emulation::Machine::Get().thread_index())
#define blockIdx (emulation::Machine::Get().block_index())
#define blockDim (emulation::Machine::Get().block_dim())
#define gridDim (emulation::Machine::Get().grid_dim())

using std::max;
using std::min;

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __clz(int bits) { return bits == 0 ? 32 : __builtin_clz(static_cast<unsigned>(bits)); }
inline unsigned __vcmpeq2(unsigned a, unsigned b) {
  const unsigned differs = a ^ b;
  return ((differs & 0xffff) == 0 ? 0xffff : 0) | (differs >> 16 == 0 ? 0xffff0000 : 0);
}

// Each takes the line where it is called, at which all threads that wait for each other must be.
inline int __syncthreads_or(int mine, int line = __builtin_LINE()) {
  emulation::Machine& machine = emulation::Machine::Get();
  return machine.Wait(machine.block_barrier(), mine != 0, line) != 0;
}
inline void __syncthreads(int line = __builtin_LINE()) { (void)__syncthreads_or(0, line); }

inline unsigned __ballot_sync(unsigned, bool mine, int line = __builtin_LINE()) {
  emulation::Machine& machine = emulation::Machine::Get();
  return machine.Wait(machine.warp_barrier(), mine ? 1u << machine.thread_index().x % 32 : 0, line);
}
inline void __syncwarp(int line = __builtin_LINE()) { (void)__ballot_sync(~0u, false, line); }
inline int __any_sync(unsigned, bool mine, int line = __builtin_LINE()) {
  return __ballot_sync(~0u, mine, line) != 0;
}
inline int __all_sync(unsigned, bool mine, int line = __builtin_LINE()) {
  return __ballot_sync(~0u, mine, line) == ~0u;
}

// Shows each lane's number to the other lanes. The result lasts until the warp meets again.
inline const uint32_t* ShowLanes(unsigned mine, int line) {
  emulation::Machine& machine = emulation::Machine::Get();
  emulation::Barrier& warp = machine.warp_barrier();
  {
    emulation::Quiet quiet;
    warp.values[machine.thread_index().x % 32] = mine;
  }
  (void)machine.Wait(warp, 0, line);
  return warp.shown;
}
// Of numbers of any size: 32 bits at a time.
template <typename T>
T __shfl_sync(unsigned, T mine, int lane, int line = __builtin_LINE()) {
  uint32_t words[(sizeof(T) + 3) / 4] = {};
  std::memcpy(words, &mine, sizeof(T));
  for (uint32_t& word : words) {
    const uint32_t* const shown = ShowLanes(word, line);
    emulation::Quiet quiet;
    word = shown[lane];
  }
  std::memcpy(&mine, words, sizeof(T));
  return mine;
}
template <typename T>
T __shfl_xor_sync(unsigned, T mine, int mask, int line = __builtin_LINE()) {
  const unsigned lane = emulation::Machine::Get().thread_index().x % 32;
  return __shfl_sync(~0u, mine, static_cast<int>(lane) ^ mask, line);
}
template <typename T>
T __shfl_up_sync(unsigned, T mine, int by, int line = __builtin_LINE()) {
  const int lane = static_cast<int>(emulation::Machine::Get().thread_index().x % 32);
  return __shfl_sync(~0u, mine, lane < by ? lane : lane - by, line);
}
inline unsigned __reduce_or_sync(unsigned, unsigned mine, int line = __builtin_LINE()) {
  const uint32_t* const shown = ShowLanes(mine, line);
  emulation::Quiet quiet;
  unsigned all = 0;
  for (int lane = 0; lane < 32; ++lane) all |= shown[lane];
  return all;
}
inline int __reduce_add_sync(unsigned, int mine, int line = __builtin_LINE()) {
  const uint32_t* const shown = ShowLanes(static_cast<unsigned>(mine), line);
  emulation::Quiet quiet;
  unsigned sum = 0;
  for (int lane = 0; lane < 32; ++lane) sum += shown[lane];
  return static_cast<int>(sum);
}

inline unsigned __match_any_sync(unsigned, int mine, int line = __builtin_LINE()) {
  const uint32_t* const shown = ShowLanes(static_cast<unsigned>(mine), line);
  emulation::Quiet quiet;
  unsigned lanes = 0;
  for (int lane = 0; lane < 32; ++lane) lanes |= shown[lane] == static_cast<unsigned>(mine) ? 1u << lane : 0;
  return lanes;
}

inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
inline float __fdividef(float a, float b) { return a / b; }
inline int __float2int_rz(float number) { return static_cast<int>(number); }
inline float __uint_as_float(unsigned bits) {
  float number;
  std::memcpy(&number, &bits, sizeof(number));
  return number;
}
template <typename T>
T __ldcg(const T* address) {
  emulation::Machine::Get().Access(false);
  return *address;
}

inline void __nanosleep(unsigned) { emulation::Machine::Get().Access(false); }
inline void __threadfence_block() {}

// ThreadSanitizer knows no fences: there what is relaxed next to one is ordered itself.
#if defined(__SANITIZE_THREAD__)
constexpr int kNextToFence = __ATOMIC_ACQ_REL, kStoreNextToFence = __ATOMIC_RELEASE;
#else
constexpr int kNextToFence = __ATOMIC_RELAXED, kStoreNextToFence = __ATOMIC_RELAXED;
#endif

template <typename T>
T atomicAdd(T* to, T number) {
  emulation::Machine::Get().Access(true);
  return __atomic_fetch_add(to, number, __ATOMIC_RELAXED);
}
template <typename T>
T atomicSub(T* to, T number) {
  emulation::Machine::Get().Access(true);
  return __atomic_fetch_sub(to, number, __ATOMIC_RELAXED);
}
template <typename T>
T atomicOr(T* to, T bits) {
  emulation::Machine::Get().Access(true);
  return __atomic_fetch_or(to, bits, __ATOMIC_RELAXED);
}
template <typename T>
T atomicExch(T* to, T number) {
  emulation::Machine::Get().Access(true);
  return __atomic_exchange_n(to, number, __ATOMIC_RELAXED);
}
template <typename T>
T atomicCAS(T* to, T expected, T wanted) {
  emulation::Machine::Get().Access(true);
  __atomic_compare_exchange_n(to, &expected, wanted, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}
inline unsigned EmulatedInc(unsigned* to, unsigned most, int order) {
  emulation::Machine::Get().Access(true);
  unsigned old = __atomic_load_n(to, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(to, &old, old >= most ? 0 : old + 1, false, order, __ATOMIC_RELAXED)) {
  }
  return old;
}
inline unsigned atomicInc(unsigned* to, unsigned most) { return EmulatedInc(to, most, kNextToFence); }
