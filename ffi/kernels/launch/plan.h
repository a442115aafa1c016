// How many SMs an op that communicates takes, and what for.
//
// A few carry the rows over the links. What else an op does in device memory meanwhile - clear what no row
// fills, spread or fold a token's rows - gets as many SMs as it needs to end when the transfers do, under
// uniform routing. The rates are those of an H200 (docs/performance.md); on other GPUs they are estimates,
// which `Group(num_sms=...)` can overrule.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "core/index.h"

namespace jax_ep {

struct SmPlan {
  int32_t links;
  int32_t local;  // 0 only where an op does nothing but carry rows

  int32_t total() const { return links + local; }
};

// Bytes a microsecond: of a GPU's links in one direction, and of one SM that stores (at most), sends, makes
// FP8 (of what it makes), or scales, folds or copies rows. kFoldRate and kCopyRate are less than what it can
// do, so that the links need not wait for it; kFreeCopyRate is what it can do.
constexpr double kLinkRate = 320e3;
constexpr double kStoreRate = 48e3;
constexpr double kSendRate = 40e3;
constexpr double kQuantizeRate = 18.5e3;
constexpr double kScaleRate = 15e3;
constexpr double kFoldRate = 21e3;
constexpr double kCopyRate = 30e3;
constexpr double kFreeCopyRate = 36e3;
// By how much less: this counts where SMs are short, and all wait for each other. Blocks that have sent all
// rows help to copy.
constexpr double kFoldSlack = 1.7;
constexpr double kCopySlack = 3;
// SMs that carry rows, at least. Twelve fill the links of four GPUs, ten do not. By expert a sender tells the
// peers of what has arrived, which is the later the more is under way. A pull sums as it goes, the rank's own
// rows too; by expert the folds beside it slow it down.
constexpr int32_t kRankSenders = 12;
constexpr int32_t kExpertSenders = 20;
constexpr int32_t kScalingSenders = 16;
constexpr int32_t kQuantizingSenders = 20;
constexpr int32_t kPullers = 20;
constexpr int32_t kFoldingPullers = 24;
constexpr int32_t kFoldingPullersOfTwo = 15;  // of two ranks: sums of two rows have more loads in flight
// The same by rings (SuitsRings), and how fast an SM then folds and scales. Of two ranks not the links take
// longest, but device memory, through which all rows go; its rates are those of rows beside the links, and of
// zeros. Sums of more than two rows leave a ring emptier between them. How much that costs has not been
// measured, so there are more pullers then.
constexpr int32_t kRingPullersOfTwo = 6;
constexpr int32_t kFoldingRingPullersOfTwo = 7;
constexpr int32_t kRingPullers = 12;
constexpr int32_t kFoldingRingPullers = 14;
constexpr double kRingFoldRate = 39.5e3;
constexpr double kRingScaleRate = 26e3;
constexpr double kRingFoldSlack = 1.25;
constexpr double kMemoryRate = 3000e3;
constexpr double kClearRate = 4460e3;
// From here on rings are faster: a ring is filled before the first sum ends, and each row costs some steps.
constexpr int32_t kLeastRingTokens = 1024;
constexpr double kLeastRingRow = 8192;  // bytes
// Few tokens are a matter of latency: a token a warp.
constexpr int32_t kFewTokens = 256;
constexpr int32_t kFewSms = 32;
// Below this an op is bound by its steps, not by its bytes.
constexpr double kLeastMicroseconds = 10;

// Rows that one rank receives if every token goes to each of them once, whatever experts it has there.
inline double ExpectedTokens(const Shape& shape) {
  const double ranks = shape.num_ranks;
  return ranks * shape.num_tokens * (1 - std::pow(1 - 1 / ranks, shape.top_k));
}

// Rows that it receives in all: by rank no more than these.
inline double ExpectedRows(const Shape& shape) {
  return shape.has_row_per_choice() ? 1.0 * shape.num_tokens * shape.top_k : ExpectedTokens(shape);
}

// The work in device memory: what one SM takes for it, in microseconds, with slack; and the SMs that it needs
// at least to keep up with the links.
struct LocalWork {
  double us;
  double least_sms;
};

// What the links take for one row of each (token, rank), in microseconds. A rank alone moves rows at no less
// than that.
inline double LinkMicroseconds(const Shape& shape, double row_bytes) {
  const double wire = ExpectedTokens(shape) * std::max(shape.num_ranks - 1, 1) / shape.num_ranks * row_bytes;
  return std::max(wire / kLinkRate, kLeastMicroseconds);
}

// The work is to end in `op_us`. `budget` 0 means no limit but that of the device.
inline SmPlan PlanSms(double op_us, int32_t links, LocalWork work, int32_t num_sms, int32_t budget) {
  SmPlan plan{links, static_cast<int32_t>(std::min(std::ceil(work.us / op_us), 1e6))};
  const bool limited = budget > 0 && budget < num_sms;
  // The others are left to kernels that run beside this one: a collective that finds no SM on one rank, and
  // keeps this op's blocks from theirs on another, would hold up both.
  const int32_t max_sms = limited ? budget : std::max(num_sms * 3 / 4, 2);
  if (plan.total() <= max_sms) return plan;
  if (plan.local > 0) {
    const int32_t share = static_cast<int32_t>(max_sms * work.least_sms / (links + work.least_sms));
    // Where nothing limits the op, the links keep theirs.
    plan.local = std::clamp(limited ? share : max_sms - links, 1, max_sms - 1);
  }
  plan.links = max_sms - plan.local;
  return plan;
}

// Whether rows of `row_bytes`, the shortest, are better pulled, folded and scaled by rings, in shared
// memory, than by loads into registers.
inline bool SuitsRings(const Shape& shape, double row_bytes) {
  return shape.num_tokens >= kLeastRingTokens && row_bytes >= kLeastRingRow;
}

// What a push does to rows while it moves them.
enum class PushWork : int32_t { kMove, kScale, kQuantize };

// The SMs that send. They store the rank's own rows, too, which are half of all with two ranks. `row_bytes`
// of all payloads together, as they travel.
inline int32_t PlanSenders(const Shape& shape, double row_bytes, PushWork kind) {
  if (shape.num_tokens <= kFewTokens) return kFewSms;
  const int32_t least = kind == PushWork::kQuantize   ? kQuantizingSenders
                        : !shape.has_row_per_choice() ? kRankSenders
                        : kind == PushWork::kScale    ? kScalingSenders
                                                      : kExpertSenders;
  const double sent = ExpectedTokens(shape) * row_bytes, converted = shape.num_tokens * row_bytes;
  const double us =
      kind == PushWork::kQuantize ? sent / kStoreRate + converted / kQuantizeRate : sent / kSendRate;
  return std::max(least, static_cast<int32_t>(std::ceil(us / LinkMicroseconds(shape, row_bytes))));
}

// A push that scales works on every row; `by_ring`: through shared memory.
inline SmPlan PlanScale(const Shape& shape, double row_bytes, bool by_ring, int32_t num_sms, int32_t budget) {
  const double tokens = ExpectedTokens(shape), rows = ExpectedRows(shape);
  const double clear_us = std::max(shape.capacity - rows, 0.0) * row_bytes / kStoreRate;
  const double local_us = clear_us + rows * row_bytes / (by_ring ? kRingScaleRate : kScaleRate);
  const double link_us = LinkMicroseconds(shape, row_bytes);
  // The tokens are written and read, the factors read, and the rows written. (What is cleared is not counted:
  // it takes little of the memory's time, and as many more SMs.)
  const double memory_us = 2 * (tokens + rows) * row_bytes / kMemoryRate;
  const double op_us = by_ring ? std::max(link_us, memory_us) : link_us;
  const int32_t senders = PlanSenders(shape, row_bytes, PushWork::kScale);
  return PlanSms(op_us, senders, {std::max(local_us, 1.0), local_us / op_us}, num_sms, budget);
}

// A push that moves rows, or makes FP8 of them, copies those of a token beyond its first.
inline SmPlan PlanMove(const Shape& shape, double row_bytes, PushWork kind, int32_t num_sms, int32_t budget) {
  const double tokens = ExpectedTokens(shape), rows = ExpectedRows(shape);
  const double cleared = std::max(shape.capacity - rows, 0.0), copied = rows - tokens;
  const double clear_us = cleared * row_bytes / kStoreRate, link_us = LinkMicroseconds(shape, row_bytes);
  const double least_sms = (clear_us + copied * row_bytes / kCopyRate / kCopySlack) / link_us;
  // Each token is read where it is sent, and written, and read again to be copied.
  const double moved = shape.num_tokens + 2 * tokens + copied;
  const double op_us = std::max(link_us, (moved / kMemoryRate + cleared / kClearRate) * row_bytes);
  const int32_t senders = PlanSenders(shape, row_bytes, kind);
  // Where memory takes longer than the links, nothing waits for the copies, and the senders copy, too (they
  // clear nothing), when they have sent all.
  const bool waits = op_us == link_us || kind == PushWork::kQuantize;
  const double copy_us = copied * row_bytes / (waits ? kCopyRate : kFreeCopyRate);
  const double local_us = clear_us + std::max(copy_us - senders * (op_us - link_us), 0.0);
  return PlanSms(op_us, senders, {std::max(local_us, 1.0), least_sms}, num_sms, budget);
}

inline SmPlan PlanPush(const Shape& shape, double row_bytes, PushWork kind, bool by_ring, int32_t num_sms,
                       int32_t budget) {
  return kind == PushWork::kScale ? PlanScale(shape, row_bytes, by_ring, num_sms, budget)
                                  : PlanMove(shape, row_bytes, kind, num_sms, budget);
}

// The SMs that pull: so many for each byte that comes over the links, and as many more for the rank's own.
inline int32_t PlanPullers(const Shape& shape, bool folds, bool by_ring) {
  const int32_t ranks = shape.num_ranks, num_peers = std::max(ranks - 1, 1);
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
  // Rows are read, their sums written and read, and the tokens' written.
  const double memory_us = (rows + 2 * tokens + shape.num_tokens) * row_bytes / kMemoryRate;
  const double op_us = by_ring ? std::max(link_us, memory_us) : link_us;
  const double fold_us = rows * row_bytes / (by_ring ? kRingFoldRate : kFoldRate);
  const LocalWork work{fold_us, fold_us / (by_ring ? kRingFoldSlack : kFoldSlack) / op_us};
  return PlanSms(op_us, links, work, num_sms, budget);
}

}  // namespace jax_ep
