// Sets of a group's ranks.
#pragma once

#include <cstdint>

#include "core/index.h"

namespace jax_ep {

// Most ranks of a group on one host, or of one NVLink domain.
constexpr int kMaxRanks = 128;
constexpr int kRankBits = 32;  // ranks that a word has bits for

// Some of the kRankBits ranks from kRankBits * `word` on: those whose bits are set. A report has room for one
// word of the ranks that were missed. It is the first that has any.
struct RankBits {
  int32_t word;
  uint32_t bits;

  JAX_EP_HD static RankBits Of(int rank) { return {rank / kRankBits, 1u << rank % kRankBits}; }

  JAX_EP_HD bool Has(int rank) const {
    return rank / kRankBits == word && (bits >> rank % kRankBits & 1) != 0;
  }
  JAX_EP_HD int Count() const {
    int count = 0;
    for (uint32_t rest = bits; rest != 0; rest &= rest - 1) ++count;
    return count;
  }
  // Returns the lowest rank, or -1 if there is none.
  JAX_EP_HD int First() const {
    if (bits == 0) return -1;
    int rank = word * kRankBits;
    for (uint32_t rest = bits; (rest & 1) == 0; rest >>= 1) ++rank;
    return rank;
  }
  JAX_EP_HD bool Is(int rank) const { return First() == rank && Count() == 1; }
};

// Any of a group's ranks.
struct RankSet {
  uint32_t words[kMaxRanks / kRankBits];

  JAX_EP_HD void Add(const RankBits& ranks) { words[ranks.word] |= ranks.bits; }
  // Returns the ranks of the first word that has any.
  JAX_EP_HD RankBits FirstBits() const {
    int word = 0;
    while (word < kMaxRanks / kRankBits - 1 && words[word] == 0) ++word;
    return {word, words[word]};
  }
};

}  // namespace jax_ep
