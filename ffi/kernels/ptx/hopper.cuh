// Instructions that only sm_90a has: tensor loads for clusters, products of warpgroups, and clusters'
// barriers.
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

// Starts a load of a box of a matrix, from (column, row) on. With `blocks`, a mask, it goes to the same
// address in several blocks of the cluster, and counts for the barrier of each.
__device__ inline void LoadBox(void* to, const CUtensorMap* map, int column, int row, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
      "[%4];" ::"r"(SharedAddress(to)),
      "l"(map), "r"(column), "r"(row), "r"(SharedAddress(barrier))
      : "memory");
}
__device__ inline void LoadBox(void* to, const CUtensorMap* map, int column, int row, uint64_t* barrier,
                               uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%2, %3}], [%4], %5;" ::"r"(SharedAddress(to)),
      "l"(map), "r"(column), "r"(row), "r"(SharedAddress(barrier)), "h"(blocks)
      : "memory");
}

// Starts a store of a box of a matrix, from (column, row) on, if `stores`. Other lanes stay with this one.
__device__ inline void StoreBox(const CUtensorMap* map, int column, int row, const void* from, bool stores) {
  asm volatile(
      "{\n"
      ".reg .pred stores;\n"
      "setp.ne.b32 stores, %4, 0;\n"
      "@stores cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];\n"
      "}\n" ::"l"(map),
      "r"(column), "r"(row), "r"(SharedAddress(from)), "r"(static_cast<int>(stores))
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

// Rows of 128 bytes in shared memory, swizzled as a tensor load stores them with CU_TENSOR_MAP_SWIZZLE_128B:
// an operand of products. The first one lies at a multiple of 1024.
struct OperandRows {
  uint32_t low;

  __device__ explicit OperandRows(const void* first)
      : low((SharedAddress(first) & 0x3ffff) >> 4 | 1u << 16) {}

  // Returns the descriptor of the operand so many bytes behind the first, a multiple of 16.
  __device__ uint64_t At(uint32_t bytes) const {
    constexpr uint64_t kSwizzle128 = uint64_t{1} << 62, kEightRows = uint64_t{1024 / 16} << 32;
    return kSwizzle128 | kEightRows | (low + bytes / 16);
  }
};

// Orders this thread's accesses to registers and shared memory before the products that follow.
__device__ inline void BeginProducts() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Ends a group of products.
__device__ inline void CommitProducts() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits for this warpgroup's products, except its last kLeft groups.
template <int kLeft>
__device__ void WaitForProducts() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

// Starts a product of a warpgroup: of 64 rows and 128 columns, over 32 elements of FP8 (e4m3). `adds`: to the
// sums, instead of replacing them. A thread has two adjacent columns of two rows, in each 8 columns j: sums[4
// j] and sums[4 j + 1] are those of row lane / 4 of its warp's 16 rows, the other two those of the row 8
// below.
__device__ inline void MultiplyFp8(float (&sums)[64], uint64_t rows, uint64_t columns, bool adds) {
  asm volatile(
      "{\n"
      ".reg .pred adds;\n"
      "setp.ne.b32 adds, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, "
      "%11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, "
      "%31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, "
      "%51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, adds, 1, 1;\n"
      "}\n"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]), "+f"(sums[4]), "+f"(sums[5]),
        "+f"(sums[6]), "+f"(sums[7]), "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]),
        "+f"(sums[12]), "+f"(sums[13]), "+f"(sums[14]), "+f"(sums[15]), "+f"(sums[16]), "+f"(sums[17]),
        "+f"(sums[18]), "+f"(sums[19]), "+f"(sums[20]), "+f"(sums[21]), "+f"(sums[22]), "+f"(sums[23]),
        "+f"(sums[24]), "+f"(sums[25]), "+f"(sums[26]), "+f"(sums[27]), "+f"(sums[28]), "+f"(sums[29]),
        "+f"(sums[30]), "+f"(sums[31]), "+f"(sums[32]), "+f"(sums[33]), "+f"(sums[34]), "+f"(sums[35]),
        "+f"(sums[36]), "+f"(sums[37]), "+f"(sums[38]), "+f"(sums[39]), "+f"(sums[40]), "+f"(sums[41]),
        "+f"(sums[42]), "+f"(sums[43]), "+f"(sums[44]), "+f"(sums[45]), "+f"(sums[46]), "+f"(sums[47]),
        "+f"(sums[48]), "+f"(sums[49]), "+f"(sums[50]), "+f"(sums[51]), "+f"(sums[52]), "+f"(sums[53]),
        "+f"(sums[54]), "+f"(sums[55]), "+f"(sums[56]), "+f"(sums[57]), "+f"(sums[58]), "+f"(sums[59]),
        "+f"(sums[60]), "+f"(sums[61]), "+f"(sums[62]), "+f"(sums[63])
      : "l"(rows), "l"(columns), "r"(static_cast<int>(adds)));
}

// Stores four 8 x 8 matrices of 16-bit elements, one register of each per lane. Lane i gives the address of
// row i % 8 of matrix i / 8.
__device__ inline void StoreMatrices(void* row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(SharedAddress(row)),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

}  // namespace jax_ep::cuda
