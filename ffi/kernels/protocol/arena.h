// The arena: memory of a group on each of its devices, after the control block and the mailboxes, that ops
// for few tokens use.
//
// Each rank has a slot at every peer for each of its tokens. Slots are not XLA's memory. Therefore a rank may
// write to a slot before the peer has begun the op, and a receiver need not wait until the peer has ended it;
// it only needs the row. There are two halves, and ops alternate between them. A rank writes to a half again
// two ops later. In the op between, it has heard from the peer, which began that op after it had ended the
// first one. If it has not heard from the peer, because one of them took no part in that op, it first waits
// until the peer has begun the present one.
//
// A row lies in a slot as it is, and a word with the epoch tells that it has arrived. Or it travels as lines,
// each of which has the epoch in itself. Lines have a region of their own, in which nothing else is ever
// stored, so that no row can be mistaken for an epoch.
#pragma once

#include <algorithm>

#include "kernels/protocol/control.h"

namespace jax_ep {

constexpr int kSlotTokens = 128;     // most tokens of a rank
constexpr int kSlotChoices = 4096;   // most choices of a rank's tokens, T * K
constexpr int kSlotHeadBytes = 128;  // before the row: the token's weights
static_assert(kMaxRowsPerToken * sizeof(float) <= kSlotHeadBytes);

// The words that a rank writes at a peer, besides rows.
struct alignas(128) ArenaMailbox {
  EpochWord call[2];                    // Call::WithBlocks: lower half, upper half
  EpochWord choices[kSlotChoices / 2];  // of a dispatch: two experts each, as int16
  EpochWord arrived[kSlotTokens];       // the row of this slot has arrived
};

// The beginning of the arena. The mailboxes follow, two of each source, one for each half. Then come the
// slots, of each source those of one half and then those of the other, and then the lines in the same way.
struct alignas(128) Arena {
  // By half. If ranks may be left out: those that came, as decided by this rank's leader.
  EpochWord verdicts[2][kMaxRanks / kRankBits];
  uint32_t begun[kMaxRanks];  // the last op that each rank has begun, as far as it has reported
  uint32_t heard[kMaxRanks];  // the last op in which this rank has received each rank's call

  // Returns the mailbox of a half that `source` writes.
  JAX_EP_HD ArenaMailbox& mailbox(int source, int half) {
    return reinterpret_cast<ArenaMailbox*>(this + 1)[2 * source + half];
  }
};

// Returns the bytes of the slots of a half. A group of few ranks has slots for more tokens of each.
inline int64_t SlotsOfHalf(int num_ranks) {
  constexpr int kLeastRanks = 16;
  return (int64_t{1} << 20) * (num_ranks < kLeastRanks ? kLeastRanks : num_ranks);
}
constexpr int64_t kLinesOfHalf = int64_t{2} << 20;

// Returns where the arena begins, in bytes from the control block.
inline int64_t ArenaOffset(int num_ranks) { return AlignUp(ControlBytes(num_ranks), alignof(Arena)); }
// Returns the same from the arena's channel.
inline int64_t ArenaOffsetFromChannel(int num_ranks) {
  return ArenaOffset(num_ranks) - static_cast<int64_t>(offsetof(Control, channels[kArenaChannel]));
}
// Return where the slots and the lines begin, in bytes from the arena.
inline int64_t SlotsOffset(int num_ranks) {
  return static_cast<int64_t>(sizeof(Arena)) +
         int64_t{2} * num_ranks * static_cast<int64_t>(sizeof(ArenaMailbox));
}
inline int64_t LinesOffset(int num_ranks) { return SlotsOffset(num_ranks) + 2 * SlotsOfHalf(num_ranks); }

// Returns the size of all memory of a group on a device.
inline int64_t GroupBytes(int num_ranks) {
  return ArenaOffset(num_ranks) + LinesOffset(num_ranks) + 2 * kLinesOfHalf;
}

// The layout of an op's slots. Each source has a region of its own in each half, independent of the op, so
// that a rank that was left out and comes late writes to no other rank's slots.
struct Slots {
  int64_t first;   // where the first region begins, in bytes from the arena
  int64_t region;  // bytes of a region
  int64_t bytes;   // of a slot

