// The rows that a token's sum is made of.
#pragma once

#include "kernels/pull/args.cuh"
#include "kernels/routing/destination.cuh"

namespace jax_ep::cuda {

// The source of a token's rows at one rank: lane r holds that of rank r. If there are more ranks than lanes,
// and each choice has a row, the lanes hold those of the ranks that have rows, in their order.
struct Source {
  int rank;
  int row;         // -1: none or several
  bool is_folded;  // there are several, which the rank has folded
};

// Returns the sources by expert, of more than kWarp ranks, given the destination of each lane's choice.
__device__ inline Source FindSourceOfMany(const Shape& shape, const Destination& destination, int lane) {
  const unsigned same = __match_any_sync(kAllLanes, destination.row < 0 ? -1 : destination.rank);
  const bool is_first = destination.row >= 0 && __ffs(same) - 1 == lane, is_single = __popc(same) == 1;
  const int rank = is_first ? destination.rank : shape.num_ranks;
  int before = 0, from = -1;  // ranks before this lane's; the lane whose source this lane shall hold
  for (int i = 0; i < shape.top_k; ++i) before += __shfl_sync(kAllLanes, rank, i) < rank;
  for (int i = 0; i < shape.top_k; ++i) {
    if (__shfl_sync(kAllLanes, is_first ? before : -1, i) == lane) from = i;
  }
  const int row = __shfl_sync(kAllLanes, is_single ? destination.row : -1, max(from, 0));
  const Source source{__shfl_sync(kAllLanes, destination.rank, max(from, 0)), row, row < 0};
  return from >= 0 ? source : Source{0, -1, false};
}

// Returns the sources, given the token's destinations, of which lane k holds the k-th.
__device__ inline Source FindSource(const PullArgs& args, const Destination& destination, int lane) {
  if (!args.shape.has_row_per_choice()) return {destination.rank, destination.row, false};
  if (args.shape.num_ranks > kWarp) return FindSourceOfMany(args.shape, destination, lane);
  unsigned row_lanes = 0;
  for (int r = 0; r < args.shape.num_ranks; ++r) {
    const unsigned lanes = __ballot_sync(kAllLanes, destination.row >= 0 && destination.rank == r);
    if (lane == r) row_lanes = lanes;
  }
  const int row = __shfl_sync(kAllLanes, destination.row, row_lanes == 0 ? 0 : __ffs(row_lanes) - 1);
  return {lane, __popc(row_lanes) == 1 ? row : -1, __popc(row_lanes) > 1};
}

// The addresses of a sum's rows and weights. Each lane in `lanes` holds those of one row.
template <typename T>
struct SumSources {
  const T* row;
  const float* weight;  // null: the factor is 1
  unsigned lanes;

  // Loads the weights.
  __device__ SumInputs<T> Load() const { return {row, weight == nullptr ? 1.0f : *weight, lanes}; }
};

// Returns the rows of a token's sum on a rank that is alone: all of the token's rows.
template <typename T>
__device__ SumSources<T> FindOwnSources(const PullArgs& args, int index, int row) {
  SumSources<T> sources{nullptr, nullptr, __ballot_sync(kAllLanes, row >= 0)};
  if (row < 0) return sources;
  sources.row = static_cast<const T*>(args.summands[index].rows) + row * args.summands[index].num_elements;
  if (args.row_weights != nullptr) sources.weight = args.row_weights + row;
  return sources;
}

// Returns the rows that a token's sum is made of, given the token's destinations, of which lane k holds the
// k-th.
template <typename T>
__device__ SumSources<T> FindSumSources(const PullArgs& args, const Published* published, int index, int t,
                                        const Destination& destination, int lane) {
  if (args.shape.is_alone()) return FindOwnSources<T>(args, index, destination.row);
  const Source source = FindSource(args, destination, lane);
  const int64_t width = args.summands[index].num_elements;
  SumSources<T> sources{nullptr, nullptr, __ballot_sync(kAllLanes, source.row >= 0 || source.is_folded)};
  if (source.is_folded) {
    const int64_t global_token = int64_t{args.peers.rank} * args.shape.num_tokens + t;
    sources.row = static_cast<const T*>(published[source.rank].partials[index]) + global_token * width;
  } else if (source.row >= 0) {
    sources.row = static_cast<const T*>(published[source.rank].buffers[index]) + source.row * width;
    if (args.row_weights != nullptr) {
      sources.weight = static_cast<const float*>(published[source.rank].weights) + source.row;
    }
  }
  return sources;
}

}  // namespace jax_ep::cuda
