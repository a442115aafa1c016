// What one rank brings to an op: plain pointers and sizes, filled in by the handlers.
// Shapes in brackets use the notation of index.h; all index arrays are int32.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/index.h"

namespace jax_ep {

// Floating types whose rows can be summed. Others are cast to one of these before the call.
enum class Float : int32_t { kF16, kBF16, kF32, kF64 };

JAX_EP_HD inline int64_t BytesOf(Float type) { return type == Float::kF64 ? 8 : type == Float::kF32 ? 4 : 2; }

// Router output: ids are int32 or int64.
struct TopkIds {
  const void* data;  // [T, K]
  bool is_int64;
};

struct LayoutParams {
  Shape shape;
  int32_t ranks_per_node;
  TopkIds topk_idx;
  int32_t* num_tokens_per_rank;    // [R]
  int32_t* num_tokens_per_node;    // [R / ranks_per_node]
  int32_t* num_tokens_per_expert;  // [E]
  bool* is_token_in_rank;          // [T, R]
};

// One array whose rows are moved bit for bit.
struct Payload {
  const std::byte* in;  // [T, row_bytes]
  std::byte* out;       // [C, row_bytes], at the receiver
  int64_t row_bytes;
  int32_t dtype;  // XLA's number of it: all ranks must agree, nothing depends on it
};

// Where each row of a routing lies. Written by a push that routes, read by everything after it.
struct HandleArrays {
  int32_t* topk_idx;            // [T, K] routed expert, -1 unused
  int32_t* sent_rows;           // [T, R] or [T, K]: row in the receiver's buffer, -1 none or dropped
  int32_t* rank_prefix_matrix;  // [R, R]: [s, d] = rows that ranks 0..s send to d, before drops
  int32_t* expert_counts;       // [L] choices that fell on each local expert, before drops
  int32_t* received_rows;       // [R * T, K] by expert: row here of each choice of all ranks' tokens, -1 none
};

// Which ranks take part in an op that some may miss. All null: all ranks do.
struct Attendance {
  const int32_t* active_ranks;  // [R] 0: the rank is as if it were not there
  int32_t* active_after;        // [R] the same, and 0 for those that did not come in time; where the above is
  bool masks;                   // a rank that does not come in time is left out; or else the op fails
  float* wait_us;               // [R] microseconds until each rank had come; or null

  JAX_EP_HD bool is_active(int32_t rank) const { return active_ranks == nullptr || active_ranks[rank] != 0; }
};

// Elements along a dimension of FP8 operands that share a scale, where that dimension has scales.
constexpr int kFp8Block = 128;

// What a push does to its rows on the way.
enum class Quantize : int32_t {
  kNone = 0,
  kFp8 = 1,         // rows become e4m3 values, and a scale for each kFp8Block elements
  kFp8Rounded = 2,  // the same, scales rounded up to powers of two
};

// Rows from their tokens to their places. A push either routes, which is to find out where those are, or goes
// along a handle.
struct PushOperands {
  Shape shape;
  int32_t rank;
  const MeshPosition* position_operand;  // as the program computed it
  HandleArrays handle;                   // written by a push that routes, otherwise read
  int32_t num_payloads;
  const float* topk_weights;  // [T, K], or null
  float* arrived_weights;     // [C, K] by rank, [C] by expert, or null

  // Of a push that routes; else null.
  TopkIds topk_idx;
  int32_t* arrived_idx;        // [C, K] by rank, else null
  int32_t* tokens_per_expert;  // [L] kept (row, k) pairs of each local expert
  int32_t* group_sizes;        // [L] by expert, else null
  int32_t* num_tokens;         // [1] kept rows
  int32_t* num_dropped;        // [1] dropped rows
  int32_t* chunk_counts;       // [NumChunks, NumBins] scratch of the kernels
  Attendance attendance;
  // Unless kNone there are two payloads, values and scales, both of which are made of the first one's `in`.
  Quantize quantize;
  Float quantized_type;  // of `in`

  // Of a push that scales, along a handle by expert; else null. Each row arrives times the weight of its
  // place, and arrived_weights take the dot products of the rows, not scaled, with the factors.
  const float* row_weights;  // [C]
  Float factor_type;         // of all payloads and factors

