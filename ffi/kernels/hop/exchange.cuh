// Hop 1 by puts into slots at the other domains: the protocol, independent of the network (see wait.cuh).
//
// A track works in rounds. In each round it sends the next piece to every domain, and receives an earlier
// piece from every domain. The sender writes a piece to one of its own slots, and puts it into the slot of
// the same number at the receiver. The receiver copies it to the result, and then returns a credit. Only the
// credit of a piece allows its two slots to be reused: the receiver has read all of it, and therefore so has
// the network. Credits outlive the op, so that no rank waits at its end. The network never accesses an array
// of XLA's.
#pragma once

#include "kernels/hop/wait.cuh"
#include "kernels/ptx/memory.cuh"

namespace jax_ep::cuda {

// Loads without the L1 cache, because the network writes to slots.
__device__ inline uint4 LoadWord(const uint4* word) { return LoadRow(word); }
template <typename Word>
__device__ Word LoadWord(const Word* word) {
  return *static_cast<const volatile Word*>(word);
}

template <typename Word>
__device__ void CopyWords(std::byte* to, const std::byte* from, int64_t bytes) {
  const int64_t words = bytes / static_cast<int64_t>(sizeof(Word));
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < words; i += blockDim.x) {
    reinterpret_cast<Word*>(to)[i] = LoadWord(reinterpret_cast<const Word*>(from) + i);
  }
}

// Copies bytes at any alignment. Called by the whole block.
__device__ inline void CopyBlock(std::byte* to, const std::byte* from, int64_t bytes) {
  const uintptr_t ends = reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from);
  int64_t done = 0;
  if (ends % sizeof(uint4) == 0) {
    CopyWords<uint4>(to, from, bytes);
    done = bytes / 16 * 16;
  } else if (ends % sizeof(uint32_t) == 0) {
    CopyWords<uint32_t>(to, from, bytes);
    done = bytes / 4 * 4;
  }
  CopyWords<unsigned char>(to + done, from + done, bytes - done);
}

// Rounds between sending a piece and waiting for it, during which it travels. This is less than the number of
// slots, because the sender of a piece waits for the credit of the piece kHopSlots rounds before it. The
// receiver must have taken that one in an earlier round.
constexpr int kHopLag = kHopSlots - 1;

// Returns this rank's position among all domains, according to the program: its domain, and the list of the
// ranks that it exchanges pieces with, which have the same index on the other domains.
__device__ inline MeshPosition FindHopPosition(const HopParams& hop) {
  const int per_domain = max(1, hop.peers.num_ranks);
  const MeshPosition position = *hop.position_operand;
  return {position.rank / per_domain, position.list * per_domain + position.rank % per_domain};
}

// A piece of a track in the present hop.
struct HopPiece {
  uint64_t call;  // as this rank sends it: it differs between lists
  int track;
  uint64_t number;  // counts all pieces of the track, over all hops
  int64_t offset;   // within the block
  int64_t bytes;

  __device__ static HopPiece Of(const HopParams& hop, uint32_t list, uint64_t first, int64_t i) {
    const int track = static_cast<int>(blockIdx.x);
    const int64_t offset = hop.window.OffsetOf(track, i);
    return {hop.call ^ list, track, first + static_cast<uint64_t>(i), offset,
            min(hop.window.piece_bytes, hop.block_bytes - offset)};
  }
};

// Sends a piece to every other domain, and copies this domain's own piece. Called by the whole block. Returns
// false if the hop has failed.
template <typename Net>
__device__ bool SendPiece(const HopParams& hop, const Net& net, const HopPiece& piece) {
  const HopWindow& window = hop.window;
  const int64_t own_offset = hop.domain * hop.block_bytes + piece.offset;
  CopyBlock(hop.out + own_offset, hop.in + own_offset, piece.bytes);
  for (int k = 1; k < window.domains; ++k) {
    const int to = (hop.domain + k) % window.domains;
    uint64_t reason = 0;
    if (threadIdx.x == 0 && piece.number >= kHopSlots) {
      const uint64_t credits = piece.number - kHopSlots + 1;
      reason = AwaitDomain(hop, net, to,
                           [&] { return net.ReadSignal(window.CreditSignal(piece.track, to)) >= credits; });
      if (reason != 0) GiveUpHop(hop, net, reason);
    }
    if (__syncthreads_or(reason != 0)) return false;
    const int64_t slot = window.SlotTo(piece.track, to, piece.number);
    if (threadIdx.x == 0) *reinterpret_cast<uint64_t*>(hop.slots + slot) = piece.call;
    CopyBlock(hop.slots + slot + kHopHeadBytes, hop.in + to * hop.block_bytes + piece.offset, piece.bytes);
    __syncthreads();
    if (threadIdx.x == 0) {
      net.Put(to, window.SlotFrom(piece.track, hop.domain, piece.number), slot,
              kHopHeadBytes + AlignUp(piece.bytes, 16),
              window.PieceSignal(piece.track, hop.domain, piece.number));
    }
  }
  return true;
}

