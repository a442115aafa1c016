// Bulk copies (cp.async.bulk, sm_90 and newer), which move rows through shared memory without registers. On
// older devices these functions compile to nothing, and the kernels that use them are never launched.
#pragma once

#include "kernels/threads.cuh"

namespace jax_ep::cuda {

// Returns true if bulk copies are used for a row. They require a multiple of 16 bytes, and shorter rows gain
// nothing.
JAX_EP_HD inline bool IsBulkRow(int64_t row_bytes) { return row_bytes >= 256 && row_bytes % 16 == 0; }

__device__ inline uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Initializes a barrier. A phase of it completes after `count` arrivals, once the bytes of the loads that
// count for the phase have also arrived.
__device__ inline void InitBarrier(uint64_t* barrier, uint32_t count) {
#if JAX_EP_HAS_SM_90
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(barrier)), "r"(count)
               : "memory");
#endif
}

// Makes the initialized barriers visible to this thread's later bulk copies.
__device__ inline void FenceBarriers() {
#if JAX_EP_HAS_SM_90
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// Initializes two barriers whose phases each complete when the bytes of one load have arrived. Called by the
// thread that issues the loads.
__device__ inline void InitBarriers(uint64_t* barriers) {
  for (int i = 0; i < 2; ++i) InitBarrier(&barriers[i], 1);
  FenceBarriers();
}

// Orders this thread's ordinary accesses with its bulk copies, in both directions.
__device__ inline void FenceBulk() {
#if JAX_EP_HAS_SM_90
  asm volatile("fence.proxy.async;" ::: "memory");
#endif
}

// Orders accesses to shared memory only. It does not wait for this thread's stores to other memory.
__device__ inline void FenceBulkShared() {
#if JAX_EP_HAS_SM_90
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Starts a load into shared memory. Addresses and sizes are multiples of 16.
__device__ inline void BulkLoad(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
#if JAX_EP_HAS_SM_90
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(barrier)),
               "r"(bytes)
               : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          SharedAddress(to)),
      "l"(from), "r"(bytes), "r"(SharedAddress(barrier))
      : "memory");
#endif
}

// Arrives at a barrier. A thread that sees the phase complete also sees this thread's earlier accesses.
__device__ inline void Arrive(uint64_t* barrier) {
#if JAX_EP_HAS_SM_90
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(SharedAddress(barrier)) : "memory");
#endif
}

// Starts a copy of a number into shared memory. Unlike a bulk copy, all lanes of a warp start theirs at once.
__device__ inline void CopyFloat(float* to, const float* from) {
#if JAX_EP_HAS_SM_90
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(SharedAddress(to)), "l"(from) : "memory");
#endif
}

// Starts a copy of four numbers, whose addresses are multiples of 16, as CopyFloat does.
__device__ inline void CopyFloats(float* to, const float* from) {
#if JAX_EP_HAS_SM_90
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(SharedAddress(to)), "l"(from) : "memory");
#endif
}

// Keeps a barrier's phase open until this thread's earlier CopyFloats are complete. A thread that sees the
// phase complete also sees the numbers. Called before the thread arrives at the barrier.
__device__ inline void HoldForCopies(uint64_t* barrier) {
#if JAX_EP_HAS_SM_90
  asm volatile("cp.async.mbarrier.arrive.shared::cta.b64 [%0];" ::"r"(SharedAddress(barrier)) : "memory");
#endif
}

// Waits for a phase: for a load from mapped memory, which always completes, or for warps of this cluster.
// Therefore the wait needs no time-out.
__device__ inline void WaitForLoad(uint64_t* barrier, uint32_t phase) {
#if JAX_EP_HAS_SM_90
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(SharedAddress(barrier)),
      "r"(phase)
      : "memory");
#endif
}

// Starts a store from shared memory to global memory, of this device or of a peer.
__device__ inline void BulkStore(void* to, const void* from, uint32_t bytes) {
#if JAX_EP_HAS_SM_90
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
               "r"(SharedAddress(from)), "r"(bytes)
               : "memory");
#endif
}

// Closes a group of the stores that this thread has started.
__device__ inline void CommitStores() {
#if JAX_EP_HAS_SM_90
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}

// Waits until this thread's stores, except its last kLeft groups, have read their shared memory, which may
// then be overwritten.
template <int kLeft = 0>
__device__ void WaitForStoresRead() {
#if JAX_EP_HAS_SM_90
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kLeft) : "memory");
#endif
}

// Waits until this thread's stores are complete, except its last kLeft groups.
template <int kLeft = 0>
__device__ void WaitForStores() {
#if JAX_EP_HAS_SM_90
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kLeft) : "memory");
#endif
}

}  // namespace jax_ep::cuda
