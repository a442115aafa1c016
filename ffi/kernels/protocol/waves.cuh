// Tokens move in waves: a rank works on a wave when all ranks are done with it.
#pragma once

#include "kernels/protocol/session.cuh"

namespace jax_ep::cuda {

// Waves of tokens: `head` of them, then `tokens` a wave.
struct Waves {
  int32_t head;
  int32_t tokens;
  int32_t count;

  JAX_EP_HD int First(const Shape& shape, int wave) const {
    if (wave == 0) return 0;
    const int64_t first = head + int64_t{tokens} * (wave - 1);
    return first < shape.num_tokens ? static_cast<int>(first) : shape.num_tokens;
  }
  JAX_EP_HD int Of(int token) const { return token < head ? 0 : 1 + (token - head) / tokens; }
};

// Waves of about `tokens`, the first of `head`, or more if they were too many; multiples of `step`.
inline Waves PlanWaves(const Shape& shape, int head, int tokens, int step) {
  const int64_t least = (shape.num_tokens + kMaxWaves - 2) / (kMaxWaves - 1);
  const int64_t later = AlignUp(least > tokens ? least : tokens, step), first = AlignUp(head, step);
  const int64_t rest = shape.num_tokens > first ? shape.num_tokens - first : 0;
  return {static_cast<int32_t>(first), static_cast<int32_t>(later),
          static_cast<int32_t>(1 + (rest + later - 1) / later)};
}

// Waits as a warp until every rank is done with a wave. False if that did not happen in time: the block then
// leaves the op without having done its part.
__device__ inline bool WaitForWave(const Peers& peers, Op op, int wave, uint32_t epoch) {
  const int lane = threadIdx.x % kWarp;
  const uint32_t* flags = peers.own().wave_done[wave];
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
  if (lane == 0) Fail(peers, op, Phase::kWave, epoch, missing);
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

// Tells every peer when this rank is done with a wave, whose work its blocks share. Called for each of the
// `num_shares`, by one warp of the block that has done it, after the threads that did it have synchronised
// with this warp.
__device__ inline void FinishShare(const Peers& peers, int wave, int num_shares, uint32_t epoch) {
  if (threadIdx.x % kWarp != 0) return;
  const Stamped opened = LoadStamped(&peers.own().opened);
  // What the threads have done comes before the share is counted, and all shares before the peers are told.
  FenceSystem();
  // Who folds has not met the peers yet. An op that finds the channel in use tells them nothing.
  if (opened != Stamp(peers.call.site + 1, epoch) && !AwaitOpened(peers, epoch)) return;
  const unsigned most = static_cast<unsigned>(num_shares) - 1;
  if (atomicInc(&peers.own().wave_shares[wave], most) != most) return;  // back to 0 with the last
  FenceSystem();
  for (int r = 0; r < peers.num_ranks; ++r)
    StoreRelaxed(&peers.channel[r]->wave_done[wave][peers.rank], epoch);
}

}  // namespace jax_ep::cuda
