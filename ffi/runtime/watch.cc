#include "runtime/watch.h"

#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace jax_ep {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kInterval = std::chrono::milliseconds(200);
// Time from the end of a peer's socket until HasProcessEnded reports the peer.
//
// It is part of this promise: a process that is reported as ended writes nothing any more. The kernel closes
// the sockets of a killed process before the driver has torn down its GPU contexts. Until then a GPU kernel
// of that process may still store to memory of its peers. The driver reports nothing about a dead process, so
// no fence orders the two, only time. Stopping the channels of a context is expected to take milliseconds,
// and stores that are under way arrive within microseconds, so one second is a wide margin. It is not a
// guarantee.
//
// Ops that leave a dead rank behind depend on it: a rank that gives up does not wait until such a peer has
// left the op, and returns memory that the peer could write to. StopGpu (kernels/protocol/fail.cuh) waits two
// seconds for the report, which must be longer than this time and two intervals.
constexpr auto kTeardownTime = std::chrono::seconds(1);

// Returns whether the other end is closed. Drops what it may have sent.
bool IsClosed(int descriptor) {
  char dropped[256];
  while (true) {
    const ssize_t size = recv(descriptor, dropped, sizeof(dropped), MSG_DONTWAIT);
    if (size == 0) return true;
    if (size > 0 || errno == EINTR) continue;
    return errno != EAGAIN && errno != EWOULDBLOCK;
  }
}

class Watch {
 public:
  void AddProcess(int process, int descriptor) {
    std::lock_guard<std::mutex> lock(mutex_);
    sockets_.emplace_back(process, descriptor);
    Start();
  }

  void AddTick(std::function<void()> tick) {
    std::lock_guard<std::mutex> lock(mutex_);
    ticks_.push_back(std::move(tick));
    Start();
  }

  bool HasProcessEnded(int process) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto it = ended_.find(process);
    return it != ended_.end() && Clock::now() - it->second >= kTeardownTime;
  }

 private:
  void Start() {
    if (std::exchange(started_, true)) return;
    std::thread([this] { Loop(); }).detach();
  }

  void Loop() {
    while (true) {
      std::this_thread::sleep_for(kInterval);
      std::vector<std::function<void()>> ticks;
      {
        std::lock_guard<std::mutex> lock(mutex_);
        CheckSockets();
        ticks = ticks_;
      }
      for (const auto& tick : ticks) tick();
    }
  }

  void CheckSockets() {
    for (auto it = sockets_.begin(); it != sockets_.end();) {
      if (!IsClosed(it->second)) {
        ++it;
        continue;
      }
      ended_.emplace(it->first, Clock::now());
      close(it->second);
      it = sockets_.erase(it);
    }
  }

  std::mutex mutex_;
  std::vector<std::pair<int, int>> sockets_;  // process, descriptor
  std::map<int, Clock::time_point> ended_;    // when the end of a process was seen
  std::vector<std::function<void()>> ticks_;
  bool started_ = false;
};

Watch& GetWatch() {
  // Never destroyed, because its thread lives until the process ends.
  static Watch* const watch = new Watch;
  return *watch;
}

}  // namespace

void WatchProcess(int process, int descriptor) { GetWatch().AddProcess(process, descriptor); }

bool HasProcessEnded(int process) { return GetWatch().HasProcessEnded(process); }

void OnTick(std::function<void()> tick) { GetWatch().AddTick(std::move(tick)); }

}  // namespace jax_ep
