// The control blocks: what the ranks of a group tell each other on the devices.
//
// Each device of a group has one, in its own memory, allocated once. A rank writes into its peers' blocks and
// reads its own; of its own it also writes what no peer writes. Only a rank that gives up reads its peers'.
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
// Tokens are moved in waves where a rank works on what another has moved: it need not wait for all of them.
constexpr int kMaxWaves = 32;
// Blocks of one kernel that communicates: at most one for each SM.
constexpr int kMaxBlocks = 256;
// Ops of a group that can be in flight on a device at a time, each in a channel of its own.
constexpr int kChannels = 8;
// Of few tokens one at a time: they share the arena, and have the last channel (arena.h).
constexpr int kArenaChannel = kChannels;

// Which op a rank runs: ranks whose calls differ must not exchange a byte.
struct Call {
  uint32_t hash;  // of the op, its shapes and its dtypes
  uint32_t site;  // number of the call site in the group, below kMaxSites

  // What a rank publishes of it, together with the blocks of its kernel, which may differ between ranks.
  JAX_EP_HD uint64_t WithBlocks(uint32_t num_blocks) const {
    return static_cast<uint64_t>(hash) << 32 | site << 9 | num_blocks;
  }
  JAX_EP_HD static Call Of(uint64_t word) {
    return {static_cast<uint32_t>(word >> 32), static_cast<uint32_t>(word) >> 9};
  }
  // The same, as ranks tell each other of it: it differs between lists of ranks (MeshPlace), so that those of
  // several lists do not meet.
  JAX_EP_HD Call In(int32_t list) const { return {hash ^ static_cast<uint32_t>(list), site}; }
  // Whether two calls that differ do so by their lists only, as far as can be told.
  static bool DifferInList(const Call& a, const Call& b) {
    return a.hash != b.hash && (a.hash ^ b.hash) >> 16 == 0;
  }
  JAX_EP_HD static int BlocksOf(uint64_t word) { return static_cast<int>(word & 0x1ff); }
  JAX_EP_HD bool operator==(const Call& other) const { return hash == other.hash && site == other.site; }
};
constexpr uint32_t kMaxSites = 1u << 23;
static_assert(kMaxBlocks <= 0x1ff, "the blocks are the lowest nine bits of a published call");

// What a rank tells its peers of the present op: what it is and where its buffers lie. Addresses travel on
// the device, each time, so nothing is baked into a captured graph.
struct Published {
  uint64_t call;  // Call::WithBlocks
  void* weights;
  void* routing;  // what arrives with the rows: topk_idx by rank, received_rows by expert
  void* buffers[kMaxPayloads];
  void* partials[kMaxPayloads];  // combine by expert: sums of each token's rows

  // Those words of it that an op with `num_buffers` of each uses, by number.
  static JAX_EP_HD int Count(int num_buffers) { return 3 + 2 * num_buffers; }
  JAX_EP_HD uint64_t& Word(int i, int num_buffers) {
    const bool is_partial = i >= 3 + num_buffers;
    return reinterpret_cast<uint64_t*>(this)[is_partial ? i + kMaxPayloads - num_buffers : i];
  }
};
static_assert(sizeof(Published) == 8 * (3 + 2 * kMaxPayloads), "made of words");

// A number below, and above it the epoch of the op that it belongs to. It is written and read as one, so that
// whoever finds the epoch has the number too: no fence, no flag after it.
using Stamped = uint64_t;

// How a block left an op.
enum Left : uint32_t {
  kWhole = 1,   // after it had done its part
  kBroken = 2,  // before; the op has failed
};

// What a peer tells before any row moves. It may tell of its next op once every block of this rank has left.
struct Mail {
  Stamped words[sizeof(Published) / 8][2];  // Published: lower half, upper half
  Stamped counts[kMaxBins];                 // dispatch: its rows by expert, then by rank
};

// What one op in flight needs. A call site keeps its channel, so that ops that run side by side on several
// streams are told apart. Epochs count the ops of a channel; 0 is none, which the counts skip.
struct Channel {
  // Upper half: the epoch of the last op that this rank has opened; from then on until its blocks have left,
  // it may touch its peers' memory. Lower half: 0, or a Reason; then the rank opens no op any more. A rank
  // opens an op by adding one above, which also tells it what was below, and a peer that gives up stores the
  // lower half: one of them is first. A rank that finds a reason takes back what it has added.
  uint64_t gate;
  Stamped opened;                                    // the call site, plus 1, of the op that was opened last
  uint32_t epoch;                                    // of the last op that has ended here
  uint32_t ended;                                    // blocks that have ended, or failed; 0 between ops
  uint32_t wave_shares[kMaxWaves];                   // shares of each wave that are done; 0 between ops
  uint32_t next[kMaxPayloads];                       // tickets that were taken, of each array if they differ
  uint32_t spread[2];                                // likewise, for rows to spread: by turns, op by op
  uint32_t cleared[2];                               // and for rows to clear
  alignas(128) Stamped left[kMaxRanks][kMaxBlocks];  // Left, of each block of each peer's kernel
  alignas(128) uint32_t wave_done[kMaxWaves][kMaxRanks];  // the epoch whose wave each peer is done with
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
  kStuck = 8,    // ranks did not finish, and could still write here: the GPU was stopped
  kHop = 9,      // a hop between hosts failed (hop.h)
};
enum class Op : int32_t { kDispatch = 0, kRedispatch = 1, kCombine = 2, kGather = 3, kHop = 4 };

// Who gave up first, and why, in one word that every rank passes on. Never 0.
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

// In host memory that the device can read and write: how an op failed, and what the host tells the kernels.
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
  uint32_t left_out;    // an op has left out a rank, which may have counted fewer ops since

  // Written by the host.
  uint64_t timeout_ns;   // how long an op waits for its peers, all of its waits together
  uint64_t stall_ns[2];  // tests: how long this rank is held up before it enters, and inside
  uint32_t gone;         // bit r: rank r's process has ended, and writes nothing any more
};

// What a communicating kernel needs to know of its group, passed by value.
struct Peers {
  Channel* channel[kMaxRanks];  // this op's, by rank; [rank] is this device's own
  int64_t shift[kMaxRanks];     // from an address that rank r publishes to the same memory here
  Report* report;
  Call call;
  uint32_t stress_ns;  // longest random delay before Enter and before leaving; 0 but in stress tests
  int32_t rank;
  int32_t num_ranks;       // 0: the op is local, nobody is met
  int32_t channel_number;  // of `channel` in the control blocks

  JAX_EP_HD Channel& own() const { return *channel[rank]; }
  JAX_EP_HD Control& control(int r) const { return *reinterpret_cast<Control*>(channel[r] - channel_number); }
};

}  // namespace jax_ep
