// The rows that a token's sum is made of.
#pragma once

#include "kernels/pull/args.cuh"
#include "kernels/routing/destination.cuh"

namespace jax_ep::cuda {

// The source of a token's rows at one rank: lane r holds that of rank r.
struct Source {
  int row;         // -1: none or several
  bool is_folded;  // there are several, which the rank has folded
};

// Returns the sources, given the token's destinations, of which lane k holds the k-th.
__device__ inline Source FindSource(const PullArgs& args, const Destination& destination, int lane) {
  if (!args.shape.has_row_per_choice()) return {destination.row, false};
  unsigned row_lanes = 0;
  for (int r = 0; r < args.shape.num_ranks; ++r) {
    const unsigned lanes = __ballot_sync(kAllLanes, destination.row >= 0 && destination.rank == r);
    if (lane == r) row_lanes = lanes;
  }
  const int row = __shfl_sync(kAllLanes, destination.row, row_lanes == 0 ? 0 : __ffs(row_lanes) - 1);
  return {__popc(row_lanes) == 1 ? row : -1, __popc(row_lanes) > 1};
}

// Returns the rows of a token's sum on a rank that is alone: all of the token's rows.
template <typename T>
__device__ SumInputs<T> FindOwnInputs(const PullArgs& args, int index, int row) {
  SumInputs<T> inputs{nullptr, 1.0f, __ballot_sync(kAllLanes, row >= 0)};
  if (row < 0) return inputs;
  inputs.row = static_cast<const T*>(args.summands[index].rows) + row * args.summands[index].num_elements;
  if (args.row_weights != nullptr) inputs.factor = args.row_weights[row];
  return inputs;
}

// Returns the rows that a token's sum is made of, given the token's destinations, of which lane k holds the
// k-th.
template <typename T>
__device__ SumInputs<T> FindSumInputs(const PullArgs& args, const Published* published, int index, int t,
                                      const Destination& destination, int lane) {
  if (args.shape.is_alone()) return FindOwnInputs<T>(args, index, destination.row);
  const Source source = FindSource(args, destination, lane);
  const int64_t width = args.summands[index].num_elements;
  SumInputs<T> inputs{nullptr, 1.0f, __ballot_sync(kAllLanes, source.row >= 0 || source.is_folded)};
  if (source.is_folded) {
    const int64_t global_token = int64_t{args.peers.rank} * args.shape.num_tokens + t;
    inputs.row = static_cast<const T*>(published[lane].partials[index]) + global_token * width;
  } else if (source.row >= 0) {
    inputs.row = static_cast<const T*>(published[lane].buffers[index]) + source.row * width;
    if (args.row_weights != nullptr) {
      inputs.factor = static_cast<const float*>(published[lane].weights)[source.row];
    }
  }
  return inputs;
}

}  // namespace jax_ep::cuda
