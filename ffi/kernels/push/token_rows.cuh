// The rows of a token at this rank, by expert.
#pragma once

#include "kernels/push/args.cuh"

namespace jax_ep::cuda {

// The rows of a token at this rank. Lane k holds the row of its k-th choice, -1 if none.
struct TokenRows {
  int row;
  unsigned lanes;  // lanes that hold a row; the token arrived in the first one's
};

// Loads the rows of a global token (source * T + token) from the received rows.
__device__ inline TokenRows FindTokenRows(const int32_t* received_rows, const Shape& shape,
                                          int64_t global_token, int lane) {
  const int row = lane < shape.top_k ? __ldcg(&received_rows[global_token * shape.top_k + lane]) : -1;
  return {row, __ballot_sync(kAllLanes, IsRow(row, shape.capacity))};
}

}  // namespace jax_ep::cuda
