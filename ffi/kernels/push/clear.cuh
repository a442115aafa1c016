// Clears the rows of a rank's buffers that no token fills: the tail and, by expert, the padding of each
// block. Of placed rows, the empty places.
#pragma once

#include "kernels/ptx/bulk.cuh"
#include "kernels/push/counts.cuh"

namespace jax_ep::cuda {

constexpr int kZeroBytes = 4 * 1024;        // per bulk store
constexpr int64_t kClearBytes = 16 * 1024;  // per ticket
// Warps of a block that clear in bulk: enough to keep the SM busy. More of them would delay the rows that the
// block spreads. They are the last warps, which have no stages to spread rows with. If rows are scaled by
// rings, the last teams start after they have cleared.
constexpr int kClearingWarps = 8;

// The rows that hold tokens: of each block, which is a local expert's or a place, the first `rows[i]`. By
// rank there is no block, and they are all rows before the tail.
struct FilledRows {
  const int32_t* rows;
  const int32_t* starts;  // [num_blocks + 1], the tail last; null: all blocks have `place_rows` rows
  int num_blocks;
  int place_rows;

  // Returns where a block starts, or the tail.
  __device__ int Start(int block) const { return starts == nullptr ? block * place_rows : starts[block]; }
};

// Returns the filled rows of this rank, according to the counts or the handle. By expert, the starts of this
// rank's blocks must have been computed.
__device__ inline FilledRows FindFilledRows(const PushArgs& args, const BinCounts& counts) {
  const Shape& shape = args.shape;
  const int R = shape.num_ranks, L = shape.num_local_experts(), me = args.peers.rank;
  const bool routes = args.routes();
  if (shape.order == Order::kPlaced) {
    return {args.handle.expert_counts, nullptr, shape.num_counts(), shape.alignment};
  }
  if (!shape.has_expert_blocks()) {
    const int32_t* const num_rows =
        routes ? &counts.totals[shape.num_experts + me] : &args.handle.rank_prefix_matrix[(R - 1) * R + me];
    return {nullptr, num_rows, 0, 0};
  }
  return {routes ? counts.totals + me * L : args.handle.expert_counts, counts.starts + me * (L + 1), L, 0};
}

// Returns the first row of the first place that is not full. Redundant experts fill the first
// places, so all rows before it are skipped without a ticket. Called by a warp.
__device__ inline int FindFirstEmpty(const FilledRows& filled, int lane) {
  for (int base = 0; base < filled.num_blocks; base += kWarp) {
    const int place = base + lane;
    const bool is_full = place >= filled.num_blocks || filled.rows[place] >= filled.place_rows;
    if (const unsigned gaps = __ballot_sync(kAllLanes, !is_full); gaps != 0) {
      return filled.Start(base + __ffs(static_cast<int>(gaps)) - 1);
    }
  }
  return filled.Start(filled.num_blocks);
}

// Zeroes bytes of this device's memory. If `zeros` is not null, this only starts bulk stores of its
// kZeroBytes. Called by a warp.
__device__ inline void ClearBytes(std::byte* data, int64_t bytes, const uint4* zeros, int lane) {
  const bool in_vectors = reinterpret_cast<uintptr_t>(data) % 16 == 0 && bytes % 16 == 0;
  if (in_vectors && zeros != nullptr) {
    for (int64_t at = 0; at < bytes && lane == 0; at += kZeroBytes) {
      BulkStore(data + at, zeros, static_cast<uint32_t>(min(int64_t{kZeroBytes}, bytes - at)));
    }
  } else {
    FillBytes(data, bytes, 0, lane, kWarp);
  }
}

// Clears rows [begin, end) of this rank's buffers. Called by a warp.
__device__ inline void ClearRows(const PushArgs& args, int64_t begin, int64_t end, const uint4* zeros,
                                 int lane) {
  if (begin >= end) return;
  for (int p = 0; p < args.num_payloads; ++p) {
    const int64_t bytes = args.payloads[p].row_bytes;
    ClearBytes(args.payloads[p].out + begin * bytes, (end - begin) * bytes, zeros, lane);
  }
  const int64_t per_row = args.shape.weights_per_row();
  for (int64_t i = begin * per_row + lane; i < end * per_row; i += kWarp) {
    if (args.arrived_weights != nullptr) args.arrived_weights[i] = 0.0f;
    if (args.arrived_idx != nullptr) args.arrived_idx[i] = -1;
  }
}

// Clears the unfilled rows among rows [begin, end). Called by a warp.
__device__ inline void ClearUnfilledWithin(const PushArgs& args, const FilledRows& filled, int64_t begin,
                                           int64_t end, const uint4* zeros, int lane) {
  const int n = filled.num_blocks;
  int block = 0;  // the last one that starts at or before `begin`; n is the tail
  for (int above = n; block < above;) {
    const int middle = (block + above + 1) / 2;
    if (filled.Start(middle) <= begin) {
      block = middle;
    } else {
      above = middle - 1;
    }
  }
  for (; block < n && filled.Start(block) < end; ++block) {
    ClearRows(args, max(begin, int64_t{filled.Start(block)} + filled.rows[block]),
              min(end, int64_t{filled.Start(block + 1)}), zeros, lane);
  }
  ClearRows(args, max(begin, int64_t{filled.Start(n)}), end, zeros, lane);
}

// Clears all rows that no token fills, in bulk if `zeros` is not null. The warps that clear, in blocks that
// do not send, take tickets for ranges of rows. The last rows come first, because most gaps are there.
// Without peers, each warp takes a fixed share.
__device__ inline void ClearUnfilled(const PushArgs& args, const BinCounts& counts, const uint4* zeros) {
  const bool in_bulk = zeros != nullptr;
  const int warps = static_cast<int>(blockDim.x) / kWarp, lane = threadIdx.x % kWarp;
  const int clearing = in_bulk ? kClearingWarps : warps;
  const int clearing_warp = static_cast<int>(threadIdx.x) / kWarp - (warps - clearing);
  if (clearing_warp < 0) return;
  const FilledRows filled = FindFilledRows(args, counts);
  int64_t row_bytes = 1;
  for (int p = 0; p < args.num_payloads; ++p) row_bytes += args.payloads[p].row_bytes;
  const int64_t rows = max(kClearBytes / row_bytes, int64_t{1}), capacity = args.shape.capacity;
  const bool padded =
      args.shape.has_expert_blocks() && (args.shape.alignment > 1 || args.shape.has_fixed_blocks());
  // The program may have changed the handle, so the start may be negative.
  const int64_t first = padded                     ? 0
                        : filled.starts == nullptr ? FindFirstEmpty(filled, lane)
                                                   : max(filled.starts[filled.num_blocks], 0);
  const bool local = args.is_local();
  const TicketCounter tickets{local ? nullptr : &args.peers.own().cleared};
  const int count = (static_cast<int>(gridDim.x) - args.num_senders) * clearing;
  int ticket = (static_cast<int>(blockIdx.x) - args.num_senders) * clearing + clearing_warp;
  for (int64_t end; (end = capacity - ticket * rows) > first;) {
    const unsigned requested = local ? 0 : tickets.Request(lane);
    ClearUnfilledWithin(args, filled, max(end - rows, first), end, zeros, lane);
    if (in_bulk) {
      CommitStores();
      WaitForStoresRead<1>();
    }
    ticket = count + (local ? ticket : TicketCounter::Broadcast(requested));
  }
  if (in_bulk) WaitForStores();
}

}  // namespace jax_ep::cuda
