// The number of SMs that an op that communicates uses, and their division.
//
// A few SMs carry the rows over the links. Meanwhile the op works in device memory: it clears unfilled rows,
// and spreads or folds tokens' rows. This work gets as many SMs as it needs to end with the transfers, under
// uniform routing. `Group(num_sms=...)` overrides the plan.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "core/params.h"

namespace jax_ep {

struct SmPlan {
  int32_t links;
  int32_t local;  // 0 only if the op does nothing but carry rows

  int32_t total() const { return links + local; }
};

// Rates of a GPU in bytes per microsecond: of its links in one direction, of its memory for rows while the
// links are busy, and for zeros.
struct Rates {
  double link;
  double memory;
  double clear;
};
constexpr Rates kHopper{320e3, 3000e3, 4460e3};     // measured on H200s (docs/performance.md)
constexpr Rates kBlackwell{640e3, 5000e3, 7400e3};  // not measured: those of H200s, times B200's bandwidths

// The GPU that an op is planned for. `budget` is the most SMs that it may use; 0: no limit except the GPU's.
struct Card {
  int32_t num_sms;
  int32_t budget;
  Rates rates;
};

// Returns the rates of a compute capability such as 90. sm_120 has no links of its own.
inline Rates RatesOf(int32_t compute_capability) {
  return compute_capability / 10 == 10 ? kBlackwell : kHopper;
}

// Rates of one SM, in bytes per microsecond: at which it stores (at most), converts to FP8 (counted in FP8
// bytes), scales, folds or copies rows. kFoldRate and kCopyRate are lower than the hardware's, so that the
// links need not wait for this work. kFreeCopyRate is the hardware's rate.
constexpr double kStoreRate = 48e3;
constexpr double kQuantizeRate = 18.5e3;
constexpr double kScaleRate = 15e3;
constexpr double kFoldRate = 21e3;
constexpr double kCopyRate = 30e3;
constexpr double kFreeCopyRate = 36e3;

// The rate at which an SM sends rows of at least `row_bytes`.
struct SendRate {
  double row_bytes;
  double rate;
};
constexpr SendRate kSendRates[] = {{8192, 40e3}, {5632, 37e3}, {0, 30e3}};

// The factors by which the hardware is faster than kFoldRate and kCopyRate. They matter if SMs are scarce,
// because all parts then wait for each other. Blocks that have sent all rows help to copy.
constexpr double kFoldSlack = 1.7;
constexpr double kCopySlack = 3;
// Minimum SMs that carry rows, as needed to fill the links of an H200 (docs/performance.md). By expert, a
// sender notifies the peers of arrived rows, and the notification is later if more rows are in flight. A pull
// also sums, including the rank's own rows. By expert, the folds that run beside it slow it down.
constexpr int32_t kRankSenders = 12;
constexpr int32_t kExpertSenders = 20;
constexpr int32_t kScalingSenders = 16;
constexpr int32_t kQuantizingSenders = 20;
// If a token goes to few of more than two ranks, an SM has few bytes on their way. More SMs then send, if any
// are left: the minimum times kRanksPerToken, divided by the ranks that a token goes to on average, but at
// most kMostSenders. Short rows of FP8 have more senders. Measured on four H100 (docs/performance.md).
constexpr double kRanksPerToken = 3;
constexpr int32_t kMostSenders = 36;
constexpr int32_t kShortQuantizingSenders = 48;
constexpr double kShortQuantizedRowBytes = 3072;  // of FP8
constexpr int32_t kPullers = 20;
constexpr int32_t kFoldingPullers = 24;
constexpr int32_t kFoldingPullersOfTwo = 15;  // with two ranks, sums of two rows have more loads in flight
// Values for rings (SuitsRings): pullers, and the rates at which an SM folds and scales. With two ranks the
// bottleneck is not the links but device memory, through which all rows pass. Sums of more than two rows
// leave the ring emptier between sums. That cost has not been measured, so there are more pullers then.
constexpr int32_t kRingPullersOfTwo = 6;
constexpr int32_t kFoldingRingPullersOfTwo = 7;
constexpr int32_t kRingPullers = 12;
constexpr int32_t kTopOneRingPullers = 18;  // by expert: a warp looks up each row, and its weight, alone
constexpr int32_t kTopOneRingPullersOfTwo = 9;
constexpr int32_t kFoldingRingPullers = 14;
constexpr double kRingFoldRate = 39.5e3;
constexpr double kRingScaleRate = 26e3;
constexpr double kRingFoldSlack = 1.25;
// A warp that folds through a ring looks up the rows of several sums at a time: so many that on average
// kFoldedSumsPerTicket of them have several rows, and at most kMostSumsPerTicket. With more, the teams of a
// block would have unequal work. Measured on two and four H100.
constexpr double kFoldedSumsPerTicket = 1.9;
constexpr double kMostSumsPerTicket = 8;
// Minimum sizes for which rings are faster. A ring has to be filled before the first sum ends, and each row
// has overhead. Shorter rows suffice if a ring works on several rows for each token: on a rank that is alone,
// and if rows are scaled.
constexpr int32_t kMinRingTokens = 1024;
constexpr double kMinRingRowBytes = 8192;
constexpr double kMinSeveralRingRowBytes = 4096;  // of several rows for each token
// Most tokens for which latency dominates. A warp then sends one token at a time.
constexpr int32_t kFewTokens = 256;
constexpr int32_t kFewSms = 32;
// Placed rows are mostly a rank's own, and a rank that is alone has no others. Its memory, not its links,
// bounds them, so all SMs move them. Of a push, at least this share of SMs clears the rows that stay empty,
// because the host does not know their number.
constexpr int32_t kAllSms = 1024;
constexpr double kClearingShare = 0.25;
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

// Returns the time that the links need for one row of each (token, rank), in microseconds.
inline double LinkMicroseconds(const Shape& shape, double row_bytes, const Card& card) {
  const double wire = ExpectedTokens(shape) * std::max(shape.num_ranks - 1, 1) / shape.num_ranks * row_bytes;
  return std::max(wire / card.rates.link, kMinMicroseconds);
}

// Returns the number of SMs that carry as much over this card's links as `sms` do over an H200's.
inline int32_t ForLinks(int32_t sms, const Card& card) {
  return static_cast<int32_t>(std::ceil(sms * card.rates.link / kHopper.link));
}

// Plans the SMs such that the work ends within `op_us`. Up to `most_links` carry rows if SMs are left.
inline SmPlan PlanSms(const Shape& shape, double op_us, int32_t links, LocalWork work, const Card& card,
                      int32_t most_links = 0) {
  SmPlan plan{links, static_cast<int32_t>(std::min(std::ceil(work.us / op_us), 1e6))};
  const bool limited = card.budget > 0 && card.budget < card.num_sms;
  // The other SMs are left to kernels that run beside this one. Otherwise there could be a deadlock: on one
  // rank a collective gets no SM, and on another it keeps this op's blocks from theirs. A rank that is alone
  // waits for no other.
  const int32_t most = shape.is_alone() ? card.num_sms : std::max(card.num_sms * 3 / 4, 2);
  const int32_t max_sms = limited ? card.budget : most;
  if (plan.total() <= max_sms) {
    plan.links = std::max(links, std::min(most_links, max_sms - plan.local));
    return plan;
  }
  if (plan.local > 0) {
    const int32_t share = static_cast<int32_t>(max_sms * work.min_sms / (links + work.min_sms));
    // Without a budget, the links keep their SMs.
    plan.local = std::clamp(limited ? share : max_sms - links, 1, max_sms - 1);
  }
  plan.links = max_sms - plan.local;
  return plan;
}

// Most rows of a token that rings sum: one for each lane of a warp.
constexpr int32_t kMaxRingRows = 32;

// Returns true if rings in shared memory pull and fold rows, or scale them, faster than loads into registers.
// `row_bytes` is the size of the shortest row.
inline bool SuitsRings(const Shape& shape, double row_bytes, bool scales) {
  if (shape.rows_per_token() > kMaxRingRows) return false;
  const bool several = scales || (shape.is_alone() && shape.has_row_per_choice() && shape.top_k > 1);
  return shape.num_tokens >= kMinRingTokens &&
         row_bytes >= (several ? kMinSeveralRingRowBytes : kMinRingRowBytes);
}

// Plans a push that memory bounds, with all SMs. `clearing` is the share of them that clears.
inline SmPlan PlanAllSms(const Shape& shape, double clearing, const Card& card) {
  const int32_t total = PlanSms(shape, 1, kAllSms, {}, card).links;
  const int32_t local = std::clamp(static_cast<int32_t>(std::lround(total * clearing)), 1, total - 1);
  return {total - local, local};
}

// The work that a push does on rows while it moves them.
enum class PushWork : int32_t { kMove, kScale, kQuantize };

// Returns the rate at which an SM sends rows.
inline double SendRateOf(double row_bytes) {
  const SendRate* entry = kSendRates;
  while (row_bytes < entry->row_bytes) ++entry;
  return entry->rate;
}

// Returns the number of SMs that send. They also store the rank's own rows, which are half of all rows with
// two ranks. `row_bytes` is the size of all payloads together, as they are sent.
inline int32_t PlanSenders(const Shape& shape, double row_bytes, PushWork kind, const Card& card) {
  if (shape.num_tokens <= kFewTokens) return kFewSms;
  const int32_t min_senders = kind == PushWork::kQuantize ? kQuantizingSenders
                              : kind == PushWork::kScale  ? kScalingSenders
                              : shape.shares_rows()       ? kExpertSenders
                                                          : kRankSenders;
  const double sent = ExpectedTokens(shape) * row_bytes, converted = shape.num_tokens * row_bytes;
  const double us = kind == PushWork::kQuantize ? sent / kStoreRate + converted / kQuantizeRate
                                                : sent / SendRateOf(row_bytes);
  const double link_us = LinkMicroseconds(shape, row_bytes, card);
  return std::max(ForLinks(min_senders, card), static_cast<int32_t>(std::ceil(us / link_us)));
}

// Returns the number of SMs that send if enough are left, at least `senders`.
inline int32_t PlanMostSenders(const Shape& shape, double row_bytes, PushWork kind, int32_t senders,
                               const Card& card) {
  if (shape.num_ranks <= 2 || shape.num_tokens <= kFewTokens) return senders;
  const double ranks_per_token = ExpectedTokens(shape) / shape.num_tokens;
  const auto wanted = static_cast<int32_t>(std::lround(senders * kRanksPerToken / ranks_per_token));
  const bool is_short = kind == PushWork::kQuantize && row_bytes < kShortQuantizedRowBytes;
  const int32_t most =
      is_short ? ForLinks(kShortQuantizingSenders, card) : std::min(wanted, ForLinks(kMostSenders, card));
  return std::max(senders, most);
}

// Plans a push that scales, which works on every row. `by_ring`: through shared memory.
inline SmPlan PlanScale(const Shape& shape, double row_bytes, bool by_ring, const Card& card) {
  const double tokens = ExpectedTokens(shape), rows = ExpectedRows(shape);
  const double clear_us = std::max(shape.capacity - rows, 0.0) * row_bytes / kStoreRate;
  const double local_us = clear_us + rows * row_bytes / (by_ring ? kRingScaleRate : kScaleRate);
  const double link_us = LinkMicroseconds(shape, row_bytes, card);
  // The tokens are written and read, the factors read, and the rows written. Cleared bytes are not counted,
  // because they take little of the memory's time.
  const double memory_us = 2 * (tokens + rows) * row_bytes / card.rates.memory;
  const double op_us = by_ring ? std::max(link_us, memory_us) : link_us;
  const int32_t senders = PlanSenders(shape, row_bytes, PushWork::kScale, card);
  return PlanSms(shape, op_us, senders, {std::max(local_us, 1.0), local_us / op_us}, card,
                 PlanMostSenders(shape, row_bytes, PushWork::kScale, senders, card));
}

// Plans a push that moves rows, or converts them to FP8. It copies all rows of a token except the first.
inline SmPlan PlanMove(const Shape& shape, double row_bytes, PushWork kind, const Card& card) {
  const double tokens = ExpectedTokens(shape), rows = ExpectedRows(shape);
  const double cleared = std::max(shape.capacity - rows, 0.0), copied = rows - tokens;
  const double clear_us = cleared * row_bytes / kStoreRate,
               link_us = LinkMicroseconds(shape, row_bytes, card);
  const double min_sms = (clear_us + copied * row_bytes / kCopyRate / kCopySlack) / link_us;
  // Each token is read by the sender, written, and read again to be copied.
  const double moved = shape.num_tokens + 2 * tokens + copied;
  const double op_us =
      std::max(link_us, (moved / card.rates.memory + cleared / card.rates.clear) * row_bytes);
  const int32_t senders = PlanSenders(shape, row_bytes, kind, card);
  // If memory is slower than the links, nothing waits for the copies. The senders, which clear nothing, also
  // copy once they have sent everything.
  const bool waits = op_us == link_us || kind == PushWork::kQuantize;
  const double copy_us = copied * row_bytes / (waits ? kCopyRate : kFreeCopyRate);
  const double local_us = clear_us + std::max(copy_us - senders * (op_us - link_us), 0.0);
  return PlanSms(shape, op_us, senders, {std::max(local_us, 1.0), min_sms}, card,
                 PlanMostSenders(shape, row_bytes, kind, senders, card));
}

inline SmPlan PlanPush(const Shape& shape, double row_bytes, PushWork kind, bool by_ring, const Card& card) {
  if (shape.order == Order::kPlaced) return PlanAllSms(shape, kClearingShare, card);
  if (shape.is_alone()) {
    const double rows = ExpectedRows(shape), clear_us = std::max(shape.capacity - rows, 0.0) / kStoreRate;
    const double clearing = clear_us / (clear_us + rows / SendRateOf(row_bytes));
    return PlanAllSms(shape, std::max(clearing, kClearingShare), card);
  }
  return kind == PushWork::kScale ? PlanScale(shape, row_bytes, by_ring, card)
                                  : PlanMove(shape, row_bytes, kind, card);
}

// Returns the number of sums that a warp looks up at a time to fold them through a ring. Those with fewer
// than two rows are skipped.
inline int32_t PlanSumsPerTicket(const Shape& shape) {
  const double elsewhere = 1 - 1.0 / shape.num_ranks, choices = shape.top_k;
  const double none = std::pow(elsewhere, choices),
               one = choices / shape.num_ranks * std::pow(elsewhere, choices - 1);
  return static_cast<int32_t>(std::clamp(kFoldedSumsPerTicket / (1 - none - one), 1.0, kMostSumsPerTicket));
}

// Returns the number of SMs that pull: a number for each byte that comes over the links, and the same for the
// rank's own bytes.
inline int32_t PlanPullers(const Shape& shape, bool folds, bool by_ring) {
  const int32_t ranks = shape.num_ranks, num_peers = std::max(ranks - 1, 1);
  if (shape.order == Order::kPlaced || shape.is_alone()) return kAllSms;
  const bool is_top_one = shape.has_row_per_choice() && !folds;
  if (by_ring && ranks == 2) {
    return ranks * (folds        ? kFoldingRingPullersOfTwo
                    : is_top_one ? kTopOneRingPullersOfTwo
                                 : kRingPullersOfTwo);
  }
  if (by_ring) {
    return (folds ? kFoldingRingPullers : is_top_one ? kTopOneRingPullers : kRingPullers) * ranks / num_peers;
  }
  const int32_t folding = ranks == 2 ? kFoldingPullersOfTwo : kFoldingPullers;
  return (folds ? folding : kPullers) * ranks / num_peers;
}

// Plans a pull of one array whose sums travel as FP8. A rank converts a sum for each token that has rows
// there; `fp8_bytes` is the size of a sum's values. By rank, where less is folded, more SMs pull. Measured on
// two H200.
inline SmPlan PlanPullFp8(const Shape& shape, double fp8_bytes, double row_bytes, const Card& card) {
  const double sum_bytes = fp8_bytes * (1 + 4.0 / kFp8Block), tokens = ExpectedTokens(shape),
               rows = ExpectedRows(shape);
  const int32_t usual = PlanPullers(shape, true, false), wanted = shape.shares_rows() ? usual : usual * 4 / 3;
  const int32_t pullers = shape.is_alone() ? card.num_sms / 4 : ForLinks(wanted, card);
  const double memory_us =
      ((rows + shape.num_tokens) * row_bytes + 2 * tokens * sum_bytes) / card.rates.memory;
  const double op_us = std::max(LinkMicroseconds(shape, sum_bytes, card), memory_us);
  const double fold_us = rows * row_bytes / kFoldRate + tokens * fp8_bytes / kQuantizeRate;
  const LocalWork work{std::max(fold_us, 1.0), fold_us / kFoldSlack / op_us};
  return PlanSms(shape, op_us, shape.num_tokens <= kFewTokens ? kFewSms : pullers, work, card);
}

inline SmPlan PlanPull(const Shape& shape, double row_bytes, bool folds, bool by_ring, const Card& card) {
  const double tokens = ExpectedTokens(shape), rows = 1.0 * shape.num_tokens * shape.top_k;
  const int32_t links =
      shape.num_tokens <= kFewTokens ? kFewSms : ForLinks(PlanPullers(shape, folds, by_ring), card);
  const double link_us = LinkMicroseconds(shape, row_bytes, card);
  if (!folds) return PlanSms(shape, link_us, links, {}, card);
  // Rows are read, their sums are written and read, and the tokens' results are written.
  const double memory_us = (rows + 2 * tokens + shape.num_tokens) * row_bytes / card.rates.memory;
  const double op_us = by_ring ? std::max(link_us, memory_us) : link_us;
  const double fold_us = rows * row_bytes / (by_ring ? kRingFoldRate : kFoldRate);
  const LocalWork work{fold_us, fold_us / (by_ring ? kRingFoldSlack : kFoldSlack) / op_us};
  return PlanSms(shape, op_us, links, work, card);
}

}  // namespace jax_ep
