// Bulk copies (cp.async.bulk, sm_90 and newer): rows through shared memory without a thread's registers.
// On older devices these compile to nothing; their kernels are never launched there.
#pragma once

#include "kernels/device.cuh"

namespace jax_ep::cuda {

__device__ inline uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Two barriers, which complete a phase once the bytes of one load have arrived. Called by the thread that
// begins the loads.
__device__ inline void InitBarriers(uint64_t* barriers) {
#if JAX_EP_HAS_SM_90
  for (int i = 0; i < 2; ++i) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(SharedAddress(&barriers[i])) : "memory");
  }
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
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

// Waits for a load of this device's own memory: it always comes.
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
