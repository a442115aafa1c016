// The arena: memory of a group on each of its devices, beside the control block, that ops of few tokens use.
//
// Each rank has a slot at every peer for each of its tokens. A slot is not memory of XLA's, so a rank may
// write to it before the peer has begun the op, and the receiver need not wait until the peer has ended it: a
// row that has come is enough. There are two halves, which ops use in turn. A rank writes to a half again two
// ops later. In the op between it has heard from the peer, which began that op after it had ended the first
// one. If it has not, because one of them took no part in that op, it first waits until the peer has begun
// the present one.
#pragma once

#include "kernels/protocol/control.h"

namespace jax_ep {

constexpr int64_t kArenaBytes = int64_t{32} << 20;
constexpr int kSlotTokens = 128;     // most tokens of a rank
constexpr int kSlotChoices = 4096;   // most choices of a rank's tokens, T * K
constexpr int kSlotHeadBytes = 128;  // a token's weights, before its row
static_assert(kMaxRowsPerToken * sizeof(float) <= kSlotHeadBytes);

// Words that a rank writes at a peer, beside rows.
struct Mailbox {
  EpochWord call[2];                    // Call::WithBlocks: lower half, upper half
  EpochWord choices[kSlotChoices / 2];  // of a dispatch: two experts each, as int16
  EpochWord arrived[kSlotTokens];       // the row of this slot is there
};

// Of one half.
struct ArenaHead {
  Mailbox mail[kMaxRanks];  // by source
  EpochWord verdict;        // where ranks may be left out: those that came, according to this rank's leader
};

// At the beginning of the arena; the slots follow.
struct alignas(128) Arena {
  ArenaHead heads[2];
  uint32_t begun[kMaxRanks];  // the last op that each rank says it has begun
  uint32_t heard[kMaxRanks];  // the last op in which each rank's call was heard
};
constexpr int64_t kSlotsOfHalf = (kArenaBytes - static_cast<int64_t>(sizeof(Arena))) / 2 / 128 * 128;

// How the slots of one op lie in a half. Each source has a region of its own, whatever the op, so that a rank
// that was left out and comes late writes to no other rank's slots.
struct Slots {
  int64_t region;
  int64_t bytes;  // of a slot

  JAX_EP_HD int64_t offset(int source, int token) const { return source * region + token * bytes; }
};

// Returns the slots of rows that take `row_bytes`, those of each array rounded up to 16.
inline Slots SlotsOf(const Shape& shape, int64_t row_bytes) {
  return {kSlotsOfHalf / shape.num_ranks / 128 * 128, AlignUp(kSlotHeadBytes + row_bytes, 128)};
}

// Shared memory in which a block finds out where rows lie: see Routes in kernels/small/route.cuh. A rank's
// choices take whole vectors.
JAX_EP_HD inline int64_t ChoicesStride(const Shape& shape) {
  return AlignUp(int64_t{shape.num_tokens} * shape.top_k, 8);
}
JAX_EP_HD inline int64_t RoutingTableBytes(const Shape& shape) {
  const int64_t R = shape.num_ranks;
  return 2 * R * ChoicesStride(shape) + AlignUp(2 * R * shape.num_tokens, 16) +
         4 * (int64_t{4} * shape.num_experts + R);
}
constexpr int64_t kMaxRoutingTableBytes = 96 * 1024;  // a block may have as much on all GPUs from sm_80 on

// Returns whether an op whose rows take so many bytes fits into the arena.
inline bool FitsArena(const Shape& shape, int64_t row_bytes) {
  if (shape.num_ranks > kMaxRanks || shape.num_tokens > kSlotTokens || shape.top_k > kMaxRowsPerToken) {
    return false;
  }
  const Slots slots = SlotsOf(shape, row_bytes);
  return int64_t{shape.num_tokens} * shape.top_k <= kSlotChoices &&
         RoutingTableBytes(shape) <= kMaxRoutingTableBytes && shape.num_tokens * slots.bytes <= slots.region;
}

}  // namespace jax_ep
