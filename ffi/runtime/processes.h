// Connections with the other processes of this process's groups. A thread serves them: it passes on what they
// send, finds whether they still live, and calls registered functions five times a second.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace jax_ep {

// What a rank tells the other processes of its group about one of its calls (HostMeeting).
struct CallEvent {
  enum class Kind : uint32_t { kBegun, kLaunched, kGivenUp };

  uint64_t group;      // a number that stands for the group in all processes
  uint64_t signature;  // of a call that was begun
  uint32_t rank;       // its index in the mesh
  uint32_t number;     // of the call
  Kind kind;
  uint32_t generation;  // of the group's calls, which a reset changes
};

// Takes over a connected stream socket on which only another process sends. Its end of file means that the
// process has ended.
void WatchProcess(int process, int descriptor);

// Adds a connected stream socket, whose other end watches this process. The caller keeps the descriptor, and
// must not close it before this process ends.
void AddWatcher(int process, int descriptor);

// Sends an event to those of these processes that watch this one, in the order of the calls. Does not block.
void SendEvent(const std::vector<int>& processes, const CallEvent& event);

// Calls `listener` with every event of a group that another process sends, until IgnoreEvents returns. Events
// of other groups are dropped. The listener must neither throw nor block.
void ListenToEvents(uint64_t group, std::function<void(const CallEvent&)> listener);
void IgnoreEvents(uint64_t group);

// Returns whether a process ended long enough ago that the driver has stopped its kernels, so that it neither
// reads nor writes memory any more. Returns false for processes that are not watched, and for those whose
// connection was lost, because they may still run.
bool HasProcessEnded(int process);

// Returns why the connection to a watched process was lost, empty if it stands or the process has ended.
std::string WhyProcessIsLost(int process);

// Calls the function about five times a second until this process ends. It must neither throw nor block.
void OnTick(std::function<void()> tick);

}  // namespace jax_ep
