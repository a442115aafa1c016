// Waits of a track for other hosts, which end when the hop's time is up or a host has given up; and what is
// recorded then. All of it is done by the first thread of a block.
//
// A network (Net) offers, to one thread:
//
// - Put(host, to, from, bytes, signal): bytes of the window here go to the window there, and then there is 1
//   more on a signal there;
// - Signal(host, signal, number): so many more on a signal there;
// - Signalled(signal): what has been signalled here, by all hosts together.
//
// Nothing keeps its order, but for a put's signal, which comes after what that put brings. What a put takes
// it may read until the signal is seen. Neither Put nor Signal waits for another host.
#pragma once

#include "kernels/hop/window.h"
#include "kernels/protocol/fail.cuh"

namespace jax_ep::cuda {

// How long a wait has lasted; the first thread's own.
struct HopClock {
  uint64_t began = 0;  // in nanoseconds
  uint64_t limit = 0;  // 0 until the host was asked

  __device__ bool IsUp(const uint64_t* timeout_ns) {
    constexpr uint64_t kLong = 1'000'000;
    const uint64_t now = GlobalNanoseconds();
    if (began == 0) began = now;
    if (now < began + kLong) return false;
    if (limit == 0) limit = LoadFromHost(timeout_ns);
    return now - began > limit;
  }
};

// Why this rank hops no more: a hop of it has failed, or an op within its host, so that it might send on what
// has not come. 0 if neither has. (The host may have refused the hop for a failure that has not closed this
// rank's gate: that of another list, or one that is about to.)
__device__ inline uint64_t FindOwnReason(const HopParams& hop) {
  const uint64_t known = LoadRelaxed(&hop.state->reason);
  if (known != 0) return known;
  const bool has_failed = hop.is_refused || (hop.peers.num_ranks != 0 && IsGivenUp(hop.peers));
  return has_failed ? HopReason::Of(HopPhase::kWithin, hop.host, hop.host).word : 0;
}

// The same, and why another rank has given up, as it has told.
template <typename Net>
__device__ uint64_t FindReason(const HopParams& hop, const Net& net) {
  const uint64_t known = FindOwnReason(hop);
  if (known != 0) return known;
  for (int host = 0; host < hop.window.hosts; ++host) {
    if (host == hop.host) continue;
    const uint64_t reason = net.ReadSignal(hop.window.EndSignal(static_cast<int>(blockIdx.x), host));
    if (reason != 0) return reason;
  }
  return 0;
}

// Waits until ready(), and returns 0; otherwise returns why the hop cannot go on.
template <typename Net, typename Ready>
__device__ uint64_t AwaitHost(const HopParams& hop, const Net& net, int host, Ready&& ready) {
  HopClock clock;
  uint64_t reason = 0;
  const bool came = PollUntil(ready, [&] {
    reason = FindReason(hop, net);
    if (reason == 0 && clock.IsUp(hop.timeout_ns)) {
      reason = HopReason::Of(HopPhase::kLate, hop.host, host).word;
    }
    return reason != 0;
  });
  return came ? 0 : reason;
}

// Lets all ops within this host fail that begin from now on: its ranks would take what has not come for rows,
// and send it on to others. Where the hop fails because a host runs on another mesh, this one or another, the
// ranks are told of the mesh, for their own programs run on it, too. `other_call` is what another host called
// instead, if that is why.
JAX_EP_RARE void GiveUpHost(const HopParams& hop, uint64_t reason, uint32_t other_call) {
  const Peers& peers = hop.peers;
  if (peers.num_ranks == 0) return;
  const bool is_on_other_mesh = HopReason{reason}.phase() == HopPhase::kMesh;
  const bool is_first =
      CloseGate(peers, Reason::Of(peers.rank, is_on_other_mesh ? Phase::kRank : Phase::kHop, 0));
  CloseAllGates(peers, 0, 1);
  // Another track tells, or an earlier op of this rank has told.
  if (!is_first && Reason{ReasonIn(&peers.own().gate)}.rank() == peers.rank) return;
  if (!IsFirstFailure(peers)) return;
  peers.report->hop = reason;
  WriteReport(peers, Op::kHop, is_first ? Phase::kHop : Phase::kGivenUp, 0, 0,
              Call{other_call, 0}.WithBlocks(0));
}

// Lets this hop and all later ones fail, and the ops within the host. By each track, once, the first reason
// is told to the other hosts: a track of theirs that has not ended may wait for this one.
template <typename Net>
__device__ void GiveUpHop(const HopParams& hop, const Net& net, uint64_t reason, uint32_t other_call = 0) {
  const uint64_t earlier = CompareAndSwap(&hop.state->reason, 0, reason);
  const uint64_t first = earlier == 0 ? reason : earlier;
  if (earlier == 0) *static_cast<volatile uint64_t*>(&hop.report->reason) = reason;
  GiveUpHost(hop, first, earlier == 0 ? other_call : 0);
  HopTrack& track = hop.state->tracks[blockIdx.x];
  if (atomicExch(&track.notified, 1u) != 0) return;
  for (int host = 0; host < hop.window.hosts; ++host) {
    if (host == hop.host) continue;
    net.Signal(host, hop.window.EndSignal(static_cast<int>(blockIdx.x), hop.host), first);
  }
}

}  // namespace jax_ep::cuda
