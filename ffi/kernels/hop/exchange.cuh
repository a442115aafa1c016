// Hop 1 by puts into slots at the other hosts: the protocol, for any network (see wait.cuh).
//
// A lane goes in rounds. In each it sends the next chunk to every host, and takes an earlier one from every
// host. A chunk is written to a slot here, put into the slot of the same number there, and copied from there
// to where it belongs; then the receiver returns a credit. Only a chunk's credit allows its slots to be
// written again, here and there: the receiver has read all of it, so the network has too. Credits outlive the
// op, so that nobody waits at its end. No network touches an array of XLA's.
#pragma once

#include "kernels/comm/fill.cuh"
#include "kernels/hop/copy.cuh"
#include "kernels/hop/wait.cuh"

namespace jax_ep::cuda {

// Rounds that a chunk has for its way before somebody waits for it. Fewer than the slots: who sends a chunk
// waits for the credit of that kHopSlots rounds ago, which the receiver must have taken in an earlier round.
constexpr int kHopLag = kHopSlots - 1;

// One chunk of a lane in the present hop.
struct HopChunk {
  int lane;
  uint64_t number;  // among all that the lane has had, of all hops
  int64_t offset;   // in the block
  int64_t bytes;

  __device__ static HopChunk Of(const HopParams& hop, uint64_t first, int64_t i) {
    const int lane = static_cast<int>(blockIdx.x);
    const int64_t offset = hop.window.OffsetOf(lane, i);
    return {lane, first + static_cast<uint64_t>(i), offset,
            min(hop.window.chunk_bytes, hop.block_bytes - offset)};
  }
};

// The whole block: sends a chunk to every other host, and copies the own one. False if the hop has failed.
template <typename Net>
__device__ bool SendChunk(const HopParams& hop, const Net& net, HopClock& clock, const HopChunk& chunk) {
  const HopWindow& window = hop.window;
  const int64_t own = hop.host * hop.block_bytes + chunk.offset;
  CopyBlock(hop.out + own, hop.in + own, chunk.bytes);
  for (int k = 1; k < window.hosts; ++k) {
    const int to = (hop.host + k) % window.hosts;
    uint64_t reason = 0;
    if (threadIdx.x == 0 && chunk.number >= kHopSlots) {
      const uint64_t credits = chunk.number - kHopSlots + 1;
      reason = AwaitHost(hop, net, clock, to,
                         [&] { return net.Signalled(window.CreditSignal(chunk.lane, to)) >= credits; });
      if (reason != 0) GiveUpHop(hop, net, reason);
    }
    if (__syncthreads_or(reason != 0)) return false;
    const int64_t slot = window.SlotTo(chunk.lane, to, chunk.number);
    if (threadIdx.x == 0) *reinterpret_cast<uint64_t*>(hop.slots + slot) = hop.call;
    CopyBlock(hop.slots + slot + kHopHeadBytes, hop.in + to * hop.block_bytes + chunk.offset, chunk.bytes);
    __syncthreads();
    if (threadIdx.x == 0) {
      net.Put(to, window.SlotFrom(chunk.lane, hop.host, chunk.number), slot,
              kHopHeadBytes + AlignUp(chunk.bytes, 16),
              window.ChunkSignal(chunk.lane, hop.host, chunk.number));
    }
  }
  return true;
}

// As the first thread: waits for a chunk from a host, and refuses one of another op.
template <typename Net>
__device__ bool HasArrived(const HopParams& hop, const Net& net, HopClock& clock, const HopChunk& chunk,
                           int from) {
  const HopWindow& window = hop.window;
  const uint64_t uses = chunk.number / kHopSlots + 1;  // of its slot
  const uint64_t reason = AwaitHost(hop, net, clock, from, [&] {
    return net.Signalled(window.ChunkSignal(chunk.lane, from, chunk.number)) >= uses;
  });
  if (reason != 0) {
    GiveUpHop(hop, net, reason);
    return false;
  }
  const std::byte* const slot = hop.slots + window.SlotFrom(chunk.lane, from, chunk.number);
  const uint64_t call = LoadWord(reinterpret_cast<const uint64_t*>(slot));
  if (call == hop.call) return true;
  GiveUpHop(hop, net, HopReason::Of(HopPhase::kOther, hop.host, from).word, call);
  return false;
}

// The whole block: takes a chunk from every other host. False if the hop has failed.
template <typename Net>
__device__ bool TakeChunk(const HopParams& hop, const Net& net, HopClock& clock, const HopChunk& chunk) {
  const HopWindow& window = hop.window;
  for (int k = 1; k < window.hosts; ++k) {
    const int from = (hop.host + window.hosts - k) % window.hosts;
    const bool fails = threadIdx.x == 0 && !HasArrived(hop, net, clock, chunk, from);
    if (__syncthreads_or(fails)) return false;
    const int64_t slot = window.SlotFrom(chunk.lane, from, chunk.number);
    CopyBlock(hop.out + from * hop.block_bytes + chunk.offset, hop.slots + slot + kHopHeadBytes, chunk.bytes);
    __syncthreads();
    if (threadIdx.x == 0) net.Signal(from, window.CreditSignal(chunk.lane, hop.host), 1);
  }
  return true;
}

// As the first thread: takes the lane, if the hop may begin.
template <typename Net>
__device__ bool OpenLane(const HopParams& hop, const Net& net, HopLane& lane) {
  uint64_t reason = LoadStamped(&hop.state->reason);
  const bool is_busy = atomicExch(&lane.busy, 1u) != 0;
  FenceSystem();  // what the hop before has left of this lane is seen
  if (reason == 0 && is_busy) reason = HopReason::Of(HopPhase::kBusy, hop.host, hop.host).word;
  if (reason == 0 && *hop.operand != hop.host) {
    reason = HopReason::Of(HopPhase::kPlace, hop.host, hop.host).word;
  }
  if (reason != 0) GiveUpHop(hop, net, reason);
  return reason == 0;
}

// One lane's part of a hop: a block of each rank's kernel, all of which run at the same time.
template <typename Net>
__device__ void Exchange(const HopParams& hop, const Net& net) {
  HopLane& lane = hop.state->lanes[blockIdx.x];
  bool alive = !__syncthreads_or(threadIdx.x == 0 && !OpenLane(hop, net, lane));
  if (alive) {
    const uint64_t first = lane.chunks;
    const int64_t chunks = hop.window.ChunksOf(static_cast<int>(blockIdx.x), hop.block_bytes);
    HopClock clock;
    for (int64_t i = 0; alive && i < chunks + kHopLag; ++i) {
      if (i < chunks) alive = SendChunk(hop, net, clock, HopChunk::Of(hop, first, i));
      if (alive && i >= kHopLag) alive = TakeChunk(hop, net, clock, HopChunk::Of(hop, first, i - kHopLag));
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      if (alive) lane.chunks = first + static_cast<uint64_t>(chunks);
      FenceSystem();
      atomicExch(&lane.busy, 0u);
    }
  }
  // A lane that fails clears all of the result, and one that ends after it does so too. Of a lane that finds
  // no reason here, the rows were written before any other lane clears them.
  FenceTotal();
  __syncthreads();
  const bool fails = threadIdx.x == 0 && LoadStamped(&hop.state->reason) != 0;
  if (!__syncthreads_or(fails)) return;
  FenceTotal();
  FillResult(hop.out, hop.window.hosts * hop.block_bytes);
}

}  // namespace jax_ep::cuda
