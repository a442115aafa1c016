// Where a token's rows lie, according to its handle.
#pragma once

#include "core/params.h"
#include "kernels/threads.cuh"

namespace jax_ep::cuda {

// What a handle says of a token's row that this lane of a warp stands for.
struct LoadedPlace {
  int row;     // -1: none
  int expert;  // of the choice that it is for, where rows are those of choices
};

__device__ inline LoadedPlace LoadPlace(const Shape& shape, const HandleArrays& handle, int t, int lane) {
  LoadedPlace place{-1, 0};
  const int width = shape.rows_per_token();
  if (lane < width) place.row = handle.sent_rows[int64_t{t} * width + lane];
  if (lane < width && shape.has_row_per_choice()) place.expert = handle.topk_idx[int64_t{t} * width + lane];
  return place;
}

// The row that this lane stands for, -1 none, and the rank that holds it: 0 where lanes stand for nothing,
// for it is used as an index before rows are looked at.
struct Place {
  int row;
  int rank;
};

__device__ inline Place FindPlace(const Shape& shape, const LoadedPlace& place, int lane) {
  if (lane >= shape.rows_per_token()) return {-1, 0};
  const bool by_choice = shape.has_row_per_choice();
  if (by_choice && !IsExpert(place.expert, shape.num_experts)) return {-1, 0};
  return {IsRow(place.row, shape.capacity) ? place.row : -1, by_choice ? shape.rank_of(place.expert) : lane};
}

__device__ inline Place FindPlace(const Shape& shape, const HandleArrays& handle, int t, int lane) {
  return FindPlace(shape, LoadPlace(shape, handle, t, lane), lane);
}

}  // namespace jax_ep::cuda
