// Hop 1 by puts into slots at the other hosts: the protocol, for any network (see wait.cuh).
//
// A track goes in rounds. In each it sends the next piece to every host, and takes an earlier one from every
// host. A piece is written to a slot here, put into the slot of the same number there, and copied from there
// to where it belongs; then the receiver returns a credit. Only a piece's credit allows its slots to be
// written again, here and there: the receiver has read all of it, so the network has too. Credits outlive the
// op, so that nobody waits at its end. No network touches an array of XLA's.
#pragma once

#include "kernels/hop/copy.cuh"
#include "kernels/hop/wait.cuh"

namespace jax_ep::cuda {

// Rounds that a piece has for its way before somebody waits for it. Fewer than the slots: who sends a piece
// waits for the credit of that kHopSlots rounds ago, which the receiver must have taken in an earlier round.
constexpr int kHopLag = kHopSlots - 1;

// Where the program says that this rank is: its host, and the list of those that it exchanges pieces with,
// which have the same index on other hosts.
__device__ inline MeshPosition FindHopPosition(const HopParams& hop) {
  const int per_host = max(1, hop.peers.num_ranks);
  const MeshPosition position = *hop.position_operand;
  return {position.rank / per_host, position.list * per_host + position.rank % per_host};
}

// One piece of a track in the present hop.
struct HopPiece {
  uint64_t call;  // as this rank tells of it: it differs between lists
  int track;
  uint64_t number;  // among all that the track has had, of all hops
  int64_t offset;   // in the block
  int64_t bytes;

