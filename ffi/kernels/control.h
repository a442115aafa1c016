// The control blocks: what the ranks of a group tell each other on the devices.
//
// Each device of a group has one, in its own memory, allocated once. Peers write to it and its owner
// reads it; a device writes into its peers' blocks, and into the members of its own up to `next`.
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
constexpr int kMaxWaves = 16;
constexpr int kTokensPerWave = 512;

// Where a rank's buffers of the present op lie. Addresses travel on the device, each time, so nothing
// is baked into a captured graph.
struct Published {
  void* buffers[kMaxPayloads];
  void* partials[kMaxPayloads];  // combine by expert: sums of each token's rows
  void* weights;
  void* routing;  // what arrives with the rows: topk_idx by rank, the row map by expert
};

struct Control {
  uint32_t epoch;                  // ops that have ended here
  uint32_t blocks_done;            // blocks of the present op that have moved their rows
  uint32_t failed;                 // a wait expired: no later op of this group touches a peer
  uint32_t wave_parts[kMaxWaves];  // parts of each wave that are done
  uint32_t next[kMaxPayloads];     // parts of the work that are dealt out, of each array if they differ
  alignas(128) uint32_t enter[kMaxRanks];             // the epoch that each peer has entered
  alignas(128) uint32_t leave[kMaxRanks];             // the epoch whose rows each peer has moved
  alignas(128) uint32_t moved[kMaxWaves][kMaxRanks];  // the epoch whose wave each peer is done with
  alignas(128) Published published[kMaxRanks];
  int32_t counts[kMaxRanks][kMaxBins];  // rows of each peer by expert, then by rank
};

enum class Phase : int32_t { kNone = 0, kEnter = 1, kLeave = 2, kRank = 3, kMove = 4 };
enum class Op : int32_t { kDispatch = 0, kCachedDispatch = 1, kCombine = 2, kGather = 3 };

// In host memory that the device can write: how a wait ended that ended badly.
struct Expired {
  int32_t phase;  // Phase; written last
  int32_t op;
  int32_t rank;
  uint32_t missing;  // bit r: rank r did not come
  uint32_t expected_epoch;
  uint32_t seen_epoch[kMaxRanks];
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
