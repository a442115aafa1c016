#include "runtime/gpu/host_meeting.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <optional>
#include <thread>
#include <utility>

#include "core/text.h"

namespace jax_ep {

// State of one rank, as far as this process knows it.
struct HostMeeting::Row {
  // Number of calls that a rank may be ahead of a peer that still checks an earlier one. A rank is ahead only
  // of calls that it has refused, or that its other threads are in.
  static constexpr uint32_t kEntries = 64;

  struct Entry {
    std::atomic<uint64_t> signature{0};
    std::atomic<uint32_t> begun{0};     // the number of the call that the signature belongs to
    std::atomic<uint32_t> launched{0};  // the number of the last call of this entry that was launched
  };

  std::atomic<uint32_t> calls{0};   // numbers assigned so far
  std::atomic<uint32_t> failed{0};  // the rank gave up this call and all later ones; 0: none
  Entry entries[kEntries];

  Entry& At(uint32_t number) { return entries[number % kEntries]; }

  void GiveUp(uint32_t number) {
    uint32_t first = failed.load(std::memory_order_relaxed);
    while (
        (first == 0 || number < first) &&
        !failed.compare_exchange_weak(first, number, std::memory_order_release, std::memory_order_relaxed)) {
    }
  }

  bool HasGivenUp(uint32_t number) const {
    const uint32_t first = failed.load(std::memory_order_acquire);
    return first != 0 && first <= number;
  }
};

// Wait of one rank for its peers in a call.
class HostMeeting::PeerWait {
 public:
  using Clock = std::chrono::steady_clock;

  PeerWait(HostMeeting& meeting, const char* op, const Group& group, const Group::Position& position,
           uint32_t number, const Hooks& hooks)
      : meeting_(meeting),
        rows_(&meeting.rows_[position.group_index * group.num_ranks()]),
        op_(op),
        group_(group),
        position_(position),
        number_(number),
        hooks_(hooks) {}

  // Waits until `has_arrived` returns true for every rank, or sets an error, which refuses the call.
  template <typename HasArrived>
  std::string Await(const char* what, bool has_launched, HasArrived has_arrived) {
    const auto begin = Clock::now();
    const auto limit = std::chrono::duration<double>(group_.timeout_s());
    std::optional<Clock::time_point> gave_up_at;  // when this rank first saw that a peer had given up
    while (true) {
      // Read before the ranks are checked: an op fails only after all ranks have begun it, which the check
      // then finds. So no rank gives up the very op that it begins after others have launched it.
      const std::string failure = hooks_.failure ? hooks_.failure() : "";
      std::string error, missing, ended, lost, why_lost, failed;
      for (int rank = 0; rank < group_.num_ranks(); ++rank) {
        const bool has_rank_arrived = has_arrived(rank, error);
        // A rank that gave up does not count, even if it had arrived before.
        if (rows_[rank].HasGivenUp(number_)) {
          failed += Text(' ', rank);
        } else if (!has_rank_arrived) {
          missing += Text(' ', rank);
          if (hooks_.has_ended && hooks_.has_ended(rank)) ended += Text(' ', rank);
          if (const std::string why = hooks_.why_lost ? hooks_.why_lost(rank) : ""; !why.empty()) {
            lost += Text(' ', rank);
            why_lost = why;
          }
        }
      }
      // All ranks find the same difference, so all refuse the call and stay in step.
      if (!error.empty() && failed.empty()) return error + kRefused;
      if (error.empty() && missing.empty() && failed.empty()) return "";
      // A rank that has launched the op does not give up because of a reported failure. All others have begun
      // the op and are about to launch it, and the op itself reports to each rank why it fails.
      if (!failure.empty() && error.empty() && (!has_launched || !failed.empty())) {
        meeting_.GiveUp(group_, position_, number_);
        return failure;
      }
      const auto waited = Clock::now() - begin;
      if (!failed.empty() && !gave_up_at) gave_up_at = Clock::now();
      // Most often a peer gives up because of a failure that this process is about to see, too. Wait for it
      // for a moment, because its cause is a better error than that a peer gave up.
      const bool may_learn_cause =
          hooks_.failure && gave_up_at && waited < limit && Clock::now() - *gave_up_at < kCauseDelay;
      if (error.empty() && !ended.empty()) {
        error = Text(Intro(), ", rank(s)", ended, " did not ", what,
                     " because their process has ended: ", Where());
      } else if (error.empty() && !lost.empty()) {
        meeting_.GiveUp(group_, position_, number_);
        return Text(Intro(), ", rank(s)", lost,
                    " can say no more, because the connection to their process was lost (", why_lost,
                    "): ", Where(), ". Start all processes of this group again.");
      } else if (error.empty() && !failed.empty() && !may_learn_cause) {
        const std::string who = missing.empty() ? "" : Text(", rank(s)", missing, " did not ", what, ", and");
        error =
            Text(Intro(), who.empty() ? "," : who, " rank(s)", failed, " gave up at a first call: ", Where());
      } else if (error.empty() && waited >= limit) {
        error =
            Text(Intro(), ", rank(s)", missing, " did not ", what, " within ", group_.timeout_s(),
                 " s: ", Where(), ". ", kSameOrder,
                 ": look for a branch that differs between ranks, or raise Group(timeout_s=...) if a rank "
                 "is only slow, for example to compile");
      }
      if (!error.empty()) {
        meeting_.GiveUp(group_, position_, number_);
        return error + ". Make the Group anew to go on.";
      }
      std::this_thread::sleep_for(
          std::chrono::microseconds(waited < std::chrono::milliseconds(5) ? 20 : 500));
    }
  }

