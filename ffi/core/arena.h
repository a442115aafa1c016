// The arena: memory of a group on each of its devices, beside the control block, through which ops of few
// tokens go.
//
// Each rank has a slot there for each of its tokens, at every peer. What it writes does not touch memory of
// XLA's, so it need not know that the peer has begun the op, and need not wait until it has ended: a row that
// has come is enough. There are two halves, which ops use by turns. A rank writes to a half again two ops
// later; in between it has heard from every peer of the op between, which each began after it had ended the
// first one.
#pragma once

#include "core/control.h"

namespace jax_ep {

constexpr int64_t kArenaBytes = int64_t{32} << 20;
constexpr int kSlotTokens = 128;     // most tokens of a rank
constexpr int kSlotChoices = 4096;   // most choices of a rank's tokens, T * K
constexpr int kSlotHeadBytes = 128;  // a token's weights, before its row
static_assert(kMaxRowsPerToken * sizeof(float) <= kSlotHeadBytes);

// What a rank writes at a peer beside rows.
struct SlotMail {
  Stamped call[2];                    // Call::WithBlocks: lower half, upper half
  Stamped choices[kSlotChoices / 2];  // of a dispatch: two experts each, as int16
  Stamped arrived[kSlotTokens];       // the row of this slot is there
};

// Of one half.
struct SlotHead {
  SlotMail mail[kMaxRanks];  // by source
  Stamped verdict;  // where ranks may be left out: the ranks that came, as this rank's first block found
};

// At the beginning of the arena; the slots follow.
struct alignas(128) Arena {
  SlotHead heads[2];
};
constexpr int64_t kSlotsOfHalf = (kArenaBytes - static_cast<int64_t>(sizeof(Arena))) / 2 / 128 * 128;

// How the slots of one op lie in a half: by source, then by token.
struct Slots {
  int32_t tokens;  // slots of each source, T
  int64_t bytes;   // of a slot

  JAX_EP_HD bool Fit(int num_ranks) const { return num_ranks * tokens * bytes <= kSlotsOfHalf; }
};

// Bytes of a slot whose rows take `row_bytes`, each array's rounded up to 16.
inline int64_t SlotBytes(int64_t row_bytes) { return AlignUp(kSlotHeadBytes + row_bytes, 128); }

// Whether an op whose rows take so many bytes can go through the arena.
inline bool FitsArena(const Shape& shape, int64_t row_bytes) {
  if (shape.num_ranks > kMaxRanks || shape.num_tokens > kSlotTokens || shape.top_k > kMaxRowsPerToken) {
    return false;
  }
  const Slots slots{shape.num_tokens, SlotBytes(row_bytes)};
  return int64_t{shape.num_tokens} * shape.top_k <= kSlotChoices && slots.Fit(shape.num_ranks);
}

}  // namespace jax_ep
