// How many SMs an op of few tokens takes, and how its warps share rows.
#pragma once

#include <algorithm>

#include "kernels/kernels.h"
#include "kernels/slots/args.cuh"

namespace jax_ep::cuda {

struct SlotPlan {
  int blocks;
  int receivers;  // of them
  int team_warps;
};

// A block for each token to send, and teams for all ranks' tokens to receive, as large as there are warps for
// them; and `others`, where there is room. SMs are left to other kernels as by the other ops (core/plan.h).
inline SlotPlan PlanSlots(const Shape& shape, int others, const Device& device) {
  const bool limited = device.sm_budget > 0 && device.sm_budget < device.num_sms;
  const int most = limited ? device.sm_budget : std::max(device.num_sms * 3 / 4, 1);
  if (most < 4 * others) others = 0;
  const int most_receivers = most - others;
  const int tokens = shape.num_tokens * shape.num_ranks;
  int team_warps = kSlotWarps;
  while (team_warps * kMaxTeams > kSlotWarps && tokens * team_warps > most_receivers * kSlotWarps) {
    team_warps /= 2;
  }
  const int teams = kSlotWarps / team_warps;
  const int receivers = std::min(std::max(shape.num_tokens, (tokens + teams - 1) / teams), most_receivers);
  return {receivers + others, receivers, team_warps};
}

}  // namespace jax_ep::cuda
