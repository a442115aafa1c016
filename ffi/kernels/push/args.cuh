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
struct PushArgs : PushOperands {
  Peers peers;
  Payload payloads[kMaxPayloads];
  const void* factors[kMaxPayloads];
  BulkPlan bulk;
  RingPlan ring;        // of a push that scales
  int32_t num_senders;  // blocks that send; the others clear rows that no token fills
  // By expert one row travels for all of a token's rows at a rank, which the receiver spreads, wave by wave.
  bool spreads;
  bool sends_received_rows;  // received_rows, which are the handle's if routed earlier
  Waves waves;
  Batches batches;        // that blocks send
  bool counts_in_kernel;  // every block counts all tokens, as one chunk: few tokens; others are counted
                          // beforehand
  int32_t element_bytes;  // bytes of an element that becomes FP8 on the way, before that; otherwise 1

  // Whether it is a permute, which has no peers.
  JAX_EP_HD bool is_local() const { return peers.num_ranks == 0; }
};

}  // namespace jax_ep::cuda
