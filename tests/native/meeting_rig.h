// Ranks of a mesh that meet on the host, without XLA and GPUs: what the programs that stress it share.
#pragma once

#include <sys/socket.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/text.h"
#include "runtime/gpu/host_meeting.h"

namespace jax_ep {

constexpr int kRanks = 4, kGroups = 2, kTotal = kRanks * kGroups;
constexpr char kOp[] = "dispatch";

inline void Check(bool holds, const std::string& what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what.c_str());
  std::exit(1);
}

inline bool Has(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

class Stopwatch {
 public:
  double seconds() const { return std::chrono::duration<double>(Clock::now() - begin_).count(); }

 private:
  using Clock = std::chrono::steady_clock;
  const Clock::time_point begin_ = Clock::now();
};

class TimedGroup : public Group {
 public:
  explicit TimedGroup(double timeout_s) : Group("key", "G", std::vector<int64_t>(kTotal, 0), kRanks, false) {
    set_options({timeout_s, 0});
  }
};

inline HostMeeting::Hooks Known() {
  return {[](uint64_t signature) { return signature < 100 ? Text("op ", signature) : std::string(); },
          nullptr, nullptr, nullptr};
}

template <typename Work>
inline void OnRanks(const std::vector<int>& ranks, Work work) {
  std::vector<std::thread> threads;
  for (int rank : ranks) threads.emplace_back([&work, rank] { work(rank); });
  for (std::thread& thread : threads) thread.join();
}

// Two ends that are connected.
inline std::array<int, 2> SocketPair() {
  std::array<int, 2> ends{};
  Check(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) == 0, "no sockets");
  return ends;
}

inline std::unique_ptr<HostMeeting> MakeAlone() {
  return std::make_unique<HostMeeting>("key", kTotal, std::vector<int>());
}

}  // namespace jax_ep
