// Waits of a track for other domains. They end when the hop's time is up or a domain has given up, which is
// then recorded. All of this is done by the first thread of a block.
//
// A network (Net) provides, to one thread:
//
// - Put(domain, to, from, bytes, signal): copies bytes of this window to the window at a domain, and then
//   adds 1 to a signal there;
// - Signal(domain, signal, number): adds to a signal at a domain;
// - ReadSignal(signal): returns what all domains together have added to a signal here.
//
// Operations are unordered, except that a put's signal comes after its bytes. A put may read its source until
// the signal is seen. Neither Put nor Signal waits for another domain.
#pragma once

#include "kernels/hop/window.h"
#include "kernels/protocol/fail.cuh"

namespace jax_ep::cuda {

// The time that a wait has lasted, in the first thread.
struct HopClock {
  uint64_t began = 0;  // in nanoseconds
  uint64_t limit = 0;  // 0 until the host's value was read

  __device__ bool IsUp(const uint64_t* timeout_ns) {
    constexpr uint64_t kLong = 1'000'000;
    const uint64_t now = GlobalNanoseconds();
    if (began == 0) began = now;
    if (now < began + kLong) return false;
    if (limit == 0) limit = LoadFromHost(timeout_ns);
    return now - began > limit;
  }
};

// Returns why this rank must not hop any more, or 0: one of its hops has failed, or an op within its domain.
// After such an op it could send rows that never arrived. (The host may refuse the hop for a failure that has
// not closed this rank's gate: one of another list, or one that is about to close it.)
__device__ inline uint64_t FindOwnReason(const HopParams& hop) {
  const uint64_t known = LoadRelaxed(&hop.state->reason);
  if (known != 0) return known;
  const bool has_failed = hop.is_refused || (hop.peers.num_ranks != 0 && IsGivenUp(hop.peers));
  return has_failed ? HopReason::Of(HopPhase::kWithin, hop.domain, hop.domain).word : 0;
}

// Returns the same reason, or the one that another domain has sent when it gave up.
template <typename Net>
__device__ uint64_t FindReason(const HopParams& hop, const Net& net) {
  const uint64_t known = FindOwnReason(hop);
  if (known != 0) return known;
  for (int domain = 0; domain < hop.window.domains; ++domain) {
    if (domain == hop.domain) continue;
    const uint64_t reason = net.ReadSignal(hop.window.EndSignal(static_cast<int>(blockIdx.x), domain));
    if (reason != 0) return reason;
  }
  return 0;
}

// Waits until ready(), and returns 0. If the hop cannot go on, returns the reason.
template <typename Net, typename Ready>
__device__ uint64_t AwaitDomain(const HopParams& hop, const Net& net, int domain, Ready&& ready) {
  HopClock clock;
  uint64_t reason = 0;
  const bool came = PollUntil(ready, [&] {
    reason = FindReason(hop, net);
    if (reason == 0 && clock.IsUp(hop.timeout_ns)) {
      reason = HopReason::Of(HopPhase::kLate, hop.domain, domain).word;
    }
    return reason != 0;
  });
  return came ? 0 : reason;
}

// Makes all later ops within this domain fail, because its ranks would take missing rows for received ones
// and send them on. If the hop fails because a domain runs on another mesh, this one or another, the ranks
// get that reason, because their own programs run on that mesh too. `other_call` is the call of another
// domain, if it differs.
JAX_EP_RARE void GiveUpHost(const HopParams& hop, uint64_t reason, uint32_t other_call) {
  const Peers& peers = hop.peers;
  if (peers.num_ranks == 0) return;
  const bool is_on_other_mesh = HopReason{reason}.phase() == HopPhase::kMesh;
  const bool is_first =
      CloseGate(peers, Reason::Of(peers.rank, is_on_other_mesh ? Phase::kRank : Phase::kHop));
  CloseAllGates(peers, 0, 1);
  // Another track reports the failure, or an earlier op of this rank has reported it.
  if (!is_first && Reason{ReasonIn(&peers.own().gate)}.rank() == peers.rank) return;
  if (!IsFirstFailure(peers)) return;
  peers.report->hop = reason;
  WriteReport(peers, Op::kHop, is_first ? Phase::kHop : Phase::kGivenUp, 0, {},
              Call{other_call, 0}.WithBlocks(0));
}

// Makes this hop and all later ones fail, and the ops within the domain. Each track sends the first reason
// once to the other domains, because a track of theirs that has not ended may wait for this one.
template <typename Net>
__device__ void GiveUpHop(const HopParams& hop, const Net& net, uint64_t reason, uint32_t other_call = 0) {
  const uint64_t earlier = CompareAndSwap(&hop.state->reason, 0, reason);
  const uint64_t first = earlier == 0 ? reason : earlier;
  if (earlier == 0) *static_cast<volatile uint64_t*>(&hop.report->reason) = reason;
  GiveUpHost(hop, first, earlier == 0 ? other_call : 0);
  HopTrack& track = hop.state->tracks[blockIdx.x];
  if (atomicExch(&track.notified, 1u) != 0) return;
  for (int domain = 0; domain < hop.window.domains; ++domain) {
    if (domain == hop.domain) continue;
    net.Signal(domain, hop.window.EndSignal(static_cast<int>(blockIdx.x), hop.domain), first);
  }
}

}  // namespace jax_ep::cuda