  JAX_EP_HD bool routes() const { return topk_idx.data != nullptr; }
  JAX_EP_HD bool scales() const { return row_weights != nullptr; }
};

struct PushParams : PushOperands {
  const Payload* payloads;
  const void* const* factors;  // [C, ...] each, one for each payload of a push that scales
};

// One array whose rows are summed.
struct Summand {
  const void* rows;  // [C, num_elements], at the receiver of the push
  void* out;         // [T, num_elements]
  int64_t num_elements;
  Float type;
  void* partial;  // [R * T, num_elements] scratch of the kernels by expert: sums of a token's rows here, or
                  // null
};

struct Bias {
  const void* data;  // [T, num_elements] of the one summand
  Float type;
};

// Each token's rows back from their places, summed.
struct PullOperands {
  Shape shape;
  int32_t rank;
  const MeshPosition* position_operand;
  HandleArrays handle;
  int32_t num_summands;
  const float* row_weights;  // [C] by expert, or null: the factor of each row
  bool folds;  // the kernels first sum a token's rows where they lie, in the summands' `partial`
  int32_t num_biases;
  const float* arrived_weights;  // [C, K] by rank, [C] by expert, or null: taken back to ...
  float* topk_weights;           // ... [T, K], 0 where a choice has no row
  Attendance attendance;
};

struct PullParams : PullOperands {
  const Summand* summands;
  const Bias* biases;
};

// All rows of every rank to every rank.
struct GatherParams {
  int32_t num_ranks;
  int32_t rank;
  const MeshPosition* position_operand;
  const std::byte* in;  // [rows, row_bytes], a multiple of 16 bytes in all
  std::byte* out;       // [R, rows, row_bytes]
  int64_t rows;
  int64_t row_bytes;
};

// Rank order to expert order on one device: a push within a group of one rank.
struct PermuteParams {
  Shape shape;                // one rank; T stands for the C rows that come in, C for P
  TopkIds topk_idx;           // [C, K] local experts
  const float* topk_weights;  // [C, K], or null
  const Payload* payloads;    // in [C, ...], out [P, ...]
  int32_t num_payloads;
  int32_t* row_map;            // [C, K] row of each (row, k), -1 none or dropped
  float* row_weights;          // [P], or null
  int32_t* group_sizes;        // [L]
  int32_t* tokens_per_expert;  // [L]
  int32_t* num_dropped;        // [1]
  int32_t* chunk_counts;       // [NumChunks, NumBins] scratch of the kernels ...
  int32_t* routed_idx;         // ... and [C, K] behind it
};

// The same permutation again, for another array. With weights, as in the gradient of unpermute, each row is
// scaled on the way.
struct RepermuteParams {
  int32_t num_rows;           // C
  int32_t top_k;              // K
  int32_t num_permuted;       // P
  const int32_t* row_map;     // [C, K]
  Payload payload;            // in [C, ...], out [P, ...]
  uint8_t* written;           // [P] scratch of the kernels: whether a row is one of a choice
  const float* topk_weights;  // [C, K] factor of each choice's row, or null: rows as they are
  // With weights only.
  Float type;           // of the payload and of ...
  const void* factors;  // ... [P, ...]
  float* dots;          // [C, K] of each choice the dot product of its two rows, 0 if it has none
};

struct UnpermuteParams {
  int32_t num_rows;           // C
  int32_t top_k;              // K
  int32_t num_local_experts;  // L
  int32_t num_permuted;       // P
  const int32_t* row_map;     // [C, K] row of y, -1 none
  Summand y;                  // rows [P, H], out [C, H]
  Float out_type;
  const float* topk_weights;  // [C, K], or null
  const Bias* bias;           // [L, H], or null
  TopkIds topk_idx;           // [C, K] local experts; read only with a bias
};

// What a grouped product makes of a rank's rows, which lie group by group.
enum class GroupedDot : int32_t {
  kRows = 0,            // [C, N]: rows [C, M] times their group's matrix of others [L, M, N]
  kRowsTransposed = 1,  // [C, M]: rows [C, N] times its transpose
  kWeights = 2,         // [L, M, N]: rows [C, M], transposed, times others [C, N], group by group
};

// Room for the descriptors of bulk tensor copies of 256 SMs, and for nine numbers of each group.
JAX_EP_HD inline int64_t GroupedDotScratchBytes(int64_t num_groups) { return (128 << 10) + 80 * num_groups; }

struct GroupedDotParams {
  GroupedDot product;
  Float type;                  // of out, and of rows and others if they have no scales; not float64
  int32_t num_rows;            // C
  int32_t num_groups;          // L
  int32_t inner;               // width of rows
  int32_t outer;               // width of out
  const int32_t* group_sizes;  // [L]
  const void* rows;
  const void* others;
  // Of FP8 (e4m3) operands, which only kRowsTransposed has; else null. A scale belongs to 128 elements of a
  // row [C, N / 128], and to 128 x 128 elements of a matrix [L, M / 128, N / 128].
  const float* row_scales;
  const float* other_scales;
  void* out;
  void* scratch;    // [GroupedDotScratchBytes(L)] of the kernels
  int32_t num_sms;  // most SMs to take; 0: all
};

}  // namespace jax_ep
