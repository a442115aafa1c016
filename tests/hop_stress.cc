// Runs the protocol of hop 1 (ffi/kernels/hop/exchange.cuh) on the host, over a network that delays and
// reorders whatever it may (emulation/network.h), with faults: neither a GPU nor a network is needed.
//
//   g++ -std=c++17 -O2 -U_FORTIFY_SOURCE -Itests/emulation -Iffi -o /tmp/hop_stress tests/hop_stress.cc
//   /tmp/hop_stress 500 1    (scenarios, first seed)
//
// Each scenario has a few hosts with a rank each, which run the same hops, and at most one fault. A failure
// repeats with the seed that is printed.
#include <cstdarg>
#include <deque>

#include "emulation/network.h"
#include "kernels/hop/exchange.cuh"

namespace jax_ep::cuda {
namespace {

uint64_t seed;
const char* what = "";

[[noreturn]] void Die(const char* format, ...) {
  std::fprintf(stderr, "hop_stress: seed %llu (%s): ", static_cast<unsigned long long>(seed), what);
  va_list arguments;
  va_start(arguments, format);
  std::vfprintf(stderr, format, arguments);
  va_end(arguments);
  std::fprintf(stderr, "\n");
  std::_Exit(1);
}

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
struct Call {
  int number = 0;
  int64_t block_bytes = 16;
  uint64_t word = 1;     // HopParams::call
  int shift = 0;         // of the arrays, from where 16-byte words begin
  uint64_t late_by = 0;  // it begins so much later than the one before has ended
  bool stray = false;    // it begins while another one is under way
  bool misplaced = false;
};

// What host `from` sends to host `to`.
std::byte ByteOf(int call, int from, int to, int64_t at) {
  uint32_t hash = static_cast<uint32_t>(call * 7919 + from * 131 + to * 17 + at * 2654435761u);
  hash ^= hash >> 13;
  return static_cast<std::byte>(hash * 0x9e3779b1u >> 24 & 0x7f);  // never as a failed hop leaves it
}

struct Run {
  Call call;
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
  std::deque<Call> calls, strays;
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
  void Begin(int h, std::deque<Call>& calls, const std::function<void(int, Run&)>& freeze) {
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

enum Fault { kNoFault, kSlow, kShort, kGone, kCut, kLate, kOther, kLonger, kPlace, kStray, kNumFaults };
const char* const kNames[] = {"no fault", "slow",  "short",  "gone",      "cut",
                              "late",     "other", "longer", "misplaced", "stray"};
struct Count {
  int scenarios, good, failed;
};
Count counts[kNumFaults];

void SetManner(Random& random, World& world, Fault fault, uint64_t timeout) {
  emulation::Manner& manner = Machine::Get().manner;
  static const int kBudgets[] = {1, 3, 12, 60, 400};
  manner.budget = kBudgets[random() % 5];
  manner.skip_percent = random() % 2 == 0 ? 0 : 30;
  manner.most_ns = 2000;
  emulation::Network::Manner& network = world.network.manner;
  network.most_ns = fault == kSlow ? timeout / 100 : random() % 2 == 0 ? 0 : random() % 20'000;
  network.grain_bytes = 16 << random() % 3;
}

void CheckReason(const World& world, const HopReport& report, int h, Fault fault, int f) {
  const HopReason reason{report.reason};
  const auto phase = reason.phase();
  const bool names_f = reason.blamed() == f || reason.by() == f;
  bool fits = false;
  switch (fault) {
    case kGone:
    case kLate:
    case kCut:
      // Of several that wait for each other, any may be the first whose time is up.
      fits = phase == HopPhase::kLate && (world.num_hosts() > 2 || reason.by() != reason.blamed());
      if (fault != kCut && world.num_hosts() == 2 && h != f) fits = fits && reason.blamed() == f;
      break;
    case kOther:
    case kLonger:
      fits = names_f && phase == HopPhase::kOther;
      break;
    case kPlace:
      fits = names_f && phase == HopPhase::kPlace;
      break;
    case kStray:
      fits = phase == HopPhase::kBusy || phase == HopPhase::kOther || phase == HopPhase::kLate;
      break;
    default:
      break;
  }
  if (!fits) {
    Die("host %d says phase %d, by %d, blaming %d; the fault was at %d", h, static_cast<int>(phase),
        reason.by(), reason.blamed(), f);
  }
}

void RunScenario() {
  Random random(seed);
  Machine::Get().random.seed(static_cast<uint32_t>(seed));
  const auto fault = static_cast<Fault>(random() % kNumFaults);
  what = kNames[fault];
  const uint64_t timeout = 30'000'000;
  World world(random, 2 + random() % 3, timeout);
  SetManner(random, world, fault, timeout);
  const int hops = 3 + random() % 6, at = random() % hops, f = random() % world.num_hosts();
  const int other = (f + 1) % world.num_hosts();
  for (int i = 0; i < hops; ++i) {
    Call call;
    call.number = i;
    const int64_t most = world.piece_bytes() * world.tracks() * (random() % 3 == 0 ? 12 : 3);
    call.block_bytes = 1 + random() % most;
    if (random() % 2 == 0) call.block_bytes = AlignUp(call.block_bytes, 16);
    call.word = 1 + random() % 1000;
    call.shift = random() % 3 == 0 ? 4 * (random() % 4) : random() % 4 == 0 ? random() % 16 : 0;
    for (int h = 0; h < world.num_hosts(); ++h) {
      Call here = call;
      here.late_by = random() % 3 == 0 ? random() % (timeout / 10) : 0;
      if (i == at && h == f) {
        if (fault == kLate) here.late_by = 2 * timeout;
        if (fault == kOther) here.word += 5000;
        if (fault == kLonger) here.word += 5000, here.block_bytes += world.piece_bytes() * 5;
        if (fault == kPlace) here.misplaced = true;
      }
      world.host(h).calls.push_back(here);
    }
  }
  if (fault == kStray) {
    Call stray;
    stray.number = 1000, stray.word = 7000, stray.block_bytes = 1 + random() % 4000;
    world.host(f).strays.push_back(stray);
  }
  int begun = 0;
  const auto freeze = [&](int h, Run& run) {
    if (h != f || begun++ != at) return;
    if (fault == kCut) world.network.Cut(f, other);
    if (fault != kShort && fault != kGone) return;
    run.launch.freezes_at = 1 + random() % 400;
    run.launch.freezes_for = fault == kShort ? timeout / 4 : kForEver;
    run.launch.freezes_rank = true;
  };
  world.RunAll(freeze);
  const bool must_not = fault == kNoFault || fault == kSlow || fault == kShort;
  // In the last hop a host may have all of it before the fault, and then it needs nobody any more.
  const bool must = fault == kLate || fault == kOther || fault == kPlace ||
                    (at + 1 < hops && (world.host(f).gone || fault == kCut || fault == kLonger));
  const uint64_t bound = 2 * timeout + timeout / 2 + (fault == kLate ? 2 * timeout : 0);
  if (world.longest_ns > bound) Die("a hop took %.1f ms", world.longest_ns / 1e6);
  Count& count = counts[fault];
  ++count.scenarios;
  int failed = 0;
  for (int h = 0; h < world.num_hosts(); ++h) {
    Host& host = world.host(h);
    failed += host.failed;
    count.failed += host.failed, count.good += host.ended - host.failed;
    if (must_not && host.failed != 0) Die("host %d fails without a fault", h);
    if (host.failed != 0) CheckReason(world, host.report, h, fault, f);
  }
  if (must && failed == 0) Die("no hop fails");
  // What is left of a host that is gone does not go on.
  Machine::Get().Abandon();
}

int Main(int argc, char** argv) {
  const int scenarios = argc > 1 ? std::atoi(argv[1]) : 500;
  seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  for (int i = 0; i < scenarios; ++i, ++seed) RunScenario();
  for (int i = 0; i < kNumFaults; ++i) {
    std::printf("%-10s %5d scenarios, hops of a host: %6d well, %6d failed\n", kNames[i], counts[i].scenarios,
                counts[i].good, counts[i].failed);
  }
  return 0;
}

}  // namespace
}  // namespace jax_ep::cuda

int main(int argc, char** argv) { return jax_ep::cuda::Main(argc, argv); }