  JAX_EP_HD int64_t offset(int source, int half, int token) const {
    return first + (2 * source + half) * region + token * bytes;
  }
};

// Returns the layout for rows of `row_bytes`, in which each array is rounded up to 16.
inline Slots SlotsOf(const Shape& shape, int64_t row_bytes) {
  const int R = shape.num_ranks;
  return {SlotsOffset(R), SlotsOfHalf(R) / R / 128 * 128, AlignUp(kSlotHeadBytes + row_bytes, 128)};
}

// A row in lines consists of chunks, one of which a warp stores or loads at a time
// (kernels/few_tokens/chunk.cuh).
constexpr int kChunkRowBytes = 1024;   // of the row
constexpr int kChunkLineBytes = 1536;  // as lines

// Returns the number of chunks of a row.
JAX_EP_HD inline int ChunksOf(int64_t row_bytes) {
  return static_cast<int>((row_bytes + kChunkRowBytes - 1) / kChunkRowBytes);
}

// Returns the layout of rows in lines, in the place of slots.
inline Slots LinesOf(const Shape& shape, int64_t row_bytes) {
  const int R = shape.num_ranks;
  return {LinesOffset(R), kLinesOfHalf / R / 128 * 128, int64_t{ChunksOf(row_bytes)} * kChunkLineBytes};
}

// Most bytes that a rank sends to the others as lines, measured: lines are half as long again as the row, but
// no word has to follow it.
constexpr int64_t kMostLineBytesOfDispatch = 1 << 20, kMostLineBytesOfCombine = 256 << 10;

// Returns whether rows of `row_bytes` travel as lines, if a rank may send at most `most_bytes` in this way.
// Ranks must have bits in one word.
inline bool SuitsLines(const Shape& shape, int64_t row_bytes, int64_t most_bytes) {
  const Slots lines = LinesOf(shape, row_bytes);
  const int64_t sent_bytes = int64_t{ChunksOf(row_bytes)} * kChunkRowBytes;  // of a row, as whole chunks
  const int64_t bytes = shape.num_tokens * std::max(shape.num_ranks - 1, 1) * sent_bytes;
  return shape.num_ranks <= kRankBits && row_bytes > 0 && row_bytes % 16 == 0 && bytes <= most_bytes &&
         shape.num_tokens * lines.bytes <= lines.region;
}

// Returns the number of choices of a rank, rounded up to whole vectors. RoutingTableBytes is the shared
// memory of a RoutingTable (kernels/few_tokens/route.cuh).
JAX_EP_HD inline int64_t ChoicesStride(const Shape& shape) {
  return AlignUp(int64_t{shape.num_tokens} * shape.top_k, 8);
}
// Returns the words for the ranks that each token goes to, by rank.
JAX_EP_HD inline int RankTableWords(const Shape& shape) {
  return shape.has_row_per_choice() ? 0 : WordsForRanks(shape.num_ranks) * shape.num_ranks * shape.num_tokens;
}
JAX_EP_HD inline int64_t RoutingTableBytes(const Shape& shape) {
  const int64_t R = shape.num_ranks;
  const int64_t words = RankTableWords(shape) + int64_t{4} * shape.num_experts + R;
  return 2 * R * ChoicesStride(shape) + 4 * words;
}
constexpr int64_t kMaxRoutingTableBytes = 96 * 1024;  // available to a block on all GPUs from sm_80 on

// Returns whether an op with rows of `row_bytes` fits in the arena.
inline bool FitsArena(const Shape& shape, int64_t row_bytes) {
  if (shape.num_tokens > kSlotTokens || shape.top_k > kMaxRowsPerToken) return false;
  const Slots slots = SlotsOf(shape, row_bytes);
  return int64_t{shape.num_tokens} * shape.top_k <= kSlotChoices &&
         RoutingTableBytes(shape) <= kMaxRoutingTableBytes && shape.num_tokens * slots.bytes <= slots.region;
}

}  // namespace jax_ep