// Waits for a piece from a domain. Returns false if the hop has failed, also because the piece is of another
// op. Called by the first thread.
template <typename Net>
__device__ bool HasArrived(const HopParams& hop, const Net& net, const HopPiece& piece, int from) {
  const HopWindow& window = hop.window;
  const uint64_t uses = piece.number / kHopSlots + 1;  // of the piece's slot
  const uint64_t reason = AwaitDomain(hop, net, from, [&] {
    return net.ReadSignal(window.PieceSignal(piece.track, from, piece.number)) >= uses;
  });
  if (reason != 0) {
    GiveUpHop(hop, net, reason);
    return false;
  }
  const std::byte* const slot = hop.slots + window.SlotFrom(piece.track, from, piece.number);
  const uint64_t call = LoadWord(reinterpret_cast<const uint64_t*>(slot));
  if (call == piece.call) return true;
  GiveUpHop(hop, net, HopReason::Of(HopPhase::kOther, hop.domain, from).word,
            static_cast<uint32_t>(call ^ piece.call ^ hop.call));
  return false;
}

// Receives a piece from every other domain. Called by the whole block. Returns false if the hop has failed.
template <typename Net>
__device__ bool ReceivePiece(const HopParams& hop, const Net& net, const HopPiece& piece) {
  const HopWindow& window = hop.window;
  for (int k = 1; k < window.domains; ++k) {
    const int from = (hop.domain + window.domains - k) % window.domains;
    const bool fails = threadIdx.x == 0 && !HasArrived(hop, net, piece, from);
    if (__syncthreads_or(fails)) return false;
    const int64_t slot = window.SlotFrom(piece.track, from, piece.number);
    CopyBlock(hop.out + from * hop.block_bytes + piece.offset, hop.slots + slot + kHopHeadBytes, piece.bytes);
    __syncthreads();
    if (threadIdx.x == 0) net.Signal(from, window.CreditSignal(piece.track, hop.domain), 1);
  }
  return true;
}

// Takes the track. Returns false if the hop must not begin. Called by the first thread.
template <typename Net>
__device__ bool OpenTrack(const HopParams& hop, const Net& net, HopTrack& track) {
  uint64_t reason = FindOwnReason(hop);
  const bool is_busy = atomicExch(&track.busy, 1u) != 0;
  FenceSystem();  // makes the previous hop's state of this track visible
  if (reason == 0 && is_busy) reason = HopReason::Of(HopPhase::kBusy, hop.domain, hop.domain).word;
  if (reason == 0 && FindHopPosition(hop).rank != hop.domain) {
    reason = HopReason::Of(HopPhase::kMesh, hop.domain, hop.domain).word;
  }
  const int64_t pieces = hop.window.PiecesOf(static_cast<int>(blockIdx.x), hop.block_bytes);
  if (reason == 0 && track.pieces + static_cast<uint64_t>(pieces) > hop.max_pieces) {
    reason = HopReason::Of(HopPhase::kCounterExhausted, hop.domain, hop.domain).word;
  }
  if (reason != 0) GiveUpHop(hop, net, reason);
  return reason == 0;
}

// Runs one track's part of a hop. Each track is a block of the kernel, and all of them run at the same time.
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
  // A track that fails clears the whole result, and so does each track that ends after it. If a track finds
  // no reason here, it has written its rows before any other track clears them.
  FenceSeqCst();
  __syncthreads();
  const bool fails = threadIdx.x == 0 && LoadRelaxed(&hop.state->reason) != 0;
  if (!__syncthreads_or(fails)) return;
  FenceSeqCst();
  FillResult(hop.out, hop.window.domains * hop.block_bytes);
}

}  // namespace jax_ep::cuda
