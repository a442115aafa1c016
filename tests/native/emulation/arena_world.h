// The ranks of a group and their programs of ops through the arena. Each rank has a control block and an
// arena. Each op is checked when it returns.
#pragma once

#include <deque>

#include "arena_ops.h"

namespace jax_ep::cuda {

using Random = std::mt19937;
using emulation::Machine;
constexpr uint64_t kForEver = 1'000'000'000'000;

// One op of one rank's program and its faults.
struct ArenaScript {
  ArenaWork work;
  uint64_t late_by = 0;  // nanoseconds from the end of the op before to the beginning of this one
  // If not 0, the op begins this many nanoseconds after the first other rank has begun it.
  uint64_t after_others = 0;
  uint64_t freezes_at = 0, freezes_at_look = 0, freezes_for = 0;
  bool freezes_rank = false;
  bool dies = false;  // when it freezes
  bool wrong_rank = false;
  int list = 0;  // of the ranks in the mesh of its program
};

// How an op of a rank ended.
struct ArenaEnd {
  bool is_known = false, has_failed = false;
  RankSet ranks{};  // that took part, according to this rank
  uint64_t at = 0, held_until = 0;
};

class ArenaWorld {
 public:
  static constexpr uint64_t kNearNs = 40'000;  // distance from a deadline at which time is counted finely

  uint64_t coarse_ns = 20'000, fine_ns = 700;  // longest round
  uint32_t stress_ns = 0;
  // The longest times of an op that succeeded and of one that failed, on ranks that were never held up.
  uint64_t longest_ns = 0, longest_failed_ns = 0;
  uint64_t gates_close_at = 0;  // nanoseconds from the start until all gates close; 0: they do not
  int good = 0, failed = 0, masked = 0;
  bool has_disagreed = false;

  ArenaWorld(Random& random, int num_ranks, uint32_t epoch, uint64_t timeout_ns)
      : random_(random), timeout_ns_(timeout_ns), ranks_(num_ranks) {
    Machine& machine = Machine::Get();
    machine.random.seed(random());
    machine.on_trap = [](int rank) { Die("rank %d was stopped", rank); };
    machine.on_mismatch = [this](int rank, const char* fault) { Disagree(rank, fault); };
    on_disagreement = [this](int rank, const char* about) {
      if (!counts_disagreements) Die("threads of a block of rank %d disagree on %s", rank, about);
      has_disagreed = true;
    };
    for (int r = 0; r < num_ranks; ++r) {
      ranks_[r].num_ranks = num_ranks;
      ranks_[r].memory = Memory(r, num_ranks);
      ranks_[r].report.timeout_ns = timeout_ns;
    }
    Reset(epoch);
  }
  ArenaWorld(const ArenaWorld&) = delete;
  ~ArenaWorld() {
    Machine::Get().Abandon();
    Machine::Get().next_event = 0;
  }

  inline static bool counts_disagreements = false;

  int num_ranks() const { return static_cast<int>(ranks_.size()); }
  uint64_t timeout_ns() const { return timeout_ns_; }
  const Report& report(int r) const { return ranks_[r].report; }
  int num_ops() const { return static_cast<int>(ranks_[0].ends.size()); }
  ArenaScript& script(int r, int op) { return ranks_[r].scripts[op]; }
  const ArenaEnd& end(int r, int op) const { return ranks_[r].ends[op]; }
  void SetProgram(const std::vector<ArenaWork>& program) {
    for (Rank& rank : ranks_) {
      rank.scripts.assign(program.size(), {});
      rank.ends.assign(program.size(), {});
      for (size_t i = 0; i < program.size(); ++i) rank.scripts[i].work = program[i];
    }
  }
  void CutAfter(int r, int op) { ranks_[r].scripts.resize(op); }
  // Adds an op that begins `after` nanoseconds from the start if another op of the rank is in flight then.
  void SetStray(int r, const ArenaWork& work, uint64_t after) {
    ranks_[r].stray.work = work;
    ranks_[r].stray.late_by = after;
    ranks_[r].has_stray = true;
  }

