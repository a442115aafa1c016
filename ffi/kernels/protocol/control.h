// The control blocks, through which the ranks of a group communicate on the devices.
//
// Each device of a group has one in its own memory, allocated once. After it lie the mailboxes, one for each
// channel and rank, and then the arena (arena.h). A rank writes to its peers' blocks and reads its own. It
// also writes those words of its own block that no peer writes. A rank reads its peers' blocks only when it
// gives up.
#pragma once

#include <cstdint>

#include "core/params.h"
#include "kernels/protocol/rank_set.h"

namespace jax_ep {

constexpr int kMaxPayloads = 16;
constexpr int kMaxBiases = 8;  // of a combine
constexpr int kMaxBins = 4096 + kMaxRanks;
// Most rows of a token, because the lanes of one warp handle them.
constexpr int kMaxRowsPerToken = 32;
// Most waves of an op. A rank that works on rows which another rank has moved waits for waves of tokens, so
// that it can start before all of them have arrived.
constexpr int kMaxWaves = 32;
// Most blocks of a kernel that communicates, with one block per SM.
constexpr int kMaxBlocks = 256;
// Most ops of a group in flight on a device at a time. Each has a channel of its own.
constexpr int kChannels = 8;
// The channel of ops for few tokens. They share the arena (arena.h), so only one is in flight at a time.
constexpr int kArenaChannel = kChannels;

// The identity of the op that a rank runs. Ranks whose calls differ must not exchange any data.
struct Call {
  uint32_t hash;  // of the op, its shapes and its dtypes
  uint32_t site;  // number of the call site in the group, below kMaxSites

  // Returns the word that a rank publishes: the call, and the number of its kernel's blocks, which may differ
  // between ranks.
  JAX_EP_HD uint64_t WithBlocks(uint32_t num_blocks) const {
    return static_cast<uint64_t>(hash) << 32 | site << 9 | num_blocks;
  }
  JAX_EP_HD static Call Of(uint64_t word) {
    return {static_cast<uint32_t>(word >> 32), static_cast<uint32_t>(word) >> 9};
  }
  // Returns the call as it is published. It differs between lists of ranks (MeshPosition), so that ranks of
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

// The addresses and the call that a rank publishes to its peers in each op. Addresses are sent on the device
// every time, so that a captured graph holds none.
struct Published {
  uint64_t call;  // Call::WithBlocks
  void* weights;
  void* routing;  // receives the routing: topk_idx by rank, received_rows by expert
  void* buffers[kMaxPayloads];
  void* partials[kMaxPayloads];  // combine by expert: sums of each token's rows

  // Count returns how many words an op with `num_buffers` buffers and as many partials uses. Word returns one
  // of them.
  static JAX_EP_HD int Count(int num_buffers) { return 3 + 2 * num_buffers; }
  JAX_EP_HD uint64_t& Word(int i, int num_buffers) {
    const bool is_partial = i >= 3 + num_buffers;
    return reinterpret_cast<uint64_t*>(this)[is_partial ? i + kMaxPayloads - num_buffers : i];
  }
};
static_assert(sizeof(Published) == 8 * (3 + 2 * kMaxPayloads), "made of words");

// Returns the shared memory that a block needs for what all ranks publish.
JAX_EP_HD inline int64_t PublishedBytes(int num_ranks) {
  return AlignUp(num_ranks * static_cast<int64_t>(sizeof(Published)), 128);
}

// A number in the lower half, and the epoch of the op that it belongs to in the upper half. Both are written
// and read at once. Therefore a reader that finds the epoch also has the number, without a fence or a flag.
using EpochWord = uint64_t;

// The way in which a block left an op.
enum Left : uint32_t {
  kWhole = 1,   // it has done its part
  kBroken = 2,  // it has not, and the op has failed
};

// The words that a peer publishes before any row moves. It may publish its next op once every block of this
// rank has left.
struct Mailbox {
  EpochWord words[sizeof(Published) / 8][2];  // Published: lower half, upper half
  EpochWord counts[kMaxBins];                 // dispatch: the peer's rows by expert, then by rank
};

// The state of one op in flight. A call site keeps its channel, so that ops on several streams do not mix.
// Epochs count the ops of a channel. Epoch 0 stands for no op, and the count skips it.
struct Channel {
  // Upper half: the epoch of the last op that this rank has opened. From then on until its blocks have left,
  // it may access its peers' memory. Lower half: 0 or a Reason, after which the rank opens no op. A rank
  // opens an op by adding one to the upper half, and the atomic also returns the lower half. A peer that
  // gives up stores the lower half. One of the two comes first. A rank that finds a reason takes its addition
  // back.
  uint64_t gate;
  EpochWord opened;  // call site, plus 1, of the op opened last
  // The next two are also read and written as one 64-bit word. The holder changes by a 32-bit atomic, which
  // is safe because a device's memory serializes accesses of all sizes.
  alignas(uint64_t) uint32_t holder;  // call site, plus 1, of the arena's op in flight; otherwise 0
  uint32_t epoch;                     // of the last op whose blocks on this rank have all ended
  // The counters below are 0 between ops. wave_shares wrap by themselves; the block that frees the channel
  // resets the others.
  uint32_t ended;                   // blocks of this rank that have ended (CountEnd)
  uint32_t wave_shares[kMaxWaves];  // shares of each wave that are finished
  uint32_t sent[kMaxPayloads];      // tickets taken for tokens to send or to pull, for each array of a pull
  uint32_t spread;                  // tickets taken for rows to spread
  uint32_t cleared;                 // tickets taken for rows to clear
  alignas(128) EpochWord left[kMaxRanks][kMaxBlocks];  // Left, of each block of each peer's kernel
  alignas(
      128) uint32_t wave_done[kMaxWaves][kMaxRanks];  // the last epoch in which each peer finished the wave
};

struct Control {
  Channel channels[kChannels + 1];
  uint32_t recorded;  // 1 once a failure of this rank has been recorded
};

// Returns the size of a rank's control block and its mailboxes.
inline int64_t ControlBytes(int num_ranks) {
  return static_cast<int64_t>(sizeof(Control)) +
         int64_t{kChannels} * num_ranks * static_cast<int64_t>(sizeof(Mailbox));
}

// The reasons for a failed op.
enum class Phase : int32_t {
  kNone = 0,
  kEnter = 1,    // ranks did not arrive
  kLeave = 2,    // ranks did not finish
  kWave = 3,     // ranks did not finish a wave
  kRank = 4,     // the program runs on another mesh than the group's
  kCall = 5,     // ranks called a different op
  kChannel = 6,  // another op of this device was still using the channel
  kGivenUp = 7,  // another rank gave up
  kStuck = 8,    // ranks did not finish and might still write to this rank: the GPU was stopped
  kHop = 9,      // a hop between domains failed (hop/window.h)
};
enum class Op : int32_t { kDispatch = 0, kRedispatch = 1, kCombine = 2, kGather = 3, kHop = 4 };

// The rank that gave up first, and the reason, in one word that every rank passes on. Never 0. Of the ranks
// that were missed, it has room for the lowest one and their number.
struct Reason {
  uint32_t word;

