// The ops on the CPU. Those that communicate run once for each rank, at the same time on all of
// them, after the ranks have met; `ranks` are everybody's parameters, in rank order, and null for ranks that
// take no part.
#pragma once

#include <cstdint>
#include <vector>

#include "core/params.h"

namespace jax_ep::host {

void Layout(const LayoutParams& params);

// What a rank sends, counted before the ranks meet.
struct SendCounts {
  std::vector<int32_t> to_rank;    // [R] rows, in the routing's order
  std::vector<int32_t> to_expert;  // [E] choices

  SendCounts() = default;
  explicit SendCounts(const Shape& shape) : to_rank(shape.num_ranks), to_expert(shape.num_experts) {}
};

// Writes handle.topk_idx and counts it. `here` [R] says which ranks take part: the choices of others, and
// choices of experts on others, are unused.
SendCounts Count(const PushParams& params, const std::vector<bool>& here);

// One rank's share of a push: its rows to their final places in the peers' buffers, and what no row reaches
// in its own. Of a push that routes `counts` are those of all ranks.
void Push(const PushParams& me, const std::vector<const PushParams*>& ranks,
          const std::vector<const SendCounts*>& counts);

// One rank's share of a pull: its tokens' rows from the peers, summed.
void Pull(const PullParams& me, const std::vector<const PullParams*>& ranks);

void Permute(const PermuteParams& params);
void Repermute(const RepermuteParams& params);
void Unpermute(const UnpermuteParams& params);

}  // namespace jax_ep::host
