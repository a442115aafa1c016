// Runs the arena's own protocol (ffi/kernels/protocol/arena_session.cuh and what it uses) on the host, with
// faults: no GPU is needed.
//
//   cd tests/native
//   g++ -std=c++17 -O2 -U_FORTIFY_SOURCE -I. -Iemulation -I../../ffi -o /tmp/arena_stress arena_stress.cc
//   /tmp/arena_stress faults 2000 1    (scenarios, first seed)
//   /tmp/arena_stress faults 2000 1 late    (only scenarios with this fault)
//   /tmp/arena_stress plain 2000 1     (ops without a fault, seed)
//   /tmp/arena_stress many 20 1        (programs with more ranks than a word has bits, seed)
//   /tmp/arena_stress count 2000 1     (counts scenarios in which threads of a block disagree)
//
// Each scenario has a program of several ops through the arena, with all ranks or some of them, and one
// fault. A failure repeats with the seed that is printed. TRACE=1 in the environment prints each op.
//
// Like hop_stress.cc, it does not test the order in which stores become visible.
#include "emulation/arena_world.h"

namespace jax_ep::cuda {
namespace {

bool Chance(Random& random, int percent) { return static_cast<int>(random() % 100) < percent; }
template <typename T>
T Pick(Random& random, std::initializer_list<T> from) {
  return from.begin()[random() % from.size()];
}

RankSet Without(const RankSet& ranks, int rank) {
  RankSet one{};
  one.Add(RankBits::Of(rank));
  return ranks.Without(one);
}

// Most time-outs that an op of a rank that is not held up may last.
constexpr int kMostWaits = 1;
// Time that an op takes otherwise, and time that a failed op waits until stores land (FailArenaOp).
constexpr uint64_t kSlackNs = 700'000, kStoresLandNs = 1'000'000;

enum Mode { kAll, kActive, kMasks, kMixed, kNumModes };
const char* const kModeNames[] = {"all ranks", "active ranks", "masks", "mixed"};
enum Fault {
  kNoFault,
  kLate,
  kShort,
  kLong,
  kDies,
  kNever,
  kOtherCall,
  kWrongRank,
  kWrongList,
  kGate,
  kStray,
  kTwo,
  kHeld,
  kNumFaults
};
const char* const kNames[] = {"no fault",   "late",       "short", "long",  "dies", "never", "other call",
                              "wrong rank", "wrong list", "gate",  "stray", "two",  "held"};

struct Count {
  int scenarios, disagreed, good, failed, masked, exact, weak;
  double longest;  // in time-outs
};
Count counts[kNumFaults][kNumModes];

uint32_t FirstEpoch(Random& random) {
  const uint32_t near = Pick(random, {0u, 1u << 31, 0xffffffffu, static_cast<uint32_t>(random())});
  const uint32_t epoch = near - static_cast<uint32_t>(near != 0 ? random() % 6 : 0);
  return epoch == 0xffffffffu ? 1 : epoch;
}

void SetManner(Random& random, ArenaWorld& world) {
  emulation::Manner& manner = Machine::Get().manner;
  manner.budget = Pick(random, {3, 12, 12, 60});
  manner.skip_percent = Pick(random, {0, 0, 30});
  manner.alone = 1;  // because waits of single threads have time-outs here
  // An access takes no longer than it does on a GPU, or the time-outs would be too short for the polls.
  world.coarse_ns = std::max(1000, 600 * std::min(manner.budget, 30) * (100 - manner.skip_percent) / 100);
}

std::vector<ArenaWork> MakeProgram(Random& random, int ops, int num_ranks, Mode mode, uint32_t first_number,
                                   bool repeats) {
  std::vector<ArenaWork> sites, program;
  for (uint32_t i = 0; i < 4; ++i) {
    ArenaWork work{};
    work.call = {static_cast<uint32_t>(random()), i};
    work.pushes = Chance(random, 50);
    work.tokens = 1 + static_cast<int>(random() % 5);
    work.top_k = 1 + static_cast<int>(random() % 2);
    work.row_bytes = 16 * (1 + static_cast<int>(random() % 20));
    const Mode own = mode == kMixed ? static_cast<Mode>(random() % 3) : mode;
    work.has_attendance = own != kAll;
    work.masks = own == kMasks;
    work.in_lines = num_ranks <= kRankBits && !work.masks && Chance(random, 40);
    if (work.in_lines) work.row_bytes *= Pick(random, {1, 8});  // of up to three chunks
    sites.push_back(work);
  }
  const RankSet all = RankSet::Below(num_ranks);
  for (int i = 0; i < ops; ++i) {
    ArenaWork work = sites[random() % sites.size()];
    work.number = first_number + i;
    if (!repeats) work.call.hash += 0x10000 * i;
    work.active = all;
    if (work.has_attendance && Chance(random, 40)) {
      for (uint32_t& word : work.active.words) word &= random();
    }
    program.push_back(work);
  }
  return program;
}

void RunPlain(int ops) {
  Random random(seed);
  what = "plain";
  for (int done = 0; done < ops; done += 100) {
    ArenaWorld world(random, Pick(random, {2, 3, 4, 8, 17, 32}), FirstEpoch(random), 10'000'000'000);
    SetManner(random, world);
    world.SetProgram(
        MakeProgram(random, 100, world.num_ranks(), static_cast<Mode>(random() % kNumModes), 100, true));
    world.RunAll();
    if (world.failed != 0 || world.masked != 0) Die("an op failed, or left out a rank");
  }
}

// Lets rank f begin an op within a few microseconds of a deadline of the others.
void Straggle(Random& random, ArenaWorld& world, int f, int op) {
  ArenaScript& script = world.script(f, op);
  const uint64_t timeout = world.timeout_ns();
  const int quarters = script.work.masks ? Pick(random, {1, 1, 1, 4, 5}) : Pick(random, {4, 4, 4, 8});
  const int within = Pick(random, {20'000, 4'000, 4'000});
  script.after_others = timeout * quarters / 4 + random() % (2 * within) - within;
  for (int r = 0; r < world.num_ranks(); ++r) world.script(r, op).late_by = 0;
  // In most scenarios the others have not heard from it in the op before.
  if (op == 0 || !Chance(random, 80)) return;
  for (int r = 0; r < world.num_ranks(); ++r) {
    ArenaWork& before = world.script(r, op - 1).work;
    if (before.has_attendance) before.active = Without(before.active, f);
    world.script(r, op).work.active.Add(RankBits::Of(f));
  }
}

// Checks that the rank that gave up first reports why.
void CheckReasons(const ArenaWorld& world) {
  for (int r = 0; r < world.num_ranks(); ++r) {
    const Reason reason{world.report(r).reason};
    if (static_cast<Phase>(world.report(r).phase) == Phase::kGivenUp && reason.phase() == Phase::kGivenUp) {
      Die("rank %d fails because rank %d has given up without a reason", r, reason.rank());
    }
  }
}

// Checks that reports blame rank f, which was late or did not come.
void CheckReports(const ArenaWorld& world, int f, bool all_active, Count& count) {
  for (int r = 0; r < world.num_ranks(); ++r) {
    const Report& report = world.report(r);
    const auto phase = static_cast<Phase>(report.phase);
    if (phase != Phase::kEnter && phase != Phase::kWave) continue;
    const bool is_exact = report.missing.Is(f);
    ++(is_exact ? count.exact : count.weak);
    // A rank that waited for rank f may be late for ranks that do not take part in that op.
    if (all_active && r != f && !report.missing.Has(f)) {
      Die("rank %d misses %x, but rank %d was late", r, report.missing.bits, f);
    }
    if (!is_exact && std::getenv("VERBOSE") != nullptr) {
      std::printf("seed %llu %s: rank %d says phase %d, missing %x; rank %d was late\n",
                  static_cast<unsigned long long>(seed), what, r, report.phase, report.missing.bits, f);
    }
  }
}

// Checks that no rank but f is left out because f is late, if all others take part in all ops and so begin
// them together.
void CheckOthersStay(ArenaWorld& world, int ops, int f) {
  if (world.failed != 0) Die("an op failed where ranks may be left out");
  const RankSet others = Without(RankSet::Below(world.num_ranks()), f);
  for (int i = 0; i < ops; ++i) {
    if (!others.Without(world.script(0, i).work.active).IsEmpty()) return;
  }
  for (int r = 0; r < world.num_ranks(); ++r) {
    for (int i = 0; i < ops; ++i) {
      const RankBits left_out = others.Without(world.end(r, i).ranks).FirstBits();
      if (r != f && left_out.bits != 0) Die("rank %d leaves out %x in its op %d", r, left_out.bits, i);
    }
  }
}

// Holds up rank f when it looks at the clock in the last op, in which all ranks take part.
void Hold(Random& random, ArenaWorld& world, int f, int op, uint64_t ns) {
  for (int r = 0; r < world.num_ranks(); ++r) {
    world.script(r, op).work.active = RankSet::Below(world.num_ranks());
    world.script(r, op).late_by = r == f ? 0 : random() % 100'000;
    if (op == 0 || !world.script(r, op - 1).work.has_attendance || Chance(random, 50)) continue;
    for (int p = 0; p < world.num_ranks(); ++p) {
      RankSet& active = world.script(p, op - 1).work.active;
      active = Without(active, r);
    }
  }
  if (ns > world.timeout_ns()) {  // so that it is waiting for a rank when it is held up
    world.script((f + 1) % world.num_ranks(), op).late_by =
        world.timeout_ns() / 10 + random() % (world.timeout_ns() / 8);
  }
  ArenaScript& script = world.script(f, op);
  script.freezes_at_look = 1 + random() % 10;
  script.freezes_for = ns;
  script.freezes_rank = true;
}

// Lets all ranks take part in an op, all except f in the next one, and all in the one after that, which uses
// the same half of the arena as the first.
void Skip(Random& random, ArenaWorld& world, int f, int op) {
  const RankSet all = RankSet::Below(world.num_ranks());
  for (int r = 0; r < world.num_ranks(); ++r) {
    for (int i = op; i < std::min(op + 3, world.num_ops()); ++i) {
      ArenaScript& script = world.script(r, i);
      if (i == op + 1) script.work.has_attendance = true;
      script.work.active = i == op + 1 ? Without(all, f) : all;
      script.late_by = 0;
    }
  }
  world.script(f, op).freezes_at = 1 + random() % Pick(random, {300u, 1500u});
}

// Runs a program of many ranks. If ranks may be left out, one of those that have no bit in the first word
// comes late in an op.
void RunMany() {
  Random random(seed);
  what = "many";
  const auto mode = static_cast<Mode>(random() % kNumModes);
  constexpr int kOps = 5, kLateOp = 2;
  const uint64_t timeout = mode == kMasks ? 3'000'000 : 10'000'000'000;
  ArenaWorld world(random, Pick(random, {33, 40, 65, 128}), FirstEpoch(random), timeout);
  SetManner(random, world);
  std::vector<ArenaWork> program = MakeProgram(random, kOps, world.num_ranks(), mode, 100, true);
  const int f = kRankBits + static_cast<int>(random() % static_cast<unsigned>(world.num_ranks() - kRankBits));
  if (mode == kMasks) program[kLateOp].active = RankSet::Below(world.num_ranks());
  world.SetProgram(program);
  if (mode == kMasks) world.script(f, kLateOp).after_others = 2 * timeout;
  world.RunAll();
  if (mode != kMasks && (world.failed != 0 || world.masked != 0)) Die("an op failed, or left out a rank");
  if (mode != kMasks) return;
  CheckOthersStay(world, kLateOp + 1, f);
  for (int r = 0; r < world.num_ranks(); ++r) {
    if (r != f && world.end(r, kLateOp).ranks.Has(f)) Die("rank %d does not leave out rank %d", r, f);
  }
}

int held_and_has_all = 0;  // scenarios

// Checks that the others waited for rank f if it was held up shortly, and otherwise that it took all rows
// that had arrived meanwhile.
void CheckHeld(ArenaWorld& world, int f, int op) {
  const RankSet all = RankSet::Below(world.num_ranks());
  const bool is_short = world.script(f, op).freezes_for < world.timeout_ns();
  const ArenaEnd& held = world.end(f, op);
  bool has_all = held.held_until != 0;
  for (int r = 0; r < world.num_ranks(); ++r) {
    const ArenaEnd& end = world.end(r, op);
    if (is_short && end.has_failed) Die("rank %d fails where rank %d was held up but shortly", r, f);
    if (is_short && r != f && !(end.ranks == all))
      Die("rank %d leaves out rank %d, which comes in time", r, f);
    if (r != f) has_all = has_all && !end.has_failed && end.ranks == all && end.at < held.held_until;
  }
  // The others have ended with all rows of rank f, so their own rows have arrived there, too.
  if (has_all && (held.has_failed || !(held.ranks == all))) {
    Die("rank %d uses ranks %x, but all rows had arrived while it was held up", f, held.ranks.words[0]);
  }
  held_and_has_all += has_all;
}

int only = -1;  // a Fault, or -1: all

void RunFaults() {
  Random random(seed);
  const int any = Chance(random, 60) ? Pick(random, {kLate, kLate, kShort, kHeld})
                                     : static_cast<Fault>(random() % kNumFaults);
  const auto fault = static_cast<Fault>(only >= 0 ? only : any);
  const auto mode = static_cast<Mode>(random() % kNumModes);
  static char name[64];
  std::snprintf(name, sizeof(name), "%s, %s", kNames[fault], kModeNames[mode]);
  what = name;
  const uint64_t timeout = 1'050'000 + random() % 900'000;
  ArenaWorld world(random, 2 + random() % 3, FirstEpoch(random), timeout);
  SetManner(random, world);
  if (Chance(random, 30)) world.stress_ns = 20'000;
  const int R = world.num_ranks(), ops = 2 + random() % 6, any_op = random() % ops, f = random() % R;
  const int at = fault == kHeld ? ops - 1 : any_op;
  world.SetProgram(MakeProgram(random, ops, R, mode, 100, fault != kStray));
  for (int r = 0; r < R; ++r) {
    for (int i = 0; i < ops; ++i) world.script(r, i).late_by = Chance(random, 30) ? random() % 50'000 : 0;
  }
  ArenaScript& script = world.script(f, at);
  const auto freeze = [&](ArenaScript& p, uint64_t ns) {
    p.freezes_at = 1 + random() % Pick(random, {60u, 600u, 4000u});
    p.freezes_for = ns;
    p.freezes_rank = Chance(random, 70);
  };
  const auto share = [&](int least, int most) { return timeout * (least + random() % (most - least)) / 100; };
  const bool straggles = fault == kLate || fault == kTwo || fault == kGate || Chance(random, 30);
  int late = f;
  if (straggles && fault != kNoFault && fault != kShort && fault != kHeld) {
    if (fault != kLate && Chance(random, 40)) late = static_cast<int>(random() % R);
    Straggle(random, world, late, at);
    if (at + 2 < ops && Chance(random, 40)) Straggle(random, world, late, at + 2);
  }
  switch (fault) {
    case kShort:
      freeze(script, share(5, 20));
      script.freezes_rank = true;
      Skip(random, world, f, at);
      break;
    case kLong:
      freeze(script, share(20, 400));
      break;
    case kDies:
      freeze(script, kForEver);
      script.dies = script.freezes_rank = true;
      break;
    case kNever:
      world.CutAfter(f, at);
      break;
    case kOtherCall:
      script.work.call.hash += 8 + random() % 8;
      script.work.number += 1000;
      break;
    case kWrongRank:
      script.wrong_rank = true;
      break;
    case kWrongList:
      script.list = 1 + random() % 3;
      break;
    case kGate: {
      const uint64_t near = Chance(random, 50) ? timeout / 4 : timeout;
      world.gates_close_at = Chance(random, 50) ? 1 + random() % (2 * timeout) : near + random() % 60'000;
      break;
    }
    case kStray: {
      ArenaWork stray = script.work;
      stray.number += 5000, stray.call = {static_cast<uint32_t>(random()), 900};
      world.SetStray(f, stray, random() % 300'000);
      if (Chance(random, 50)) freeze(world.script((f + 1) % R, at), share(5, 40));
      break;
    }
    case kTwo:
      freeze(world.script(random() % R, random() % ops), share(20, 300));
      freeze(world.script(random() % R, random() % ops), share(20, 300));
      break;
    case kHeld:
      Hold(random, world, f, at, Chance(random, 50) ? share(30, 60) : share(110, 160));
      break;
    default:
      break;
  }
  world.RunAll();
  Count& count = counts[fault][mode];
  ++count.scenarios;
  count.good += world.good, count.failed += world.failed, count.masked += world.masked;
  count.disagreed += world.has_disagreed;
  if (world.has_disagreed) return;
  if (fault == kHeld) CheckHeld(world, f, at);
  count.longest = std::max(
      count.longest, static_cast<double>(std::max(world.longest_ns, world.longest_failed_ns)) / timeout);
  CheckReasons(world);
  const uint64_t bound = kMostWaits * timeout + kSlackNs;
  if (world.longest_ns > bound)
    Die("an op took %.2f ms, where a time-out is %.2f", world.longest_ns / 1e6, timeout / 1e6);
  if (world.longest_failed_ns > bound + kStoresLandNs)
    Die("an op took %.2f ms to fail, where a time-out is %.2f", world.longest_failed_ns / 1e6, timeout / 1e6);
  if ((fault == kNoFault || fault == kShort) && (world.failed != 0 || world.masked != 0)) {
    Die("an op failed, or left out a rank, without a reason");
  }
  if (fault == kLate && mode == kMasks) CheckOthersStay(world, ops, f);
  const bool meets = script.work.active.Has(f) && !Without(script.work.active, f).IsEmpty();
  const bool differs = fault == kOtherCall || fault == kWrongList;
  if (fault == kWrongRank && world.failed == 0) Die("no op failed on a wrong mesh");
  if (differs && meets && !straggles && world.failed == 0) Die("no op failed of different calls");
  if ((fault == kLate || fault == kNever) && mode != kMasks)
    CheckReports(world, f, mode == kAll && late == f, count);
  // The ranks' memory is reset, or new if a process has ended.
  if (fault == kDies) {
    world.Replace(FirstEpoch(random));
  } else {
    world.Reset(world.LastEpoch());
  }
  SetManner(random, world);
  world.stress_ns = 0, world.gates_close_at = 0;
  const int failed = world.failed, masked = world.masked;
  world.SetProgram(MakeProgram(random, 4, R, static_cast<Mode>(random() % kNumModes), 10'000, true));
  world.RunAll();
  if (world.failed != failed || world.masked != masked) Die("an op failed after the reset");
}

}  // namespace

int Main(int argc, char** argv) {
  const char* const mode = argc > 1 ? argv[1] : "faults";
  const int count = argc > 2 ? std::atoi(argv[2]) : 1000;
  seed = argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 1;
  for (int i = 0; argc > 4 && i < kNumFaults; ++i) {
    if (std::strcmp(argv[4], kNames[i]) == 0) only = i;
  }
  if (std::strcmp(mode, "many") == 0) {
    for (int i = 0; i < count; ++i, ++seed) RunMany();
    std::printf("%d programs of many ranks: good\n", count);
    return 0;
  }
  if (std::strcmp(mode, "plain") == 0) {
    RunPlain(count);
    std::printf("%d ops without a fault, seed %llu: good\n", count, static_cast<unsigned long long>(seed));
    return 0;
  }
  ArenaWorld::counts_disagreements = std::strcmp(mode, "count") == 0;
  for (int i = 0; i < count; ++i, ++seed) RunFaults();
  for (int i = 0; i < kNumFaults * kNumModes; ++i) {
    const Count& c = counts[i / kNumModes][i % kNumModes];
    std::printf(
        "%-10s %-12s %5d scenarios, ops of a rank: %6d good, %5d failed, %5d ranks left out; "
        "%4d disagree; %.2f time-outs; reports: %d exact, %d others\n",
        kNames[i / kNumModes], kModeNames[i % kNumModes], c.scenarios, c.good, c.failed, c.masked,
        c.disagreed, c.longest, c.exact, c.weak);
  }
  std::printf("%d scenarios in which all has come while a rank was held up\n", held_and_has_all);
  if (only < 0 && count >= 300 && held_and_has_all == 0) Die("no rank was held up while all came");
  return 0;
}

}  // namespace jax_ep::cuda

int main(int argc, char** argv) { return jax_ep::cuda::Main(argc, argv); }
