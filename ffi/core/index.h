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
  kExpertPadded = 2,  // one row for each choice, in blocks of `alignment` rows, one block per local expert
  kPlaced = 3,  // one row for each (token, rank), where the handle puts it: the program makes the handle. The
                // buffer is divided into places of `alignment` rows
};

// The static part of a routing, equal on all ranks of a group.
struct Shape {
  Order order;
  int32_t num_ranks;    // R
  int32_t num_tokens;   // T
  int32_t top_k;        // K
  int32_t num_experts;  // E
  int32_t capacity;     // C
  int32_t alignment;  // kExpert: each expert's block starts at a multiple of it; kExpertPadded: rows of each
                      // block; kPlaced: rows of each place, a divisor of C

  JAX_EP_HD int32_t num_local_experts() const {
#if defined(__CUDA_ARCH__)
    // GPUs divide integers by many instructions. E is a multiple of R, so the quotient is near a whole
    // number.
    return __float2int_rn(__fdividef(static_cast<float>(num_experts), static_cast<float>(num_ranks)));
#else
    return num_experts / num_ranks;
#endif
  }
  JAX_EP_HD int32_t rank_of(int32_t expert) const {
#if defined(__CUDA_ARCH__)
    // On GPUs E is at most 4096, so the quotient's error is far below 0.5 / L, its distance from a whole
    // number.
    const float L = static_cast<float>(num_local_experts());
    return __float2int_rd(__fdividef(static_cast<float>(expert) + 0.5f, L));
#else
    return expert / num_local_experts();
#endif
  }

  // Returns true if a token has one row for each of its choices. Otherwise it has one row for each rank that
  // it goes to. That row stands for all of the token's choices at the rank, whose ids and weights travel with
  // it. Code reads these properties, never the order itself.
  JAX_EP_HD bool has_row_per_choice() const { return has_expert_blocks(); }
  // Returns true if the rows of each local expert form a block, which may be padded. Otherwise the rows of
  // each source rank do.
  JAX_EP_HD bool has_expert_blocks() const {
    return order == Order::kExpert || order == Order::kExpertPadded;
  }
  // Returns the length of a handle's expert_counts: the number of local experts, or of places.
  JAX_EP_HD int32_t num_counts() const {
    return order == Order::kPlaced ? capacity / alignment : num_local_experts();
  }
  // Returns true if each of these blocks has exactly `alignment` rows. Rows that do not fit are dropped.
  JAX_EP_HD bool has_fixed_blocks() const { return order == Order::kExpertPadded; }
  // Returns the rows of an expert's block, including padding, if the expert has `rows` rows.
  JAX_EP_HD int64_t BlockOf(int64_t rows) const {
    return has_fixed_blocks() ? alignment : AlignUp(rows, alignment);
  }
  // Returns the end of the rows that a local expert may have.
  JAX_EP_HD int32_t EndOf(int32_t local) const {
    return has_fixed_blocks() ? (local + 1) * alignment : capacity;
  }
  // Returns the number of columns of `sent_rows`.
  JAX_EP_HD int32_t rows_per_token() const { return has_row_per_choice() ? top_k : num_ranks; }
  // Returns the number of weights that arrive with a row.
  JAX_EP_HD int32_t weights_per_row() const { return has_row_per_choice() ? 1 : top_k; }
  // Returns true if a rank is alone: all rows stay in its memory.
  JAX_EP_HD bool is_alone() const { return num_ranks == 1; }
  // Returns true if a token may have several rows at a peer. One row travels for all of them: a push copies
  // it to the others where it arrives, and before a pull the peer sums them ("folds").
  JAX_EP_HD bool shares_rows() const { return has_row_per_choice() && top_k > 1 && !is_alone(); }
  // Returns the number of sums that a rank has for a pull that quantizes them: one for each token of all
  // ranks, or for each row of its buffer.
  JAX_EP_HD int64_t num_partials() const {
    return has_row_per_choice() ? int64_t{num_ranks} * num_tokens : capacity;
  }
};

// A device's position in the mesh of a program, an operand [2] of all ops that communicate. Devices that
// never exchange rows are in different lists. Ranks of a group that exchange rows must be in the same list.
struct MeshPosition {
  int32_t rank;
  int32_t list;
};

// Tokens that the kernels count together, as a chunk. The index of a row among a rank's rows is the start of
// its chunk plus its index within the chunk. A chunk has a bin for each expert, then a bin for each rank.
constexpr int32_t kChunkTokens = 64;
JAX_EP_HD inline int32_t NumChunks(const Shape& shape) {
  return (shape.num_tokens + kChunkTokens - 1) / kChunkTokens;
}
JAX_EP_HD inline int32_t NumBins(const Shape& shape) { return shape.num_experts + shape.num_ranks; }

// Returns the expert that an id names, or -1 if it is out of range, which marks the choice as unused. A token
// may name an expert several times. Each time counts as a separate choice.
template <typename Id>
JAX_EP_HD inline int32_t RoutedExpert(Id id, int32_t num_experts) {
  return id < 0 || id >= static_cast<Id>(num_experts) ? -1 : static_cast<int32_t>(id);
}

// Returns true if choice k is the token's first choice on its rank, so that the token counts for that rank
// once. `experts` are a token's routed experts (-1 unused).
JAX_EP_HD inline bool IsFirstOnRank(const int32_t* experts, int32_t k, int32_t num_local_experts) {
  const int32_t rank = experts[k] / num_local_experts;
  for (int32_t j = 0; j < k; ++j) {
    if (experts[j] >= 0 && experts[j] / num_local_experts == rank) return false;
  }
  return true;
}

// Returns how many of the rows [begin, end) lie inside a buffer of `capacity` rows.
JAX_EP_HD inline int32_t RowsKept(int64_t begin, int64_t end, int64_t capacity) {
  if (begin > capacity) begin = capacity;
  if (end > capacity) end = capacity;
  return static_cast<int32_t>(end - begin);
}

// Returns true if an entry of a handle names a row. A program may have changed the arrays of a handle, so
// their entries are checked before they are used as indices.
JAX_EP_HD inline bool IsRow(int32_t row, int32_t capacity) { return row >= 0 && row < capacity; }

JAX_EP_HD inline bool IsExpert(int32_t expert, int32_t num_experts) {
  return expert >= 0 && expert < num_experts;
}

}  // namespace jax_ep
