// The arguments of the push kernel.
#pragma once

#include "kernels/protocol/session.cuh"
#include "kernels/rows/ring_plan.cuh"

namespace jax_ep::cuda {

// How a block copies in bulk: its first warps have two stages of shared memory each.
struct BulkPlan {
  int32_t num_warps;    // 0: rows are sent by loads and stores
  int32_t num_sending;  // of them, a token each
  int32_t stage_bytes;
  int32_t num_payloads;  // of the first so many the long rows are copied so
};

// A push, routed now or earlier, to peers or on one device. By value in the kernel's parameters.
struct PushArgs {
  Shape shape;
  Peers peers;
  const MeshPlace* place_operand;
  HandleArrays handle;
  const int32_t* chunk_counts;  // null: routed earlier, sent_rows are final
  Payload payloads[kMaxPayloads];
  int32_t num_payloads;
  BulkPlan bulk;
  RingPlan ring;        // of a push that scales
  int32_t num_senders;  // blocks that send; the others clear what no row fills
  // By expert one row travels for all of a token's rows at a rank, which the receiver spreads, wave by wave.
  bool spreads;
  bool sends_map;  // received_rows, which are the handle's if routed earlier
  Waves waves;
  Batches batches;  // that blocks send
  // Few tokens are counted by every block for itself, as one chunk; others beforehand.
  bool counts_here;
  TopkIds topk_idx;
  // Unless kNone, rows of this type become FP8 on the way: values, and scales as a second payload. An element
  // has `width` bytes before; it is 1 where rows are moved as they are.
  Quantize quantize;
  Float quantized_type;
  int32_t width;
  const float* row_weights;
  const void* factors[kMaxPayloads];
  const float* topk_weights;
  float* arrived_weights;
  int32_t* arrived_idx;
  int32_t* tokens_per_expert;
  int32_t* group_sizes;
  int32_t* num_tokens;
  int32_t* num_dropped;
  float* wait_us;

  // Whether it finds out where the rows lie, or else goes along a handle.
  JAX_EP_HD bool routes() const { return chunk_counts != nullptr; }
  // Whether it is a permute, which meets nobody.
  JAX_EP_HD bool is_local() const { return peers.num_ranks == 0; }
};

}  // namespace jax_ep::cuda
