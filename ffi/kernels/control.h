// The control blocks: what the ranks of a group tell each other on the devices.
//
// Each device of a group has one, in its own memory, allocated once. Peers write to it and its owner
// reads it; a device writes into its peers' blocks, and into the members of its own up to `leave`.
#pragma once

#include <cstdint>

#include "core/params.h"

namespace jax_ep {

constexpr int kMaxRanks = 16;
constexpr int kMaxPayloads = 16;
constexpr int kMaxBins = 4096 + kMaxRanks;
// A token's rows are handled by the lanes of one warp.
constexpr int kMaxRowsPerToken = 32;
// Tokens are moved in waves where a rank works on what another has moved: it need not wait for all of them.
constexpr int kMaxWaves = 32;

// What a rank tells its peers of the present op: where its buffers lie. Addresses travel on the device, each
// time, so nothing is baked into a captured graph.
struct Published {
  uint64_t num_blocks;  // of its kernel
  void* weights;
  void* routing;  // what arrives with the rows: topk_idx by rank, the row map by expert
  void* buffers[kMaxPayloads];
  void* partials[kMaxPayloads];  // combine by expert: sums of each token's rows

  // Those words of it that an op with `num_buffers` of each uses, by number.
  static JAX_EP_HD int Count(int num_buffers) { return 3 + 2 * num_buffers; }
  static JAX_EP_HD bool IsAddress(int i) { return i > 0; }
  JAX_EP_HD uint64_t& Word(int i, int num_buffers) {
    const bool is_partial = i >= 3 + num_buffers;
    return reinterpret_cast<uint64_t*>(this)[is_partial ? i + kMaxPayloads - num_buffers : i];
  }
};
static_assert(sizeof(Published) == 8 * (3 + 2 * kMaxPayloads), "made of words");

// A number below, and above it the epoch of the op that it belongs to. It is written and read as one, so that
// whoever finds the epoch has the number too: no fence, no flag after it.
using Stamped = uint64_t;

// What a peer tells before any row moves. It may tell of its next op once every block of this rank has
// arrived.
struct Mail {
  Stamped words[sizeof(Published) / 8][2];  // Published: lower half, upper half
  Stamped counts[kMaxBins];                 // dispatch: its rows by expert, then by rank
};

struct Control {
  uint32_t epoch;                  // ops that have ended here
  uint32_t failed;                 // a wait expired: no later op of this group touches a peer
  uint32_t wave_parts[kMaxWaves];  // parts of each wave that are done
  uint32_t next[kMaxPayloads];     // parts of the work that are dealt out, of each array if they differ
  uint32_t spread[2];              // likewise, of the slots to spread: by turns, op by op
  uint32_t cleared[2];             // and of the rows to clear
  alignas(128) uint32_t leave[kMaxRanks];             // blocks of each peer that are done; 0 between ops
  alignas(128) uint32_t moved[kMaxWaves][kMaxRanks];  // the epoch whose wave each peer is done with
  alignas(128) Mail mail[kMaxRanks];
};

enum class Phase : int32_t { kNone = 0, kEnter = 1, kLeave = 2, kRank = 3, kMove = 4 };
enum class Op : int32_t { kDispatch = 0, kCachedDispatch = 1, kCombine = 2, kGather = 3 };

// In host memory that the device can write: how a wait ended that ended badly.
struct Expired {
  int32_t phase;  // Phase; written last
  int32_t op;
  int32_t rank;
  uint32_t missing;  // bit r: rank r did not come
  uint32_t epoch;
};

// What a communicating kernel needs to know of its group, passed by value.
struct Peers {
  Control* control[kMaxRanks];  // by rank; [rank] is this device's own
  int64_t shift[kMaxRanks];     // from an address that rank r publishes to the same memory here
  Expired* expired;
  uint64_t timeout_ns;
  uint32_t stress_ns;  // longest random delay before Enter and before Leave; 0 but in stress tests
  int32_t rank;
  int32_t num_ranks;  // 0: the op is local, nobody is met
};

}  // namespace jax_ep
