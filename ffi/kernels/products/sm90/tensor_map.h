// Descriptions of matrices that tensor loads read and tensor stores write.
#pragma once

#include <cuda.h>  // types only
#include <cuda_runtime_api.h>

#include <cstdint>

namespace jax_ep::cuda::sm90 {

// A box of some matrices [matrices, rows, width], in elements.
struct Box {
  int rows, columns, matrices = 1;
};

// Matrices, of elements of 1 or 2 bytes.
struct Matrices {
  int element_bytes;
  const void* data;
  int64_t count, rows, width;
  int64_t row_stride, matrix_stride;  // in elements

  Matrices(int element_bytes, const void* data, int64_t count, int64_t rows, int64_t width)
      : Matrices(element_bytes, data, count, rows, width, width, rows * width) {}
  Matrices(int element_bytes, const void* data, int64_t count, int64_t rows, int64_t width,
           int64_t row_stride, int64_t matrix_stride)
      : element_bytes(element_bytes),
        data(data),
        count(count),
        rows(rows),
        width(width),
        row_stride(row_stride),
        matrix_stride(matrix_stride) {}
};

// Describes matrices of which a load or a store takes a box at a time, with rows of 128 bytes, swizzled. What
// lies outside of a matrix is read as zeros, and not stored. Addresses and rows are multiples of 16 bytes.
cudaError_t DescribeMatrices(const Matrices& matrices, Box box, CUtensorMap& map);

// Describes scales [rows, width], which begin `stride` apart, a multiple of 4. A load takes so many of a row.
cudaError_t DescribeScales(const float* scales, int64_t rows, int64_t width, int64_t stride, int box_columns,
                           CUtensorMap& map);

}  // namespace jax_ep::cuda::sm90