  std::string DescribeMismatch(int rank, uint64_t own, uint64_t other) const {
    return Text(Intro(), ", rank ", position_.rank, " has reached ", Describe(own), ", but rank ", rank,
                " has reached ", Describe(other), " (first call no. ", number_, "). ", kSameOrder,
                ", with the same shapes and dtypes", TakeTurns());
  }

  std::string DescribeAhead(int rank) const {
    return Text(Intro(), ", rank ", rank, " is more than ", Row::kEntries, " first calls ahead: ", Where(),
                ". ", kSameOrder, TakeTurns());
  }

  // Describe a call that this rank, or another one, began while its process was in another first call.
  std::string DescribeTwoThreads(uint64_t own, uint64_t other) const {
    return Text(Intro(), ", rank ", position_.rank, " has reached ", Describe(own), " (first call no. ",
                number_, ") while another thread of its process was at the first call of ", Describe(other),
                ". ", kSameOrder, kTakeTurns);
  }
  std::string DescribeTwoThreadsOf(int rank) const {
    return Text(Intro(), ", rank ", rank, " has reached first call no. ", number_,
                " while another thread of its process was at the first call of another op: ", Where(), ". ",
                kSameOrder, kTakeTurns);
  }

  static constexpr char kRefused[] = ". No rank has launched this call";

 private:
  static constexpr char kSameOrder[] = "Every rank must reach the same ops in the same order";
  static constexpr char kTakeTurns[] =
      ". If several threads run programs of this group, let them take turns, in an order that is the same in "
      "all processes";

  const char* TakeTurns() const { return meeting_.processes_.empty() ? "" : kTakeTurns; }

  std::string Intro() const { return Text(op_, ": of group ", group_.ListName(position_.group_index)); }

  std::string Where() const {
    return Text("rank ", position_.rank, " waited at the first call of a call site (no. ", number_, ")");
  }

  std::string Describe(uint64_t signature) const {
    const std::string text = hooks_.describe ? hooks_.describe(signature) : "";
    return text.empty() ? "another op, or an op of another program" : text;
  }

