// The division of an op for few tokens among blocks and warps.
#pragma once

#include <algorithm>

#include "kernels/few_tokens/args.cuh"
#include "kernels/launch/device.h"

namespace jax_ep::cuda {

// Returns the most blocks that an op may use. SMs are left to other kernels as in kernels/launch/plan.h.
inline int MaxBlocks(const Device& device) {
  return device.sm_budget > 0 ? std::min(device.sm_budget, device.num_sms) : device.num_sms * 3 / 4;
}

// Returns how many warps share a row. All warps of `blocks` blocks with `warps_per_block` warps each are used
// if possible.
inline int WarpsPerRow(int rows, int blocks, int warps_per_block) {
  int warps = warps_per_block;
  while (warps > 2 && (warps_per_block % warps != 0 || rows * warps > blocks * warps_per_block)) --warps;
  return warps;
}

}  // namespace jax_ep::cuda
