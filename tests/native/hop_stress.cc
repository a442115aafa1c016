// Runs the protocol of hop 1 (ffi/kernels/hop/exchange.cuh) on the domain, over a network that delays and
// reorders whatever it may (emulation/network.h), with faults: neither a GPU nor a network is needed.
//
//   cd tests/native
//   g++ -std=c++17 -O2 -U_FORTIFY_SOURCE -I. -Iemulation -I../../ffi -o /tmp/hop_stress hop_stress.cc
//   /tmp/hop_stress 500 1    (scenarios, first seed)
//
// Each scenario has a few domains with one to three ranks each, which run the same hops and ops within their
// domain, and at most one fault. What a rank has failed of no other may take for rows. A failure repeats with
// the seed that is printed.
//
// It shows nothing of the order in which memory shows what was written: here all of it is seen at once. So
// fences that lack, reports whose words are written in another order, and counts that are not atomic go
// unnoticed. Nor does this network read past the end of what a put takes, so pieces need not be rounded up.
#include <algorithm>

#include "emulation/domains.h"

namespace jax_ep::cuda {
namespace {

enum Fault {
  kNoFault,
  kSlow,
  kShort,
  kGone,
  kCut,
  kLate,
  kOther,
  kLonger,
  kPlace,
  kList,
  kStray,
  kWorn,
  kHeld,
  kRefused,
  kNumFaults
};
const char* const kNames[] = {"no fault", "slow",      "short", "gone",  "cut",  "late", "other",
                              "longer",   "misplaced", "list",  "stray", "worn", "held", "refused"};
struct Count {
  int scenarios, good, failed;
};
Count counts[kNumFaults];

int lasting;   // hops that went well and took longer than a wait may
int of_mesh;   // ranks that were told by another one of their domain that a program runs on another mesh
int has_come;  // scenarios in which all came while a rank was held up where it looks at the clock

void SetManner(Random& random, World& world, Fault fault, uint64_t timeout) {
  emulation::Manner& manner = Machine::Get().manner;
  static const int kBudgets[] = {1, 3, 12, 60, 400};
  manner.budget = kBudgets[random() % 5];
  manner.skip_percent = random() % 2 == 0 ? 0 : 30;
  manner.most_ns = 2000;
  if (world.num_ranks() > 1) {  // many threads wait in an op within a domain
    manner.most_ns = 10'000;
    manner.budget = 12;
  }
  emulation::Network::Manner network;
  network.most_ns = random() % 2 == 0 ? 0 : random() % 20'000;
  // Ranks of a domain wait for each other, and so for all of a hop.
  if (fault == kSlow || fault == kHeld) network.most_ns = timeout / (world.num_ranks() == 1 ? 12 : 100);
  network.grain_bytes = 16 << random() % 3;
  for (int rail = 0; rail < world.num_ranks(); ++rail) world.network(rail).manner = network;
}

// `h` and `f` are domains.
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
      fits = phase == HopPhase::kLate && (world.num_domains() > 2 || reason.by() != reason.blamed());
      if (fault != kCut && world.num_domains() == 2 && h != f) fits = fits && reason.blamed() == f;
      break;
    case kOther:
    case kList:
    case kLonger:
      fits = names_f && phase == HopPhase::kOther;
      break;
    case kPlace:
      fits = names_f && phase == HopPhase::kMesh;
      break;
    case kHeld:
      fits = phase == HopPhase::kLate;
      break;
    case kRefused:
      fits = names_f && phase == HopPhase::kWithin;
      break;
    case kStray:
      fits = phase == HopPhase::kBusy || phase == HopPhase::kOther || phase == HopPhase::kLate;
      break;
    case kWorn:
      fits = phase == HopPhase::kCounterExhausted;
      break;
    default:
      break;
  }
  // A rank tells its peers on its domain, and they tell theirs on other domains.
  fits = fits || (phase == HopPhase::kWithin && world.num_ranks() > 1);
  // Who waits for another rank of its domain may be waited for longer than that one.
  fits = fits || (phase == HopPhase::kLate && world.num_ranks() > 1 && fault != kWorn);
  if (!fits) {
    Die("domain %d says phase %d, by %d, blaming %d; the fault was at %d", h, static_cast<int>(phase),
        reason.by(), reason.blamed(), f);
  }
}

