// Error texts of failed ops.

#include "core/text.h"
#include "runtime/gpu/peers.h"

namespace jax_ep {
namespace {

std::string RankList(const RankBits& ranks) {
  std::string text;
  for (int r = 0; r < kMaxRanks; ++r) {
    if (ranks.Has(r)) text += Text(' ', r);
  }
  return text;
}

// Returns the ranks of a reason, which names only one of them.
std::string RankList(const Reason& reason) {
  const int others = reason.num_missing() - 1;
  return Text(' ', reason.first_missing(),
              others > 0 ? Text(" and ", others, others > 1 ? " others" : " other") : "");
}

const char* OpName(Op op) {
  static const char* const kNames[] = {"dispatch", "redispatch", "combine", "gather", "hop between domains"};
  return kNames[static_cast<int>(op)];
}

// Returns the step that the blamed ranks did not take.
const char* MissedStep(Phase phase) {
  return phase == Phase::kEnter ? "arrive" : phase == Phase::kWave ? "finish a part of their rows" : "finish";
}

constexpr const char* kRemedy =
    " Every rank must reach the same ops in the same order; a rank that is only slow needs a larger "
    "Group(timeout_s=...). The results of this op, and of later ones, are NaN and -1. Make the Group anew to "
    "go on.";

// Returns why a rank that others name gave up.
std::string DescribeReason(const Reason& reason) {
  if (reason.phase() == Phase::kHop) return ": its hop between domains failed, whose error says why";
  if (reason.phase() == Phase::kRank) return ": its program runs on another mesh than the group's";
  if (reason.num_missing() == 0) return "";
  if (reason.phase() == Phase::kCall) {
    return Text(": rank(s)", RankList(reason), " did not call the same op or run on another mesh");
  }
  return Text(": rank(s)", RankList(reason), " did not ", MissedStep(reason.phase()), " in time");
}

// Returns how specific a report is. A failure that a rank found itself says more than that another rank gave
// up.
int Specificity(Phase phase) {
  return phase == Phase::kNone ? 0 : phase == Phase::kGivenUp ? 1 : phase == Phase::kStuck ? 3 : 2;
}

Phase PhaseOf(const Report& report) {
  return static_cast<Phase>(__atomic_load_n(&report.phase, __ATOMIC_ACQUIRE));
}

}  // namespace

std::string DescribeReason(const HopReason& reason, const std::string& in_time) {
  const std::string rank_text = Text("the rank of domain ", reason.by());
  switch (reason.phase()) {
    case HopPhase::kNone:
      return "";
    case HopPhase::kLate:
      return Text(
          rank_text, " heard nothing from domain ", reason.blamed(), " ", in_time,
          ". A process there has ended, hangs or has not reached the same op, or the network has "
          "failed (after its first error it may deliver nothing any more, not even from living domains)");
    case HopPhase::kOther:
      return Text(rank_text, " was sent rows of another op, of other shapes or from another mesh by domain ",
                  reason.blamed());
    case HopPhase::kBusy:
      return Text(rank_text,
                  " began a hop while another one was in progress on the same GPU. Let one of them use the "
                  "other's result, so that they run in turn");
    case HopPhase::kMesh:
      return Text(
          rank_text,
          " runs as the rank of another domain: the group was made for another mesh. Make the Group from "
          "the mesh of this shard_map");
    case HopPhase::kWithin:
      return Text(rank_text,
                  " gave up because an op among the ranks of that domain had failed, whose error says why");
    case HopPhase::kCounterExhausted:
      return Text(rank_text,
                  " has sent as many pieces as NCCL's proxy can count. A Group that is made anew uses JAX's "
                  "collectives between domains; a new process can use NCCL again");
  }
  return "";
}

bool DevicePeers::HasFailed() const {
  for (size_t i = 0; i < ranks_.size(); ++i) {
    if (ranks_[i].device < 0) continue;
    if (__atomic_load_n(&reports_[i].left_out, __ATOMIC_ACQUIRE) != 0) return true;
    if (PhaseOf(reports_[i]) != Phase::kNone || host_meeting_->HasFailed(static_cast<int>(i), 1)) return true;
  }
  return false;
}

std::string DevicePeers::DescribeFailure() const {
  int best = -1;
  for (size_t i = 0; i < ranks_.size(); ++i) {
    if (ranks_[i].device < 0) continue;
    const int specificity = Specificity(PhaseOf(reports_[i]));
    if (specificity > 0 && (best < 0 || specificity > Specificity(PhaseOf(reports_[best]))))
      best = static_cast<int>(i);
  }
  return best < 0 ? "" : Describe(reports_[best], best);
}

std::string DevicePeers::Describe(const Call& call) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = calls_.find(call.hash);
  return it == calls_.end() ? "an op that this process has not run" : it->second;
}

