// Runs the kernels' own protocol (ffi/kernels/protocol/session.cuh and what it uses) on the host, with
// faults: no GPU is needed.
//
//   cd tests/native
//   g++ -std=c++17 -O2 -U_FORTIFY_SOURCE -I. -Iemulation -I../../ffi \
//     -o /tmp/protocol_stress protocol_stress.cc
//   /tmp/protocol_stress faults 2000 1     (scenarios, first seed)
//   /tmp/protocol_stress faults 2000 1 tail    (only scenarios with this fault)
//   /tmp/protocol_stress held 300 1        (likewise: a rank is held up where it looks at the clock)
//   /tmp/protocol_stress plain 100000 1    (ops without a fault, seed)
//   /tmp/protocol_stress many 1 1 72       (ops of so many ranks; one of them is slow, and then late)
//
// The threads of all ranks' kernels are fibers of one thread, in an order that follows from the seed
// (emulation/machine.h); so a failure repeats with the seed that is printed. TRACE=1 shows each op, VERBOSE=1
// each report that names another fault. With -fsanitize=address,undefined or thread instead of -O2 it is ten
// times slower; `faults` then shows what is meant with strays: own.epoch, which one op writes while another
// reads it.
#include "emulation/world.h"

namespace jax_ep::cuda {
namespace {

using Random = std::mt19937;
bool Chance(Random& random, int percent) { return static_cast<int>(random() % 100) < percent; }
template <typename T>
T Pick(Random& random, std::initializer_list<T> from) {
  return from.begin()[random() % from.size()];
}

Work MakeWork(Random& random, uint32_t number, uint32_t site, int num_ranks) {
  Work work{};
  work.number = number;
  work.call = {static_cast<uint32_t>(random()), site};
  work.pushes = Chance(random, 60);
  work.in_waves = Chance(random, 60);
  // Rings do not sum rows of more than kWarp ranks (SuitsRings).
  work.by_ring = Chance(random, 35) && (work.in_waves || (!work.pushes && num_ranks <= kWarp));
  work.counts = Chance(random, 50);
  work.tokens = 1 + static_cast<int>(random() % 12);
  const int head = 1 + static_cast<int>(random() % 6), later = 1 + static_cast<int>(random() % 6);
  const int rest = std::max(0, work.tokens - head);
  work.waves = {head, later, 1 + (rest + later - 1) / later};
  return work;
}

uint32_t FirstEpoch(Random& random) {
  const uint32_t near = Pick(random, {0u, 1u << 31, 0xffffffffu, static_cast<uint32_t>(random())});
  const uint32_t epoch = near - static_cast<uint32_t>(near != 0 ? random() % 6 : 0);
  return epoch == 0xffffffffu ? 1 : epoch;
}

void SetManner(Random& random) {
  emulation::Manner& manner = emulation::Machine::Get().manner;
  manner.budget = Pick(random, {1, 3, 12, 60, 400});
  manner.skip_percent = Pick(random, {0, 0, 30, 80});
  // An access takes no longer than it does on a GPU, or the time-outs would be too short for the polls.
  manner.most_ns = std::max(1000, 750 * std::min(manner.budget, 30) * (100 - manner.skip_percent) / 100);
}

// Calls of several sites, each with a shape of its own, over all channels or few.
std::vector<Work> MakeProgram(Random& random, int ops, uint32_t first_number, int num_ranks) {
  std::vector<Work> sites, program;
  const int channels = Pick(random, {1, 2, kChannels});
  for (uint32_t i = 0; i < 12; ++i)
    sites.push_back(MakeWork(random, 0, i / channels * kChannels + i % channels, num_ranks));
  for (int i = 0; i < ops; ++i) {
    program.push_back(sites[random() % sites.size()]);
    program.back().number = first_number + i;
  }
  return program;
}

void RunPlain(int ops) {
  Random random(seed);
  World world(random, Pick(random, {2, 3}), FirstEpoch(random), 10'000'000'000);
  what = "plain";
  for (int done = 0; done < ops; done += 2000) {
    SetManner(random);
    emulation::Machine::Get().manner.skip_percent = 0;
    world.SetProgram(MakeProgram(random, 2000, done, world.num_ranks()));
    world.RunAll(nullptr);
    if (Chance(random, 30)) world.Reset(FirstEpoch(random));
  }
}

// Ops of each kind, of more ranks than a warp has lanes. The last rank is held up in each of them. Then a
// rank comes last, and the others log that. Then the last rank is late, and all others name it.
void RunMany(int num_ranks) {
  Random random(seed);
  what = "many";
  const int last = num_ranks - 1;
  std::vector<std::vector<float>> waits(num_ranks);
  const auto run = [&](const std::vector<Work>& program, uint64_t timeout, int held, auto&& hold_up) {
    World world(random, num_ranks, FirstEpoch(random), timeout);
    emulation::Manner& manner = emulation::Machine::Get().manner;
    manner.skip_percent = 0;
    manner.budget = 12;
    manner.most_ns = 9000;
    world.SetProgram(program);
    for (size_t i = 0; i < program.size(); ++i) hold_up(world.script(held, static_cast<int>(i)));
    const Outcome outcome = world.RunAll(nullptr);
    for (int r = 0; r < last && outcome.failed > 0; ++r) {
      const Report& report = world.report(r);
      const Reason reason{report.reason};
      const bool is_told = reason.first_missing() == last && reason.num_missing() == 1;
      if (!report.missing.Is(last) && !is_told) Die("rank %d does not name rank %d", r, last);
    }
    for (int r = 0; r < num_ranks; ++r) waits[r] = world.wait_us(r);
    return outcome;
  };
  std::vector<Work> program;
  for (const bool pushes : {false, true}) {
    for (const bool by_ring : {false, true}) {
      Work work = MakeWork(random, static_cast<uint32_t>(program.size()), 0, num_ranks);
      work.pushes = pushes, work.by_ring = by_ring, work.in_waves = true;
      work.tokens = 2, work.waves = {1, 1, 2};
      program.push_back(work);
    }
  }
  const auto hold = [&](Script& script) {
    script.freezes_at = 1 + random() % 2000;
    script.freezes_for = 500'000;
    script.freezes_rank = true;
  };
  if (run(program, 10'000'000'000, last, hold).failed != 0) Die("an op failed that was held up but shortly");
  const auto come_last = [](Script& script) { script.late_by = 100'000; };
  if (run({program[2]}, 10'000'000'000, 5, come_last).failed != 0) Die("an op failed whose rank came last");
  for (int r = 0; r < num_ranks; ++r) {
    const auto longest = std::max_element(waits[r].begin(), waits[r].end());
    if (r != 5 && longest != waits[r].begin() + 5) Die("rank %d does not log that rank 5 came last", r);
  }
  const auto be_late = [](Script& script) { script.late_by = 10'000'000; };
  if (run({program[0]}, 2'000'000, last, be_late).good != 0) Die("an op went well without a rank");
}

enum Fault {
  kShort,
  kLong,
  kGone,
  kLate,
  kNever,
  kOtherCall,
  kWrongRank,
  kWrongList,
  kStray,
  kClash,
  kTail,
  kGate,
  kTwo,
  kOverlap,
  kNumFaults
};
const char* const kNames[] = {"short",      "long",  "gone",  "late", "never", "other call", "wrong rank",
                              "wrong list", "stray", "clash", "tail", "gate",  "two",        "overlap"};

struct Count {
  int scenarios, failed_runs, good_runs, traps, exact, weak;
};
Count counts[kNumFaults];

// The ranks that a report or a reason names: of the latter's, the lowest one and their number.
struct Blamed {
  int first, number;

  bool Is(int rank) const { return first == rank && number == 1; }
  bool MayInclude(int rank) const { return first == rank || (first >= 0 && first < rank && number > 1); }
};

// What a report may say of a fault at rank f, and whether it names the fault itself.
void CheckReport(const World& world, int r, Fault fault, int f) {
  const Report& report = world.report(r);
  if (report.phase == 0) return;
  Phase phase = static_cast<Phase>(report.phase);
  Blamed missing{report.missing.First(), report.missing.Count()};
  int by = r;
  if (phase == Phase::kGivenUp) {
    const Reason reason{report.reason};
    if (reason.word == 0) Die("rank %d gave up without a reason", r);
    phase = reason.phase(), by = reason.rank();
    missing = {reason.first_missing(), reason.num_missing()};
  }
  const bool all_but_f = missing.number == world.num_ranks() - 1 && missing.first == (f == 0 ? 1 : 0);
  bool exact = false;
  switch (fault) {
    case kLate:
    case kNever:
      exact = phase == Phase::kEnter && missing.Is(f);
      break;
    case kOtherCall:
    case kWrongList:
      exact = phase == Phase::kCall && (by == f ? all_but_f : missing.Is(f));
      break;
    case kWrongRank:
      exact = phase == Phase::kRank && by == f;
      break;
    case kLong:
    case kGone:
      exact = (phase == Phase::kEnter || phase == Phase::kWave || phase == Phase::kLeave ||
               phase == Phase::kStuck) &&
              missing.Is(f);
      if (phase == Phase::kStuck && !missing.Is(f))
        Die("rank %d says that rank %d is stuck", r, missing.first);
      break;
    case kStray:
      exact = phase == Phase::kChannel && by == f && missing.Is(f);
      break;
    case kClash:
    case kTail:
      exact = phase == Phase::kChannel && missing.Is(by);
      break;
    default:
      return;
  }
  ++(exact ? counts[fault].exact : counts[fault].weak);
  if (!exact && std::getenv("VERBOSE") != nullptr) {
    std::printf("seed %llu %s at %d: rank %d says phase %d (%d) missing %d and %d others by %d\n",
                static_cast<unsigned long long>(seed), what, f, r, report.phase, static_cast<int>(phase),
                missing.first, missing.number - 1, by);
  }
  // Nobody is blamed for nothing: a rank that is on time is never the only one that is missed.
  const bool names = phase == Phase::kEnter || phase == Phase::kWave || phase == Phase::kLeave;
  const bool one_fault = fault == kLate || fault == kNever || fault == kGone || fault == kOtherCall;
  if (one_fault && names && by != f && !missing.MayInclude(f)) {
    Die("rank %d is told of phase %d, missing %d, but rank %d was", r, static_cast<int>(phase), missing.first,
        f);
  }
}

int only = -1;  // a Fault, or -1: all

void RunFaults() {
  Random random(seed);
  const auto any = static_cast<Fault>(random() % kNumFaults);
  const auto fault = only >= 0 ? static_cast<Fault>(only) : any;
  what = kNames[fault];
  const uint64_t timeout = (3 + random() % 6) * 1'000'000;
  World world(random, 2 + random() % 3, FirstEpoch(random), timeout);
  SetManner(random);
  if (Chance(random, 30)) world.stress_ns = 20000;
  const int ops = 2 + random() % 10, at = random() % ops;
  world.SetProgram(MakeProgram(random, ops, 100, world.num_ranks()));
  const int f = random() % world.num_ranks();
  Script& script = world.script(f, at);
  uint64_t allowed = 0;  // time that the fault itself may cost
  const auto freeze = [&](Script& p, uint64_t ns) {
    p.freezes_at = 1 + random() % Pick(random, {60u, 600u, 6000u});
    p.freezes_for = ns;
    p.freezes_rank = Chance(random, 70);
    allowed += ns;
  };
  const auto share = [&](int least, int most) { return timeout * (least + random() % (most - least)) / 100; };
  switch (fault) {
    case kShort:
      freeze(script, share(5, 40));
      break;
    case kLong:
      freeze(script, share(50, 600));
      break;
    case kGone:
      freeze(script, 0);
      script.gone_after = random() % 1'800'000'000;
      script.freezes_for = 1'000'000'000'000;
      script.freezes_rank = true;
      allowed += script.gone_after;
      break;
    case kLate:
      script.late_by = share(130, 400);
      allowed += script.late_by;
      break;
    case kNever:
      world.CutAfter(f, at);
      break;
    case kOtherCall:
      (Chance(random, 50) ? script.work.call.hash : script.work.call.site) += Chance(random, 50) ? 8 : 16;
      script.work.number += 1000;
      break;
    case kWrongRank:
      script.wrong_rank = true;
      break;
    case kWrongList:
      script.list = 1 + random() % 3;
      break;
    case kStray:
      world.AddStray(f, MakeWork(random, 5000, script.work.call.site + 800, world.num_ranks()),
                     random() % 300'000);
      break;
    case kClash: {
      const Work stray = MakeWork(random, 5000, script.work.call.site + 800, world.num_ranks());
      for (int r = 0; r < world.num_ranks(); ++r) world.AddStray(r, stray, random() % 300'000);
      break;
    }
    case kTail: {
      // A block is held up in the first op while others of its rank end it, and the rank begins another op.
      // Then one fails.
      Script& first = world.script(f, 0);
      for (int r = 0; r < world.num_ranks(); ++r) {
        Work& work = world.script(r, 0).work;
        work.pushes = work.in_waves = true;
        world.script(r, ops - 1).work.call.site = work.call.site;
      }
      first.freezes_at = 1 + random() % 3000;
      first.freezes_for = share(30, 60);
      world.script(f, ops - 1).late_by = share(130, 200);
      allowed += first.freezes_for + 2 * timeout;
      const Work stray = MakeWork(random, 5000, first.work.call.site + 801, world.num_ranks());
      for (int r = 0; r < world.num_ranks(); ++r) world.AddStray(r, stray, random() % first.freezes_for);
      break;
    }
    case kGate:
      world.gates_close_at = 1 + random() % 200'000;
      break;
    case kOverlap:
      world.overlaps = true;
      break;
    default:
      freeze(script, share(50, 300));
      freeze(world.script(random() % world.num_ranks(), random() % ops), share(50, 300));
      if (Chance(random, 50))
        world.script(random() % world.num_ranks(), random() % ops).late_by = share(50, 300);
      allowed += 4 * timeout;
  }
  Outcome outcome = world.RunAll([&](int rank) {
    // Stopped: only for one that was held up inside.
    const Report& report = world.report(rank);
    if (static_cast<Phase>(report.phase) != Phase::kStuck) Die("rank %d was stopped without a report", rank);
    if (fault == kTwo) return;
    if (fault != kLong) Die("rank %d was stopped", rank);
    if (!report.missing.Is(f))
      Die("rank %d was stopped by rank %d, but %d was held up", rank, report.missing.First(), f);
    if (script.freezes_for < timeout * 17 / 10) Die("rank %d was stopped too early", rank);
  });
  const uint64_t bound = 3 * timeout + allowed + 40'000'000 + (outcome.traps > 0 ? 3'100'000'000 : 0);
  if (outcome.longest_ns > bound) Die("an op took %.1f ms", outcome.longest_ns / 1e6);
  if (fault == kShort && outcome.failed != 0) Die("an op failed that was held up but shortly");
  if (fault == kOverlap && outcome.failed != 0) Die("an op failed that began when the channel was free");
  const bool must =
      fault == kLate || fault == kNever || fault == kOtherCall || fault == kWrongRank || fault == kWrongList;
  if (must && outcome.failed == 0) Die("no op failed");
  for (int r = 0; r < world.num_ranks(); ++r) CheckReport(world, r, fault, f);
  Count& count = counts[fault];
  ++count.scenarios;
  count.failed_runs += outcome.failed, count.good_runs += outcome.good, count.traps += outcome.traps;
  world.gates_close_at = 0;
  world.overlaps = false;
  // A process that was stopped, or has ended, is replaced: nothing is kept. Else what the ranks keep is
  // reset.
  if (outcome.traps > 0 || fault == kGone) {
    world.Replace(FirstEpoch(random));
  } else {
    world.Reset(world.LastEpoch());
  }
  SetManner(random);
  world.SetProgram(MakeProgram(random, 10, 10000, world.num_ranks()));
  outcome = world.RunAll(nullptr);
  if (outcome.failed != 0) Die("an op failed after the reset");
}

int held_and_has_all = 0;  // scenarios

// An op in which one rank is slow, and another looks at the clock meanwhile. That one is held up for longer
// than a wait may last before its `look`th look (0: it is not). Returns how often it looks.
uint64_t RunSlow(uint64_t look) {
  Random random(seed);
  const uint64_t timeout = (3 + random() % 6) * 1'000'000;
  World world(random, 2 + random() % 2, FirstEpoch(random), timeout);
  SetManner(random);
  world.SetProgram(MakeProgram(random, 1, 100, world.num_ranks()));
  Script &held = world.script(0, 0), &slow = world.script(1, 0);
  slow.freezes_at = 1 + random() % 600;
  slow.freezes_for = timeout * (40 + random() % 40) / 100;
  held.freezes_rank = slow.freezes_rank = true;
  held.freezes_at_look = look;
  held.freezes_for = timeout * (110 + random() % 50) / 100;
  world.RunAll([](int) {});
  const bool fails = world.report(0).phase != 0;
  if (look == 0 && fails) Die("a rank fails that was not held up");
  // Others that have ended well meanwhile had all of this rank, and it has all of them.
  bool has_all = true;
  for (int r = 1; r < world.num_ranks(); ++r) {
    has_all = has_all && world.report(r).phase == 0 && world.ended(r).at < world.ended(0).held_until;
  }
  if (has_all && fails) Die("a rank fails, for which all has come while it was held up");
  held_and_has_all += has_all && look != 0;
  return world.ended(0).looks;
}

void RunHeld() {
  what = "held";
  // With the same seed the second run is like the first until the rank is held up: at one of its last three
  // looks. The last ones are where it waits for others to leave.
  const uint64_t looks = RunSlow(0);
  if (looks != 0) RunSlow(looks - seed % std::min<uint64_t>(looks, 3));
}

}  // namespace

int Main(int argc, char** argv) {
  const bool plain = argc > 1 && std::strcmp(argv[1], "plain") == 0;
  const int count = argc > 2 ? std::atoi(argv[2]) : 1000;
  seed = argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 1;
  for (int i = 0; argc > 4 && i < kNumFaults; ++i) {
    if (std::strcmp(argv[4], kNames[i]) == 0) only = i;
  }
  if (plain) {
    RunPlain(count);
    std::printf("%d ops without a fault, seed %llu: well\n", count, static_cast<unsigned long long>(seed));
    return 0;
  }
  if (argc > 4 && std::strcmp(argv[1], "many") == 0) {
    for (int i = 0; i < count; ++i, ++seed) RunMany(std::atoi(argv[4]));
    std::printf("ops of %s ranks: well\n", argv[4]);
    return 0;
  }
  if (argc > 1 && std::strcmp(argv[1], "held") == 0) {
    for (int i = 0; i < count; ++i, ++seed) RunHeld();
    std::printf(
        "%d ops in which a rank is held up where it looks at the clock; all has come meanwhile in %d\n",
        count, held_and_has_all);
    return held_and_has_all > count / 10 ? 0 : 1;
  }
  for (int i = 0; i < count; ++i, ++seed) RunFaults();
  for (int i = 0; i < kNumFaults; ++i) {
    const Count& c = counts[i];
    std::printf(
        "%-11s %6d scenarios, ops of a rank: %7d well, %7d failed; %5d stopped; reports: %d name it, %d do "
        "not\n",
        kNames[i], c.scenarios, c.good_runs, c.failed_runs, c.traps, c.exact, c.weak);
  }
  return 0;
}

}  // namespace jax_ep::cuda

int main(int argc, char** argv) { return jax_ep::cuda::Main(argc, argv); }