void RunScenario() {
  Random random(seed);
  Machine::Get().random.seed(static_cast<uint32_t>(seed));
  const auto fault = static_cast<Fault>(random() % kNumFaults);
  what = kNames[fault];
  const uint64_t timeout = 30'000'000;
  const int domains = 2 + random() % 3, ranks = random() % 2 == 0 ? 1 : 2 + random() % (kMostRanks - 1);
  World world(random, domains, ranks, timeout);
  SetManner(random, world, fault, timeout);
  const int ops = 3 + random() % 6, any = random() % ops, f = random() % world.num_members();
  const int at = fault == kHeld ? ops - 1 : any;
  const int f_domain = f / ranks, other = (f_domain + 1) % domains;
  if (fault == kWorn) world.max_pieces = 1 + random() % 12;
  bool ends_within = false;
  int64_t sent = 0;  // pieces of the first track, which has most
  for (int i = 0; i < ops; ++i) {
    HopCall call;
    call.number = i;
    call.is_within = ranks > 1 && (i != at || fault == kShort || fault == kGone) && random() % 2 == 0;
    const int pieces = random() % 3 != 0 ? 3 : fault == kSlow && ranks == 1 ? 40 : 12;
    const int64_t most = world.window().piece_bytes * world.window().tracks * pieces;
    call.block_bytes = 1 + random() % most;
    if (random() % 2 == 0) call.block_bytes = AlignUp(call.block_bytes, 16);
    call.word = 1 + random() % 1000;
    call.shift = random() % 3 == 0 ? 4 * (random() % 4) : random() % 4 == 0 ? random() % 16 : 0;
    ends_within = call.is_within;
    if (!call.is_within) sent += world.window().PiecesOf(0, call.block_bytes);
    for (int m = 0; m < world.num_members(); ++m) {
      HopCall here = call;
      here.late_by = random() % 3 == 0 ? random() % (timeout / 10) : 0;
      if (i == at && m == f) {
        if (fault == kLate) here.late_by = 2 * timeout;
        if (fault == kOther) here.word += 5000;
        if (fault == kLonger) here.word += 5000, here.block_bytes += world.window().piece_bytes * 5;
        if (fault == kPlace) here.misplaced = true;
        if (fault == kList) here.list = 1;
        if (fault == kRefused) here.refused = true;
      }
      world.member(m).calls.push_back(here);
    }
  }
  if (fault == kStray) {
    HopCall stray;
    stray.number = 1000, stray.word = 7000, stray.block_bytes = 1 + random() % 4000;
    world.member(f).strays.push_back(stray);
  }
  int begun = 0;
  const auto freeze = [&](int m, Run& run) {
    if (m != f || begun++ != at) return;
    if (fault == kCut) world.network(f % ranks).Cut(f_domain, other);
    run.launch.freezes_rank = true;
    if (fault == kHeld) {
      run.launch.freezes_at_look = 1 + random() % 20;
      run.launch.freezes_for = timeout + timeout / 2;
    }
    if (fault != kShort && fault != kGone) return;
    run.launch.freezes_at = 1 + random() % 400;
    run.launch.freezes_for = fault == kShort ? timeout / 4 : kForEver;
  };
  world.RunAll(freeze);
  const bool wears = fault == kWorn && sent > static_cast<int64_t>(world.max_pieces);
  const bool must_not = fault == kNoFault || fault == kSlow || fault == kShort || (fault == kWorn && !wears);
  // In the last op a rank may have all of it before the fault, and then it needs nobody any more.
  const bool must =
      fault == kLate || fault == kOther || fault == kPlace || fault == kList || fault == kRefused || wears ||
      (at + 1 < ops && (world.member(f).gone || fault == kLonger || (fault == kCut && ranks == 1)));
  const uint64_t bound = 2 * timeout + timeout / 2 + (fault == kLate ? 2 * timeout : 0);
  if (fault != kSlow && fault != kHeld && world.longest_ns > bound) {
    Die("an op took %.1f ms", world.longest_ns / 1e6);
  }
  lasting += must_not && world.longest_ns > timeout;
  Count& count = counts[fault];
  ++count.scenarios;
  int failed = 0;
  bool has_all = fault == kHeld;  // the rank that was held up, of others that ended well meanwhile
  for (int m = 0; m < world.num_members(); ++m) {
    Member& member = world.member(m);
    failed += member.failed;
    if (m != f) has_all = has_all && member.failed == 0 && member.since < world.member(f).held_until;
    const Reason reason{member.within.reason};
    const bool is_told = static_cast<Phase>(member.within.phase) == Phase::kGivenUp;
    of_mesh += fault == kPlace && is_told && reason.phase() == Phase::kRank;
    count.failed += member.failed, count.good += member.ended - member.failed;
    if (must_not && member.failed != 0) Die("rank %d fails without a fault", m);
    if (member.failed != 0 && member.within.phase == 0) Die("rank %d fails and does not say why", m);
    if (member.hop_failed && member.report.reason == 0) Die("rank %d does not say that hops fail", m);
    if (member.report.reason != 0) CheckReason(world, member.report, member.domain, fault, f_domain);
    // The last op within a domain is one that all of its ranks have failed of, if one has failed before.
    const Member& peer = world.member(m / ranks * ranks);
    if (ends_within && !member.gone && !peer.gone && (member.failed == 0) != (peer.failed == 0)) {
      Die("rank %d and rank %d of a domain do not fail together", m, m / ranks * ranks);
    }
  }
  if (must && failed == 0) Die("no op fails");
  if (has_all && world.member(f).failed != 0) {
    Die("rank %d fails, for which all came while it was held up", f);
  }
  has_come += has_all;
  // What is left of a domain that is gone does not go on.
  Machine::Get().Abandon();
}

