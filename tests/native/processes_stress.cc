// Connections between processes, for the sanitizers: what comes in pieces, late or for others, who does not
// read, and who is killed.
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "meeting_rig.h"
#include "runtime/processes.h"

namespace jax_ep {
namespace {

// Sends bytes of events as another process does, a few at a time.
void SendInPieces(int descriptor, const std::vector<CallEvent>& events) {
  const char* bytes = reinterpret_cast<const char*>(events.data());
  for (size_t left = events.size() * sizeof(CallEvent); left > 0;) {
    const size_t piece = std::min<size_t>(left, 7);
    Check(write(descriptor, bytes, piece) == static_cast<ssize_t>(piece), "the other end is closed");
    bytes += piece;
    left -= piece;
  }
}

template <typename Condition>
bool HoldsSoon(Condition condition) {
  for (const Stopwatch watch; !condition();) {
    if (watch.seconds() > 10) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

// Rank 1 lives in another process. What that says of calls before a reset may arrive after it, and what it
// says of other groups and ranks is dropped.
void TestEventsThatComeLate() {
  using Kind = CallEvent::Kind;
  const std::array<int, 2> hears = SocketPair(), says = SocketPair();
  AddWatcher(5, says[0]);
  WatchProcess(5, hears[0]);
  HostMeeting meeting("key", kTotal, {5});
  const TimedGroup group(60);
  CallEvent heard{};
  meeting.GiveUp(group, {0, 0}, 1);
  Check(read(says[1], &heard, sizeof(heard)) == sizeof(heard), "nothing was sent");
  Check(heard.kind == Kind::kGivenUp && heard.rank == 0 && heard.number == 1, "something else was sent");
  uint32_t generation = heard.generation;
  const auto event = [&](uint32_t rank, uint32_t number, Kind kind) {
    return CallEvent{heard.group, 7, rank, number, kind, generation};
  };
  SendInPieces(hears[1], {event(1, 3, Kind::kBegun), event(1, 3, Kind::kGivenUp)});
  Check(HoldsSoon([&] { return meeting.HasFailed(1, 1); }) && meeting.LastCall(1, 1) == 3,
        "it was not heard");
  meeting.Reset(10);
  SendInPieces(hears[1], {event(1, 11, Kind::kGivenUp), event(1, 12, Kind::kGivenUp)});
  meeting.GiveUp(group, {0, 0}, 99);
  Check(read(says[1], &heard, sizeof(heard)) == sizeof(heard), "nothing was sent");
  Check(heard.generation != generation, "others do not see the reset");
  generation = heard.generation;
  meeting.Reset(11);  // the group has failed again before its next call
  CallEvent foreign = event(2, 99, Kind::kGivenUp);
  SendInPieces(hears[1], {foreign, event(1, 13, Kind::kGivenUp)});
  ++generation;
  foreign = event(2, 99, Kind::kGivenUp);
  ++foreign.group;
  SendInPieces(hears[1], {foreign, event(kTotal, 99, Kind::kGivenUp), event(1, 13, Kind::kBegun),
                          event(1, 13, Kind::kLaunched)});
  OnRanks({0, 2, 3}, [&](int rank) {
    const auto call = meeting.Begin(kOp, group, {0, rank}, 7, Known());
    Check(call.error.empty() && call.number == 13, call.error);
    Check(meeting.AwaitLaunches(kOp, group, {0, rank}, 13, Known()).empty(), "a launch was missed");
  });
  Check(!meeting.HasFailed(0, kTotal), "something that came late, or was for others, was heeded");
}

// The network breaks a connection, which says nothing of the process at the other end.
void TestAConnectionThatIsLost() {
  const int server = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  socklen_t size = sizeof(address);
  Check(bind(server, any, size) == 0 && listen(server, 1) == 0 && getsockname(server, any, &size) == 0,
        "no port");
  const int watched = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  Check(connect(watched, any, size) == 0, "no connection");
  const int other = accept(server, nullptr, nullptr);
  WatchProcess(8, watched);
  const linger at_once{1, 0};
  setsockopt(other, SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
  close(other);  // sends a reset
  close(server);
  Check(HoldsSoon([] { return !WhyProcessIsLost(8).empty(); }), "it was not noticed");
  const auto meeting = MakeAlone();
  HostMeeting::Hooks hooks = Known();
  hooks.why_lost = [](int rank) { return rank == 1 ? WhyProcessIsLost(8) : ""; };
  const std::string error = meeting->Begin(kOp, TimedGroup(60), {0, 0}, 1, hooks).error;
  Check(Has(error, "rank(s) 1 can say no more") && Has(error, "Connection reset by peer"), error);
  Check(!HasProcessEnded(8), "a process that may live counts as ended");
}

// Another process that does not read for a while receives everything nevertheless; one that has ended harms
// nobody.
void TestAWatcherThatIsSlow() {
  constexpr uint32_t kEvents = 20000;
  const std::array<int, 2> slow = SocketPair(), ended = SocketPair();
  AddWatcher(6, slow[0]);
  AddWatcher(7, ended[0]);
  close(ended[1]);
  const Stopwatch watch;
  for (uint32_t number = 0; number < kEvents; ++number) {
    SendEvent({6, 7}, {1, 2, 3, number, CallEvent::Kind::kBegun, 0});
  }
  Check(watch.seconds() < 10, "it waited for the other process");
  for (uint32_t number = 0; number < kEvents; ++number) {
    CallEvent event{};
    Check(recv(slow[1], &event, sizeof(event), MSG_WAITALL) == sizeof(event), "it was cut off");
    Check(event.number == number, "an event was lost");
  }
}

// Starts a process that holds one end of a socket and does nothing else; the other end.
std::pair<pid_t, int> StartIdle() {
  const std::array<int, 2> ends = SocketPair();
  const pid_t child = fork();
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);  // where a check fails, too
    close(ends[0]);
    while (true) pause();
  }
  close(ends[1]);
  return {child, ends[0]};
}

void TestAProcessThatIsKilled(std::pair<pid_t, int> lives, std::pair<pid_t, int> dies) {
  static std::atomic<int> ticks{0};  // counted as long as this process lives
  OnTick([] { ++ticks; });
  WatchProcess(1, lives.second);
  WatchProcess(2, dies.second);
  const auto meeting = MakeAlone();
  const TimedGroup group(60);
  HostMeeting::Hooks hooks = Known();
  hooks.has_ended = [](int rank) { return rank == 2 && HasProcessEnded(2); };
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  Check(!HasProcessEnded(1) && !HasProcessEnded(2) && !HasProcessEnded(3), "gone too soon");
  const Stopwatch watch;
  kill(dies.first, SIGKILL);
  OnRanks({0, 1, 3}, [&](int rank) {
    const std::string error = meeting->Begin(kOp, group, {0, rank}, 1, hooks).error;
    Check(Has(error, "rank(s) 2 did not arrive"), error);
  });
  Check(watch.seconds() >= 1 && watch.seconds() < 10, "told too soon or too late");
  Check(HasProcessEnded(2) && !HasProcessEnded(1), "the wrong process is gone");
  Check(fcntl(dies.second, F_GETFD) == -1 && ticks.load() >= 5, "the socket stayed open, or no tick came");
  kill(lives.first, SIGKILL);
  for (const auto& child : {lives, dies}) waitpid(child.first, nullptr, 0);
}

int Main() {
  const auto lives = StartIdle(), dies = StartIdle();  // while this process has one thread
  TestEventsThatComeLate();
  TestAConnectionThatIsLost();
  TestAWatcherThatIsSlow();
  TestAProcessThatIsKilled(lives, dies);
  std::puts(
      "processes_stress: what came late, in pieces or for others did no harm; a killed process was seen");
  return 0;
}

}  // namespace
}  // namespace jax_ep

int main() { return jax_ep::Main(); }
