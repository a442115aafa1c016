// The control blocks, through which the ranks of a group communicate on the devices.
//
// Each device of a group has one, in its own memory, allocated once. A rank writes into its peers' blocks and
// reads its own. It also writes those words of its own that no peer writes. Only a rank that gives up reads
// its peers' blocks.
#pragma once

#include <cstdint>

#include "core/params.h"

namespace jax_ep {

constexpr int kMaxRanks = 16;
constexpr int kMaxPayloads = 16;
constexpr int kMaxBiases = 8;  // of a combine
constexpr int kMaxBins = 4096 + kMaxRanks;
// A token's rows are handled by the lanes of one warp.
constexpr int kMaxRowsPerToken = 32;
// Where a rank works on rows that another has moved, tokens move in waves, so that it need not wait for all.
constexpr int kMaxWaves = 32;
// Most blocks of a kernel that communicates: one for each SM.
constexpr int kMaxBlocks = 256;
// Ops of a group that can be in flight on a device at a time, each in a channel of its own.
constexpr int kChannels = 8;
// Ops of few tokens share the arena, so only one of them is in flight at a time, in the last channel
// (arena.h).
constexpr int kArenaChannel = kChannels;

// Identifies the op that a rank runs: ranks whose calls differ must not exchange a byte.
struct Call {
  uint32_t hash;  // of the op, its shapes and its dtypes
  uint32_t site;  // number of the call site in the group, below kMaxSites

  // Returns the word that a rank publishes: the call, and its kernel's blocks, which may differ between
  // ranks.
  JAX_EP_HD uint64_t WithBlocks(uint32_t num_blocks) const {
    return static_cast<uint64_t>(hash) << 32 | site << 9 | num_blocks;
  }
  JAX_EP_HD static Call Of(uint64_t word) {
    return {static_cast<uint32_t>(word >> 32), static_cast<uint32_t>(word) >> 9};
  }
  // Returns the call as it is published. It differs between lists of ranks (MeshPlace), so that ranks of
  // different lists do not meet.
  JAX_EP_HD Call In(int32_t list) const { return {hash ^ static_cast<uint32_t>(list), site}; }
  // Returns whether two different calls appear to differ in their lists only.
  static bool DifferInList(const Call& a, const Call& b) {
    return a.hash != b.hash && (a.hash ^ b.hash) >> 16 == 0;
  }
  JAX_EP_HD static int BlocksOf(uint64_t word) { return static_cast<int>(word & 0x1ff); }
  JAX_EP_HD bool operator==(const Call& other) const { return hash == other.hash && site == other.site; }
};
constexpr uint32_t kMaxSites = 1u << 23;
static_assert(kMaxBlocks <= 0x1ff, "the blocks are the lowest nine bits of a published call");

// What a rank publishes to its peers in each op: the call and the addresses of its buffers. Addresses travel
// on the device every time, so that a captured graph holds none.
struct Published {
  uint64_t call;  // Call::WithBlocks
  void* weights;
  void* routing;  // arrives with the rows: topk_idx by rank, received_rows by expert
  void* buffers[kMaxPayloads];
  void* partials[kMaxPayloads];  // combine by expert: sums of each token's rows

