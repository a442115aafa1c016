#include "core/params.h"
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

cudaError_t Describe(CUtensorMapDataType type, int64_t element, const void* matrix, int64_t rows,
                     int64_t width, int box_rows, int box_columns, CUtensorMap& map) {
  static Encode* const encode = FindEncode();
  if (encode == nullptr) return cudaErrorNotSupported;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(width), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(width * element)};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(box_columns), static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[] = {1, 1};
  const CUresult result = encode(&map, type, 2, const_cast<void*>(matrix), sizes, strides, box, steps,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace

cudaError_t DescribeFp8(const void* matrix, int64_t rows, int64_t width, int box_rows, CUtensorMap& map) {
  return Describe(CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, matrix, rows, width, box_rows, kFp8Block, map);
}

cudaError_t DescribeBf16(const void* matrix, int64_t rows, int64_t width, int box_rows, CUtensorMap& map) {
  return Describe(CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, matrix, rows, width, box_rows, kBf16BoxColumns, map);
}

}  // namespace jax_ep::cuda::sm90
