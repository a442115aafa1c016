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

// Returns the row of a token whose rows are scaled: where it arrived, in the first of them, or if none
// travels, where it lies.
template <typename T>
__device__ const T* TokenRow(const PushArgs& args, int p, const TokenRows& rows, int64_t global_token) {
  const Payload& payload = args.payloads[p];
  const int64_t first = __shfl_sync(kAllLanes, rows.row, __ffs(rows.lanes) - 1);
  return reinterpret_cast<const T*>(args.scales_in_place() ? payload.in + global_token * payload.row_bytes
                                                           : payload.out + first * payload.row_bytes);
}

}  // namespace jax_ep::cuda
