// Functions of the kernels that a warp calls together, for tests of such a function alone.
#pragma once

#include "die.h"
#include "kernels/threads.cuh"

namespace jax_ep::cuda {

// Runs f in a warp and returns what its first thread returns, if anything.
template <typename F>
auto InWarp(F&& f) {
  using Result = decltype(f());
  constexpr bool kReturns = !std::is_void_v<Result>;
  std::conditional_t<kReturns, Result, int> result{};
  emulation::Launch launch;
  launch.grid = {1};
  launch.block = {kWarp};
  launch.body = [&] {
    if constexpr (kReturns) {
      const auto mine = f();
      if (threadIdx.x == 0) result = mine;
    } else {
      f();
    }
  };
  emulation::Machine& machine = emulation::Machine::Get();
  machine.Start(launch);
  while (machine.Round().empty()) {
  }
  if constexpr (kReturns) return result;
}

}  // namespace jax_ep::cuda
