// Hosts with a rank each, which run hops between them over an emulated network, and what each must find at
// the end of one.
#pragma once

#include <deque>

#include "kernels/hop/exchange.cuh"
#include "network.h"

namespace jax_ep::cuda {

// Ends the program: of what is not as it must be.
[[noreturn]] void Die(const char* format, ...);

using Random = std::mt19937;
using emulation::Machine;
constexpr uint64_t kForEver = 1'000'000'000'000;

struct EmulatedNet {
  emulation::Network* network;
  int host;

  void Put(int to, int64_t there, int64_t here, int64_t bytes, uint32_t signal) const {
    network->Put(host, to, there, here, bytes, signal);
  }
  void Signal(int to, uint32_t signal, uint64_t number) const { network->Signal(host, to, signal, number); }
  uint64_t Signalled(uint32_t signal) const {
    Machine::Get().Access(false);
    return network->Signalled(host, signal);
  }
};

// One hop, as a host calls it.
struct HopCall {
  int number = 0;
  int64_t block_bytes = 16;
  uint64_t word = 1;     // HopParams::call
  int shift = 0;         // of the arrays, from where 16-byte words begin
  uint64_t late_by = 0;  // it begins so much later than the one before has ended
  bool misplaced = false;
};

// What host `from` sends to host `to`.
inline std::byte ByteOf(int call, int from, int to, int64_t at) {
  uint32_t hash = static_cast<uint32_t>(call * 7919 + from * 131 + to * 17 + at * 2654435761u);
  hash ^= hash >> 13;
  return static_cast<std::byte>(hash * 0x9e3779b1u >> 24 & 0x7f);  // never as a failed hop leaves it
}

struct Run {
  HopCall call;
  HopParams hop{};
  int32_t operand = 0;
  std::vector<uint4> in, out;
  emulation::Launch launch;
  EmulatedNet net{};
  std::byte* rows() { return reinterpret_cast<std::byte*>(out.data()) + call.shift; }
};

struct Host {
  std::vector<uint4> slots;
  HopState state{};
  HopReport report{};
  std::deque<HopCall> calls, strays;
  std::vector<std::unique_ptr<Run>> running;
  uint64_t since = 0;
  int ended = 0, failed = 0;
  bool gone = false;
};

class World {
 public:
  World(Random& random, int hosts, uint64_t timeout)
      : random_(random),
        network(hosts),
        hosts_(hosts),
        window_{hosts, 1 + static_cast<int>(random() % 3), 0} {
    window_.piece_bytes = 16 << random() % 4;
    threads_ = random() % 2 == 0 ? 32 : 64;
    for (int h = 0; h < hosts; ++h) {
      hosts_[h].slots.resize(window_.bytes() / 16);
      hosts_[h].report.timeout_ns = timeout;
      network.Attach(h, reinterpret_cast<std::byte*>(hosts_[h].slots.data()), window_.num_signals());
    }
  }

  Host& host(int h) { return hosts_[h]; }
  int num_hosts() const { return window_.hosts; }
  int tracks() const { return window_.tracks; }
  int64_t piece_bytes() const { return window_.piece_bytes; }

  // Until every host that is not gone has run its hops. `freeze` may hold one of them up.
  void RunAll(const std::function<void(int, Run&)>& freeze) {
    Machine& machine = Machine::Get();
    const uint64_t last = machine.now + 1'000'000'000;
    for (Host& host : hosts_) host.since = machine.now;
    while (true) {
      bool done = true;
      for (int h = 0; h < num_hosts(); ++h) {
        Host& host = hosts_[h];
        if (host.gone) continue;
        if (!host.calls.empty() && host.running.empty() &&
            machine.now >= host.since + host.calls.front().late_by) {
          Begin(h, host.calls, freeze);
        }
        if (!host.strays.empty() && !host.running.empty()) Begin(h, host.strays, freeze);
        done = done && host.calls.empty() && host.running.empty();
      }
      if (done) return;
      network.Deliver();
      for (emulation::Launch* launch : machine.Round()) {
        Host& host = hosts_[launch->rank];
        for (size_t i = 0; i < host.running.size(); ++i) {
          if (&host.running[i]->launch != launch) continue;
          End(launch->rank, *host.running[i]);
          host.running.erase(host.running.begin() + i);
          host.since = machine.now;
          break;
        }
      }
      for (int h = 0; h < num_hosts(); ++h) {
        if (hosts_[h].gone || machine.rank_frozen_until[h] < machine.now + kForEver / 2) continue;
        hosts_[h].gone = true;
        network.CutOff(h);
      }
      if (machine.now > last) Die("hops do not return");
    }
  }

  uint64_t longest_ns = 0;

 private:
  void Begin(int h, std::deque<HopCall>& calls, const std::function<void(int, Run&)>& freeze) {
    Host& host = hosts_[h];
    host.running.push_back(std::make_unique<Run>());
    Run& run = *host.running.back();
    run.call = calls.front();
    calls.pop_front();
    const int64_t block = run.call.block_bytes, bytes = block * num_hosts();
    run.in.resize((bytes + run.call.shift) / 16 + 1);
    run.out.assign(run.in.size(), uint4{0, 0, 0, 0});
    auto* const in = reinterpret_cast<std::byte*>(run.in.data()) + run.call.shift;
    for (int64_t i = 0; i < bytes; ++i) {
      in[i] = ByteOf(run.call.number, h, static_cast<int>(i / block), i % block);
    }
    run.operand = run.call.misplaced ? (h + 1) % num_hosts() : h;
    run.hop = {window_,     h,           &run.operand,  in,
               run.rows(),  block,       run.call.word, reinterpret_cast<std::byte*>(host.slots.data()),
               &host.state, &host.report};
    run.net = {&network, h};
    run.launch.rank = h;
    run.launch.grid = {static_cast<unsigned>(window_.tracks)};
    run.launch.block = {static_cast<unsigned>(threads_)};
    run.launch.body = [&run] { Exchange(run.hop, run.net); };
    freeze(h, run);
    Machine::Get().Start(run.launch);
  }

  // What has come is whole, or all 0xff; and a hop that follows a failed one has failed.
  void End(int h, Run& run) {
    Host& host = hosts_[h];
    longest_ns = std::max(longest_ns, Machine::Get().now - run.launch.began);
    const int64_t block = run.call.block_bytes, bytes = block * num_hosts();
    const std::byte* const rows = run.rows();
    const bool filled = std::all_of(rows, rows + bytes, [](std::byte b) { return b == std::byte{0xff}; });
    ++host.ended;
    if (filled) {
      ++host.failed;
      if (host.report.reason == 0) Die("host %d fails hop %d and does not say why", h, run.call.number);
      return;
    }
    if (host.failed != 0) Die("host %d's hop %d goes well after one has failed", h, run.call.number);
    for (int64_t i = 0; i < bytes; ++i) {
      if (rows[i] != ByteOf(run.call.number, static_cast<int>(i / block), h, i % block)) {
        Die("host %d, hop %d: byte %d from host %d is not what it sent", h, run.call.number,
            static_cast<int>(i % block), static_cast<int>(i / block));
      }
    }
  }

  Random& random_;

 public:
  emulation::Network network;

 private:
  std::vector<Host> hosts_;
  HopWindow window_;
  int threads_;
};

}  // namespace jax_ep::cuda