  // Resets all ranks as DevicePeers::Reset does.
  void Reset(uint32_t epoch) {
    if (epoch == 0xffffffffu) epoch = 1;
    for (Rank& rank : ranks_) {
      std::memset(static_cast<void*>(&rank.channel()), 0, sizeof(Channel));
      rank.control().recorded = 0;
      for (Channel& channel : rank.control().channels) {
        channel.epoch = epoch;
        channel.gate = channel.opened = static_cast<uint64_t>(epoch) << 32;
      }
      ClearWords(rank.memory, num_ranks());
      std::fill_n(rank.arena().heard, kMaxRanks, epoch);
      std::fill_n(rank.arena().begun, kMaxRanks, epoch);
      rank.report.phase = 0;
      rank.report.left_out = 0;
    }
  }
  // Replaces all ranks by new processes with new memory.
  void Replace(uint32_t epoch) {
    Machine::Get().Abandon();
    for (int r = 0; r < num_ranks(); ++r) {
      (void)Memory(r, num_ranks());
      ranks_[r].has_died = false;
    }
    Reset(epoch);
  }
  // Returns the largest epoch, as DevicePeers::LastEpoch does.
  uint32_t LastEpoch() const {
    uint32_t last = 0;
    for (const Rank& rank : ranks_) last = std::max(last, rank.channel().epoch);
    return last;
  }

  // Runs the program of each rank and checks each op.
  void RunAll() {
    Machine& machine = Machine::Get();
    for (Rank& rank : ranks_) rank.since = machine.now, rank.next = 0, rank.runs.clear();
    first_begun_.assign(1000, 0);
    began_ = machine.now;
    has_failed_ = false;
    next_gate_ = 0;
    machine.Abandon();
    uint64_t last = machine.now + 40 * timeout_ns_;
    for (const Rank& rank : ranks_) {
      for (const ArenaScript& script : rank.scripts)
        last += 3 * timeout_ns_ + script.late_by + script.freezes_for % kForEver;
    }
    while (true) {
      bool done = true;
      for (int r = 0; r < num_ranks(); ++r) {
        BeginWhatIsDue(r);
        Rank& rank = ranks_[r];
        done = done && (rank.has_died || (rank.runs.empty() && rank.next == rank.scripts.size()));
      }
      if (done) break;
      CloseGates();
      SetPace();
      for (emulation::Launch* launch : machine.Round()) {
        auto& runs = ranks_[launch->rank].runs;
        const auto run =
            std::find_if(runs.begin(), runs.end(), [&](auto& r) { return &r->launch == launch; });
        if (!has_disagreed) End(**run);
        runs.erase(run);
      }
      for (Rank& rank : ranks_) {
        rank.has_died |=
            !rank.runs.empty() && rank.runs[0]->launch.frozen && rank.scripts[rank.next - 1].dies;
      }
      if (has_disagreed) break;
      if (machine.now > last) {
        for (Rank& rank : ranks_) {
          for (const auto& run : rank.runs) Show(*run);
        }
        Disagree(0, "ops do not return");
        break;
      }
    }
    machine.Abandon();
    for (int r = 0; r < num_ranks(); ++r) {
      Rank& rank = ranks_[r];
      const bool has_failed =
          std::any_of(rank.ends.begin(), rank.ends.end(), [](auto& end) { return end.has_failed; });
      if (has_failed && rank.report.phase == 0) Die("rank %d fails without a report", r);
      rank.runs.clear(), rank.has_stray = false;
    }
  }

 private:
  struct Rank {
    int num_ranks = 0;
    std::byte* memory = nullptr;
    Report report{};
    std::vector<ArenaScript> scripts;
    std::vector<ArenaEnd> ends;
    ArenaScript stray;
    bool has_stray = false, has_died = false;
    size_t next = 0;
    uint64_t since = 0;  // when its last op ended
    std::vector<std::unique_ptr<ArenaRun>> runs;

    Control& control() const { return *reinterpret_cast<Control*>(memory); }
    Channel& channel() const { return control().channels[kArenaChannel]; }
    Arena& arena() const { return *reinterpret_cast<Arena*>(memory + ArenaOffset(num_ranks)); }
  };

