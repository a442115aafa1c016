// The arguments of the push kernels.
#pragma once

#include "kernels/few_tokens/partition.cuh"
#include "kernels/protocol/session.cuh"
#include "kernels/rows/ring_partition.cuh"

namespace jax_ep::cuda {

constexpr int kMaxSliceTokens = 4;

// The division of a block that copies in bulk. Its first warps have two stages of shared memory each.
struct BulkPartition {
  int32_t num_warps;    // 0: rows are sent by loads and stores
  int32_t num_sending;  // warps that send, one slice at a time each
  int32_t stage_bytes;
  int32_t num_payloads;  // leading payloads whose long rows are copied in bulk
  // Consecutive tokens that a warp sends at a time. A stage holds a short row of each of them.
  int32_t slice_tokens;
};

// The arguments of a push, routed now or earlier, to peers or on one device: of PushKernel, and of
// FewTokensPushKernel, which uses the operands, peers and payloads, and the last members. Passed by value as
// the kernels' parameter.
struct PushArgs : PushOperands {
  Peers peers;
  Payload payloads[kMaxPayloads];
  const void* factors[kMaxPayloads];
  BulkPartition bulk;
  RingPartition ring;   // used by a push that scales
  int32_t num_senders;  // blocks that send; the others clear unfilled rows. 0 if rows are scaled in place
  // One row travels for all of a token's rows at a rank. The receiver spreads it to the others, or scales it,
  // wave by wave.
  bool spreads;
  bool sends_received_rows;  // send received_rows; a handle already has them
  Waves waves;
  Batches batches;        // of tokens, which the blocks send
  bool counts_in_kernel;  // few tokens: every block counts all of them, as one chunk; otherwise CountKernel
                          // counts
  int32_t element_bytes;  // before the conversion to FP8; 1 if rows are not converted

  // Of a push of few tokens.
  FewTokensPartition few_tokens;
  int32_t slot_offsets[kMaxPayloads];  // of each payload's row in a slot
  // Part of each payload's row that one of the warps that share it copies, in vectors or bytes.
  int32_t slot_shares[kMaxPayloads];

  // Returns true if rows are scaled straight from their tokens, because none of them travels.
  JAX_EP_HD bool scales_in_place() const { return scales() && !spreads; }
  // Returns true for a permute, which has no peers.
  JAX_EP_HD bool is_local() const { return peers.num_ranks == 0; }
};

}  // namespace jax_ep::cuda