  HostMeeting& meeting_;
  Row* const rows_;  // of this group
  const char* const op_;
  const Group& group_;
  const Group::Position position_;
  const uint32_t number_;
  const Hooks& hooks_;
};

namespace {

// FNV-1a.
uint64_t Hash(const std::string& text) {
  uint64_t hash = 14695981039346656037u;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
  return hash;
}

}  // namespace

HostMeeting::HostMeeting(const std::string& key, int total_ranks, std::vector<int> processes)
    : group_(Hash(key)),
      total_ranks_(total_ranks),
      processes_(std::move(processes)),
      rows_(new Row[total_ranks]),
      current_(total_ranks) {
  for (std::atomic<uint64_t>& signature : current_) signature = kNoSignature;
  if (!processes_.empty()) {
    ListenToEvents(group_, [this](const CallEvent& event) { Receive(event); });
  }
}

HostMeeting::~HostMeeting() {
  if (!processes_.empty()) IgnoreEvents(group_);
}

void HostMeeting::Receive(const CallEvent& event) {
  if (event.rank >= static_cast<uint32_t>(total_ranks_)) return;
  Row& row = rows_[event.rank];
  std::lock_guard<std::mutex> lock(mutex_);
  if (event.generation != generation_) return;
  Row::Entry& entry = row.At(event.number);
  switch (event.kind) {
    case CallEvent::Kind::kBegun:
      row.calls.store(std::max(row.calls.load(std::memory_order_relaxed), event.number),
                      std::memory_order_relaxed);
      entry.signature.store(event.signature, std::memory_order_relaxed);
      entry.begun.store(event.number, std::memory_order_release);
      break;
    case CallEvent::Kind::kLaunched:
      entry.launched.store(event.number, std::memory_order_release);
      break;
    case CallEvent::Kind::kGivenUp:
      row.GiveUp(event.number);
      break;
  }
}

void HostMeeting::Send(CallEvent::Kind kind, int index, uint32_t number, uint64_t signature) {
  if (processes_.empty()) return;
  CallEvent event{group_, signature, static_cast<uint32_t>(index), number, kind, 0};
  {
    std::lock_guard<std::mutex> lock(mutex_);
    event.generation = generation_;
  }
  SendEvent(processes_, event);
}

std::shared_ptr<void> HostMeeting::Enter(int index, uint64_t signature, uint64_t& other) {
  std::atomic<uint64_t>& current = current_[index];
  if (!current.compare_exchange_strong(other, signature)) return nullptr;
  return {&current, [](std::atomic<uint64_t>* entered) { entered->store(kNoSignature); }};
}

HostMeeting::Call HostMeeting::Begin(const char* op, const Group& group, const Group::Position& position,
                                     uint64_t signature, const Hooks& hooks) {
  const int first = position.group_index * group.num_ranks();
  Row* const rows = &rows_[first];
  Call call{};
  uint64_t other_thread = kNoSignature;
  if (!processes_.empty()) call.in_progress = Enter(first + position.rank, signature, other_thread);
  const bool is_alone = other_thread == kNoSignature;
  // A call that this rank refuses takes a number, too, because the other ranks may begin the same call.
  const uint32_t number = rows[position.rank].calls.fetch_add(1, std::memory_order_relaxed) + 1;
  Row::Entry& entry = rows[position.rank].At(number);
  const uint64_t reported = is_alone ? signature : kNoSignature;
  entry.signature.store(reported, std::memory_order_relaxed);
  entry.begun.store(number, std::memory_order_release);
  Send(CallEvent::Kind::kBegun, first + position.rank, number, reported);
  PeerWait wait(*this, op, group, position, number, hooks);
  call.number = number;
  call.error = wait.Await("arrive", false, [&](int rank, std::string& error) {
    Row::Entry& peer = rows[rank].At(number);
    const uint32_t begun = peer.begun.load(std::memory_order_acquire);
    if (begun < number) return false;
    const uint64_t other = peer.signature.load(std::memory_order_relaxed);
    // If this rank refuses, it waits for all, so that a thread that tries again does not run ahead of them.
    if (!is_alone || !error.empty()) return true;
    if (begun > number) {
      error = wait.DescribeAhead(rank);
    } else if (other == kNoSignature) {
      error = wait.DescribeTwoThreadsOf(rank);
    } else if (other != signature) {
      error = wait.DescribeMismatch(rank, signature, other);
    }
    return true;
  });
  if (call.error.empty() && !is_alone) {
    call.error = wait.DescribeTwoThreads(signature, other_thread) + PeerWait::kRefused;
  }
  return call;
}

std::string HostMeeting::AwaitLaunches(const char* op, const Group& group, const Group::Position& position,
                                       uint32_t number, const Hooks& hooks) {
  const int first = position.group_index * group.num_ranks();
  Row* const rows = &rows_[first];
  rows[position.rank].At(number).launched.store(number, std::memory_order_release);
  Send(CallEvent::Kind::kLaunched, first + position.rank, number);
  return PeerWait(*this, op, group, position, number, hooks)
      .Await("launch it", true, [&](int rank, std::string&) {
        return rows[rank].At(number).launched.load(std::memory_order_acquire) >= number;
      });
}

void HostMeeting::GiveUp(const Group& group, const Group::Position& position, uint32_t number) {
  GiveUp(position.group_index * group.num_ranks() + position.rank, number);
}

void HostMeeting::GiveUp(int index, uint32_t number) {
  rows_[index].GiveUp(number);
  Send(CallEvent::Kind::kGivenUp, index, number);
}

void HostMeeting::GiveUpNext(const Group& group, const Group::Position& position) {
  const int index = position.group_index * group.num_ranks() + position.rank;
  GiveUp(index, LastCall(index, 1) + 1);
}

bool HostMeeting::HasFailed(int first, int count) const {
  for (int i = first; i < first + count; ++i) {
    if (rows_[i].failed.load(std::memory_order_acquire) != 0) return true;
  }
  return false;
}

uint32_t HostMeeting::LastCall(int first, int count) const {
  uint32_t most = 0;
  for (int i = first; i < first + count; ++i) {
    most = std::max(most, rows_[i].calls.load(std::memory_order_relaxed));
  }
  return most;
}

void HostMeeting::Reset(uint32_t calls) {
  std::lock_guard<std::mutex> lock(mutex_);
  generation_ = calls + 1;
  for (int i = 0; i < total_ranks_; ++i) {
    Row& row = rows_[i];
    for (Row::Entry& entry : row.entries) {
      entry.begun.store(0, std::memory_order_relaxed);
      entry.launched.store(0, std::memory_order_relaxed);
    }
    row.calls.store(generation_, std::memory_order_relaxed);
    row.failed.store(0, std::memory_order_release);
  }
}

}  // namespace jax_ep