  __device__ static HopPiece Of(const HopParams& hop, uint32_t list, uint64_t first, int64_t i) {
    const int track = static_cast<int>(blockIdx.x);
    const int64_t offset = hop.window.OffsetOf(track, i);
    return {hop.call ^ list, track, first + static_cast<uint64_t>(i), offset,
            min(hop.window.piece_bytes, hop.block_bytes - offset)};
  }
};

// The whole block: sends a piece to every other host, and copies the own one. False if the hop has failed.
template <typename Net>
__device__ bool SendPiece(const HopParams& hop, const Net& net, const HopPiece& piece) {
  const HopWindow& window = hop.window;
  const int64_t own_offset = hop.host * hop.block_bytes + piece.offset;
  CopyBlock(hop.out + own_offset, hop.in + own_offset, piece.bytes);
  for (int k = 1; k < window.hosts; ++k) {
    const int to = (hop.host + k) % window.hosts;
    uint64_t reason = 0;
    if (threadIdx.x == 0 && piece.number >= kHopSlots) {
      const uint64_t credits = piece.number - kHopSlots + 1;
      reason = AwaitHost(hop, net, to,
                         [&] { return net.ReadSignal(window.CreditSignal(piece.track, to)) >= credits; });
      if (reason != 0) GiveUpHop(hop, net, reason);
    }
    if (__syncthreads_or(reason != 0)) return false;
    const int64_t slot = window.SlotTo(piece.track, to, piece.number);
    if (threadIdx.x == 0) *reinterpret_cast<uint64_t*>(hop.slots + slot) = piece.call;
    CopyBlock(hop.slots + slot + kHopHeadBytes, hop.in + to * hop.block_bytes + piece.offset, piece.bytes);
    __syncthreads();
    if (threadIdx.x == 0) {
      net.Put(to, window.SlotFrom(piece.track, hop.host, piece.number), slot,
              kHopHeadBytes + AlignUp(piece.bytes, 16),
              window.PieceSignal(piece.track, hop.host, piece.number));
    }
  }
  return true;
}

// As the first thread: waits for a piece from a host, and refuses one of another op.
template <typename Net>
__device__ bool HasArrived(const HopParams& hop, const Net& net, const HopPiece& piece, int from) {
  const HopWindow& window = hop.window;
  const uint64_t uses = piece.number / kHopSlots + 1;  // of its slot
  const uint64_t reason = AwaitHost(hop, net, from, [&] {
    return net.ReadSignal(window.PieceSignal(piece.track, from, piece.number)) >= uses;
  });
  if (reason != 0) {
    GiveUpHop(hop, net, reason);
    return false;
  }
  const std::byte* const slot = hop.slots + window.SlotFrom(piece.track, from, piece.number);
  const uint64_t call = LoadWord(reinterpret_cast<const uint64_t*>(slot));
  if (call == piece.call) return true;
  GiveUpHop(hop, net, HopReason::Of(HopPhase::kOther, hop.host, from).word,
            static_cast<uint32_t>(call ^ piece.call ^ hop.call));
  return false;
}

// The whole block: takes a piece from every other host. False if the hop has failed.
template <typename Net>
__device__ bool ReceivePiece(const HopParams& hop, const Net& net, const HopPiece& piece) {
  const HopWindow& window = hop.window;
  for (int k = 1; k < window.hosts; ++k) {
    const int from = (hop.host + window.hosts - k) % window.hosts;
    const bool fails = threadIdx.x == 0 && !HasArrived(hop, net, piece, from);
    if (__syncthreads_or(fails)) return false;
    const int64_t slot = window.SlotFrom(piece.track, from, piece.number);
    CopyBlock(hop.out + from * hop.block_bytes + piece.offset, hop.slots + slot + kHopHeadBytes, piece.bytes);
    __syncthreads();
    if (threadIdx.x == 0) net.Signal(from, window.CreditSignal(piece.track, hop.host), 1);
  }
  return true;
}

// As the first thread: takes the track, if the hop may begin.
template <typename Net>
__device__ bool OpenTrack(const HopParams& hop, const Net& net, HopTrack& track) {
  uint64_t reason = FindOwnReason(hop);
  const bool is_busy = atomicExch(&track.busy, 1u) != 0;
  FenceSystem();  // what the hop before has left of this track is seen
  if (reason == 0 && is_busy) reason = HopReason::Of(HopPhase::kBusy, hop.host, hop.host).word;
  if (reason == 0 && FindHopPosition(hop).rank != hop.host) {
    reason = HopReason::Of(HopPhase::kMesh, hop.host, hop.host).word;
  }
  const int64_t pieces = hop.window.PiecesOf(static_cast<int>(blockIdx.x), hop.block_bytes);
  if (reason == 0 && track.pieces + static_cast<uint64_t>(pieces) > hop.most_pieces) {
    reason = HopReason::Of(HopPhase::kCounterExhausted, hop.host, hop.host).word;
  }
  if (reason != 0) GiveUpHop(hop, net, reason);
  return reason == 0;
}

// One track's part of a hop: a block of each rank's kernel, all of which run at the same time.
template <typename Net>
__device__ void Exchange(const HopParams& hop, const Net& net) {
  HopTrack& track = hop.state->tracks[blockIdx.x];
  bool alive = !__syncthreads_or(threadIdx.x == 0 && !OpenTrack(hop, net, track));
  if (alive) {
    const uint64_t first = track.pieces;
    const uint32_t list = FindHopPosition(hop).list;
    const int64_t pieces = hop.window.PiecesOf(static_cast<int>(blockIdx.x), hop.block_bytes);
    for (int64_t i = 0; alive && i < pieces + kHopLag; ++i) {
      if (i < pieces) alive = SendPiece(hop, net, HopPiece::Of(hop, list, first, i));
      if (alive && i >= kHopLag) alive = ReceivePiece(hop, net, HopPiece::Of(hop, list, first, i - kHopLag));
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      if (alive) track.pieces = first + static_cast<uint64_t>(pieces);
      FenceSystem();
      atomicExch(&track.busy, 0u);
    }
  }
  // A track that fails clears all of the result, and one that ends after it does so too. Of a track that
  // finds no reason here, the rows were written before any other track clears them.
  FenceSeqCst();
  __syncthreads();
  const bool fails = threadIdx.x == 0 && LoadRelaxed(&hop.state->reason) != 0;
  if (!__syncthreads_or(fails)) return;
  FenceSeqCst();
  FillResult(hop.out, hop.window.hosts * hop.block_bytes);
}

}  // namespace jax_ep::cuda
