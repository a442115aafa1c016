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

// A block for each of all ranks' tokens, whose `warps` warps share it, or fewer blocks whose warps form
// smaller teams; and `others`, where there is room. SMs are left to other kernels as by the other ops
// (core/plan.h).
inline SlotPlan PlanSlots(const Shape& shape, int warps, int others, const Device& device) {
  constexpr int kSmallestTeam = 2;
  const bool limited = device.sm_budget > 0 && device.sm_budget < device.num_sms;
  const int most = limited ? device.sm_budget : std::max(device.num_sms * 3 / 4, 1);
  if (most < 4 * others) others = 0;
  const int tokens = shape.num_tokens * shape.num_ranks, receivers = std::min(tokens, most - others);
  int team = warps;
  while (team > kSmallestTeam && (warps % team != 0 || tokens > receivers * (warps / team))) --team;
  return {receivers + others, receivers, team};
}

}  // namespace jax_ep::cuda
