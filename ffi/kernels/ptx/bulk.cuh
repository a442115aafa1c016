// Bulk copies (cp.async.bulk, sm_90 and newer): rows through shared memory without a thread's registers.
// On older devices these compile to nothing; their kernels are never launched there.
#pragma once

#include "kernels/threads.cuh"

namespace jax_ep::cuda {

// Shorter rows gain nothing from bulk copies, and others cannot be copied so.
JAX_EP_HD inline bool IsBulkRow(int64_t row_bytes) { return row_bytes >= 256 && row_bytes % 16 == 0; }

__device__ inline uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// A barrier that completes a phase with every `count` arrivals, once the bytes of the loads that count
// for the phase have arrived, too.
__device__ inline void InitBarrier(uint64_t* barrier, uint32_t count) {
#if JAX_EP_HAS_SM_90
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(barrier)), "r"(count)
               : "memory");
#endif
}

// What InitBarrier has done comes before this thread's bulk copies.
__device__ inline void FenceBarriers() {
#if JAX_EP_HAS_SM_90
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// Two barriers, which complete a phase once the bytes of one load have arrived. Called by the thread that
// begins the loads.
__device__ inline void InitBarriers(uint64_t* barriers) {
  for (int i = 0; i < 2; ++i) InitBarrier(&barriers[i], 1);
  FenceBarriers();
}

// Orders what this thread has seen by ordinary accesses before its later bulk copies, and the other way
// round.
__device__ inline void FenceBulk() {
#if JAX_EP_HAS_SM_90
  asm volatile("fence.proxy.async;" ::: "memory");
#endif
}

// The same of shared memory alone: it does not wait for what this thread has stored elsewhere.
__device__ inline void FenceBulkShared() {
#if JAX_EP_HAS_SM_90
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Begins a load into shared memory. Addresses and bytes are multiples of 16.
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

// Arrives: whoever sees the phase completed sees what this thread has done before.
__device__ inline void Arrive(uint64_t* barrier) {
#if JAX_EP_HAS_SM_90
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(SharedAddress(barrier)) : "memory");
#endif
}

// Waits for a load of memory that is mapped here, which always comes, or for warps of this block.
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

// Begins a store from shared memory, to a peer's or the own global memory.
__device__ inline void BulkStore(void* to, const void* from, uint32_t bytes) {
#if JAX_EP_HAS_SM_90
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
               "r"(SharedAddress(from)), "r"(bytes)
               : "memory");
#endif
}

// Closes a group of the stores that this thread has begun.
__device__ inline void CommitStores() {
#if JAX_EP_HAS_SM_90
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}

// Waits until this thread's stores have read their shared memory, which may then be written again; but for
// the last kLeft groups of them.
template <int kLeft = 0>
__device__ void WaitForStoresRead() {
#if JAX_EP_HAS_SM_90
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kLeft) : "memory");
#endif
}

// Waits until this thread's stores are done, but for the last kLeft groups of them.
template <int kLeft = 0>
__device__ void WaitForStores() {
#if JAX_EP_HAS_SM_90
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kLeft) : "memory");
#endif
}

}  // namespace jax_ep::cuda
