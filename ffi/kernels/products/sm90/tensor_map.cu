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

}  // namespace

// The types of one size differ in nothing that a copy does.
cudaError_t DescribeMatrices(int element_bytes, const void* matrices, int64_t count, int64_t rows,
                             int64_t width, Box box, CUtensorMap& map) {
  static Encode* const encode = FindEncode();
  if (encode == nullptr) return cudaErrorNotSupported;
  const auto type = element_bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT16;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(width), static_cast<cuuint64_t>(rows),
                              static_cast<cuuint64_t>(count)};
  const auto row_bytes = static_cast<cuuint64_t>(width * element_bytes);
  const cuuint64_t strides[] = {row_bytes, row_bytes * static_cast<cuuint64_t>(rows)};
  const cuuint32_t sizes_of_box[] = {static_cast<cuuint32_t>(box.columns), static_cast<cuuint32_t>(box.rows),
                                     1};
  const cuuint32_t steps[] = {1, 1, 1};
  const CUresult result = encode(&map, type, 3, const_cast<void*>(matrices), sizes, strides, sizes_of_box,
                                 steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace jax_ep::cuda::sm90
