// Loads, stores, atomics and fences in PTX, each with only the ordering that the protocol needs.
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

// Store and acquire a word that only this device uses, which costs less than for all devices. A thread that
// has loaded the word, by LoadRelaxed, and then calls AcquireOnDevice sees what the storing thread had seen
// and done. Nothing waits for the load before the fence.
__device__ inline void StoreReleaseOnDevice(uint64_t* address, uint64_t value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}
__device__ inline void AcquireOnDevice() {
#if JAX_EP_HAS_SM_90
  asm volatile("fence.acquire.gpu;" ::: "memory");
#else
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
#endif
}

// Stores the lower half of a word. Its owner may change the upper half at the same time by 64-bit atomics.
// A 32-bit store is used because a peer over PCIe has no atomics. It is safe because a device's memory
// serializes accesses of all sizes.
__device__ inline void StoreLowerHalf(uint64_t* address, uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// Orders this thread's accesses before the fence with those after it, for all devices.
__device__ inline void FenceSystem() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// Does the same, and puts all such fences in one order: if two threads each store, fence and load the other's
// location, at least one of them sees the other's store.
__device__ inline void FenceSeqCst() { asm volatile("fence.sc.sys;" ::: "memory"); }

// Returns the old value, and replaces it by `desired` if it equals `expected`.
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

// Stops the GPU; used only by StopGpu. If a peer may still write to memory that XLA would reuse, no error
// could keep a program from continuing with that memory.
__device__ inline void Trap() { asm volatile("trap;"); }

// Loads a number that the host writes.
template <typename T>
__device__ T LoadFromHost(const T* number) {
  return *static_cast<const volatile T*>(number);
}

__device__ inline uint64_t GlobalNanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

// Loads 16 bytes without the L1 cache, because peers wrote, or own, the memory. If it is not `enabled`,
// nothing is read and the result is undefined. A predicate replaces a branch, around which the compiler would
// wait for each load before it issues the next one.
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

// Load 8 and 4 bytes in the same way.
__device__ inline uint2 LoadRow(const uint2* address, bool enabled) {
  uint2 v;
  asm volatile(
      "{\n"
      ".reg .pred enabled;\n"
      "setp.ne.s32 enabled, %3, 0;\n"
      "@enabled ld.relaxed.sys.global.v2.u32 {%0, %1}, [%2];\n"
      "}\n"
      : "=r"(v.x), "=r"(v.y)
      : "l"(address), "r"(static_cast<int>(enabled)));
  return v;
}
__device__ inline uint32_t LoadRow(const uint32_t* address, bool enabled) {
  uint32_t v;
  asm volatile(
      "{\n"
      ".reg .pred enabled;\n"
      "setp.ne.s32 enabled, %2, 0;\n"
      "@enabled ld.relaxed.sys.global.u32 %0, [%1];\n"
      "}\n"
      : "=r"(v)
      : "l"(address), "r"(static_cast<int>(enabled)));
  return v;
}

// Store and load 16 bytes at once: a thread that sees a part of what was stored sees all of it.
__device__ inline void StoreLine(uint4* address, const uint4& v) {
  asm volatile(
      "{\n"
      ".reg .b64 low, high;\n"
      ".reg .b128 line;\n"
      "mov.b64 low, {%1, %2};\n"
      "mov.b64 high, {%3, %4};\n"
      "mov.b128 line, {low, high};\n"
      "st.relaxed.sys.global.b128 [%0], line;\n"
      "}\n" ::"l"(address),
      "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
      : "memory");
}
__device__ inline uint4 LoadLine(const uint4* address) {
  uint4 v;
  asm volatile(
      "{\n"
      ".reg .b64 low, high;\n"
      ".reg .b128 line;\n"
      "ld.relaxed.sys.global.b128 line, [%4];\n"
      "mov.b128 {low, high}, line;\n"
      "mov.b64 {%0, %1}, low;\n"
      "mov.b64 {%2, %3}, high;\n"
      "}\n"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(address)
      : "memory");
  return v;
}

}  // namespace jax_ep::cuda
