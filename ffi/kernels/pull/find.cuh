// Which rows a token's sum is made of, and where they lie.
#pragma once

#include "kernels/pull/args.cuh"
#include "kernels/routing/place.cuh"

namespace jax_ep::cuda {

// Where a token's rows come from: lane r holds rank r's.
struct Source {
  int row;     // -1: none, or several
  bool folds;  // several, which the rank has folded
};

// From the token's places, of which lane k holds the k-th.
__device__ inline Source FindSource(const PullArgs& args, const Place& place, int lane) {
  if (!args.shape.has_row_per_choice()) return {place.row, false};
  unsigned mine = 0;
  for (int r = 0; r < args.shape.num_ranks; ++r) {
    const unsigned here = __ballot_sync(kAllLanes, place.row >= 0 && place.rank == r);
    if (lane == r) mine = here;
  }
  const int row = __shfl_sync(kAllLanes, place.row, mine == 0 ? 0 : __ffs(mine) - 1);
  return {__popc(mine) == 1 ? row : -1, __popc(mine) > 1};
}

// The rows that a token's sum is made of.
template <typename T>
__device__ Terms<T> FindTerms(const PullArgs& args, const Published* published, int index, int t,
                              const Source& source, int lane) {
  const int64_t width = args.summands[index].num_elements;
  Terms<T> terms{nullptr, 1.0f, __ballot_sync(kAllLanes, source.row >= 0 || source.folds)};
  if (source.folds) {
    const int64_t global_token = int64_t{args.peers.rank} * args.shape.num_tokens + t;
    terms.row = static_cast<const T*>(published[lane].partials[index]) + global_token * width;
  } else if (source.row >= 0) {
    terms.row = static_cast<const T*>(published[lane].buffers[index]) + source.row * width;
    if (args.row_weights != nullptr) {
      terms.factor = static_cast<const float*>(published[lane].weights)[source.row];
    }
  }
  return terms;
}

}  // namespace jax_ep::cuda
