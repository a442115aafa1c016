// The same as ffi/kernels/ptx/memory.cuh, for the host: found before it.
#pragma once

#include "kernels/threads.cuh"

namespace jax_ep::cuda {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the lower half comes first");
using Half [[gnu::may_alias]] = uint32_t;

template <typename T>
T EmulatedLoad(const T* address, int order) {
  emulation::Machine::Get().Access(false);
  return order == __ATOMIC_ACQUIRE ? __atomic_load_n(address, __ATOMIC_ACQUIRE)
                                   : __atomic_load_n(address, __ATOMIC_RELAXED);
}

template <typename T, typename U>
void EmulatedStore(T* address, U value, int order) {
  emulation::Machine::Get().Access(true);
  if (order == __ATOMIC_RELEASE) {
    __atomic_store_n(address, value, __ATOMIC_RELEASE);
  } else {
    __atomic_store_n(address, value, __ATOMIC_RELAXED);
  }
}

inline uint32_t LoadAcquire(const uint32_t* address) { return EmulatedLoad(address, __ATOMIC_ACQUIRE); }
inline uint64_t LoadAcquire(const uint64_t* address) { return EmulatedLoad(address, __ATOMIC_ACQUIRE); }
inline uint64_t LoadRelaxed(const uint64_t* address) { return EmulatedLoad(address, __ATOMIC_RELAXED); }
inline void StoreRelaxed(uint32_t* address, uint32_t value) {
  EmulatedStore(address, value, kStoreNextToFence);
}
inline void StoreRelaxed(uint64_t* address, uint64_t value) {
  EmulatedStore(address, value, __ATOMIC_RELAXED);
}
inline void StoreRelease(uint64_t* address, uint64_t value) {
  emulation::Machine::Get().Release();
  EmulatedStore(address, value, __ATOMIC_RELEASE);
}
inline void StoreReleaseOnDevice(uint64_t* address, uint64_t value) { StoreRelease(address, value); }
inline void AcquireOnDevice() { emulation::Machine::Get().Access(false); }
inline void StoreLowerHalf(uint64_t* address, uint32_t value) {
  EmulatedStore(reinterpret_cast<Half*>(address), value, __ATOMIC_RELAXED);
}
inline void FenceSystem() {
  emulation::Machine::Get().Access(false);
  emulation::Machine::Get().Release();
}
inline void FenceSeqCst() { FenceSystem(); }
inline uint64_t CompareAndSwap(uint64_t* address, uint64_t expected, uint64_t wanted) {
  return atomicCAS(address, expected, wanted);
}
inline uint64_t AddRelaxed(uint64_t* address, uint64_t number) { return atomicAdd(address, number); }
inline void Trap() { emulation::Machine::Get().Trap(); }

template <typename T>
T LoadFromHost(const T* number) {
  emulation::Machine::Get().Access(false);
  return *static_cast<const volatile T*>(number);
}

inline uint4 LoadRow(const uint4* address, bool enabled = true) {
  emulation::Machine::Get().Access(false);
  return enabled ? *address : uint4{};
}

// A line has no half: no other thread runs between its words.
inline void StoreLine(uint4* address, const uint4& line) {
  emulation::Machine::Get().Access(true);
  *address = line;
}
inline uint4 LoadLine(const uint4* address) {
  emulation::Machine::Get().Access(false);
  return *address;
}

inline uint64_t GlobalNanoseconds() { return emulation::Machine::Get().Look(); }

}  // namespace jax_ep::cuda
