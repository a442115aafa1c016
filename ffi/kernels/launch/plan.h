// The number of SMs that an op that communicates uses, and their division.
//
// A few SMs carry the rows over the links. Meanwhile the op works in device memory: it clears unfilled rows,
// and spreads or folds tokens' rows. This work gets as many SMs as it needs to end with the transfers, under
// uniform routing. The rates are those of an H200 (docs/performance.md). On other GPUs they are estimates,
// which `Group(num_sms=...)` can override.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "core/index.h"

namespace jax_ep {

struct SmPlan {
  int32_t links;
  int32_t local;  // 0 only if the op does nothing but carry rows

  int32_t total() const { return links + local; }
};

// Rates in bytes per microsecond: of a GPU's links in one direction, and of one SM that stores (at most),
// sends, converts to FP8 (counted in FP8 bytes), scales, folds or copies rows. kFoldRate and kCopyRate are
// lower than the hardware's, so that the links need not wait for this work. kFreeCopyRate is the hardware's
// rate.
constexpr double kLinkRate = 320e3;
constexpr double kStoreRate = 48e3;
constexpr double kSendRate = 40e3;
constexpr double kQuantizeRate = 18.5e3;
constexpr double kScaleRate = 15e3;
constexpr double kFoldRate = 21e3;
constexpr double kCopyRate = 30e3;
constexpr double kFreeCopyRate = 36e3;
// The factors by which the hardware is faster than these two rates. They matter if SMs are scarce, because
// all parts then wait for each other. Blocks that have sent all rows help to copy.
constexpr double kFoldSlack = 1.7;
constexpr double kCopySlack = 3;
// Minimum SMs that carry rows, as needed to fill the links (docs/performance.md). By expert, a sender
// notifies the peers of arrived rows, and the notification is later if more rows are in flight. A pull also
// sums, including the rank's own rows. By expert, the folds that run beside it slow it down.
constexpr int32_t kRankSenders = 12;
constexpr int32_t kExpertSenders = 20;
constexpr int32_t kScalingSenders = 16;
constexpr int32_t kQuantizingSenders = 20;
constexpr int32_t kPullers = 20;
constexpr int32_t kFoldingPullers = 24;
constexpr int32_t kFoldingPullersOfTwo = 15;  // with two ranks, sums of two rows have more loads in flight
// Values for rings (SuitsRings): pullers, and the rates at which an SM folds and scales. With two ranks the
// bottleneck is not the links but device memory, through which all rows pass. Its rates are for rows while
// the links are busy, and for zeros. Sums of more than two rows leave the ring emptier between sums. That
// cost has not been measured, so there are more pullers then.
constexpr int32_t kRingPullersOfTwo = 6;
constexpr int32_t kFoldingRingPullersOfTwo = 7;
constexpr int32_t kRingPullers = 12;
constexpr int32_t kFoldingRingPullers = 14;
constexpr double kRingFoldRate = 39.5e3;
constexpr double kRingScaleRate = 26e3;
constexpr double kRingFoldSlack = 1.25;
constexpr double kMemoryRate = 3000e3;
constexpr double kClearRate = 4460e3;
// Minimum sizes for which rings are faster. A ring has to be filled before the first sum ends, and each row
// has overhead.
constexpr int32_t kMinRingTokens = 1024;
constexpr double kMinRingRowBytes = 8192;  // bytes
// Most tokens for which latency dominates. A warp then sends one token at a time.
constexpr int32_t kFewTokens = 256;
constexpr int32_t kFewSms = 32;
// Placed rows are mostly a rank's own, which its memory, not its links, bounds. So all SMs move them. Of a
// push, one in this many clears the rows that stay empty, because the host does not know their number.
constexpr int32_t kAllSms = 1024;
constexpr int32_t kClearingShare = 4;
// Minimum time of an op. Below it an op is bound by latency, not by bytes.
constexpr double kMinMicroseconds = 10;

// Returns the rows that one rank receives if each token goes at most once to each rank, however many of
// its experts are there.
inline double ExpectedTokens(const Shape& shape) {
  const double ranks = shape.num_ranks;
  return ranks * shape.num_tokens * (1 - std::pow(1 - 1 / ranks, shape.top_k));
}

// Returns the rows that one rank receives in all. By rank they equal ExpectedTokens.
inline double ExpectedRows(const Shape& shape) {
  return shape.has_row_per_choice() ? 1.0 * shape.num_tokens * shape.top_k : ExpectedTokens(shape);
}

// The work in device memory: the time that one SM needs for it, in microseconds, with slack; and the fewest
// SMs that keep up with the links.
struct LocalWork {
  double us;
  double min_sms;
};

// Returns the time that the links need for one row of each (token, rank), in microseconds. A single rank is
// assumed to move its rows at this rate too.
inline double LinkMicroseconds(const Shape& shape, double row_bytes) {
  const double wire = ExpectedTokens(shape) * std::max(shape.num_ranks - 1, 1) / shape.num_ranks * row_bytes;
  return std::max(wire / kLinkRate, kMinMicroseconds);
}

// Plans the SMs such that the work ends within `op_us`. `budget` 0 means no limit except that of the device.
inline SmPlan PlanSms(double op_us, int32_t links, LocalWork work, int32_t num_sms, int32_t budget) {
  SmPlan plan{links, static_cast<int32_t>(std::min(std::ceil(work.us / op_us), 1e6))};
  const bool limited = budget > 0 && budget < num_sms;
  // The other SMs are left to kernels that run beside this one. Otherwise there could be a deadlock: on one
  // rank a collective gets no SM, and on another it keeps this op's blocks from theirs.
  const int32_t max_sms = limited ? budget : std::max(num_sms * 3 / 4, 2);
  if (plan.total() <= max_sms) return plan;
  if (plan.local > 0) {
    const int32_t share = static_cast<int32_t>(max_sms * work.min_sms / (links + work.min_sms));
    // Without a budget, the links keep their SMs.
    plan.local = std::clamp(limited ? share : max_sms - links, 1, max_sms - 1);
  }
  plan.links = max_sms - plan.local;
  return plan;
}

// Returns true if rings in shared memory pull, fold and scale rows faster than loads into registers.
// `row_bytes` is the size of the shortest row.
inline bool SuitsRings(const Shape& shape, double row_bytes) {
  return shape.num_tokens >= kMinRingTokens && row_bytes >= kMinRingRowBytes;
}

// The work that a push does on rows while it moves them.
enum class PushWork : int32_t { kMove, kScale, kQuantize };

// Returns the number of SMs that send. They also store the rank's own rows, which are half of all rows with
// two ranks. `row_bytes` is the size of all payloads together, as they are sent.
inline int32_t PlanSenders(const Shape& shape, double row_bytes, PushWork kind) {
  if (shape.num_tokens <= kFewTokens) return kFewSms;
  const int32_t min_senders = kind == PushWork::kQuantize   ? kQuantizingSenders
                              : !shape.has_row_per_choice() ? kRankSenders
                              : kind == PushWork::kScale    ? kScalingSenders
                                                            : kExpertSenders;
  const double sent = ExpectedTokens(shape) * row_bytes, converted = shape.num_tokens * row_bytes;
  const double us =
      kind == PushWork::kQuantize ? sent / kStoreRate + converted / kQuantizeRate : sent / kSendRate;
  return std::max(min_senders, static_cast<int32_t>(std::ceil(us / LinkMicroseconds(shape, row_bytes))));
}

// Plans a push that scales, which works on every row. `by_ring`: through shared memory.
inline SmPlan PlanScale(const Shape& shape, double row_bytes, bool by_ring, int32_t num_sms, int32_t budget) {
  const double tokens = ExpectedTokens(shape), rows = ExpectedRows(shape);
  const double clear_us = std::max(shape.capacity - rows, 0.0) * row_bytes / kStoreRate;
  const double local_us = clear_us + rows * row_bytes / (by_ring ? kRingScaleRate : kScaleRate);
  const double link_us = LinkMicroseconds(shape, row_bytes);
  // The tokens are written and read, the factors read, and the rows written. Cleared bytes are not counted,
  // because they take little of the memory's time.
  const double memory_us = 2 * (tokens + rows) * row_bytes / kMemoryRate;
  const double op_us = by_ring ? std::max(link_us, memory_us) : link_us;
  const int32_t senders = PlanSenders(shape, row_bytes, PushWork::kScale);
  return PlanSms(op_us, senders, {std::max(local_us, 1.0), local_us / op_us}, num_sms, budget);
}

// Plans a push that moves rows, or converts them to FP8. It copies all rows of a token except the first.
inline SmPlan PlanMove(const Shape& shape, double row_bytes, PushWork kind, int32_t num_sms, int32_t budget) {
  if (shape.order == Order::kPlaced) {
    SmPlan plan = PlanSms(1, kAllSms, {1, 0}, num_sms, budget);
    const int32_t clearing = std::max(plan.total() / kClearingShare, 1);
    return {plan.total() - clearing, clearing};
  }
  const double tokens = ExpectedTokens(shape), rows = ExpectedRows(shape);
  const double cleared = std::max(shape.capacity - rows, 0.0), copied = rows - tokens;
  const double clear_us = cleared * row_bytes / kStoreRate, link_us = LinkMicroseconds(shape, row_bytes);
  const double min_sms = (clear_us + copied * row_bytes / kCopyRate / kCopySlack) / link_us;
  // Each token is read by the sender, written, and read again to be copied.
  const double moved = shape.num_tokens + 2 * tokens + copied;
  const double op_us = std::max(link_us, (moved / kMemoryRate + cleared / kClearRate) * row_bytes);
  const int32_t senders = PlanSenders(shape, row_bytes, kind);
  // If memory is slower than the links, nothing waits for the copies. The senders, which clear nothing, also
  // copy once they have sent everything.
  const bool waits = op_us == link_us || kind == PushWork::kQuantize;
  const double copy_us = copied * row_bytes / (waits ? kCopyRate : kFreeCopyRate);
  const double local_us = clear_us + std::max(copy_us - senders * (op_us - link_us), 0.0);
  return PlanSms(op_us, senders, {std::max(local_us, 1.0), min_sms}, num_sms, budget);
}

inline SmPlan PlanPush(const Shape& shape, double row_bytes, PushWork kind, bool by_ring, int32_t num_sms,
                       int32_t budget) {
  return kind == PushWork::kScale ? PlanScale(shape, row_bytes, by_ring, num_sms, budget)
                                  : PlanMove(shape, row_bytes, kind, num_sms, budget);
}

// Returns the number of SMs that pull: a number for each byte that comes over the links, and the same for the
// rank's own bytes.
inline int32_t PlanPullers(const Shape& shape, bool folds, bool by_ring) {
  const int32_t ranks = shape.num_ranks, num_peers = std::max(ranks - 1, 1);
  if (shape.order == Order::kPlaced) return kAllSms;
  if (by_ring && ranks == 2) return ranks * (folds ? kFoldingRingPullersOfTwo : kRingPullersOfTwo);
  if (by_ring) return (folds ? kFoldingRingPullers : kRingPullers) * ranks / num_peers;
  const int32_t folding = ranks == 2 ? kFoldingPullersOfTwo : kFoldingPullers;
  return (folds ? folding : kPullers) * ranks / num_peers;
}

inline SmPlan PlanPull(const Shape& shape, double row_bytes, bool folds, bool by_ring, int32_t num_sms,
                       int32_t budget) {
  const double tokens = ExpectedTokens(shape), rows = 1.0 * shape.num_tokens * shape.top_k;
  const int32_t links = shape.num_tokens <= kFewTokens ? kFewSms : PlanPullers(shape, folds, by_ring);
  const double link_us = LinkMicroseconds(shape, row_bytes);
  if (!folds) return PlanSms(link_us, links, {}, num_sms, budget);
  // Rows are read, their sums are written and read, and the tokens' results are written.
  const double memory_us = (rows + 2 * tokens + shape.num_tokens) * row_bytes / kMemoryRate;
  const double op_us = by_ring ? std::max(link_us, memory_us) : link_us;
  const double fold_us = rows * row_bytes / (by_ring ? kRingFoldRate : kFoldRate);
  const LocalWork work{fold_us, fold_us / (by_ring ? kRingFoldSlack : kFoldSlack) / op_us};
  return PlanSms(op_us, links, work, num_sms, budget);
}

}  // namespace jax_ep
