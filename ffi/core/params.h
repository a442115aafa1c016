// The operands and results of one rank's op: pointers and sizes, filled in by the handlers. Shapes in
// brackets use the notation of index.h. All index arrays are int32.
//
// A push and a pull have two structs. Operands are plain, and kernels take them by value. Params add the
// arrays whose number the program determines.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/index.h"

namespace jax_ep {

// Floating types whose rows can be summed. Other types are cast to one of these before the call.
enum class Float : int32_t { kF16, kBF16, kF32, kF64 };

JAX_EP_HD inline int64_t BytesOf(Float type) { return type == Float::kF64 ? 8 : type == Float::kF32 ? 4 : 2; }

// Router output: ids are int32 or int64.
struct TopkIds {
  const void* data;  // [T, K]
  bool is_int64;
};

struct LayoutParams {
  Shape shape;
  int32_t ranks_per_domain;
  TopkIds topk_idx;
  int32_t* num_tokens_per_rank;    // [R]
  int32_t* num_tokens_per_domain;  // [R / ranks_per_domain]
  int32_t* num_tokens_per_expert;  // [E]
  bool* is_token_in_rank;          // [T, R]
};

// The operands of a placement of redundant experts, equal on all ranks except for `source` and `ends`. A
// physical expert is an instance of a logical one. Each rank has L + S of them: first its L home experts,
// then S redundant ones.
struct BalanceParams {
  int32_t num_ranks;              // R
  int32_t num_experts;            // E logical experts
  int32_t num_redundant_experts;  // S of each rank
  int32_t tolerance;              // thousandths of the mean by which a rank's rows may exceed the mean
  int32_t min_rows;               // fewest rows that are worth a move
  const int32_t* counts;          // [R, E] rows that each rank has for each logical expert
  const int32_t* source;          // [1] the rank of `ends`, limited to 0 ... R - 1
  int32_t* physical_to_logical;   // [P], -1 unused
  int32_t* quotas;                // [P] rows that each physical expert computes
  int32_t* order;                 // [P] physical experts by logical expert, then rank; unused ones last
  int32_t* ends;                  // [P] rows of `source`, by logical expert, that go to order[: i + 1]

  JAX_EP_HD int32_t num_local_experts() const { return num_experts / num_ranks; }
  JAX_EP_HD int32_t physical_per_rank() const { return num_local_experts() + num_redundant_experts; }
  JAX_EP_HD int32_t num_physical_experts() const { return num_ranks * physical_per_rank(); }
};

// An array whose rows are moved bit for bit.
struct Payload {
  const std::byte* in;  // [T, row_bytes]
  std::byte* out;       // [C, row_bytes], at the receiver
  int64_t row_bytes;
  int32_t dtype;  // XLA's number of the type: all ranks must agree on it, and nothing else depends on it
};

// The positions of a routing's rows. A push that routes writes them, and all later ops read them.
struct HandleArrays {
  int32_t* topk_idx;            // [T, K] routed expert, -1 unused
  int32_t* sent_rows;           // [T, R] or [T, K]: row in the receiver's buffer, -1 none or dropped
  int32_t* rank_prefix_matrix;  // [R, R]: [s, d] = rows that ranks 0..s send to d, before drops
  // [L] choices that fell on each local expert, before drops. kPlaced: [C / alignment] rows that arrive in
  // each place, the first ones of the place.
  int32_t* expert_counts;
  int32_t* received_rows;  // [R * T, K] by expert: row at this rank of each choice of all tokens, -1 none
};

// The ranks that take part in an op that some ranks may miss. All null: all ranks take part.
struct Attendance {
  const int32_t* active_ranks;  // [R] 0: the rank is treated as absent
  int32_t* active_after;        // [R] the same, and 0 for ranks that were late; present if `active_ranks` is
  bool masks;                   // leave out a rank that is late; otherwise the op fails
  float* wait_us;               // [R] microseconds until each rank arrived; or null

