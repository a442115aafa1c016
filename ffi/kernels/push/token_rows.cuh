// By expert: where a token's rows at this rank lie.
#pragma once

#include "kernels/push/args.cuh"

namespace jax_ep::cuda {

// A token's rows at this rank: lane k holds that of its k-th choice, -1 none.
struct TokenRows {
  int row;
  unsigned lanes;  // that hold a row; the first one's has come
};

__device__ inline TokenRows FindTokenRows(const int32_t* received_rows, const Shape& shape,
                                          int64_t global_token, int lane) {
  const int row = lane < shape.top_k ? __ldcg(&received_rows[global_token * shape.top_k + lane]) : -1;
  return {row, __ballot_sync(kAllLanes, IsRow(row, shape.capacity))};
}

}  // namespace jax_ep::cuda
