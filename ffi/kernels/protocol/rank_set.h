// Sets of a group's ranks.
#pragma once

#include <cstdint>

#include "core/index.h"

namespace jax_ep {

// Most ranks of a domain.
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

// Any of a group's ranks, of which the words have a bit each.
template <int kWords>
struct RankWords {
  uint32_t words[kWords];

  // Returns the first `num_ranks` ranks.
  JAX_EP_HD static RankWords Below(int num_ranks) {
    RankWords all{};
    for (int i = 0; i < kWords; ++i) {
      const int ranks = num_ranks - i * kRankBits;
      all.words[i] = ranks >= kRankBits ? ~0u : ranks > 0 ? (1u << ranks) - 1 : 0;
    }
    return all;
  }
  JAX_EP_HD void Add(const RankBits& ranks) { words[ranks.word] |= ranks.bits; }
  // Returns a word. No index is computed, so that all words stay in registers.
  JAX_EP_HD uint32_t Word(int index) const {
    uint32_t word = words[0];
    for (int i = 1; i < kWords; ++i) word = index == i ? words[i] : word;
    return word;
  }
  // Returns the bit of a rank if it is one of word `index`, otherwise 0.
  JAX_EP_HD static uint32_t BitIn(int index, int rank) {
    if (kWords == 1) return 1u << rank;
    return rank / kRankBits == index ? 1u << rank % kRankBits : 0;
  }
  JAX_EP_HD bool Has(int rank) const {
    if (kWords == 1) return (words[0] >> rank & 1) != 0;
    return (Word(rank / kRankBits) >> rank % kRankBits & 1) != 0;
  }
  JAX_EP_HD bool IsEmpty() const {
    uint32_t all = 0;
    for (int i = 0; i < kWords; ++i) all |= words[i];
    return all == 0;
  }
  JAX_EP_HD RankWords And(const RankWords& others) const {
    RankWords both{};
    for (int i = 0; i < kWords; ++i) both.words[i] = words[i] & others.words[i];
    return both;
  }
  JAX_EP_HD RankWords Without(const RankWords& others) const {
    RankWords rest{};
    for (int i = 0; i < kWords; ++i) rest.words[i] = words[i] & ~others.words[i];
    return rest;
  }
  JAX_EP_HD bool operator==(const RankWords& other) const {
    bool equal = true;
    for (int i = 0; i < kWords; ++i) equal &= words[i] == other.words[i];
    return equal;
  }
  // Returns the ranks of the first word that has any.
  JAX_EP_HD RankBits FirstBits() const {
    int word = 0;
    while (word < kWords - 1 && words[word] == 0) ++word;
    return {word, words[word]};
  }
};

// Returns how many words have the bits of a group's ranks.
JAX_EP_HD inline int WordsForRanks(int num_ranks) { return (num_ranks + kRankBits - 1) / kRankBits; }

// Any ranks of any group.
using RankSet = RankWords<kMaxRanks / kRankBits>;

}  // namespace jax_ep
