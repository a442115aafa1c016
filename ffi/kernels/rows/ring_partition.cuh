// The decision whether an op's rows go through rings (ring.cuh), and the division of a block's warps and
// shared memory among them.
#pragma once

#include <algorithm>

#include "kernels/launch/device.h"
#include "kernels/launch/plan.h"
#include "kernels/ptx/bulk.cuh"

namespace jax_ep::cuda {

constexpr int kMaxSlots = 32;      // of a ring
constexpr int kMinSlots = 4;       // with fewer, too few bytes would be in flight
constexpr int kMaxTeams = 4;       // of a block
constexpr int kMaxSummers = 7;     // warps of a team that process rows
constexpr int kMaxTeamWarps = 16;  // of all teams of a block
constexpr int kRingVectors = 4;    // 16-byte vectors of a row per thread

// The division of a block into teams, and the size of a slot.
struct RingPartition {
  int32_t teams;       // 0: no rings
  int32_t summers;     // warps of a team that process rows
  int32_t slots;       // of a team
  int32_t slot_bytes;  // a multiple of 128

  JAX_EP_HD int threads() const { return teams * (summers + 1) * kWarp; }
  JAX_EP_HD int64_t bytes() const { return int64_t{teams} * slots * slot_bytes; }
  // Returns the number of 16-byte vectors of a row that fit in a slot.
  JAX_EP_HD int vectors() const { return summers * kRingVectors * kWarp; }
};

// The sizes of the rows of an op's arrays, in bytes.
struct RowBytes {
  int count = 0;
  int64_t sum = 0, shortest = 0, longest = 0;
  bool in_bulk = true;  // bulk copies can take all of them

  void Add(int64_t bytes) {
    shortest = count++ == 0 ? bytes : std::min(shortest, bytes);
    longest = std::max(longest, bytes);
    sum += bytes;
    in_bulk = in_bulk && IsBulkRow(bytes);
  }
};

// Divides `shared_bytes` of shared memory into rings for the longest rows, with as many slots as fit. Long
// rows are split into parts of about equal size. Some ranks may use rings while others do not.
inline RingPartition PartitionForRings(const Shape& shape, const RowBytes& rows, int64_t shared_bytes,
                                       bool scales, const Device& device) {
  constexpr int64_t kSummerBytes = int64_t{16} * kRingVectors * kWarp;
  const bool suits = device.force_bulk_path || SuitsRings(shape, static_cast<double>(rows.shortest), scales);
  if (!suits || !rows.in_bulk || rows.longest == 0 || !device.copies_in_bulk) return {};
  const auto ceiling = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int64_t parts = ceiling(rows.longest, kMaxSummers * kSummerBytes);
  RingPartition partition{};
  partition.summers = static_cast<int32_t>(ceiling(ceiling(rows.longest, parts), kSummerBytes));
  partition.teams = std::min(kMaxTeams, kMaxTeamWarps / (partition.summers + 1));
  partition.slot_bytes =
      static_cast<int32_t>(AlignUp(std::min(rows.longest, partition.summers * kSummerBytes), 128));
  const int64_t slots = shared_bytes / (int64_t{partition.teams} * partition.slot_bytes);
  partition.slots = static_cast<int32_t>(std::min(slots, int64_t{kMaxSlots}));
  return partition.slots < kMinSlots ? RingPartition{} : partition;
}

}  // namespace jax_ep::cuda
