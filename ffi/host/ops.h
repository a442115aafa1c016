// The ops on the CPU. Those that communicate run once for each rank, at the same time on all of
// them, after the ranks have met; `ranks` are everybody's parameters, in rank order.
#pragma once

#include <cstdint>
#include <vector>

#include "core/params.h"

namespace jax_ep::host {

void Layout(const LayoutParams& params);

// What a rank sends, counted before the ranks meet.
struct SendCounts {
  std::vector<int32_t> to_rank;    // [R] rows, in the routing's order
  std::vector<int32_t> to_expert;  // [E] (token, expert) pairs
};

// Writes handle.topk_idx and counts it.
SendCounts Count(const DispatchParams& params);

// One rank's share of a dispatch: pushes its rows to their final places in the peers' buffers, and
// fills what no row reaches in its own.
void Dispatch(const std::vector<const DispatchParams*>& ranks, const std::vector<const SendCounts*>& counts,
              int rank);
void CachedDispatch(const std::vector<const CachedDispatchParams*>& ranks, int rank);

// One rank's share of a combine: pulls its tokens' rows from the peers and sums them.
void Combine(const std::vector<const CombineParams*>& ranks, int rank);

void Permute(const PermuteParams& params);
void CachedPermute(const CachedPermuteParams& params);
void Unpermute(const UnpermuteParams& params);

}  // namespace jax_ep::host
