// Products of a warpgroup on the tensor cores of sm_90a, and their operands.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "kernels/ptx/bulk.cuh"

namespace jax_ep::cuda {

// Rows of 128 bytes in shared memory, swizzled as a tensor load stores them with CU_TENSOR_MAP_SWIZZLE_128B:
// an operand of products. The first one lies at a multiple of 1024. If the operand is stored along the sum, a
// row has elements that are added up. If it is stored across, a row has the elements of 64 columns (of 16
// bits) for one step of the sum, and those of the next 64 columns lie `next` bytes behind. Of each eight
// rows, which follow each other, the first lies `eight_rows` bytes behind the first of the eight before.
constexpr uint32_t kNoNext = 16;  // for operands along the sum, and for 64 columns
struct OperandRows {
  uint32_t low, eight_rows;

  __device__ explicit OperandRows(const void* first, uint32_t next = kNoNext, uint32_t eight_rows = 1024)
      : low((SharedAddress(first) & 0x3ffff) >> 4 | next / 16 << 16), eight_rows(eight_rows) {}

  // Returns the descriptor of the operand so many bytes behind the first, a multiple of 16.
  __device__ uint64_t At(uint32_t bytes) const {
    constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
    return kSwizzle128 | uint64_t{eight_rows / 16} << 32 | (low + bytes / 16);
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

// Makes the sums variables without a value, of which none is in use before the first product sets them.
template <int kSums>
__device__ void Undefine(float (&sums)[kSums]) {
  for (float& sum : sums) asm volatile("" : "=f"(sum));
}

// Keeps the compiler from reading the sums of products before they are complete.
template <int kSums>
__device__ void Keep(float (&sums)[kSums]) {
  for (float& sum : sums) asm volatile("" : "+f"(sum)::"memory");
}

// A thread's sums in assembly: their numbers, and the variables.
// clang-format off
#define JAX_EP_NUMBERS_4 "%0, %1, %2, %3"
#define JAX_EP_NUMBERS_8 JAX_EP_NUMBERS_4 ", %4, %5, %6, %7"
#define JAX_EP_NUMBERS_16 JAX_EP_NUMBERS_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define JAX_EP_NUMBERS_32 \
  JAX_EP_NUMBERS_16 \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define JAX_EP_NUMBERS_64 \
  JAX_EP_NUMBERS_32 \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50" \
  ", %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define JAX_EP_NUMBERS_128 \
  JAX_EP_NUMBERS_64 \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82" \
  ", %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100" \
  ", %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116" \
  ", %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define JAX_EP_SUMS_4_FROM(i) \
  "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define JAX_EP_SUMS_8_FROM(i) JAX_EP_SUMS_4_FROM(i), JAX_EP_SUMS_4_FROM(i + 4)
#define JAX_EP_SUMS_16_FROM(i) JAX_EP_SUMS_8_FROM(i), JAX_EP_SUMS_8_FROM(i + 8)
#define JAX_EP_SUMS_32_FROM(i) JAX_EP_SUMS_16_FROM(i), JAX_EP_SUMS_16_FROM(i + 16)
#define JAX_EP_SUMS_64_FROM(i) JAX_EP_SUMS_32_FROM(i), JAX_EP_SUMS_32_FROM(i + 32)
#define JAX_EP_SUMS_128_FROM(i) JAX_EP_SUMS_64_FROM(i), JAX_EP_SUMS_64_FROM(i + 64)
// clang-format on

#define JAX_EP_MULTIPLY_FP8(columns_of, count, rows_at, columns_at, adds_at)                      \
  asm volatile(                                                                                   \
      "{\n"                                                                                       \
      ".reg .pred adds;\n"                                                                        \
      "setp.ne.b32 adds, " adds_at                                                                \
      ", 0;\n"                                                                                    \
      "wgmma.mma_async.sync.aligned.m64n" columns_of "k32.f32.e4m3.e4m3 {" JAX_EP_NUMBERS_##count \
      "}, " rows_at ", " columns_at                                                               \
      ", adds, 1, 1;\n"                                                                           \
      "}\n"                                                                                       \
      : JAX_EP_SUMS_##count##_FROM(0)                                                             \
      : "l"(rows), "l"(columns), "r"(static_cast<int>(adds)))
// Starts a product of 64 rows and 2 * kSums columns, over 32 elements of FP8 (e4m3). `adds`: to the sums,
// instead of replacing them. A thread has two adjacent columns of two rows, in each 8 columns j: sums[4 j]
// and sums[4 j + 1] are those of row lane / 4 of its warp's 16 rows, the other two those of the row 8 below.
template <int kSums>
__device__ void MultiplyFp8(float (&sums)[kSums], uint64_t rows, uint64_t columns, bool adds) {
  static_assert(kSums == 4 || kSums == 8 || kSums == 16 || kSums == 32 || kSums == 64);
  if constexpr (kSums == 4) {
    JAX_EP_MULTIPLY_FP8("8", 4, "%4", "%5", "%6");
  } else if constexpr (kSums == 8) {
    JAX_EP_MULTIPLY_FP8("16", 8, "%8", "%9", "%10");
  } else if constexpr (kSums == 16) {
    JAX_EP_MULTIPLY_FP8("32", 16, "%16", "%17", "%18");
  } else if constexpr (kSums == 32) {
    JAX_EP_MULTIPLY_FP8("64", 32, "%32", "%33", "%34");
  } else {
    JAX_EP_MULTIPLY_FP8("128", 64, "%64", "%65", "%66");
  }
}

#define JAX_EP_MULTIPLY_FLOATS(columns_of, count, type, rows_at, columns_at, adds_at, rows_across,        \
                               columns_across)                                                            \
  asm volatile(                                                                                           \
      "{\n"                                                                                               \
      ".reg .pred adds;\n"                                                                                \
      "setp.ne.b32 adds, " adds_at                                                                        \
      ", 0;\n"                                                                                            \
      "wgmma.mma_async.sync.aligned.m64n" columns_of "k16.f32." type "." type " {" JAX_EP_NUMBERS_##count \
      "}, " rows_at ", " columns_at ", adds, 1, 1, " rows_across ", " columns_across                      \
      ";\n"                                                                                               \
      "}\n"                                                                                               \
      : JAX_EP_SUMS_##count##_FROM(0)                                                                     \
      : "l"(rows), "l"(columns), "r"(static_cast<int>(adds)), "n"(kRowsAcross), "n"(kColumnsAcross))
#define JAX_EP_MULTIPLY_TYPE(type)                                                    \
  if constexpr (kSums == 4) {                                                         \
    JAX_EP_MULTIPLY_FLOATS("8", 4, type, "%4", "%5", "%6", "%7", "%8");               \
  } else if constexpr (kSums == 8) {                                                  \
    JAX_EP_MULTIPLY_FLOATS("16", 8, type, "%8", "%9", "%10", "%11", "%12");           \
  } else if constexpr (kSums == 16) {                                                 \
    JAX_EP_MULTIPLY_FLOATS("32", 16, type, "%16", "%17", "%18", "%19", "%20");        \
  } else if constexpr (kSums == 32) {                                                 \
    JAX_EP_MULTIPLY_FLOATS("64", 32, type, "%32", "%33", "%34", "%35", "%36");        \
  } else if constexpr (kSums == 64) {                                                 \
    JAX_EP_MULTIPLY_FLOATS("128", 64, type, "%64", "%65", "%66", "%67", "%68");       \
  } else {                                                                            \
    JAX_EP_MULTIPLY_FLOATS("256", 128, type, "%128", "%129", "%130", "%131", "%132"); \
  }
// The same over 16 elements of a 16-bit float T. Operands are stored along the sum, or across it.
template <typename T, int kRowsAcross, int kColumnsAcross, int kSums>
__device__ void MultiplyFloats(float (&sums)[kSums], uint64_t rows, uint64_t columns, bool adds) {
  static_assert(kSums == 4 || kSums == 8 || kSums == 16 || kSums == 32 || kSums == 64 || kSums == 128);
  if constexpr (std::is_same_v<T, __half>) {
    JAX_EP_MULTIPLY_TYPE("f16")
  } else {
    JAX_EP_MULTIPLY_TYPE("bf16")
  }
}
#undef JAX_EP_MULTIPLY_TYPE
#undef JAX_EP_MULTIPLY_FLOATS
#undef JAX_EP_MULTIPLY_FP8
#undef JAX_EP_SUMS_128_FROM
#undef JAX_EP_SUMS_64_FROM
#undef JAX_EP_SUMS_32_FROM
#undef JAX_EP_SUMS_16_FROM
#undef JAX_EP_SUMS_8_FROM
#undef JAX_EP_SUMS_4_FROM
#undef JAX_EP_NUMBERS_128
#undef JAX_EP_NUMBERS_64
#undef JAX_EP_NUMBERS_32
#undef JAX_EP_NUMBERS_16
#undef JAX_EP_NUMBERS_8
#undef JAX_EP_NUMBERS_4

}  // namespace jax_ep::cuda
