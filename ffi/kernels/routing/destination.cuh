// Destinations of a token's rows, according to its handle.
#pragma once

#include "core/params.h"
#include "kernels/threads.cuh"

namespace jax_ep::cuda {

// A token has as many rows as it has choices, at most kMaxRowsPerToken, or one at each rank. The lanes of a
// warp stand for its rows from row `first` on, which is a multiple of kWarp. Loops over these rows have one
// step, unless there are more than kWarp ranks.

// A handle's entry for the row of a token that this lane of a warp stands for.
struct HandleEntry {
  int row;     // -1: none
  int expert;  // of the choice that the row belongs to, if each choice has a row
};

// Loads the entry for the row of token t that `lane` stands for.
__device__ inline HandleEntry LoadHandleEntry(const Shape& shape, const HandleArrays& handle, int t, int lane,
                                              int first = 0) {
  HandleEntry entry{-1, 0};
  const int width = shape.rows_per_token(), i = first + lane;
  if (i < width) entry.row = handle.sent_rows[int64_t{t} * width + i];
  if (i < width && shape.has_row_per_choice()) entry.expert = handle.topk_idx[int64_t{t} * width + i];
  return entry;
}

// A row's destination. `row` is -1 if this lane has none. `rank` is then still valid (0), because it is used
// as an index before `row` is checked.
struct Destination {
  int row;
  int rank;
};

// Returns the destination that an entry names.
__device__ inline Destination FindDestination(const Shape& shape, const HandleEntry& entry, int lane,
                                              int first = 0) {
  if (first + lane >= shape.rows_per_token()) return {-1, 0};
  const bool by_choice = shape.has_row_per_choice();
  if (by_choice && !IsExpert(entry.expert, shape.num_experts)) return {-1, 0};
  return {IsRow(entry.row, shape.capacity) ? entry.row : -1,
          by_choice ? shape.rank_of(entry.expert) : first + lane};
}

__device__ inline Destination FindDestination(const Shape& shape, const HandleArrays& handle, int t, int lane,
                                              int first = 0) {
  return FindDestination(shape, LoadHandleEntry(shape, handle, t, lane, first), lane, first);
}

}  // namespace jax_ep::cuda
