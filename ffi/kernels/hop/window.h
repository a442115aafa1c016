// Hop 1 through a window of NCCL's: where its parts lie, and what a device keeps from one hop to the next.
//
// The ranks of the same index on all hosts take part, one of each host, and go by the number of their host.
// Each sends a block to every other. A *track* is a block of CUDA threads on each of them: it moves its share
// of the blocks' *pieces*, one after the other, through slots of its own, and tracks know nothing of each
// other.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/index.h"
#include "kernels/protocol/control.h"

namespace jax_ep {

constexpr int kMaxHosts = 64;
constexpr int kHopTracks = 8;
// Pieces on their way from one track to one host. A slot is written again once its last piece has been read.
constexpr int kHopSlots = 4;
constexpr int64_t kHopHeadBytes = 128;  // in front of a piece: the call that it belongs to
constexpr int64_t kMostPieceBytes = int64_t{128} << 10;
constexpr int64_t kMostHopSlotBytes = int64_t{32} << 20;  // of all slots, but for their heads

// The window: slots for what is sent, then slots for what arrives. It is of the same size on all ranks, so
// that an offset in it means the same everywhere.
struct HopWindow {
  int32_t hosts;
  int32_t tracks;
  int64_t piece_bytes;

  // At most 16 MiB of two hosts, and at most 33 of any number.
  static HopWindow Of(int hosts) {
    const int64_t even = kMostHopSlotBytes / (2 * kHopTracks * kHopSlots * hosts) / 1024 * 1024;
    return {hosts, kHopTracks, even < kMostPieceBytes ? even : kMostPieceBytes};
  }

  JAX_EP_HD int64_t slot_bytes() const { return kHopHeadBytes + piece_bytes; }
  JAX_EP_HD int64_t half_bytes() const { return int64_t{tracks} * hosts * kHopSlots * slot_bytes(); }
  JAX_EP_HD int64_t bytes() const { return 2 * half_bytes(); }
  // Of a track's piece with this number, to a host or from it.
  JAX_EP_HD int64_t SlotTo(int track, int host, uint64_t number) const {
    return slot_bytes() *
           ((int64_t{track} * hosts + host) * kHopSlots + static_cast<int>(number % kHopSlots));
  }
  JAX_EP_HD int64_t SlotFrom(int track, int host, uint64_t number) const {
    return half_bytes() + SlotTo(track, host, number);
  }

  // Signals count what a host has sent: pieces into one slot; credits, which say that it has read a piece;
  // and at last why it has given up. A piece's signal says that this piece has arrived, and nothing of any
  // other, so each slot has its own.
  JAX_EP_HD uint32_t PieceSignal(int track, int host, uint64_t number) const {
    return First(track, host) + static_cast<uint32_t>(number % kHopSlots);
  }
  JAX_EP_HD uint32_t CreditSignal(int track, int host) const { return First(track, host) + kHopSlots; }
  JAX_EP_HD uint32_t EndSignal(int track, int host) const { return First(track, host) + kHopSlots + 1; }
  JAX_EP_HD int num_signals() const { return tracks * hosts * (kHopSlots + 2); }

  // A track has every `tracks`-th piece of a block.
  JAX_EP_HD int64_t PiecesOf(int track, int64_t block_bytes) const {
    const int64_t pieces = (block_bytes + piece_bytes - 1) / piece_bytes;
    return pieces <= track ? 0 : (pieces - track + tracks - 1) / tracks;
  }
  JAX_EP_HD int64_t OffsetOf(int track, int64_t i) const { return (i * tracks + track) * piece_bytes; }

 private:
  JAX_EP_HD uint32_t First(int track, int host) const {
    return static_cast<uint32_t>((track * hosts + host) * (kHopSlots + 2));
  }
};

// Why a hop failed.
enum class HopPhase : int32_t {
  kNone = 0,
  kLate = 1,              // nothing came from a host
  kOther = 2,             // a host called another op
  kBusy = 3,              // another hop of this device was under way
  kMesh = 4,              // the program runs on another mesh than the group's
  kWithin = 5,            // an op among the ranks of the host has failed
  kCounterExhausted = 6,  // the network counts no further
};

// The host that gave up first, the one that it blames, and why, in one word that hosts pass on. Never 0.
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
  uint64_t pieces;    // that it has exchanged with each host, in all hops that have ended
  uint32_t busy;      // it is part of a hop that is under way
  uint32_t notified;  // it has told the other hosts that this one has given up
};

// In device memory, zero at first.
struct HopState {
  HopTrack tracks[kHopTracks];
  uint64_t reason;  // HopReason, once a hop has failed: from then on all fail
};

// In host memory that the device can read and write.
struct HopReport {
  uint64_t reason;    // as that of HopState
  uint64_t trial_ns;  // written by the host: how long a wait may last while hops are tried
};

struct HopParams {
  HopWindow window;
  int32_t host;                          // of this rank
  const MeshPosition* position_operand;  // among all ranks, as the program computed it
  const std::byte* in;                   // [hosts, block_bytes]
  std::byte* out;                        // [hosts, block_bytes]
  int64_t block_bytes;                   // more than 0
  uint32_t call;                         // stands for the op and its shape
  std::byte* slots;                      // the window, here
  HopState* state;
  HopReport* report;
  const uint64_t* timeout_ns;  // in host memory: how long a wait may last
  uint64_t most_pieces;        // that a track may have in all
  Peers peers;                 // the ranks of this host; none where hops are tried
  bool is_refused;             // it moves nothing, and tells the other hosts that this one has failed
};

}  // namespace jax_ep
