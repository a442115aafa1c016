// The ranks' meetings on the host, for the sanitizers: every rank on a thread of its own, in one process and
// in two that are connected; ranks that never come, or come to another op; programs of several threads.
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "meeting_rig.h"

namespace jax_ep {
namespace {

constexpr int kCalls = 300;

// Calls of the ranks of this process; nobody passes before all have come.
void RunCalls(HostMeeting& meeting, const Group& group, const std::vector<int>& ranks) {
  OnRanks(ranks, [&](int index) {
    const Group::Position position{index / kRanks, index % kRanks};
    std::mt19937 random(index);
    for (uint32_t call = 1; call <= kCalls; ++call) {
      if (random() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
      const auto [number, error, in_progress] = meeting.Begin(kOp, group, position, call % 100, Known());
      Check(error.empty() && number == call, Text("call ", call, ": ", number, ' ', error));
      const int first = position.group_index * kRanks;
      for (int rank = first; rank < first + kRanks; ++rank) {
        Check(meeting.LastCall(rank, 1) >= call, "passed before all had come");
      }
      const std::string late = meeting.AwaitLaunches(kOp, group, position, number, Known());
      Check(late.empty(), late);
    }
  });
}

void TestOneProcess() {
  const auto meeting = MakeAlone();
  const TimedGroup group(60);
  RunCalls(*meeting, group, {0, 1, 2, 3, 4, 5, 6, 7});
  Check(!meeting->HasFailed(0, kTotal) && meeting->LastCall(0, kTotal) == kCalls, "wrong count of calls");
}

// Runs ranks in two processes that watch each other. Must run while this process has one thread.
template <typename Work>
void InTwoProcesses(Work work) {
  const std::array<int, 2> events[2] = {SocketPair(), SocketPair()}, ready = SocketPair();
  pid_t children[2];
  for (int process = 0; process < 2; ++process) {
    children[process] = fork();
    if (children[process] != 0) continue;
    const int other = 1 - process;
    AddWatcher(other, events[process][0]);
    WatchProcess(other, events[other][1]);
    HostMeeting meeting("key", kTotal, {other});
    char byte = 0;
    Check(write(ready[process], &byte, 1) == 1 && read(ready[process], &byte, 1) == 1, "the other is gone");
    work(meeting, process == 1 ? std::vector<int>{1, 2, 5, 6} : std::vector<int>{0, 3, 4, 7});
    // The other may still wait for what this process has said last, and would otherwise see its end.
    Check(write(ready[process], &byte, 1) == 1 && read(ready[process], &byte, 1) == 1, "the other is gone");
    _exit(0);
  }
  for (const auto& ends : {events[0], events[1], ready}) {
    for (const int end : ends) close(end);
  }
  for (const pid_t child : children) {
    int status = 0;
    Check(waitpid(child, &status, 0) == child && status == 0, "a process failed");
  }
}

void TestTwoProcesses() {
  InTwoProcesses(
      [](HostMeeting& meeting, const std::vector<int>& ranks) { RunCalls(meeting, TimedGroup(60), ranks); });
}

constexpr int kOps = 5;  // of a program

// Runs the first call of an op. Returns its error, empty if all ranks have launched it.
std::string RunOp(HostMeeting& meeting, const Group& group, const Group::Position& position,
                  uint64_t signature) {
  const auto begun = meeting.Begin(kOp, group, position, signature, Known());
  if (!begun.error.empty()) return begun.error;
  const std::string late = meeting.AwaitLaunches(kOp, group, position, begun.number, Known());
  Check(late.empty(), Text("a launch was missed: ", late));
  return "";
}

// Runs the first calls of a program, whose ops have signatures of its own. It ends with its first error, as a
// program of XLA does. Returns the error, empty if it has ended well.
std::string RunProgram(HostMeeting& meeting, const Group& group, const Group::Position& position, int program,
                       std::mt19937& random) {
  for (int op = 0; op < kOps; ++op) {
    if (random() % 2 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
    if (std::string error = RunOp(meeting, group, position, 10 * program + op); !error.empty()) return error;
  }
  return "";
}

// Two programs at once or in any order, and then one that all ranks run alike. Whatever happens to the two,
// all ranks launch a call or none, nobody waits for long, and the group goes on.
void RunPrograms(HostMeeting& meeting, const std::vector<int>& ranks, bool in_threads) {
  const TimedGroup group(20);
  OnRanks(ranks, [&](int index) {
    const Group::Position position{index / kRanks, index % kRanks};
    for (int round = 0; round < 20; ++round) {
      std::mt19937 random(100 * round + index);
      const Stopwatch watch;
      std::string errors[2];
      const auto run = [&](int program, uint32_t seed) {
        std::mt19937 own(seed);
        errors[program] = RunProgram(meeting, group, position, program, own);
      };
      const uint32_t seeds[] = {static_cast<uint32_t>(random()), static_cast<uint32_t>(random())};
      if (in_threads) {
        std::thread other(run, 1, seeds[1]);
        run(0, seeds[0]);
        other.join();
      } else {
        // XLA has a thread for each device, and would run the programs in one order on all of them.
        const int first = static_cast<int>(random() % 2);
        run(first, seeds[first]);
        run(1 - first, seeds[1 - first]);
      }
      for (const std::string& error : errors) {
        const bool is_named = Has(error, "another thread of its process") ||
                              (Has(error, "has reached op") && Has(error, "but rank"));
        Check(error.empty() || (is_named && Has(error, "No rank has launched this call")), error);
        Check(error.empty() || !in_threads || Has(error, "let them take turns"), error);
      }
      Check(watch.seconds() < 10, "the ranks waited for a program that had been refused");
      // All are in step again.
      Check(!meeting.HasFailed(0, kTotal), Text("the group has failed: ", errors[0], errors[1]));
      const std::string error = RunProgram(meeting, group, position, 2, random);
      Check(error.empty(), error);
    }
  });
}

void TestTwoThreads() {
  InTwoProcesses(
      [](HostMeeting& meeting, const std::vector<int>& ranks) { RunPrograms(meeting, ranks, true); });
}

void TestTwoOrders() {
  InTwoProcesses(
      [](HostMeeting& meeting, const std::vector<int>& ranks) { RunPrograms(meeting, ranks, false); });
  const auto meeting = MakeAlone();
  RunPrograms(*meeting, {0, 1, 2, 3, 4, 5, 6, 7}, false);
}

// A thread begins a call while another one of its rank is in one, and the other process comes to both in the
// same order: only the second one is refused, on both.
void TestAThreadBesideAnother() {
  InTwoProcesses([](HostMeeting& meeting, const std::vector<int>& ranks) {
    const TimedGroup group(20);
    OnRanks(ranks, [&](int rank) {
      const Group::Position position{0, rank};
      if (rank >= kRanks) return;
      if (rank != 0) {
        while (meeting.LastCall(0, 1) < 2) std::this_thread::yield();
        std::string error = RunOp(meeting, group, position, 1);
        Check(error.empty(), error);
        error = meeting.Begin(kOp, group, position, 2, Known()).error;
        Check(Has(error, "rank 0 has reached first call no. 2 while another thread of its process"), error);
        return;
      }
      std::thread second([&] {
        while (meeting.LastCall(0, 1) < 1) std::this_thread::yield();
        const std::string error = meeting.Begin(kOp, group, position, 2, Known()).error;
        Check(Has(error, "rank 0 has reached op 2") && Has(error, "was at the first call of op 1"), error);
      });
      const std::string error = RunOp(meeting, group, position, 1);
      Check(error.empty(), error);
      second.join();
    });
    Check(!meeting.HasFailed(0, kTotal), "the group has failed");
  });
}

void TestAMissingRank() {
  const auto meeting = MakeAlone();
  const TimedGroup group(0.3), patient(60);
  OnRanks({0, 1, 2, 3}, [&](int rank) {
    // Of the second group of the mesh; the first one is not concerned.
    const Group::Position position{1, rank};
    if (rank == 2) std::this_thread::sleep_for(std::chrono::milliseconds(700));
    const Stopwatch watch;
    const auto call = meeting->Begin(kOp, rank == 2 ? patient : group, position, 1, Known());
    const char* expected = rank == 2 ? "rank(s) 0 1 3 gave up" : "G (list 2 of 2), rank(s) 2 did not arrive";
    Check(call.number == 1 && Has(call.error, kOp) && Has(call.error, expected), call.error);
    Check(watch.seconds() < (rank == 2 ? 0.2 : 10), "it took too long");
  });
  Check(meeting->HasFailed(kRanks, kRanks) && !meeting->HasFailed(0, kRanks), "the wrong group has failed");
  // Nobody waits any more.
  OnRanks({0, 2}, [&](int rank) {
    const Stopwatch watch;
    Check(Has(meeting->Begin(kOp, patient, {1, rank}, 1, Known()).error, "gave up"), "it went on");
    Check(watch.seconds() < 0.2, "it waited for a group that has failed");
  });
  Check(meeting->LastCall(kRanks, kRanks) == 2, "wrong count of calls");
  meeting->Reset(7);
  OnRanks({0, 1, 2, 3}, [&](int rank) {
    const auto call = meeting->Begin(kOp, patient, {1, rank}, 3, Known());
    Check(call.error.empty() && call.number == 9, call.error);
    Check(meeting->AwaitLaunches(kOp, patient, {1, rank}, 9, Known()).empty(), "a launch was missed");
  });
}

void TestALaunchThatFails() {
  for (const bool says_so : {true, false}) {
    const auto meeting = MakeAlone();
    const TimedGroup group(says_so ? 60 : 0.3);
    OnRanks({0, 1, 2, 3}, [&](int rank) {
      const Group::Position position{0, rank};
      std::string error = meeting->Begin(kOp, group, position, 1, Known()).error;
      if (rank == 3) return says_so ? meeting->GiveUp(group, position, 1) : void();
      // Who was slow to look may find out before it has launched.
      if (error.empty()) error = meeting->AwaitLaunches(kOp, group, position, 1, Known());
      Check(Has(error, says_so ? "3 gave up" : "rank(s) 3 did not launch it"), error);
    });
  }
}

// Rank 3 gives up after an op that failed. The others wait for what their own processes hear of it, which is
// nothing on rank 0.
void TestAnOpThatFailedBefore() {
  const auto meeting = MakeAlone();
  const TimedGroup group(60);
  const Stopwatch watch;
  OnRanks({0, 1, 2, 3}, [&](int rank) {
    const Group::Position position{0, rank};
    if (rank == 3) return meeting->GiveUpNext(group, position);
    HostMeeting::Hooks hooks = Known();
    hooks.failure = [&] { return rank > 0 && watch.seconds() > 0.3 ? std::string("why") : std::string(); };
    const std::string error = meeting->Begin(kOp, group, position, 1, hooks).error;
    Check(rank == 0 ? Has(error, "3 gave up at a first call") : error == "why", error);
  });
  Check(meeting->HasFailed(0, kRanks) && watch.seconds() < 10, "it took too long, or did not fail");
}

// An op that has failed on rank 1 before the others have launched it, who then do.
void TestAnOpThatFailsAtOnce() {
  const auto meeting = MakeAlone();
  const TimedGroup group(60);
  OnRanks({0, 1, 2, 3}, [&](int rank) {
    const Group::Position position{0, rank};
    HostMeeting::Hooks hooks = Known();
    std::string error = meeting->Begin(kOp, group, position, 1, hooks).error;
    if (rank == 1) hooks.failure = [] { return std::string("why"); };
    if (rank != 1) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    if (error.empty()) error = meeting->AwaitLaunches(kOp, group, position, 1, hooks);
    Check(error.empty(), error);
  });
}

// Ranks 1 and 2 are held up for long where they look for rank 3, which comes when both are.
class Held {
 public:
  HostMeeting::Hooks HooksFor(int rank) {
    HostMeeting::Hooks hooks = Known();
    if (rank != 1 && rank != 2) return hooks;
    hooks.has_ended = [this, first = true](int) mutable {
      if (first) ++held_;
      first = false;
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      return false;
    };
    return hooks;
  }
  void AwaitBoth() const {
    while (held_ < 2) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

 private:
  std::atomic<int> held_{0};
};

// All ranks have launched an op when rank 0 gives up the next one: those that look later find the launches.
void TestAnOpThatIsRefusedAfterALaunch() {
  const auto meeting = MakeAlone();
  const TimedGroup group(60);
  Held held;
  OnRanks({0, 1, 2, 3}, [&](int rank) {
    const Group::Position position{0, rank};
    std::string error = meeting->Begin(kOp, group, position, 1, Known()).error;
    if (rank == 3) held.AwaitBoth();
    if (error.empty()) error = meeting->AwaitLaunches(kOp, group, position, 1, held.HooksFor(rank));
    if (rank == 0) meeting->GiveUpNext(group, position);
    Check(error.empty(), error);
  });
  OnRanks({1, 2, 3}, [&](int rank) {
    const std::string error = meeting->Begin(kOp, group, {0, rank}, 1, Known()).error;
    Check(Has(error, "rank(s) 0") && Has(error, "gave up at a first call"), error);
  });
}

// An op fails as soon as rank 0 has launched it. The others, who then look and find that all have come,
// launch it too, though they have heard of the failure.
void TestAnOpThatFailsBeforeOthersLook() {
  const auto meeting = MakeAlone();
  const TimedGroup group(60);
  std::atomic<bool> has_failed{false};
  Held held;
  OnRanks({0, 1, 2, 3}, [&](int rank) {
    HostMeeting::Hooks hooks = held.HooksFor(rank);
    hooks.failure = [&] { return has_failed ? std::string("why") : std::string(); };
    if (rank == 3) held.AwaitBoth();
    const std::string error = meeting->Begin(kOp, group, {0, rank}, 1, hooks).error;
    if (rank == 0) has_failed = true;
    Check(error.empty(), error);
  });
}

void TestAnotherOp() {
  const auto meeting = MakeAlone();
  const TimedGroup group(60);
  OnRanks({0, 1, 2, 3}, [&](int rank) {
    const std::string error = meeting->Begin(kOp, group, {0, rank}, rank == 1 ? 200 : 5, Known()).error;
    Check(Has(error, "but rank") && Has(error, "op 5") && Has(error, "another op"), error);
    Check(!Has(error, "threads"), error);  // XLA runs the programs of one process in one order
  });
  Check(!meeting->HasFailed(0, kTotal), "a call that nobody has launched has failed the group");
}

int Main() {
  TestTwoProcesses();
  TestTwoThreads();
  TestTwoOrders();
  TestAThreadBesideAnother();
  TestOneProcess();
  TestAMissingRank();
  TestALaunchThatFails();
  TestAnOpThatFailedBefore();
  TestAnOpThatFailsAtOnce();
  TestAnOpThatIsRefusedAfterALaunch();
  TestAnOpThatFailsBeforeOthersLook();
  TestAnotherOp();
  std::puts(
      "host_meeting_stress: 8 ranks in one process and in two; who was missing, other or out of turn was "
      "named");
  return 0;
}

}  // namespace
}  // namespace jax_ep

int main() { return jax_ep::Main(); }
