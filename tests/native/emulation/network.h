// A network between emulated devices that keeps no order but what the kernels are promised: what a put brings
// comes in grains, late and in any order, which are read when they leave; its signal comes later still.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "machine.h"

namespace emulation {

class Network {
 public:
  struct Manner {
    uint64_t most_ns = 0;  // that something is under way
    int grain_bytes = 16;
  };
  Manner manner;

  explicit Network(int domains) : windows_(domains), signals_(domains), cut_(domains * domains) {}

  // A domain's part of the window, and what it has been signalled.
  void Attach(int domain, std::byte* window, int num_signals) {
    windows_[domain] = window;
    signals_[domain].assign(num_signals, 0);
  }

  void Put(int from, int domain, int64_t to, int64_t source, int64_t bytes, uint32_t signal) {
    Post post = Begin(from, domain);
    for (int64_t at = 0; at < bytes; at += manner.grain_bytes) {
      const auto size = std::min<int64_t>(manner.grain_bytes, bytes - at);
      post.grains.push_back({windows_[domain] + to + at, windows_[from] + source + at, size});
    }
    post.signal = signal, post.number = 1;
    posts_.push_back(std::move(post));
  }

  void Signal(int from, int domain, uint32_t signal, uint64_t number) {
    Post post = Begin(from, domain);
    post.signal = signal, post.number = number;
    posts_.push_back(std::move(post));
  }

  uint64_t ReadSignal(int domain, uint32_t signal) const { return signals_[domain][signal]; }

  // From now on nothing comes from one domain to another.
  void Cut(int from, int to) { cut_[from * windows_.size() + to] = true; }
  void CutOff(int domain) {
    for (size_t other = 0; other < windows_.size(); ++other) {
      Cut(domain, static_cast<int>(other));
      Cut(static_cast<int>(other), domain);
    }
  }

  // Between the turns of the devices: some of what is due arrives.
  void Deliver() {
    Machine& machine = Machine::Get();
    std::shuffle(posts_.begin(), posts_.end(), machine.random);
    for (size_t i = 0; i < posts_.size();) {
      Post& post = posts_[i];
      if (cut_[post.from * windows_.size() + post.to]) {
        post.grains.clear(), post.number = 0;  // lost
      } else if (post.due > machine.now) {
        ++i;
        continue;
      } else if (!post.grains.empty()) {
        std::shuffle(post.grains.begin(), post.grains.end(), machine.random);
        for (size_t moved = 1 + machine.random() % post.grains.size(); moved > 0; --moved) {
          const Grain grain = post.grains.back();
          std::memcpy(grain.to, grain.from, grain.bytes);
          post.grains.pop_back();
        }
        post.due = Due(machine, manner.most_ns / 4);
        ++i;
        continue;
      }
      if (post.number != 0) signals_[post.to][post.signal] += post.number;
      posts_[i] = std::move(posts_.back());
      posts_.pop_back();
    }
  }

 private:
  struct Grain {
    std::byte* to;
    const std::byte* from;
    int64_t bytes;
  };
  struct Post {
    int from, to;
    uint64_t due;
    std::vector<Grain> grains;  // that have not arrived
    uint32_t signal;
    uint64_t number;  // to be added to it, once all have
  };

  static uint64_t Due(Machine& machine, uint64_t most) { return machine.now + machine.random() % (most + 1); }
  Post Begin(int from, int to) {
    Machine& machine = Machine::Get();
    machine.Access(true);
    return {from, to, Due(machine, manner.most_ns), {}, 0, 0};
  }

  std::vector<std::byte*> windows_;
  std::vector<std::vector<uint64_t>> signals_;
  std::vector<bool> cut_;
  std::vector<Post> posts_;
};

}  // namespace emulation
