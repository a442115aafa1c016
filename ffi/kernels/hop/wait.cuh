// Waits of a track for other hosts, which end when the hop's time is up or a host has given up; and what is
// recorded then. All of it is done by the first thread of a block.
//
// A network (Net) offers, to one thread:
//   Put(host, to, from, bytes, signal)   bytes of the window here to the window there; then 1 more on a
//   signal Signal(host, signal, number)         so many more on a signal there Signalled(signal) what has
//   been signalled here, by all hosts together
// Nothing keeps its order, but for a put's signal, which comes after what that put brings. What a put takes
// it may read until the signal is seen. Neither Put nor Signal waits for another host.
#pragma once

#include "core/hop.h"
#include "kernels/ptx/memory.cuh"

namespace jax_ep::cuda {

// How long a track has waited in the present hop; the first thread's own.
struct HopClock {
  uint64_t began = 0;  // when a wait first lasted, in nanoseconds
  uint64_t limit = 0;  // how long all waits together may last; 0 until the host was asked

  __device__ bool IsUp(const HopReport* report) {
    constexpr uint64_t kLong = 1'000'000;
    const uint64_t now = GlobalNanoseconds();
    if (began == 0) began = now;
    if (now < began + kLong) return false;
    if (limit == 0) limit = LoadFromHost(&report->timeout_ns);
    return now - began > limit;
  }
};

// Why this rank, or another one as it has told, has given up; 0 if none has.
template <typename Net>
__device__ uint64_t FindReason(const HopParams& hop, const Net& net) {
  const uint64_t known = LoadStamped(&hop.state->reason);
  if (known != 0) return known;
  for (int host = 0; host < hop.window.hosts; ++host) {
    if (host == hop.host) continue;
    const uint64_t told = net.Signalled(hop.window.EndSignal(static_cast<int>(blockIdx.x), host));
    if (told != 0) return told;
  }
  return 0;
}

// Calls ready() until it is true, and returns 0; else why the hop cannot go on.
template <typename Net, typename Ready>
__device__ uint64_t AwaitHost(const HopParams& hop, const Net& net, HopClock& clock, int host,
                              Ready&& ready) {
  constexpr int kPolls = 64;
  while (true) {
#pragma unroll 1
    for (int i = 0; i < kPolls; ++i) {
      if (ready()) return 0;
    }
    const uint64_t reason = FindReason(hop, net);
    if (reason != 0) return reason;
    if (clock.IsUp(hop.report)) return HopReason::Of(HopPhase::kLate, hop.host, host).word;
  }
}

// Lets this hop and all later ones fail. The first reason is told to the host, and by each track, once, to
// the other hosts: a track of theirs that has not ended may wait for this one.
template <typename Net>
__device__ void GiveUpHop(const HopParams& hop, const Net& net, uint64_t reason, uint64_t other_call = 0) {
  const uint64_t earlier = CompareAndSwap(&hop.state->reason, 0, reason);
  if (earlier == 0) {
    hop.report->call = hop.call;
    hop.report->other_call = other_call;
    FenceSystem();
    *static_cast<volatile uint64_t*>(&hop.report->reason) = reason;
    FenceSystem();
  }
  HopTrack& track = hop.state->tracks[blockIdx.x];
  if (atomicExch(&track.told, 1u) != 0) return;
  for (int host = 0; host < hop.window.hosts; ++host) {
    if (host == hop.host) continue;
    net.Signal(host, hop.window.EndSignal(static_cast<int>(blockIdx.x), hop.host),
               earlier == 0 ? reason : earlier);
  }
}

}  // namespace jax_ep::cuda