// Of each number of domains: slots lie apart and in the window, and no two signals are one.
void CheckWindow(int domains) {
  const HopWindow window = HopWindow::Of(domains);
  std::vector<int64_t> slots;
  std::vector<uint32_t> signals;
  for (int track = 0; track < window.tracks; ++track) {
    for (int domain = 0; domain < domains; ++domain) {
      for (uint64_t number = 0; number < kHopSlots; ++number) {
        slots.push_back(window.SlotTo(track, domain, number));
        slots.push_back(window.SlotFrom(track, domain, number));
        signals.push_back(window.PieceSignal(track, domain, number));
      }
      signals.push_back(window.CreditSignal(track, domain));
      signals.push_back(window.EndSignal(track, domain));
    }
  }
  std::sort(slots.begin(), slots.end());
  std::sort(signals.begin(), signals.end());
  slots.push_back(window.bytes());
  for (size_t i = 1; i < slots.size(); ++i) {
    if (slots[i] - slots[i - 1] < kHopHeadBytes + window.piece_bytes)
      Die("%d domains: slots overlap", domains);
  }
  for (size_t i = 0; i < signals.size(); ++i) {
    if (signals[i] != i) Die("%d domains: signals are not numbered from 0 on", domains);
  }
  if (signals.size() != static_cast<size_t>(window.num_signals())) Die("%d domains: other signals", domains);
  if (window.piece_bytes < 1024 || window.piece_bytes % 16 != 0) Die("%d domains: small pieces", domains);
  if (window.bytes() > 33 << 20)
    Die("%d domains: %lld bytes", domains, static_cast<long long>(window.bytes()));
}

// Many scenarios must have shown these.
void CheckCounts() {
  if (lasting == 0) Die("no hop took longer than a wait may");
  if (of_mesh == 0) Die("no rank was told of another mesh");
  if (has_come == 0) Die("no rank was held up where it looks at the clock");
}

int Main(int argc, char** argv) {
  for (int domains = 2; domains <= kMaxDomains; ++domains) CheckWindow(domains);

  const int scenarios = argc > 1 ? std::atoi(argv[1]) : 500;
  seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  for (int i = 1; i <= scenarios; ++i, ++seed) {
    RunScenario();
    if (i == 100) CheckCounts();
  }
  for (int i = 0; i < kNumFaults; ++i) {
    std::printf("%-10s %5d scenarios, ops of a rank: %6d well, %6d failed\n", kNames[i], counts[i].scenarios,
                counts[i].good, counts[i].failed);
  }
  std::printf("%d scenarios with a hop that took longer than a wait may\n", lasting);
  return 0;
}

}  // namespace

}  // namespace jax_ep::cuda

int main(int argc, char** argv) { return jax_ep::cuda::Main(argc, argv); }
