// Tokens move in waves: a rank works on a wave when all ranks are done with it.
#pragma once

#include "kernels/meet.cuh"

namespace jax_ep::cuda {

// Waits as a warp until every rank is done with a wave. False if that did not happen in time: the block then
// leaves the op without having done its part.
__device__ inline bool WaitForWave(const Peers& peers, Op op, int wave, uint32_t epoch) {
  const int lane = threadIdx.x % kWarp;
  const uint32_t* flags = peers.own().moved[wave];
  const auto has_come = [&] {
    // A peer may fold for the next op already while this rank still spreads: it has ended the present one.
    const uint32_t seen = LoadAcquire(&flags[lane]);
    return seen == epoch || seen == NextEpoch(epoch);
  };
  const auto is_there = [&] {
    const bool there = has_come();
    if (!there) __nanosleep(200);  // many warps wait for the same word
    return there;
  };
  bool late = lane < peers.num_ranks && !Await(peers, is_there);
  const unsigned missing = __ballot_sync(kAllLanes, late);
  if (missing == 0) return true;
  if (lane == 0) Fail(peers, op, Phase::kMove, epoch, missing);
  __syncwarp();
  // The wave may have come meanwhile, and all that follows it: whoever does not find the gate closed then
  // must not miss this warp's part.
  FenceTotal();
  late = late && !has_come();
  if (__ballot_sync(kAllLanes, late) == 0) return true;
  if (lane == 0) HasAbandoned() = true;
  __syncwarp();
  return false;
}

// Tells every peer when this rank is done with a wave. Called for each of the `num_parts` that it has, by one
// warp of the block that has done it, after the threads that did it have synchronised with this warp.
__device__ inline void FinishPart(const Peers& peers, int wave, int num_parts, uint32_t epoch) {
  if (threadIdx.x % kWarp != 0) return;
  const Stamped opened = LoadStamped(&peers.own().opened);
  // What the threads have done comes before the part is counted, and all parts before the peers are told.
  FenceSystem();
  // Who folds has not met the peers yet. An op that finds the channel in use tells them nothing.
  if (opened != Stamp(peers.call.site + 1, epoch) && !AwaitOpened(peers, epoch)) return;
  const unsigned most = static_cast<unsigned>(num_parts) - 1;
  if (atomicInc(&peers.own().wave_parts[wave], most) != most) return;  // back to 0 with the last
  FenceSystem();
  for (int r = 0; r < peers.num_ranks; ++r) StoreRelaxed(&peers.channel[r]->moved[wave][peers.rank], epoch);
}

}  // namespace jax_ep::cuda
