// Descriptions of matrices that tensor loads read and tensor stores write.
#pragma once

#include <cuda.h>  // types only
#include <cuda_runtime_api.h>

#include <cstdint>

namespace jax_ep::cuda::sm90 {

// Describes an FP8 matrix, of which a load takes 128 columns of `box_rows` rows, swizzled. Rows that the
// matrix does not have are read as zeros. `width` is a multiple of 128.
cudaError_t DescribeFp8(const void* matrix, int64_t rows, int64_t width, int box_rows, CUtensorMap& map);

// Describes a bfloat16 matrix, of which a load or a store takes 64 columns of `box_rows` rows, swizzled. A
// store leaves out what lies outside of the matrix. `width` is a multiple of 8.
constexpr int kBf16BoxColumns = 64;
cudaError_t DescribeBf16(const void* matrix, int64_t rows, int64_t width, int box_rows, CUtensorMap& map);

}  // namespace jax_ep::cuda::sm90
