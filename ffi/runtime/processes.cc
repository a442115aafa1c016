#include "runtime/processes.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
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

static_assert(sizeof(CallEvent) == 32, "an event has no padding, because its bytes travel");

// A process that this one watches.
struct Watched {
  int process;
  int descriptor;
  std::string received;  // the part of an event that has arrived
};

// A process that watches this one.
struct Watcher {
  int process;
  int descriptor;
  std::string unsent;  // what the socket has no room for
};

// Appends the events that have arrived. Returns whether the connection still stands; if not, `error` is 0 if
// the other process has ended. Only an end of file says so. Other errors come from the network between hosts,
// also a reset, which may be that of a firewall while the process still runs.
bool Receive(Watched& watched, std::vector<CallEvent>& events, int& error) {
  char bytes[4096];
  while (true) {
    const ssize_t size = recv(watched.descriptor, bytes, sizeof(bytes), MSG_DONTWAIT);
    if (size < 0 && errno == EINTR) continue;
    if (size < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return true;
    if (size <= 0) {
      error = size == 0 ? 0 : errno;
      return false;
    }
    watched.received.append(bytes, size);
    size_t read = 0;
    for (; watched.received.size() - read >= sizeof(CallEvent); read += sizeof(CallEvent)) {
      std::memcpy(&events.emplace_back(), watched.received.data() + read, sizeof(CallEvent));
    }
    watched.received.erase(0, read);
  }
}

// Sends what has not been sent, as far as there is room. Returns whether the connection still stands.
bool Flush(Watcher& watcher) {
  while (!watcher.unsent.empty()) {
    const ssize_t size =
        send(watcher.descriptor, watcher.unsent.data(), watcher.unsent.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (size < 0 && errno == EINTR) continue;
    if (size < 0) return errno == EAGAIN || errno == EWOULDBLOCK;
    watcher.unsent.erase(0, size);
  }
  return true;
}

class Connections {
 public:
  void AddWatched(int process, int descriptor) {
    std::lock_guard<std::mutex> lock(mutex_);
    watched_.push_back({process, descriptor, ""});
    Start();
    Wake();
  }

  void AddWatcher(int process, int descriptor) {
    std::lock_guard<std::mutex> lock(mutex_);
    watchers_.push_back({process, descriptor, ""});
  }

  void Send(const std::vector<int>& processes, const CallEvent& event) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto it = watchers_.begin(); it != watchers_.end();) {
      if (std::count(processes.begin(), processes.end(), it->process) != 0) {
        it->unsent.append(reinterpret_cast<const char*>(&event), sizeof(event));
        if (!Flush(*it)) {
          it = watchers_.erase(it);  // the process finds out by the same connection
          continue;
        }
        if (!it->unsent.empty()) Wake();
      }
      ++it;
    }
  }

  void Listen(uint64_t group, std::function<void(const CallEvent&)> listener) {
    std::lock_guard<std::mutex> lock(listeners_mutex_);
    listeners_[group] = std::move(listener);
  }

  void Ignore(uint64_t group) {
    std::lock_guard<std::mutex> lock(listeners_mutex_);
    listeners_.erase(group);
  }

  void AddTick(std::function<void()> tick) {
    std::lock_guard<std::mutex> lock(mutex_);
    ticks_.push_back(std::move(tick));
    Start();
  }

  std::string WhyProcessIsLost(int process) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto it = lost_.find(process);
    return it == lost_.end() ? "" : it->second;
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

  // Makes the thread look at the connections again.
  void Wake() { (void)eventfd_write(wake_, 1); }

  void Loop() {
    auto next_tick = Clock::now() + kInterval;
    while (true) {
      std::vector<pollfd> polled = Polled();
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(next_tick - Clock::now());
      (void)poll(polled.data(), polled.size(), static_cast<int>(std::max<int64_t>(left.count(), 0)));
      for (const CallEvent& event : Serve(polled)) {
        std::lock_guard<std::mutex> lock(listeners_mutex_);
        const auto it = listeners_.find(event.group);
        if (it != listeners_.end()) it->second(event);
      }
      if (Clock::now() < next_tick) continue;
      next_tick = Clock::now() + kInterval;
      std::vector<std::function<void()>> ticks;
      {
        std::lock_guard<std::mutex> lock(mutex_);
        ticks = ticks_;
      }
      for (const auto& tick : ticks) tick();
    }
  }

  // Returns what the thread waits for: to be woken, to receive from each watched process, to send the rest.
  std::vector<pollfd> Polled() {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<pollfd> polled{{wake_, POLLIN, 0}};
    for (const Watched& watched : watched_) polled.push_back({watched.descriptor, POLLIN, 0});
    for (const Watcher& watcher : watchers_) {
      if (!watcher.unsent.empty()) polled.push_back({watcher.descriptor, POLLOUT, 0});
    }
    return polled;
  }

  // Returns the events that have arrived, and sends what can be sent.
  std::vector<CallEvent> Serve(const std::vector<pollfd>& polled) {
    std::vector<CallEvent> events;
    std::lock_guard<std::mutex> lock(mutex_);
    eventfd_t woken = 0;
    (void)eventfd_read(wake_, &woken);
    const auto may_receive = [&](const Watched& watched) {
      return std::any_of(polled.begin(), polled.end(), [&](const pollfd& entry) {
        return entry.fd == watched.descriptor && entry.revents != 0;
      });
    };
    for (auto it = watched_.begin(); it != watched_.end();) {
      int error = 0;
      if (!may_receive(*it) || Receive(*it, events, error)) {
        ++it;
        continue;
      }
      if (error == 0) {
        ended_.emplace(it->process, Clock::now());
      } else {
        lost_.emplace(it->process, std::strerror(error));
      }
      close(it->descriptor);
      it = watched_.erase(it);
    }
    watchers_.erase(
        std::remove_if(watchers_.begin(), watchers_.end(), [](Watcher& watcher) { return !Flush(watcher); }),
        watchers_.end());
    return events;
  }

  const int wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  std::mutex mutex_;  // guards the members below
  std::vector<Watched> watched_;
  std::vector<Watcher> watchers_;
  std::map<int, Clock::time_point> ended_;  // when the end of a process was seen
  std::map<int, std::string> lost_;         // why the connection to a process was lost
  std::vector<std::function<void()>> ticks_;
  bool started_ = false;
  std::mutex listeners_mutex_;  // held while a listener runs, so that none runs after Ignore
  std::map<uint64_t, std::function<void(const CallEvent&)>> listeners_;
};

Connections& GetConnections() {
  // Never destroyed, because its thread lives until the process ends.
  static Connections* const connections = new Connections;
  return *connections;
}

}  // namespace

void WatchProcess(int process, int descriptor) { GetConnections().AddWatched(process, descriptor); }

void AddWatcher(int process, int descriptor) { GetConnections().AddWatcher(process, descriptor); }

void SendEvent(const std::vector<int>& processes, const CallEvent& event) {
  GetConnections().Send(processes, event);
}

void ListenToEvents(uint64_t group, std::function<void(const CallEvent&)> listener) {
  GetConnections().Listen(group, std::move(listener));
}

void IgnoreEvents(uint64_t group) { GetConnections().Ignore(group); }

bool HasProcessEnded(int process) { return GetConnections().HasProcessEnded(process); }

std::string WhyProcessIsLost(int process) { return GetConnections().WhyProcessIsLost(process); }

void OnTick(std::function<void()> tick) { GetConnections().AddTick(std::move(tick)); }

}  // namespace jax_ep
