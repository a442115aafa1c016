// Spreads tokens, by expert: each token arrived once, and is copied from there to its other rows at this
// rank.
#pragma once

#include "kernels/push/scale.cuh"
#include "kernels/push/send.cuh"

namespace jax_ep::cuda {

constexpr int kSpreadWarps = 2;  // warps that share a row

// Copies one of `parts` parts of a token's row to its other rows. Called by a warp.
__device__ inline void CopyShared(const PushArgs& args, int p, const TokenRows& rows, int part, int parts,
                                  int lane) {
  const unsigned other_lanes = rows.lanes & (rows.lanes - 1);
  if (other_lanes == 0) return;
  const int64_t bytes = args.payloads[p].row_bytes;
  // Only rows of whole 16-byte vectors are divided.
  const int64_t size = bytes % 16 == 0 ? AlignUp((bytes + parts - 1) / parts, 16) : bytes;
  const int64_t offset = part * size;
  if (offset >= bytes) return;
  std::byte* const out = args.payloads[p].out + offset;
  const int64_t first = __shfl_sync(kAllLanes, rows.row, __ffs(rows.lanes) - 1);
  CopyBytes(out + first * bytes, min(size, bytes - offset), other_lanes, out + rows.row * bytes, lane);
}

// Copies of rows to their other rows by bulk copies: while one slice is stored, the next one is loaded. Used
// by one warp.
class BulkSpreader {
 public:
  __device__ BulkSpreader(const PushArgs& args, Stages& stages, int lane)
      : args_(args), stages_(stages), lane_(lane) {}

  // Starts to copy array p of a token's row.
  __device__ void Begin(int p, const TokenRows& rows) {
    const unsigned other_lanes = rows.lanes & (rows.lanes - 1);
    const int64_t bytes = args_.payloads[p].row_bytes, stage_bytes = args_.bulk.stage_bytes;
    std::byte* const out = args_.payloads[p].out;
    const int64_t first = __shfl_sync(kAllLanes, rows.row, __ffs(rows.lanes) - 1);
    for (int64_t offset = 0; offset < bytes && other_lanes != 0; offset += stage_bytes) {
      const uint32_t size = static_cast<uint32_t>(min(stage_bytes, bytes - offset));
      const int stage = stages_.used % 2;
      WaitForStoresRead();  // the previous stores were from this stage
      __syncwarp();
      if (lane_ == 0) BulkLoad(Staged(stage), out + first * bytes + offset, size, &stages_.barriers[stage]);
      End();
      ++stages_.used;
      size_ = size;
      to_ = (other_lanes >> lane_ & 1) != 0 ? out + rows.row * bytes + offset : nullptr;
    }
  }

  // Stores the slice that was loaded last.
  __device__ void End() {
    if (size_ == 0) return;
    const int last = stages_.used - 1;
    WaitForLoad(&stages_.barriers[last % 2], last / 2 % 2);
    if (to_ != nullptr) BulkStore(to_, Staged(last % 2), size_);
    CommitStores();
    size_ = 0;
  }

 private:
  __device__ std::byte* Staged(int stage) const { return stages_.bytes + stage * args_.bulk.stage_bytes; }

  const PushArgs& args_;
  Stages& stages_;
  int lane_;
  uint32_t size_ = 0;  // of the slice that was loaded last; 0 once it is stored
  std::byte* to_;      // destination of that slice for this lane, or null
};

// Spreads the tokens of all ranks in order, ticket by ticket, by warps that have nothing left to send or to
// clear. `Scale` is the type of rows to scale, or void. In bulk, only warps that have stages take part.
template <bool kInBulk, typename Scale>
__device__ void SpreadRows(const PushArgs& args, const Session& session, Stages& stages) {
  constexpr bool kScales = !std::is_void_v<Scale>;
  constexpr int kParts = kInBulk || kScales ? 1 : kSpreadWarps;
  const Shape& shape = args.shape;
  const int lane = threadIdx.x % kWarp;
  if (kInBulk && !kScales && threadIdx.x / kWarp >= args.bulk.num_warps) return;
  const TicketCounter tickets{&args.peers.own().spread};
  BulkSpreader spreader(args, stages, lane);
  int awaited_wave = -1;  // the wave waited for last; later tickets are never of an earlier wave
  unsigned requested = tickets.Request(lane);
  while (true) {
    const int ticket = TicketCounter::Broadcast(requested);
    const int i = ticket / kParts, t = i / shape.num_ranks;
    if (t >= shape.num_tokens) break;
    requested = tickets.Request(lane);  // overlaps with the work on this one
    if (args.spreads && args.waves.Of(t) != awaited_wave) {
      if (kInBulk) spreader.End();
      awaited_wave = args.waves.Of(t);
      if (!session.AwaitWave(awaited_wave)) break;
      if (kInBulk) FenceBulk();
    }
    const int64_t global_token = int64_t{i % shape.num_ranks} * shape.num_tokens + t;
    const TokenRows rows = FindTokenRows(args.handle.received_rows, shape, global_token, lane);
    if (rows.lanes == 0) continue;
    for (int p = 0; p < args.num_payloads; ++p) {
      if constexpr (kScales) {
        ScaleArray<Scale>(args, p, rows, global_token, lane);
      } else if (kInBulk && IsBulkRow(args.payloads[p].row_bytes)) {
        spreader.Begin(p, rows);
      } else {
        CopyShared(args, p, rows, ticket % kParts, kParts, lane);
      }
    }
  }
  TicketCounter::Settle(requested);  // in flight only if a wave has not come
  if (kInBulk) {
    spreader.End();
    WaitForStores();
  }
}

}  // namespace jax_ep::cuda
