// The same as ffi/kernels/ptx/memory.cuh, for the host: found before it.
#pragma once

#include "kernels/protocol/control.h"
#include "kernels/threads.cuh"

namespace jax_ep::cuda {

// The lower half of a gate, which is 64 bits wide.
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

inline uint32_t LoadAcquire(const uint32_t* flag) { return EmulatedLoad(flag, __ATOMIC_ACQUIRE); }
inline void StoreRelaxed(uint32_t* flag, uint32_t value) { EmulatedStore(flag, value, kStoreNextToFence); }
inline void FenceSystem() { emulation::Machine::Get().Access(false); }
inline void FenceTotal() { emulation::Machine::Get().Access(false); }
inline Stamped LoadStampedAcquire(const Stamped* word) { return EmulatedLoad(word, __ATOMIC_ACQUIRE); }
inline Stamped LoadStamped(const Stamped* word) { return EmulatedLoad(word, __ATOMIC_RELAXED); }
inline bool IsOf(Stamped value, uint32_t epoch) { return static_cast<uint32_t>(value >> 32) == epoch; }
inline Stamped Stamp(uint32_t number, uint32_t epoch) { return static_cast<Stamped>(epoch) << 32 | number; }
inline void StoreStamped(Stamped* word, uint32_t number, uint32_t epoch) {
  EmulatedStore(word, Stamp(number, epoch), __ATOMIC_RELAXED);
}
inline void StoreStampedRelease(Stamped* word, uint32_t number, uint32_t epoch) {
  EmulatedStore(word, Stamp(number, epoch), __ATOMIC_RELEASE);
}
constexpr uint32_t kLastEpoch = 0xffffffffu;
inline uint32_t NextEpoch(uint32_t epoch) { return epoch == kLastEpoch ? 2 : epoch + 1; }
inline uint32_t LoadFlag(const uint64_t* gate) {
  return EmulatedLoad(reinterpret_cast<const Half*>(gate), __ATOMIC_RELAXED);
}
inline void StoreFlag(uint64_t* gate, uint32_t flag) {
  EmulatedStore(reinterpret_cast<Half*>(gate), flag, __ATOMIC_RELAXED);
}
inline uint64_t CompareAndSwap(uint64_t* gate, uint64_t expected, uint64_t wanted) {
  return atomicCAS(gate, expected, wanted);
}
inline uint64_t AddEpochs(uint64_t* gate, uint32_t epochs) { return atomicAdd(gate, Stamp(0, epochs)); }
inline void IncRelaxed(uint32_t* count, uint32_t most) { EmulatedInc(count, most, __ATOMIC_RELAXED); }
inline void IncRelease(uint32_t* count, uint32_t most) { EmulatedInc(count, most, __ATOMIC_RELEASE); }
inline void Trap() { emulation::Machine::Get().Trap(); }

template <typename T>
T LoadFromHost(const T* number) {
  emulation::Machine::Get().Access(false);
  return *static_cast<const volatile T*>(number);
}

inline uint4 LoadRow(const uint4* address) {
  emulation::Machine::Get().Access(false);
  return *address;
}

inline uint64_t GlobalNanoseconds() { return emulation::Machine::Get().Look(); }

}  // namespace jax_ep::cuda