  // The words that an op with `num_buffers` buffers and as many partials uses, by number.
  static JAX_EP_HD int Count(int num_buffers) { return 3 + 2 * num_buffers; }
  JAX_EP_HD uint64_t& Word(int i, int num_buffers) {
    const bool is_partial = i >= 3 + num_buffers;
    return reinterpret_cast<uint64_t*>(this)[is_partial ? i + kMaxPayloads - num_buffers : i];
  }
};
static_assert(sizeof(Published) == 8 * (3 + 2 * kMaxPayloads), "made of words");

// A number in the lower half, and in the upper half the epoch of the op that it belongs to. Both are written
// and read at once, so that a reader that finds the epoch has the number, too, without a fence or a flag.
using EpochWord = uint64_t;

// How a block left an op.
enum Left : uint32_t {
  kWhole = 1,   // it had done its part
  kBroken = 2,  // it had not; the op has failed
};

// What a peer publishes before any row moves. It may publish its next op once every block of this rank has
// left.
struct Mail {
  EpochWord words[sizeof(Published) / 8][2];  // Published: lower half, upper half
  EpochWord counts[kMaxBins];                 // dispatch: its rows by expert, then by rank
};

// The state of one op in flight. A call site keeps its channel, so that ops that run side by side on several
// streams do not mix. Epochs count the ops of a channel. 0 stands for no op, and the count skips it.
struct Channel {
  // Upper half: the epoch of the last op that this rank has opened; from then on until its blocks have left,
  // it may touch its peers' memory. Lower half: 0 or a Reason, after which the rank opens no op. A rank opens
  // an op by adding one to the upper half, which also returns the lower half, and a peer that gives up stores
  // the lower half. One of the two comes first. A rank that finds a reason takes its addition back.
  uint64_t gate;
  EpochWord opened;  // the call site, plus 1, of the op that was opened last
  uint32_t epoch;    // of the last op of which all blocks have ended here
  // The rest is 0 between ops; the block that ends last sees to that.
  uint32_t ended;                   // blocks of this rank that have ended (CountEnd)
  uint32_t wave_shares[kMaxWaves];  // shares of each wave that are done
  uint32_t sent[kMaxPayloads];  // tickets taken for tokens to send or to pull, of each array if they differ
  uint32_t spread;              // tickets taken for rows to spread
  uint32_t cleared;             // tickets taken for rows to clear
  alignas(128) EpochWord left[kMaxRanks][kMaxBlocks];  // Left, of each block of each peer's kernel
  alignas(
      128) uint32_t wave_done[kMaxWaves][kMaxRanks];  // the last epoch in which each peer finished the wave
  alignas(128) Mail mail[kMaxRanks];
};

struct Control {
  Channel channels[kChannels + 1];
  uint32_t recorded;  // a failure of this rank has been recorded
};

// Why an op failed.
enum class Phase : int32_t {
  kNone = 0,
  kEnter = 1,    // ranks did not arrive
  kLeave = 2,    // ranks did not finish
  kWave = 3,     // ranks did not finish a wave
  kRank = 4,     // the program runs on another mesh than the group's
  kCall = 5,     // ranks called another op
  kChannel = 6,  // another op of this device was still using the channel
  kGivenUp = 7,  // another rank gave up
  kStuck = 8,    // ranks did not finish and could still write here: the GPU was stopped
  kHop = 9,      // a hop between hosts failed (hop.h)
};
enum class Op : int32_t { kDispatch = 0, kRedispatch = 1, kCombine = 2, kGather = 3, kHop = 4 };

// The rank that gave up first, and why, in one word that every rank passes on. Never 0.
struct Reason {
  uint32_t word;

  JAX_EP_HD static Reason Of(int rank, Phase phase, uint32_t missing) {
    return {static_cast<uint32_t>(phase) << 24 | (missing & 0xffff) << 8 | (static_cast<uint32_t>(rank) + 1)};
  }
  JAX_EP_HD int rank() const { return static_cast<int>(word & 0xff) - 1; }
  JAX_EP_HD uint32_t missing() const { return word >> 8 & 0xffff; }
  JAX_EP_HD Phase phase() const { return static_cast<Phase>(word >> 24); }
};
static_assert(kMaxRanks <= 16, "a reason has a bit for each rank");

// In host memory that the device can read and write: how an op failed, and what the host sends to kernels.
struct Report {
  // Written by the device, `phase` last.
  int32_t phase;     // Phase
  int32_t op;        // Op
  int32_t rank;      // that reports
  uint32_t missing;  // bit r: rank r is the one to blame, as the phase says
  uint32_t epoch;
  uint32_t reason;      // Phase::kGivenUp: the Reason that was found
  uint64_t call;        // Call::WithBlocks(0)
  uint64_t other_call;  // Phase::kCall, kChannel and kHop: what the first of those ranks called instead
  uint64_t hop;         // Phase::kHop: the HopReason
  uint32_t left_out;    // an op has left out a rank, which may since have counted fewer ops

  // Written by the host.
  uint64_t timeout_ns;   // how long all waits of an op for its peers may last together
  uint64_t stall_ns[2];  // tests: how long this rank is delayed before it enters, and inside
  uint32_t gone;         // bit r: rank r's process has ended and writes nothing any more
};

// A communicating kernel's view of its group, passed by value.
struct Peers {
  Channel* channel[kMaxRanks];  // this op's, by rank; [rank] is this device's own
  int64_t shift[kMaxRanks];     // from an address that rank r publishes to the same memory here
  Report* report;
  Call call;
  uint32_t stress_ns;  // longest random delay before entering and before leaving; 0 except in stress tests
  int32_t rank;
  int32_t num_ranks;       // 0: the op is local
  int32_t channel_number;  // of `channel` in the control blocks

  JAX_EP_HD Channel& own() const { return *channel[rank]; }
  JAX_EP_HD Control& control(int r) const { return *reinterpret_cast<Control*>(channel[r] - channel_number); }
};

}  // namespace jax_ep
