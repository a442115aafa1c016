// The ops on the CPU. Ops that communicate run once for each rank, on all ranks at the same time, after the
// ranks have met. `ranks` holds the parameters of all ranks in rank order, and null for ranks that do not
// take part.
#pragma once

#include <cstdint>
#include <vector>

#include "core/params.h"

namespace jax_ep::host {

void Layout(const LayoutParams& params);
void Balance(const BalanceParams& params);

// Numbers of rows and choices that a rank sends, counted before the ranks meet.
struct SendCounts {
  std::vector<int32_t> to_rank;    // [R] rows, in the routing's order
  std::vector<int32_t> to_expert;  // [E] choices

  SendCounts() = default;
  explicit SendCounts(const Shape& shape) : to_rank(shape.num_ranks), to_expert(shape.num_experts) {}
};

// Writes handle.topk_idx and counts it. `active` [R] selects the ranks that take part. Choices of other
// ranks, and choices of experts on other ranks, are unused.
SendCounts Count(const PushParams& params, const std::vector<bool>& active);

// Does one rank's part of a push: writes its rows to their final places in the peers' buffers, and zeros the
// rows of its own buffers that hold no token. `counts` holds the counts of all ranks if the push routes.
void Push(const PushParams& params, const std::vector<const PushParams*>& ranks,
          const std::vector<const SendCounts*>& counts);

// Does one rank's part of a pull: reads its tokens' rows from the peers and sums them.
void Pull(const PullParams& params, const std::vector<const PullParams*>& ranks);

void Permute(const PermuteParams& params);
void Repermute(const RepermuteParams& params);
void Unpermute(const UnpermuteParams& params);

}  // namespace jax_ep::host