  JAX_EP_HD bool is_active(int32_t rank) const { return active_ranks == nullptr || active_ranks[rank] != 0; }
};

// Elements of an FP8 operand that share a scale, along a dimension that has scales.
constexpr int kFp8Block = 128;
// Returns the bytes of FP8 values, whole blocks of them, with their scales.
JAX_EP_HD inline int64_t Fp8Bytes(int64_t values) {
  return values + values / kFp8Block * static_cast<int64_t>(sizeof(float));
}
// The least value of the largest magnitude in a block of rows or sums, of which the scale is 1 / 448.
constexpr float kFloorOfRows = 1e-4f;

// The conversion of rows that a push sends, or of the sums that a pull brings back.
enum class Quantize : int32_t {
  kNone = 0,
  kFp8 = 1,         // e4m3 values, and a scale for each kFp8Block elements
  kFp8Rounded = 2,  // the same, scales rounded up to powers of two
};

// The operands of a push, which carries rows from their tokens to their destinations. A push either routes,
// which means that it computes the destinations, or follows a handle.
struct PushOperands {
  Shape shape;
  int32_t rank;
  const MeshPosition* position_operand;  // computed by the program
  HandleArrays handle;                   // written by a push that routes, otherwise read
  int32_t num_payloads;
  const float* topk_weights;  // [T, K], or null
  float* arrived_weights;  // [C, K] by rank, [C] by expert, or null; of a push that scales the dot products

  // Set by a push that routes; otherwise null.
  TopkIds topk_idx;
  int32_t* arrived_idx;        // [C, K] by rank; by expert null
  int32_t* tokens_per_expert;  // [L] kept (row, k) pairs of each local expert
  int32_t* group_sizes;        // [L] by expert; by rank null
  int32_t* num_tokens;         // [1] kept rows
  int32_t* num_dropped;        // [1] dropped rows
  int32_t* chunk_counts;       // [NumChunks, NumBins] scratch of the kernels
  Attendance attendance;
  // Unless it is kNone there are two payloads, values and scales, both computed from the first payload's
  // `in`.
  Quantize quantize;
  Float quantized_type;  // of `in`

  // Set by a push that scales, which follows a handle by expert; otherwise null. Each row arrives multiplied
  // by the weight of its destination. arrived_weights receive the dot products of the unscaled rows with the
  // factors.
  const float* row_weights;  // [C]
  Float factor_type;         // of all payloads and factors

