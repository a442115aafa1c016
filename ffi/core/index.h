// Index arithmetic of expert parallelism, shared by the host ops and the CUDA kernels.
//
// Notation: R ranks, T tokens a rank, K top-k choices a token, E experts, L = E / R experts a rank,
// C rows of a receive buffer. Expert e lives on rank e / L.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define JAX_EP_HD __host__ __device__
#else
#define JAX_EP_HD
#endif

namespace jax_ep {

JAX_EP_HD inline int64_t AlignUp(int64_t rows, int64_t alignment) {
  return (rows + alignment - 1) / alignment * alignment;
}

// How the rows of a receive buffer are ordered.
enum class Order : int32_t {
  kRank = 0,          // one row for each (token, rank): by source rank, then token
  kExpert = 1,        // one row for each choice: by local expert, then source rank, then token, then k
  kExpertPadded = 2,  // the same, each expert's rows in a block of as many rows as the others'
};

// The static part of one routing, equal on all ranks of a group.
struct Shape {
  Order order;
  int32_t num_ranks;    // R
  int32_t num_tokens;   // T
  int32_t top_k;        // K
  int32_t num_experts;  // E
  int32_t capacity;     // C
  int32_t alignment;  // by expert each expert's block starts at a multiple of it; padded, it has as many rows

  JAX_EP_HD int32_t num_local_experts() const { return num_experts / num_ranks; }
  JAX_EP_HD int32_t rank_of(int32_t expert) const { return expert / num_local_experts(); }

  // What follows from the order; nothing else asks for it.
  // A token has a row for each of its choices, or else for each rank that it goes to: then the row stands for
  // all of the choices there, and their ids and weights travel with it.
  JAX_EP_HD bool has_row_per_choice() const { return order != Order::kRank; }
  // The rows of each local expert are a block, which is padded; or else those of each source rank are.
  JAX_EP_HD bool has_expert_blocks() const { return order != Order::kRank; }
  // Each of these blocks has `alignment` rows, and rows that it cannot hold are dropped.
  JAX_EP_HD bool has_fixed_blocks() const { return order == Order::kExpertPadded; }
  // Rows of the block of an expert that has `rows` rows.
  JAX_EP_HD int64_t BlockOf(int64_t rows) const {
    return has_fixed_blocks() ? alignment : AlignUp(rows, alignment);
  }
  // Where the rows that a local expert may have end at the latest.
  JAX_EP_HD int32_t EndOf(int32_t local) const {
    return has_fixed_blocks() ? (local + 1) * alignment : capacity;
  }
  // Columns of `sent_rows`.
  JAX_EP_HD int32_t rows_per_token() const { return has_row_per_choice() ? top_k : num_ranks; }
  // Weights that arrive with a row.
  JAX_EP_HD int32_t weights_per_row() const { return has_row_per_choice() ? 1 : top_k; }
  // Whether a rank may hold several rows of a token, which the kernels sum before they travel.
  JAX_EP_HD bool folds() const { return has_row_per_choice() && top_k > 1; }
};

// A device's place in the mesh of a program, an operand [2] of all ops that communicate. Devices whose rows
// are independent of each other's are in different lists, so that ranks of a group which exchange rows must
// be in the same one.
struct MeshPosition {
  int32_t rank;
  int32_t list;
};

// The kernels count a rank's tokens in chunks, so that the index of a row among a rank's own is that of
// its chunk plus that within it. A chunk has a bin for each expert, then one for each rank.
constexpr int32_t kChunkTokens = 64;
JAX_EP_HD inline int32_t NumChunks(const Shape& shape) {
  return (shape.num_tokens + kChunkTokens - 1) / kChunkTokens;
}
JAX_EP_HD inline int32_t NumBins(const Shape& shape) { return shape.num_experts + shape.num_ranks; }

// The expert that an id names, or -1 where it is out of range: the choice is unused. A token may name an
// expert several times; each is a choice of its own.
template <typename Id>
JAX_EP_HD inline int32_t RoutedExpert(Id id, int32_t num_experts) {
  return id < 0 || id >= static_cast<Id>(num_experts) ? -1 : static_cast<int32_t>(id);
}

// Whether choice k is the token's first on its rank, so that the token counts for that rank once.
// `experts` are a token's routed experts (-1 unused).
JAX_EP_HD inline bool IsFirstOnRank(const int32_t* experts, int32_t k, int32_t num_local_experts) {
  const int32_t rank = experts[k] / num_local_experts;
  for (int32_t j = 0; j < k; ++j) {
    if (experts[j] >= 0 && experts[j] / num_local_experts == rank) return false;
  }
  return true;
}

// The part of rows [begin, end) that lies inside a buffer of `capacity` rows.
JAX_EP_HD inline int32_t RowsKept(int64_t begin, int64_t end, int64_t capacity) {
  if (begin > capacity) begin = capacity;
  if (end > capacity) end = capacity;
  return static_cast<int32_t>(end - begin);
}

// Whether a handle's entry names a row. Handles are arrays that a program could have changed, so
// what is read from one is checked before it is used as an index.
JAX_EP_HD inline bool IsRow(int32_t row, int32_t capacity) { return row >= 0 && row < capacity; }

JAX_EP_HD inline bool IsExpert(int32_t expert, int32_t num_experts) {
  return expert >= 0 && expert < num_experts;
}

}  // namespace jax_ep
