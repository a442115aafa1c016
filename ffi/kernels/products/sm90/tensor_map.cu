#include "kernels/products/sm90/tensor_map.h"

namespace jax_ep::cuda::sm90 {
namespace {

using Encode = CUresult(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                        const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                        CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// The extension does not link to libcuda.
Encode* FindEncode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result{};
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                             cudaEnableDefault, &result);
  (void)cudaGetLastError();
  return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode*>(function)
                                                                       : nullptr;
}

cudaError_t Describe(CUtensorMapDataType type, CUtensorMapSwizzle swizzle, const void* matrices,
                     const cuuint64_t (&sizes)[3], const cuuint64_t (&strides)[2], Box box,
                     CUtensorMap& map) {
  static Encode* const encode = FindEncode();
  if (encode == nullptr) return cudaErrorNotSupported;
  const cuuint32_t box_sizes[] = {static_cast<cuuint32_t>(box.columns), static_cast<cuuint32_t>(box.rows),
                                  static_cast<cuuint32_t>(box.matrices)};
  const cuuint32_t steps[] = {1, 1, 1};
  // A promotion to 256 bytes makes products of few rows up to 8 % slower, and others no faster.
  const CUresult result = encode(&map, type, 3, const_cast<void*>(matrices), sizes, strides, box_sizes, steps,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace

// The types of one size differ in nothing that a copy does.
cudaError_t DescribeMatrices(const Matrices& matrices, Box box, CUtensorMap& map) {
  const auto type =
      matrices.element_bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT16;
  const auto bytes = [&](int64_t elements) {
    return static_cast<cuuint64_t>(elements * matrices.element_bytes);
  };
  return Describe(type, CU_TENSOR_MAP_SWIZZLE_128B, matrices.data,
                  {static_cast<cuuint64_t>(matrices.width), static_cast<cuuint64_t>(matrices.rows),
                   static_cast<cuuint64_t>(matrices.count)},
                  {bytes(matrices.row_stride), bytes(matrices.matrix_stride)}, box, map);
}

cudaError_t DescribeScales(const float* scales, int64_t rows, int64_t width, int64_t stride, int box_columns,
                           CUtensorMap& map) {
  const auto row_bytes = static_cast<cuuint64_t>(stride) * sizeof(float),
             num_rows = static_cast<cuuint64_t>(rows);
  return Describe(CU_TENSOR_MAP_DATA_TYPE_FLOAT32, CU_TENSOR_MAP_SWIZZLE_NONE, scales,
                  {static_cast<cuuint64_t>(width), num_rows, 1}, {row_bytes, row_bytes * num_rows},
                  {1, box_columns}, map);
}

}  // namespace jax_ep::cuda::sm90
