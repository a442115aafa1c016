// A token's rows at a rank, by expert, and their scaling, each by its weight.
#pragma once

#include "kernels/push/args.cuh"
#include "kernels/rows/scale.cuh"

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

// Sets each row to its weight times the token's row, and the gradient of its weight to the dot product of the
// token's row with the factors. Rows are processed a few at a time, and the first row last. If the token
// arrived there, it is overwritten in place: each of its columns is read before it is written.
template <typename T, int N>
__device__ void ScaleRows(const PushArgs& args, int p, const TokenRows& rows, int64_t global_token,
                          int lane) {
  using Acc = typename Sum<T>::Acc;
  const int width = static_cast<int>(args.payloads[p].row_bytes / sizeof(T));
  T* const out = reinterpret_cast<T*>(args.payloads[p].out);
  const T* const factors = static_cast<const T*>(args.factors[p]);
  const T* const token = TokenRow<T>(args, p, rows, global_token);
  for (unsigned remaining = rows.lanes; remaining != 0;) {
    int indices[kScaledRows];
    Acc weights[kScaledRows], dots[kScaledRows];
#pragma unroll
    for (int r = 0; r < kScaledRows; ++r) {
      const int from = remaining == 0 ? 0 : 31 - __clz(remaining);
      indices[r] = __shfl_sync(kAllLanes, remaining == 0 ? -1 : rows.row, from);
      remaining &= ~(1u << from);
      weights[r] = indices[r] >= 0 ? args.row_weights[indices[r]] : 0.0f;
    }
    ScaleRow<T, N>(token, width, indices, weights, factors, out, lane, dots);
#pragma unroll
    for (int r = 0; r < kScaledRows; ++r) {
      if (lane != 0 || indices[r] < 0) continue;
      float& gradient = args.arrived_weights[indices[r]];
      gradient = static_cast<float>(p == 0 ? dots[r] : static_cast<Acc>(gradient) + dots[r]);
    }
  }
}

template <typename T>
__device__ void ScaleArray(const PushArgs& args, int p, const TokenRows& rows, int64_t global_token,
                           int lane) {
  if (args.payloads[p].row_bytes % 16 == 0) {
    ScaleRows<T, 16 / sizeof(T)>(args, p, rows, global_token, lane);
  } else {
    ScaleRows<T, 1>(args, p, rows, global_token, lane);
  }
}

}  // namespace jax_ep::cuda
