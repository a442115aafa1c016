// Loads, stores, atomics and fences in PTX, each ordered only as far as the protocol needs it.
#pragma once

#include "kernels/threads.cuh"

namespace jax_ep::cuda {

__device__ inline uint32_t LoadAcquire(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
__device__ inline uint64_t LoadAcquire(const uint64_t* address) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}
__device__ inline uint64_t LoadRelaxed(const uint64_t* address) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

__device__ inline void StoreRelaxed(uint32_t* address, uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
__device__ inline void StoreRelaxed(uint64_t* address, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}
__device__ inline void StoreRelease(uint64_t* address, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

// Stores the lower half of a word whose upper half its owner may change at the same time, by 64-bit atomics.
// The only access of that width: a peer over PCIe has no atomics. The memory of a device does one access
// after the other, whatever their sizes.
__device__ inline void StoreLowerHalf(uint64_t* address, uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// Orders this thread's accesses before it and after it, for all devices.
__device__ inline void FenceSystem() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// The same, and in one order with all other such fences: of two threads that each store, fence and load what
// the other has stored, at least one sees the other's store.
__device__ inline void FenceSeqCst() { asm volatile("fence.sc.sys;" ::: "memory"); }

// Returns what the word was; afterwards it is `wanted` if that was `expected`.
__device__ inline uint64_t CompareAndSwap(uint64_t* address, uint64_t expected, uint64_t desired) {
  uint64_t old;
  asm volatile("atom.relaxed.sys.global.cas.b64 %0, [%1], %2, %3;"
               : "=l"(old)
               : "l"(address), "l"(expected), "l"(desired)
               : "memory");
  return old;
}
__device__ inline uint64_t AddRelaxed(uint64_t* address, uint64_t number) {
  uint64_t old;
  asm volatile("atom.relaxed.sys.global.add.u64 %0, [%1], %2;"
               : "=l"(old)
               : "l"(address), "l"(number)
               : "memory");
  return old;
}
// Among the blocks of one device.
__device__ inline uint32_t AddAcqRel(uint32_t* address, uint32_t number) {
  uint32_t old;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(address), "r"(number)
               : "memory");
  return old;
}

// Stops the GPU, for StopGpu alone: where a peer may still write to memory that XLA would use again, no error
// could keep a program from going on with it.
__device__ inline void Trap() { asm volatile("trap;"); }

// Loads one number that the host writes.
template <typename T>
__device__ T LoadFromHost(const T* number) {
  return *static_cast<const volatile T*>(number);
}

__device__ inline uint64_t GlobalNanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

// A 16-byte load that does not go through the first-level cache, because peers wrote, or own, the memory. If
// it is not `wanted` nothing is read and the result is undefined: with a branch around it the compiler would
// wait for each load before it begins the next.
__device__ inline uint4 LoadRow(const uint4* address, bool enabled = true) {
  uint4 v;
  asm volatile(
      "{\n"
      ".reg .pred enabled;\n"
      "setp.ne.s32 enabled, %5, 0;\n"
      "@enabled ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];\n"
      "}\n"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(address), "r"(static_cast<int>(enabled)));
  return v;
}

}  // namespace jax_ep::cuda
