// What the protocol's headers need of CUDA, for the host: see machine.h. Found before CUDA's own.
#pragma once

#include <algorithm>

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

inline int __syncthreads_or(int mine) {
  emulation::Machine& machine = emulation::Machine::Get();
  return machine.Wait(machine.block_barrier(), mine != 0) != 0;
}
inline void __syncthreads() { (void)__syncthreads_or(0); }

inline unsigned __ballot_sync(unsigned, bool mine) {
  emulation::Machine& machine = emulation::Machine::Get();
  return machine.Wait(machine.warp_barrier(), mine ? 1u << machine.thread_index().x % 32 : 0);
}
inline void __syncwarp() { (void)__ballot_sync(~0u, false); }

inline unsigned __shfl_sync(unsigned, unsigned mine, int lane) {
  emulation::Machine& machine = emulation::Machine::Get();
  emulation::Barrier& warp = machine.warp_barrier();
  {
    emulation::Quiet quiet;
    warp.values[machine.thread_index().x % 32] = mine;
  }
  (void)machine.Wait(warp, 0);
  emulation::Quiet quiet;
  return warp.shown[lane];
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