  // Returns zeroed memory for a rank. Worlds reuse it one after the other.
  static std::byte* Memory(int r, int num_ranks) {
    static const size_t kBytes = GroupBytes(kMaxRanks);
    static std::byte* memory[kMaxRanks];
    if (memory[r] == nullptr) {
      memory[r] = static_cast<std::byte*>(
          mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    } else {
      madvise(memory[r], GroupBytes(num_ranks), MADV_DONTNEED);
    }
    return memory[r];
  }

  // Zeroes the arena's words and a rank's lines, which end where its memory does. Lines are cleared by whole
  // pages, and no scenario uses the last slots, which may be on the first one.
  static void ClearWords(std::byte* memory, int num_ranks) {
    constexpr size_t kPage = 4096;
    const size_t arena = ArenaOffset(num_ranks), lines = (arena + LinesOffset(num_ranks)) / kPage * kPage;
    std::memset(memory + arena, 0, SlotsOffset(num_ranks));
    madvise(memory + lines, GroupBytes(num_ranks) - lines, MADV_DONTNEED);
  }

  void Disagree(int rank, const char* fault) {
    if (!counts_disagreements) Die("rank %d: %s", rank, fault);
    has_disagreed = true;
  }

  uint64_t DueAt(const Rank& rank) const {
    const ArenaScript& script = rank.scripts[rank.next];
    if (script.after_others == 0) return rank.since + script.late_by;
    const uint64_t begun = first_begun_[rank.next];
    // It may be that no other rank begins this op.
    return begun == 0 ? rank.since + 20 * timeout_ns_ : std::max(rank.since, begun + script.after_others);
  }

  void BeginWhatIsDue(int r) {
    Machine& machine = Machine::Get();
    Rank& rank = ranks_[r];
    if (rank.has_died) return;
    if (rank.has_stray && !rank.runs.empty() && machine.now >= began_ + rank.stray.late_by) {
      rank.runs.push_back(Begin(r, rank.stray));
      rank.runs.back()->is_stray = true;
      rank.has_stray = false;
    }
    const bool is_busy =
        std::any_of(rank.runs.begin(), rank.runs.end(), [](const auto& run) { return !run->is_stray; });
    if (is_busy || rank.next == rank.scripts.size() || machine.now < DueAt(rank)) return;
    if (first_begun_[rank.next] == 0) first_begun_[rank.next] = machine.now;
    rank.runs.insert(rank.runs.begin(), Begin(r, rank.scripts[rank.next]));
    ++rank.next;
  }

  // Closes the gates of all ranks, one per round, as if another op had failed on rank 0.
  void CloseGates() {
    if (gates_close_at == 0 || Machine::Get().now < began_ + gates_close_at) return;
    if (next_gate_ == num_ranks()) return;
    uint64_t* const gate = &ranks_[next_gate_].channel().gate;
    if (static_cast<uint32_t>(*gate) == 0) *gate |= Reason::Of(0, Phase::kWave).word;
    ++next_gate_;
  }

  // Counts time finely only near the deadlines of ops that a straggler is about to begin.
  void SetPace() {
    Machine& machine = Machine::Get();
    machine.next_event = 0;
    machine.manner.most_ns = coarse_ns;
    const auto consider = [&](uint64_t at) {
      const uint64_t from = at - std::min(at, kNearNs);
      if (machine.now >= from && machine.now < at + kNearNs) machine.manner.most_ns = fine_ns;
      if (machine.now >= from) return;
      if (machine.next_event == 0 || from < machine.next_event) machine.next_event = from;
    };
    for (const Rank& rank : ranks_) {
      if (rank.has_died || rank.next > rank.scripts.size()) continue;
      if (rank.next < rank.scripts.size() && rank.runs.empty() && rank.scripts[rank.next].after_others != 0) {
        consider(DueAt(rank));
      }
      if (rank.next > 0 && !rank.runs.empty() && rank.scripts[rank.next - 1].after_others != 0) {
        consider(rank.runs[0]->launch.began);
      }
    }
    if (gates_close_at != 0) consider(began_ + gates_close_at);
  }

  std::unique_ptr<ArenaRun> Begin(int r, const ArenaScript& script) {
    auto run = std::make_unique<ArenaRun>();
    const ArenaWork& work = script.work;
    const int R = num_ranks();
    run->work = work;
    run->position_operand = {script.wrong_rank ? (r + 1) % R : r, script.list};
    run->must_fail = has_failed_ || static_cast<uint32_t>(ranks_[r].channel().gate) != 0;
    PushArgs& args = run->args;
    args = {};
    args.shape = work.shape(R);
    args.position_operand = &run->position_operand;
    args.few_tokens.slots = SlotsOf(args.shape, work.row_bytes);
    if (work.in_lines) {
      args.few_tokens.chunks = ChunksOf(work.row_bytes);
      args.few_tokens.slots = LinesOf(args.shape, work.row_bytes);
    }
    Peers& peers = args.peers;
    peers.rank = r;
    peers.num_ranks = R;
    peers.call = work.call;
    peers.report = &ranks_[r].report;
    peers.stress_ns = stress_ns;
    peers.channel_number = kArenaChannel;
    peers.arena_offset = ArenaOffsetFromChannel(R);
    for (int p = 0; p < R; ++p) peers.channel[p] = &ranks_[p].channel();
    run->active_after.assign(R, kUntouched);
    run->wait_us.assign(R, 0);
    for (int p = 0; p < R; ++p) run->active_ranks.push_back(work.active.Has(p));
    if (work.has_attendance) {
      args.attendance = {run->active_ranks.data(), run->active_after.data(), work.masks, nullptr};
    }
    if (random_() % 2 == 0) args.attendance.wait_us = run->wait_us.data();
    // The number of blocks differs between ops and ranks.
    args.few_tokens.num_senders = 1 + static_cast<int>(random_() % (work.pushes ? 2 : 4));
    args.few_tokens.num_receivers = work.pushes ? 1 + static_cast<int>(random_() % 2) : 0;
    const int metadata_blocks = work.pushes ? 1 + static_cast<int>(random_() % 2) : 0;
    run->summing_warps = 1 + static_cast<int>(random_() % 2);
    // Sessions of several words work for few ranks, too.
    const bool has_several = R > kRankBits || (!work.in_lines && random_() % 2 == 0);
    run->rank_words = has_several ? kMaxRanks / kRankBits : 1;
    args.few_tokens.warps_per_row = 1 + static_cast<int>(random_() % run->summing_warps);
    const int blocks = args.few_tokens.num_senders + args.few_tokens.num_receivers + metadata_blocks;
    for (int i = 0; i < work.tokens * work.top_k; ++i) {
      run->topk_idx.push_back(work.Expert(r, i / work.top_k, i % work.top_k, R));
    }
    run->rows.assign(R * work.tokens * kWords, kUntouched);
    run->choices.assign(blocks, std::vector<int16_t>(R * work.tokens * work.top_k, -7));
    run->views.resize(blocks * ArenaRun::kNumPlaces);
    emulation::Launch& launch = run->launch;
    launch.rank = r;
    launch.grid = {static_cast<unsigned>(blocks)};
    launch.block = {kArenaThreads};
    launch.body = [run = run.get()] {
      (void)WithRankWords(run->rank_words * kRankBits, [&](auto words) {
        constexpr int kRankWords = decltype(words)::value;
        run->work.pushes ? ArenaPushKernel<kRankWords>(*run) : ArenaPullKernel<kRankWords>(*run);
        return kRankWords;
      });
    };
    launch.freezes_at = script.freezes_at;
    launch.freezes_at_look = script.freezes_at_look;
    launch.freezes_for = script.freezes_for;
    launch.freezes_rank = script.freezes_rank;
    Machine::Get().Start(launch);
    Trace(*run, "begins");
    return run;
  }

  // Prints each beginning and end, with TRACE=1 in the environment.
  static void Trace(const ArenaRun& run, const char* what) {
    static const bool traces = std::getenv("TRACE") != nullptr;
    if (!traces) return;
    const char* const held = run.launch.freezes_rank ? ", its rank held up" : ", a block held up";
    std::printf("%10.3f ms: rank %d %s op %u: %s%s%s%s, active %x, %u blocks, epoch %x, gate %llx\n",
                Machine::Get().now / 1e6, run.args.peers.rank, what, run.work.number,
                run.work.pushes ? "push" : "pull", run.work.masks ? ", masks" : "",
                run.is_stray ? ", stray" : "", run.launch.frozen ? held : "", run.work.active.words[0],
                run.launch.grid.x, run.args.peers.own().epoch,
                static_cast<unsigned long long>(run.args.peers.own().gate));
  }

  // Shows an op that does not return.
  static void Show(const ArenaRun& run) {
    const Channel& own = run.args.peers.own();
    std::fprintf(stderr, "rank %d, op %u (%s%s): gate %llx, opened %llx, epoch %x, ended %x\n",
                 run.args.peers.rank, run.work.number, run.work.pushes ? "push" : "pull",
                 run.work.masks ? ", masks" : "", static_cast<unsigned long long>(own.gate),
                 static_cast<unsigned long long>(own.opened), own.epoch, own.ended);
    emulation::ShowBlocks(run.launch);
  }

  // Checks the results of a run that returns: all rows, or all 0xff.
  void End(ArenaRun& run) {
    const int me = run.args.peers.rank;
    Rank& rank = ranks_[me];
    ArenaEnd end{true, run.was_filled, {}, Machine::Get().now, run.launch.frozen_until};
    Trace(run, run.was_filled ? "fails" : "ends");
    if (!run.is_stray) rank.since = Machine::Get().now;
    if (!run.launch.frozen && Machine::Get().rank_frozen_until[me] == 0) {
      uint64_t& longest = run.was_filled ? longest_failed_ns : longest_ns;
      longest = std::max(longest, Machine::Get().now - run.launch.began);
    }
    if (run.was_filled) {
      has_failed_ = true;
      ++failed;
      CheckFilled(run);
    } else {
      ++good;
      if (run.must_fail) Die("rank %d's op succeeds after the group has failed", me);
      end.ranks = CheckWhole(run);
    }
    if (!run.is_stray) rank.ends[rank.next - 1] = end;
  }

  void CheckFilled(const ArenaRun& run) {
    const int me = run.args.peers.rank;
    for (const uint32_t word : run.rows) {
      if (word != kFilled) Die("rank %d fails, and leaves %x", me, word);
    }
    for (const int32_t active : run.active_after) {
      if (run.work.has_attendance && active != -1) Die("rank %d fails, and reports who took part", me);
    }
  }

  // Checks the results of an op that succeeded and returns the ranks that took part.
  RankSet CheckWhole(ArenaRun& run) {
    const ArenaWork& work = run.work;
    const int me = run.args.peers.rank, R = num_ranks();
    const RankSet active = work.active.Has(me) ? work.active : RankSet{};
    RankSet ranks = active;
    for (unsigned block = 0; block < run.launch.grid.x; ++block) {
      const ArenaRun::View& view = run.ViewOf(block, ArenaRun::kAtEnd);
      if (!view.is_set || !view.is_open || view.has_failed)
        Die("rank %d's op succeeds, but a block has failed", me);
      if (block > 0 && !(view.ranks == ranks))
        Die("blocks of rank %d use ranks %x and %x", me, view.ranks.words[0], ranks.words[0]);
      ranks = view.ranks;
    }
    const RankSet left_out = active.Without(ranks);
    const bool is_right =
        work.masks ? ranks.Without(active).IsEmpty() && ranks.Has(me) == active.Has(me) : ranks == active;
    if (!is_right) Die("rank %d uses ranks %x of %x", me, ranks.words[0], active.words[0]);
    for (const uint32_t word : left_out.words) masked += __builtin_popcount(word);
    for (int r = 0; r < R; ++r) {
      const int said = ranks.IsEmpty() ? work.active.Has(r) : ranks.Has(r);
      if (work.has_attendance && run.active_after[r] != said)
        Die("rank %d reports wrongly whether rank %d took part", me, r);
      for (int t = 0; t < work.tokens; ++t) {
        const bool comes = ranks.Has(r) && work.Sends(r, me, t, R);
        for (int w = 0; w < kWords; ++w) {
          const uint32_t seen = run.rows[run.At(r, t, w)];
          if (seen == (comes ? work.Value(r, me, t, w) : kUntouched)) continue;
          Die("rank %d has %x in word %d of row %d of rank %d", me, seen, w, t, r);
        }
        if (work.pushes) CheckChoices(run, ranks, r, t);
      }
    }
    return ranks;
  }

  void CheckChoices(const ArenaRun& run, const RankSet& ranks, int r, int t) const {
    const ArenaWork& work = run.work;
    for (unsigned block = run.args.few_tokens.num_senders; block < run.launch.grid.x; ++block) {
      for (int k = 0; k < work.top_k; ++k) {
        const int seen = run.choices[block][(r * work.tokens + t) * work.top_k + k];
        const int expert = ranks.Has(r) ? work.Expert(r, t, k, num_ranks()) : -1;
        if (seen != expert) Die("rank %d takes %d for a choice of rank %d", run.args.peers.rank, seen, r);
      }
    }
  }

  Random& random_;
  uint64_t timeout_ns_;
  std::vector<Rank> ranks_;
  std::vector<uint64_t> first_begun_;  // by op: when the first rank began it; 0: not yet
  uint64_t began_ = 0;
  int next_gate_ = 0;
  bool has_failed_ = false;
};

}  // namespace jax_ep::cuda
