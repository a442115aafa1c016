// The same as ffi/kernels/ptx/bulk.cuh, as far as rings need it, for the host: found before it. Barriers and
// the memory that is loaded must not be __shared__, because loads take effect while other blocks go on.
#pragma once

#include <cstring>

#include "kernels/threads.cuh"

namespace jax_ep::cuda {

JAX_EP_HD inline bool IsBulkRow(int64_t row_bytes) { return row_bytes >= 256 && row_bytes % 16 == 0; }

// Called before memory is read that may be another rank's.
inline std::function<void(const void*)> on_load;

// What is in a barrier's word.
struct EmulatedBarrier {
  uint8_t phase, count, left;  // arrivals of a phase, and those that are to come
  uint32_t bytes;              // of loads that have not taken effect

  static EmulatedBarrier& At(uint64_t* word) { return *reinterpret_cast<EmulatedBarrier*>(word); }
  void CompleteIfDone() {
    if (left != 0 || bytes != 0) return;
    phase ^= 1;
    left = count;
  }
};
static_assert(sizeof(EmulatedBarrier) == sizeof(uint64_t), "in place of a barrier of the device");

inline void InitBarrier(uint64_t* barrier, uint32_t count) {
  EmulatedBarrier::At(barrier) = {0, static_cast<uint8_t>(count), static_cast<uint8_t>(count), 0};
}
inline void FenceBarriers() {}
inline void FenceBulk() {}
inline void FenceBulkShared() {}

inline void Arrive(uint64_t* barrier) {
  emulation::Machine::Get().Access(true);
  EmulatedBarrier& state = EmulatedBarrier::At(barrier);
  --state.left;
  state.CompleteIfDone();
}

inline void BulkLoad(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  EmulatedBarrier& state = EmulatedBarrier::At(barrier);
  --state.left;
  state.bytes += bytes;
  emulation::Machine::Get().Delay([=, &state] {
    on_load(from);
    std::memcpy(to, from, bytes);
    state.bytes -= bytes;
    state.CompleteIfDone();
  });
}

inline void CopyFloat(float* to, const float* from) {
  on_load(from);
  *to = *from;
}
inline void HoldForCopies(uint64_t*) {}

inline void WaitForLoad(uint64_t* barrier, uint32_t phase) {
  while (EmulatedBarrier::At(barrier).phase == phase % 2) emulation::Machine::Get().Access(false);
}

}  // namespace jax_ep::cuda
