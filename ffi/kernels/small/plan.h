// How an op of few tokens is shared among blocks and warps.
#pragma once

#include <algorithm>

#include "kernels/launch/device.h"
#include "kernels/small/args.cuh"

namespace jax_ep::cuda {

// SMs are left to other kernels as by the other ops (kernels/launch/plan.h).
inline int MaxBlocks(const Device& device) {
  return device.sm_budget > 0 ? std::min(device.sm_budget, device.num_sms) : device.num_sms * 3 / 4;
}

// Warps that share one of `rows`, as many as there are for them in so many blocks of `of_block` warps.
inline int TeamWarps(int rows, int blocks, int warps_per_block) {
  int warps = warps_per_block;
  while (warps > 2 && (warps_per_block % warps != 0 || rows * warps > blocks * warps_per_block)) --warps;
  return warps;
}

}  // namespace jax_ep::cuda
