// Instructions that only sm_90a has, but for products: tensor loads and stores, clusters and their barriers,
// and the division of registers.
#pragma once

#include <cuda.h>  // types only

#include "kernels/ptx/bulk.cuh"

namespace jax_ep::cuda {

constexpr int kWarpgroup = 4 * kWarp;

__device__ inline int RankInCluster() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Waits for all threads of the cluster.
__device__ inline void SyncCluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Returns the address of a variable in the shared memory of another block of the cluster.
__device__ inline uint32_t AddressInBlock(const void* pointer, int rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(SharedAddress(pointer)), "r"(rank));
  return address;
}

// Returns true, once the word has been loaded. An arrival in another block overtakes loads from shared
// memory, in spite of a fence, unless it depends on them. Other functions of a word that are always true are
// optimized away.
__device__ inline bool IsLoaded(uint32_t word) {
  uint32_t bits;
  asm volatile("popc.b32 %0, %1;" : "=r"(bits) : "r"(word));
  return bits <= 32;
}

// Arrives at the barrier of a block of the cluster, if `arrives`. Lanes that do not arrive stay with the
// others. (A release for the whole cluster would wait for all of its accesses, and clear the L1 cache.)
__device__ inline void ArriveInBlock(uint64_t* barrier, int rank, bool arrives) {
  asm volatile(
      "{\n"
      ".reg .pred arrives;\n"
      "setp.ne.b32 arrives, %1, 0;\n"
      "@arrives mbarrier.arrive.shared::cluster.b64 _, [%0];\n"
      "}\n" ::"r"(AddressInBlock(barrier, rank)),
      "r"(static_cast<int>(arrives))
      : "memory");
}

// Arrives at a barrier, whose phase then also waits for so many bytes.
__device__ inline void ArriveAndExpect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(barrier)),
               "r"(bytes)
               : "memory");
}

// Arrives at a barrier when this thread's earlier CopyFloats are complete.
__device__ inline void ArriveAfterCopies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(SharedAddress(barrier))
               : "memory");
}

// Copies a value, of a multiple of 16 bytes, into a block of the cluster. Its bytes complete a phase of the
// barrier there.
template <typename T>
__device__ void SendToBlock(T* to, const T& value, uint64_t* barrier, int rank) {
  const uint32_t remote = AddressInBlock(barrier, rank);
  asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;" ::"r"(remote),
               "r"(static_cast<uint32_t>(sizeof(T)))
               : "memory");
  const uint32_t address = AddressInBlock(to, rank);
  const auto* const parts = reinterpret_cast<const int4*>(&value);
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T) / sizeof(int4)); ++i) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.s32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
            address + i * static_cast<uint32_t>(sizeof(int4))),
        "r"(parts[i].x), "r"(parts[i].y), "r"(parts[i].z), "r"(parts[i].w), "r"(remote)
        : "memory");
  }
}

// Starts a load of a box of matrices, from (column, row) of a matrix on (and of those behind it, if the map's
// boxes are of several). With `blocks`, a mask, it goes to
// the same address in several blocks of the cluster, and counts for the barrier of each.
__device__ inline void LoadBox(void* to, const CUtensorMap* map, int column, int row, int matrix,
                               uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
      "[%5];" ::"r"(SharedAddress(to)),
      "l"(map), "r"(column), "r"(row), "r"(matrix), "r"(SharedAddress(barrier))
      : "memory");
}
__device__ inline void LoadBox(void* to, const CUtensorMap* map, int column, int row, int matrix,
                               uint64_t* barrier, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%2, %3, %4}], [%5], %6;" ::"r"(SharedAddress(to)),
      "l"(map), "r"(column), "r"(row), "r"(matrix), "r"(SharedAddress(barrier)), "h"(blocks)
      : "memory");
}

// Starts a store of a box of matrices, from (column, row) of a matrix on, if `stores`. Other lanes stay with
// this one.
__device__ inline void StoreBox(const CUtensorMap* map, int column, int row, int matrix, const void* from,
                                bool stores) {
  asm volatile(
      "{\n"
      ".reg .pred stores;\n"
      "setp.ne.b32 stores, %5, 0;\n"
      "@stores cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];\n"
      "}\n" ::"l"(map),
      "r"(column), "r"(row), "r"(matrix), "r"(SharedAddress(from)), "r"(static_cast<int>(stores))
      : "memory");
}

__device__ inline void PrefetchMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Moves registers from a warpgroup to those that ask for more.
template <int kRegisters>
__device__ void ReleaseRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ void TakeRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Stores four 8 x 8 matrices of 16-bit elements, one register of each per lane. Lane i gives the address of
// row i % 8 of matrix i / 8.
__device__ inline void StoreMatrices(void* row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(SharedAddress(row)),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

}  // namespace jax_ep::cuda