  JAX_EP_HD static Reason Of(int rank, Phase phase, RankBits missing = {}) {
    return {static_cast<uint32_t>(phase) << 24 | static_cast<uint32_t>(missing.Count()) << 16 |
            static_cast<uint32_t>(missing.First() + 1) << 8 | static_cast<uint32_t>(rank + 1)};
  }
  JAX_EP_HD int rank() const { return static_cast<int>(word & 0xff) - 1; }
  JAX_EP_HD int first_missing() const { return static_cast<int>(word >> 8 & 0xff) - 1; }  // -1: none
  JAX_EP_HD int num_missing() const { return static_cast<int>(word >> 16 & 0xff); }
  JAX_EP_HD Phase phase() const { return static_cast<Phase>(word >> 24); }
};
static_assert(kMaxRanks < 0xff, "a reason has eight bits for a rank");

// The failure of an op, and values that the host sends to kernels. It is in host memory that the device can
// access.
struct Report {
  // Written by the device, `phase` last.
  int32_t phase;     // Phase
  int32_t op;        // Op
  int32_t rank;      // the rank that reports
  RankBits missing;  // the ranks that caused the failure, as `phase` defines
  uint32_t epoch;
  uint32_t reason;  // Phase::kGivenUp: the Reason that was found
  uint64_t call;    // Call::WithBlocks(0)
  // Phase::kCall, kChannel and kHop: the call of the first of those ranks, 0: unknown. kRank: the program's
  // rank.
  uint64_t other_call;
  uint64_t hop;       // Phase::kHop: the HopReason
  uint32_t left_out;  // 1 once an op has left out a rank, which may since have counted fewer ops

  // Written by the host.
  uint64_t timeout_ns;   // limit of all waits of an op for its peers together
  uint64_t stall_ns[2];  // tests: delays of this rank before it enters, and inside
  RankSet gone;          // ranks whose processes have ended, so that they write nothing any more
};

// A communicating kernel's view of its group, passed by value.
struct Peers {
  Channel* channel[kMaxRanks];  // of this op, by rank; [rank] is this device's own
  int64_t shift[kMaxRanks];     // add to an address that rank r publishes to get it in this address space
  Report* report;
  Call call;
  uint32_t stress_ns;  // stress tests: longest random delay before entering and before leaving; otherwise 0
  int32_t rank;
  int32_t num_ranks;       // 0: the op is local
  int32_t channel_number;  // index of `channel` in the control blocks
  int64_t arena_offset;    // bytes from a rank's channel to its arena, for ops through the arena

  JAX_EP_HD Channel& own() const { return *channel[rank]; }
  JAX_EP_HD Control& control(int r) const { return *reinterpret_cast<Control*>(channel[r] - channel_number); }
  // Returns the mailbox of this op at rank `at` that `source` writes. Not for ops through the arena.
  JAX_EP_HD Mailbox& mailbox(int at, int source) const {
    auto* const first = reinterpret_cast<Mailbox*>(&control(at) + 1);
    return first[channel_number * num_ranks + source];
  }
};

}  // namespace jax_ep
