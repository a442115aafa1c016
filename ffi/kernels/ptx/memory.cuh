// Loads, stores and fences in PTX: of what the ranks tell each other, ordered as far as each needs it, and of
// rows.
#pragma once

#include "kernels/protocol/control.h"
#include "kernels/threads.cuh"

namespace jax_ep::cuda {

__device__ inline uint32_t LoadAcquire(const uint32_t* flag) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}

__device__ inline void StoreRelaxed(uint32_t* flag, uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

// Orders this thread's accesses before it and after it, for all devices.
__device__ inline void FenceSystem() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// The same, and in one order with all other such fences: of two threads that each store, fence and load what
// the other has stored, at least one sees the other's store.
__device__ inline void FenceTotal() { asm volatile("fence.sc.sys;" ::: "memory"); }

__device__ inline Stamped LoadStampedAcquire(const Stamped* word) {
  Stamped value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

__device__ inline Stamped LoadStamped(const Stamped* word) {
  Stamped value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

// Epochs are compared for equality only: a peer writes the next one after this rank has left the present one,
// so no later one is ever seen, but a word may be left from any earlier epoch.
__device__ inline bool IsOf(Stamped value, uint32_t epoch) {
  return static_cast<uint32_t>(value >> 32) == epoch;
}

JAX_EP_HD inline Stamped Stamp(uint32_t number, uint32_t epoch) {
  return static_cast<Stamped>(epoch) << 32 | number;
}

__device__ inline void StoreStamped(Stamped* word, uint32_t number, uint32_t epoch) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(Stamp(number, epoch)) : "memory");
}

__device__ inline void StoreStampedRelease(Stamped* word, uint32_t number, uint32_t epoch) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(Stamp(number, epoch)) : "memory");
}

// The last epoch before they begin again: at 2, for 0 is none, and each is of another parity than the one
// before.
constexpr uint32_t kLastEpoch = 0xffffffffu;
__device__ inline uint32_t NextEpoch(uint32_t epoch) { return epoch == kLastEpoch ? 2 : epoch + 1; }

// The lower half of a gate: a Reason's word, or 0. Peers store it alone, while the rank itself changes both
// halves at once. The memory of one device does one after the other, whatever their sizes.
__device__ inline uint32_t LoadFlag(const uint64_t* gate) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(gate) : "memory");
  return value;
}

__device__ inline void StoreFlag(uint64_t* gate, uint32_t flag) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(gate), "r"(flag) : "memory");
}

// Returns what the gate was; it is `wanted` afterwards if that was `expected`.
__device__ inline uint64_t CompareAndSwap(uint64_t* gate, uint64_t expected, uint64_t wanted) {
  uint64_t old;
  asm volatile("atom.relaxed.sys.global.cas.b64 %0, [%1], %2, %3;"
               : "=l"(old)
               : "l"(gate), "l"(expected), "l"(wanted)
               : "memory");
  return old;
}

// Adds to the upper half of the gate, modulo 2^32. Returns what the gate was. Nothing waits for it until that
// is used.
__device__ inline uint64_t AddEpochs(uint64_t* gate, uint32_t epochs) {
  uint64_t old;
  asm volatile("atom.relaxed.sys.global.add.u64 %0, [%1], %2;"
               : "=l"(old)
               : "l"(gate), "l"(Stamp(0, epochs))
               : "memory");
  return old;
}

// Counts one more of this device, and back to 0 after `most`.
__device__ inline void IncRelaxed(uint32_t* count, uint32_t most) {
  asm volatile("red.relaxed.gpu.global.inc.u32 [%0], %1;" ::"l"(count), "r"(most) : "memory");
}

__device__ inline void IncRelease(uint32_t* count, uint32_t most) {
  asm volatile("red.release.gpu.global.inc.u32 [%0], %1;" ::"l"(count), "r"(most) : "memory");
}

// Stops the GPU, for StopGpu alone: where a peer may still write to memory that XLA would use again, no error
// could keep a program from going on with it.
__device__ inline void Trap() { asm volatile("trap;"); }

// One number of what the host tells.
template <typename T>
__device__ T LoadFromHost(const T* number) {
  return *static_cast<const volatile T*>(number);
}

__device__ inline uint64_t GlobalNanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

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

}  // namespace jax_ep::cuda