std::string DevicePeers::Describe(const Report& report, int rank_index) const {
  const Phase phase = PhaseOf(report);
  const char* op = OpName(static_cast<Op>(report.op));
  std::string group;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    group = ListName(name_, rank_index / num_ranks_, static_cast<int>(ranks_.size()) / num_ranks_);
  }
  const std::string missing = RankList(report.missing), of_group = Text(": of group ", group, ", ");
  const std::string call = Describe(Call::Of(report.call)), other = Describe(Call::Of(report.other_call));
  const bool differs_in_list = Call::DifferInList(Call::Of(report.call), Call::Of(report.other_call));
  switch (phase) {
    case Phase::kNone:
      return "";
    case Phase::kRank:
      return Text(op, ": group ", group, " was made for another mesh: GPU ", ranks_[rank_index].device,
                  " runs as rank ", static_cast<int32_t>(report.other_call), ", but is rank ", report.rank,
                  " there; make the Group from the mesh of this shard_map");
    case Phase::kCall:
      if (differs_in_list) {
        return Text(op, ": group ", group, " was made for another mesh: its rank(s)", missing,
                    " run in another list of ranks than its rank ", report.rank,
                    "; make the Group from the mesh of this shard_map");
      }
      return Text(op, of_group, "rank(s)", missing, " called ", other == call ? "another call of " : "",
                  other, ", where rank ", report.rank, " called ", call, ". No row was moved.", kRemedy);
    case Phase::kChannel:
      return Text(op, of_group, "rank ", report.rank, " began ", call, " while ",
                  Call::Of(report.other_call).hash == 0 ? "another op" : other,
                  " was still running on the same GPU, in the same of ", kChannels,
                  " channels (ops of few tokens share one). Let one of them use the other's result, so "
                  "that they run in turn.",
                  kRemedy);
    case Phase::kGivenUp: {
      const Reason reason{report.reason};
      // A hop has no epoch.
      const std::string number = report.epoch == 0 ? "" : Text("the group's op ", report.epoch, " ");
      return Text(op, of_group, "rank ", reason.rank(), " gave up", DescribeReason(reason), "; rank ",
                  report.rank, " found that in ", number, "(", call, ").", kRemedy);
    }
    case Phase::kHop: {
      const HopReason reason{report.hop};
      std::string what;
      if (reason.phase() == HopPhase::kOther && Call::Of(report.other_call).hash != 0) {
        what = differs_in_list
                   ? ". The program runs on another mesh than the group's: make the Group from the mesh "
                     "of this shard_map"
                   : Text(", which called ", other);
      }
      return Text(
          op, of_group, "rank ", report.rank, " in ", call, ": ",
          DescribeReason(reason, Text("within ", 1e-9 * static_cast<double>(report.timeout_ns), " s")), what,
          ".", kRemedy);
    }
    case Phase::kStuck:
      return Text(op, of_group, "rank(s)", missing, " are stuck inside ", call,
                  ", which they did not finish within ", 2e-9 * static_cast<double>(report.timeout_ns),
                  " s, and may still write to the memory of rank ", report.rank, ": GPU ",
                  ranks_[rank_index].device,
                  " was stopped, so that no program goes on with that memory. This process cannot use it "
                  "any more, and ends in ",
                  kEndsAfterSeconds, " seconds.");
    default:
      return Text(op, of_group, "rank(s)", missing, " did not ", MissedStep(phase), " in time: rank ",
                  report.rank, " waited ", 1e-9 * static_cast<double>(report.timeout_ns),
                  " s in the group's op ", report.epoch, " (", call, ").", kRemedy);
  }
}

}  // namespace jax_ep