  JAX_EP_HD bool routes() const { return topk_idx.data != nullptr; }
  JAX_EP_HD bool scales() const { return row_weights != nullptr; }
};

struct PushParams : PushOperands {
  std::vector<Payload> payloads;
  std::vector<const void*> factors;  // [C, ...], one array for each payload of a push that scales
};

// An array whose rows are summed.
struct Summand {
  const void* rows;  // [C, num_elements], at the receiver of the push
  void* out;         // [T, num_elements]
  int64_t num_elements;
  Float type;
  // Scratch: sums of a token's rows at one rank, or null. By expert [R * T, num_elements]. If the sums are
  // quantized, FP8 values [rows, num_elements], then scales [rows, num_elements / kFp8Block]: a row for each
  // token of all ranks by expert, for each row of the buffer otherwise (Shape::num_partials).
  void* partial;
};

struct Bias {
  const void* data;  // [T, num_elements] of the one summand
  Float type;
};

// The operands of a pull, which brings each token's rows back and sums them.
struct PullOperands {
  Shape shape;
  int32_t rank;
  const MeshPosition* position_operand;
  HandleArrays handle;
  int32_t num_summands;
  // Unless it is kNone, the sum of a token's rows at each rank is rounded to FP8, and there are no weights to
  // return.
  Quantize quantize;
  const float* row_weights;  // [C] by expert, or null: the factor of each row
  bool folds;  // the kernels first sum a token's rows at each rank, into the summands' `partial`
  int32_t num_biases;
  const float* arrived_weights;  // [C, K] by rank, [C] by expert, or null: sent back to their tokens
  float* topk_weights;           // [T, K] where they arrive, 0 where a choice has no row
  Attendance attendance;
};

struct PullParams : PullOperands {
  std::vector<Summand> summands;
  std::vector<Bias> biases;
};

// The operands of a gather, which sends all rows of every rank to every rank.
struct GatherParams {
  int32_t num_ranks;
  int32_t rank;
  const MeshPosition* position_operand;
  const std::byte* in;  // [rows, row_bytes], a multiple of 16 bytes in total
  std::byte* out;       // [R, rows, row_bytes]
  int64_t rows;
  int64_t row_bytes;
};

// The operands of a permute, from rank order to expert order on one device: a push within a group of one
// rank.
struct PermuteParams {
  Shape shape;                // of one rank; T is the number C of input rows, and the capacity is P
  TopkIds topk_idx;           // [C, K] local experts
  const float* topk_weights;  // [C, K], or null
  const Payload* payloads;    // in [C, ...], out [P, ...]
  int32_t num_payloads;
  int32_t* row_map;            // [C, K] row of each (row, k), -1 none or dropped
  float* row_weights;          // [P], or null
  int32_t* group_sizes;        // [L]
  int32_t* tokens_per_expert;  // [L]
  int32_t* num_dropped;        // [1]
  int32_t* chunk_counts;       // [NumChunks, NumBins] scratch of the kernels
  int32_t* routed_idx;         // [C, K] scratch, directly after chunk_counts
};

// The operands of a repermute: the same permutation, applied to another array. With weights, as in the
// gradient of unpermute, each row is also scaled.
struct RepermuteParams {
  int32_t num_rows;           // C
  int32_t top_k;              // K
  int32_t num_permuted;       // P
  const int32_t* row_map;     // [C, K]
  Payload payload;            // in [C, ...], out [P, ...]
  uint8_t* written;           // [P] scratch of the kernels: 1 if a choice maps to the row
  const float* topk_weights;  // [C, K] factor of each choice's row, or null: rows are copied unchanged
  // Used with weights only.
  Float type;           // of payload and factors
  const void* factors;  // [P, ...]
  float* dots;          // [C, K] dot product of the two rows of each choice, 0 if it has no row
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

// The size of a group, of those that a program passes. If `rows_per_group` is not 0, each group has so many
// rows, of which it fills the first ones, so group l begins at row l * rows_per_group. If it is 0, groups
// follow each other.
JAX_EP_HD inline int32_t SizeOfGroup(const int32_t* group_sizes, int64_t group, int32_t rows_per_group) {
  const int32_t size = group_sizes[group] > 0 ? group_sizes[group] : 0;
  return rows_per_group > 0 && size > rows_per_group ? rows_per_group : size;
}

// Conversion to FP8 (e4m3) with scales, of rows or of matrices, as they lie and transposed.
struct QuantizeParams {
  const void* x;          // rows [C, M], or matrices [L, C, M]
  Float type;             // of x without scales; not float64
  const float* x_scales;  // of x in FP8: of 128 elements of a row [C, M / 128]; otherwise null
  bool of_matrices;       // a scale belongs to 128 x 128 elements
  bool rounds;            // scales are powers of two
  float floor;            // least value of the largest magnitude in a block
  int32_t num_matrices;   // L
  int32_t num_rows;       // C
  int32_t width;          // M
  uint8_t* values;        // like x, or null
  float* scales;  // of 128 elements of a row [C, M / 128], or of matrices [L, C / 128, M / 128]; or null
  uint8_t* transposed;  // of rows [M, C'], of matrices [L, M, C]; or null
  // Of 128 rows of a column [C' / 128, M]; null for matrices.
  float* transposed_scales;
  int32_t num_columns;  // C', or C
  const int32_t*
      group_sizes;  // [L] of rows: in the transpose, each group begins at a multiple of 128; or null
  int32_t num_groups;
  int32_t rows_per_group;  // as in SizeOfGroup; 0 if group_sizes is null
};

// An array converted to FP8: as it lies [C, M], with scales of 128 elements of a row, and transposed [M, C'],
// with scales of 128 rows of a column. Null if it is not asked for.
struct QuantizedResults {
  uint8_t* values;
  float* scales;  // [C, M / 128]
  uint8_t* transposed;
  float* transposed_scales;  // [C' / 128, M]
};

// The activations of gated experts: of a gate, times an up projection.
enum class Activation : int32_t {
  kSilu = 0,
  kGelu = 1,     // the tanh approximation
  kClipped = 2,  // gpt-oss: gate at most 7, up within 7, (up + 1) * gate * sigmoid(1.702 * gate)
};

// The activation of bfloat16 rows as FP8 rows, or as FP8 columns with its gradient.
struct QuantizeGatedParams {
  Activation activation;
  bool rounds;           // scales are powers of two
  float floor;           // least value of the largest magnitude in a block of d_z
  const void* z;         // [C, 2F] gate, then up
  const void* d_hidden;  // [C, F] the cotangent of the activation, or null
  const int32_t* group_sizes;
  int32_t num_groups;
  int32_t rows_per_group;   // as in SizeOfGroup
  int32_t num_rows;         // C
  int32_t width;            // F
  int32_t num_columns;      // C': each group begins at a multiple of 128
  QuantizedResults hidden;  // [C, F]; transposed if d_hidden is given
  QuantizedResults d_z;     // [C, 2F]
};

// The grouped products of a rank's rows, which are stored group by group.
enum class GroupedDot : int32_t {
  kRows = 0,            // [C, N]: rows [C, M] times their group's matrix of others [L, M, N]
  kRowsTransposed = 1,  // [C, M]: rows [C, N] times its transpose
  kWeights = 2,         // [L, M, N]: rows [C, M], transposed, times others [C, N], group by group
};

// Returns the size of the scratch: tensor map descriptors for 256 SMs, nine numbers for each group, and the
// scales of FP8 rows transposed, if there are any ([C, N / 128] become [N / 128, C], C rounded up to 4).
JAX_EP_HD inline int64_t GroupedDotScratchBytes(int64_t num_groups, int64_t num_rows = 0,
                                                int64_t blocks = 0) {
  return (128 << 10) + 80 * num_groups + (num_rows + 3) / 4 * 16 * blocks;
}

struct GroupedDotParams {
  GroupedDot product;
  Float type;                  // of out, and of rows and others unless they have scales; not float64
  bool allow_tf32;             // products of float32 may round their operands to tf32
  int32_t num_rows;            // C
  int32_t num_groups;          // L
  int32_t num_home;            // the groups, from the first on, whose matrices are not in `redundant`
  int32_t inner;               // width of rows
  int32_t outer;               // width of out
  int32_t matrix_width;        // N, or of kRowsTransposed M: at least outer, if out has only some columns
  const int32_t* group_sizes;  // [L]
  int32_t rows_per_group;      // as in SizeOfGroup. Transposed FP8 rows follow each other in any case
  const int32_t* first_row;    // the first row of the first group; null: 0. Ignored with rows_per_group
  const void* rows;
  const void* others;
  // Scales of FP8 (e4m3) operands; otherwise null. For kRowsTransposed a scale belongs to 128 elements of a
  // row [C, N / 128], and to 128 x 128 elements of a matrix [L, M / 128, N / 128]. kWeights takes both
  // operands transposed, [M, C] and [N, C], and a scale belongs to 128 rows of a column [C / 128, M] and [C /
  // 128, N]. There each group begins at a multiple of 128. kRows has no FP8.
  const float* row_scales;
  const float* other_scales;
  void* out;
  // The matrices of the groups from num_home on, [L - num_home, M, N] as in others, or in out of kWeights;
  // and their scales.
  void* redundant;
  const float* redundant_scales;
  void* scratch;     // [GroupedDotScratchBytes(L, ...)] of the kernels
  bool clears_rows;  // rows of out that belong to no group are zero; otherwise they may be undefined
  int32_t num_sms;   // most SMs to use; 0: all

  // Returns the matrix of a group, of `size` elements, or its scales.
  template <typename T>
  JAX_EP_HD T* OfGroup(T* home, const void* redundant_ones, int64_t group, int64_t size) const {
    if (group < num_home) return home + group * size;
    return const_cast<T*>(static_cast<const T*>(redundant_ones)) + (group - num_home) * size;
  }
};

}  // namespace jax_ep
