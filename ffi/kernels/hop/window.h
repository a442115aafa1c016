// Hop 1 through an NCCL window: the layout of the window, and the state that a device keeps between hops.
//
// The ranks of the same index on all domains take part, one of each domain, and are numbered by domain. Each
// sends a block to every other. A *track* is a block of CUDA threads on each of them. It moves its share of
// the blocks' *pieces* one after another, through slots of its own. Tracks are independent of each other.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/index.h"
#include "kernels/protocol/control.h"

namespace jax_ep {

constexpr int kMaxDomains = 64;
constexpr int kHopTracks = 8;
// Pieces in flight from one track to one domain. A slot is reused once its last piece has been read.
constexpr int kHopSlots = 4;
constexpr int64_t kHopHeadBytes = 128;  // before each piece: the call that it belongs to
constexpr int64_t kMaxPieceBytes = int64_t{128} << 10;
constexpr int64_t kMaxHopSlotBytes = int64_t{32} << 20;  // of all slots, without their headers

// The window: slots for pieces that are sent, then slots for pieces that arrive. It has the same size on all
// ranks, so that offsets are valid everywhere.
struct HopWindow {
  int32_t domains;
  int32_t tracks;
  int64_t piece_bytes;

  // Returns a window of at most 16 MiB for two domains, and at most 33 MiB for any number.
  static HopWindow Of(int domains) {
    const int64_t even = kMaxHopSlotBytes / (2 * kHopTracks * kHopSlots * domains) / 1024 * 1024;
    return {domains, kHopTracks, even < kMaxPieceBytes ? even : kMaxPieceBytes};
  }

  JAX_EP_HD int64_t slot_bytes() const { return kHopHeadBytes + piece_bytes; }
  JAX_EP_HD int64_t half_bytes() const { return int64_t{tracks} * domains * kHopSlots * slot_bytes(); }
  JAX_EP_HD int64_t bytes() const { return 2 * half_bytes(); }
  // Return the offset of the slot for a piece of a track, to a domain or from it.
  JAX_EP_HD int64_t SlotTo(int track, int domain, uint64_t number) const {
    return slot_bytes() *
           ((int64_t{track} * domains + domain) * kHopSlots + static_cast<int>(number % kHopSlots));
  }
  JAX_EP_HD int64_t SlotFrom(int track, int domain, uint64_t number) const {
    return half_bytes() + SlotTo(track, domain, number);
  }

  // Signals count what a domain has sent: pieces into one slot, and credits, each of which means that it has
  // read a piece. The last signal holds the reason if it has given up. Each slot has its own signal, because
  // a piece's signal says nothing about other pieces, which may arrive in any order.
  JAX_EP_HD uint32_t PieceSignal(int track, int domain, uint64_t number) const {
    return First(track, domain) + static_cast<uint32_t>(number % kHopSlots);
  }
  JAX_EP_HD uint32_t CreditSignal(int track, int domain) const { return First(track, domain) + kHopSlots; }
  JAX_EP_HD uint32_t EndSignal(int track, int domain) const { return First(track, domain) + kHopSlots + 1; }
  JAX_EP_HD int num_signals() const { return tracks * domains * (kHopSlots + 2); }

  // Returns the number of a track's pieces. A track has every `tracks`-th piece of a block.
  JAX_EP_HD int64_t PiecesOf(int track, int64_t block_bytes) const {
    const int64_t pieces = (block_bytes + piece_bytes - 1) / piece_bytes;
    return pieces <= track ? 0 : (pieces - track + tracks - 1) / tracks;
  }
  JAX_EP_HD int64_t OffsetOf(int track, int64_t i) const { return (i * tracks + track) * piece_bytes; }

 private:
  JAX_EP_HD uint32_t First(int track, int domain) const {
    return static_cast<uint32_t>((track * domains + domain) * (kHopSlots + 2));
  }
};

// The reasons for a failed hop.
enum class HopPhase : int32_t {
  kNone = 0,
  kLate = 1,              // nothing came from a domain
  kOther = 2,             // a domain called a different op
  kBusy = 3,              // another hop of this device was under way
  kMesh = 4,              // the program runs on another mesh than the group's
  kWithin = 5,            // an op among the ranks of the domain has failed
  kCounterExhausted = 6,  // the network counts no further
};

// The domain that gave up first, the domain that it blames, and the reason, in one word that domains pass on.
// Never 0.
struct HopReason {
  uint64_t word;

  JAX_EP_HD static HopReason Of(HopPhase phase, int by, int blamed) {
    return {static_cast<uint64_t>(phase) << 32 | static_cast<uint64_t>(by) << 16 |
            static_cast<uint64_t>(blamed)};
  }
  JAX_EP_HD HopPhase phase() const { return static_cast<HopPhase>(word >> 32); }
  JAX_EP_HD int by() const { return static_cast<int>(word >> 16 & 0xffff); }
  JAX_EP_HD int blamed() const { return static_cast<int>(word & 0xffff); }
};

struct alignas(128) HopTrack {
  uint64_t pieces;    // exchanged with each domain, in all hops that have ended
  uint32_t busy;      // 1 while the track is part of a hop
  uint32_t notified;  // 1 once the track has sent the other domains the reason
};

// The state of hops in device memory, zero at first.
struct HopState {
  HopTrack tracks[kHopTracks];
  uint64_t reason;  // HopReason once a hop has failed; then all later ones fail
};

// The state of hops in host memory that the device can read and write.
struct HopReport {
  uint64_t reason;    // the same as in HopState
  uint64_t trial_ns;  // written by the host: the time limit of a wait in trial hops
};

struct HopParams {
  HopWindow window;
  int32_t domain;                        // of this rank
  const MeshPosition* position_operand;  // among all ranks, computed by the program
  const std::byte* in;                   // [domains, block_bytes]
  std::byte* out;                        // [domains, block_bytes]
  int64_t block_bytes;                   // more than 0
  uint32_t call;                         // hash of the op and its shape
  std::byte* slots;                      // the window on this rank
  HopState* state;
  HopReport* report;
  const uint64_t* timeout_ns;  // in host memory: the time limit of a wait
  uint64_t max_pieces;         // that a track may have over all hops
  Peers peers;                 // the ranks of this domain; none in trial hops
  bool is_refused;             // move nothing, and report to the other domains that this one has failed
};

}  // namespace jax_ep
