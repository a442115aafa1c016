// The ranks of a group, each with a control block, and the programs that they run: in order within a channel,
// side by side in several. Checks each op when it returns.
#pragma once

#include <deque>

#include "ops.h"

namespace jax_ep::cuda {

// One op of one rank's program, and what goes wrong with it.
struct Script {
  Work work;
  uint64_t late_by = 0;
  uint64_t freezes_at = 0, freezes_at_look = 0, freezes_for = 0;
  bool freezes_rank = false;
  uint64_t gone_after = 0;  // 0: never; else the freeze was the end of the process, which is noticed then
  bool wrong_rank = false;
  int list = 0;  // of the ranks in the mesh of its program
};

struct Outcome {
  int good = 0, failed = 0, traps = 0;
  uint64_t longest_ns = 0;
};

class World {
 public:
  uint32_t stress_ns = 0;
  bool overlaps = false;  // an op begins when the one before has freed the channel, before it has returned
  uint64_t gates_close_at = 0;  // nanoseconds from the start until all gates close; 0: they do not

  World(std::mt19937& random, int num_ranks, uint32_t epoch, uint64_t timeout_ns)
      : random_(random),
        num_ranks_(num_ranks),
        reports_(num_ranks),
        programs_(num_ranks),
        strays_(num_ranks),
        ended_(num_ranks),
        wait_us_(num_ranks) {
    // Each rank's ops have as many blocks as they like.
    for (int r = 0; r < num_ranks; ++r) {
      controls_.push_back(static_cast<Control*>(std::calloc(1, ControlBytes(num_ranks))));
      reports_[r].timeout_ns = timeout_ns;
      blocks_.push_back(random() % 4);
      threads_.push_back(64);  // the first warp meets the ranks, the others read what they publish
    }
    emulation::Machine::Get().random.seed(random());
    Reset(epoch);
  }
  World(const World&) = delete;
  ~World() {
    emulation::Machine::Get().Abandon();
    for (Control* control : controls_) std::free(control);
  }

  int num_ranks() const { return num_ranks_; }
  const Report& report(int r) const { return reports_[r]; }
  // The times that rank r waited for each rank, in its push that ended last.
  const std::vector<float>& wait_us(int r) const { return wait_us_[r]; }
  Script& script(int r, int op) { return programs_[r][op]; }
  // Of a rank's op that ended last: when it ended, until when it was held up, and how often it had looked at
  // the clock.
  struct Ended {
    uint64_t at, held_until, looks;
  };
  const Ended& ended(int r) const { return ended_[r]; }

  void SetProgram(const std::vector<Work>& program) {
    for (auto& scripts : programs_) {
      scripts.clear();
      for (const Work& work : program) {
        scripts.emplace_back();
        scripts.back().work = work;
      }
    }
  }
  void CutAfter(int r, int op) { programs_[r].resize(op); }
  // An op outside of the order of its channel, some time after the beginning.
  void AddStray(int r, const Work& work, uint64_t after) {
    strays_[r].emplace_back();
    strays_[r].back().work = work;
    strays_[r].back().late_by = after;
  }

  // As DevicePeers::Reset.
  void Reset(uint32_t epoch) {
    if (epoch == 0xffffffffu) epoch = 1;
    for (int r = 0; r < num_ranks_; ++r) {
      std::memset(static_cast<void*>(controls_[r]), 0, ControlBytes(num_ranks_));
      for (Channel& channel : controls_[r]->channels) {
        channel.epoch = epoch;
        channel.gate = channel.opened = static_cast<uint64_t>(epoch) << 32;
      }
      reports_[r].phase = 0;
    }
  }
  // As a new process: with other memory.
  void Replace(uint32_t epoch) {
    emulation::Machine::Get().Abandon();
    for (Report& report : reports_) report.gone = {};
    Reset(epoch);
  }
  uint32_t LastEpoch() const {
    uint32_t last = 0;
    for (const Control* control : controls_) {
      for (const Channel& channel : control->channels) last = std::max(last, channel.epoch);
    }
    return last;
  }

  // Runs the program of each rank until nothing goes on any more, and checks all that returns.
  Outcome RunAll(std::function<void(int)> on_trap) {
    emulation::Machine& machine = emulation::Machine::Get();
    outcome_ = {};
    has_failed_ = false;
    next_gate_ = 0;
    const uint64_t began = machine.now;
    struct Lane {
      std::deque<const Script*> waiting;
      bool busy = false;
      uint64_t since = 0;
      Run* last = nullptr;  // while it is in flight
    };
    std::vector<Lane> lanes(num_ranks_ * (kChannels + 2));
    std::vector<std::unique_ptr<Run>> runs;
    on_load = [&](const void* from) {
      for (const auto& run : runs) {
        if (run->ring.Owns(from)) return;
      }
      Die("memory of a rank is read that has returned");
    };
    std::vector<bool> stopped(num_ranks_), noticed(num_ranks_);
    machine.on_trap = [&](int rank) {
      ++outcome_.traps;
      stopped[rank] = true;
      if (std::getenv("TRACE") != nullptr) {
        for (const auto& run : runs) Show(*run);
      }
      if (on_trap == nullptr) Die("rank %d was stopped", rank);
      on_trap(rank);
    };
    size_t left = 0;
    for (int r = 0; r < num_ranks_; ++r) {
      for (auto& script : programs_[r]) {
        lanes[r * (kChannels + 2) + script.work.call.site % kChannels].waiting.push_back(&script);
      }
      for (auto& script : strays_[r]) lanes[r * (kChannels + 2) + kChannels].waiting.push_back(&script);
    }
    for (Lane& lane : lanes) {
      lane.since = machine.now;
      left += lane.waiting.size();
    }
    const uint64_t last = machine.now + 60'000'000'000;
    size_t lost = 0;  // ops that never end, of ranks that were stopped or are gone
    while (left > lost) {
      for (size_t i = 0; i < lanes.size(); ++i) {
        Lane& lane = lanes[i];
        const int r = static_cast<int>(i) / (kChannels + 2);
        if (overlaps && lane.last != nullptr && lane.last->epoch_before != lane.last->peers.own().epoch) {
          lane.busy = false;
        }
        if (lane.busy || lane.waiting.empty() || stopped[r] ||
            machine.now < lane.since + lane.waiting.front()->late_by) {
          continue;
        }
        runs.push_back(Begin(r, *lane.waiting.front(), static_cast<int>(i)));
        lane.waiting.pop_front();
        lane.busy = true;
        lane.last = runs.back().get();
      }
      if (gates_close_at != 0 && machine.now >= began + gates_close_at) CloseNextGates();
      for (emulation::Launch* launch : machine.Round()) {
        for (size_t i = 0; i < runs.size(); ++i) {
          if (&runs[i]->launch != launch) continue;
          Lane& lane = lanes[runs[i]->lane];
          if (lane.last == runs[i].get()) {
            lane.busy = false;
            lane.last = nullptr;
            lane.since = machine.now;
          }
          End(*runs[i]);
          --left;
          runs[i] = std::move(runs.back());
          runs.pop_back();
          break;
        }
      }
      for (const auto& run : runs) {
        const int r = run->peers.rank;
        if (!run->launch.frozen || run->gone_after == 0 || noticed[r]) continue;
        stopped[r] = true;
        if (machine.now < run->frozen_since(machine.now) + run->gone_after) continue;
        noticed[r] = true;
        for (Report& report : reports_) report.gone.Add(RankBits::Of(r));
      }
      lost = 0;
      for (size_t i = 0; i < lanes.size(); ++i) {
        if (stopped[i / (kChannels + 2)]) lost += lanes[i].waiting.size() + lanes[i].busy;
      }
      if (machine.now > last) {
        for (const auto& run : runs) Show(*run);
        Die("ops do not return");
      }
    }
    for (const auto& run : runs) run->is_inside = false;
    machine.Abandon();
    for (auto& strays : strays_) strays.clear();
    return outcome_;
  }

 private:
  std::unique_ptr<Run> Begin(int r, const Script& script, int lane) {
    auto run = std::make_unique<Run>();
    run->work = script.work;
    run->lane = lane;
    Peers& peers = run->peers;
    peers = {};
    peers.rank = r;
    peers.num_ranks = num_ranks_;
    peers.call = script.work.call;
    peers.report = &reports_[r];
    peers.stress_ns = stress_ns;
    peers.channel_number = static_cast<int>(peers.call.site % kChannels);
    for (int p = 0; p < num_ranks_; ++p) peers.channel[p] = &controls_[p]->channels[peers.channel_number];
    run->position_operand = {script.wrong_rank ? (r + 1) % num_ranks_ : r, script.list};
    run->gone_after = script.gone_after;
    run->epoch_before = peers.own().epoch;
    run->must_fail = has_failed_;
    // Each call site has a grid of its own.
    const int blocks = 1 + static_cast<int>((blocks_[r] + script.work.call.site * 7 / 3) % 4);
    run->batches = Batches::Of(script.work.waves, 1 + (r * 3 + static_cast<int>(script.work.call.site)) % 5);
    run->active = script.work.pushes || !script.work.in_waves ? std::max(1, blocks - blocks / 2)
                                                              : std::max(1, blocks / 2);
    if (!script.work.pushes && script.work.in_waves && blocks == 1) run->grid = 2;  // some must fold
    const int rows = num_ranks_ * script.work.tokens;
    for (auto* array : {&run->out, &run->copies, &run->partials, &run->rows})
      array->assign(rows * kWords, 0x7ddddddd);
    run->cleared.assign(rows, 0);
    run->wait_us.assign(num_ranks_, -1.0f);
    for (int i = 0; i < rows * kWords; ++i) {
      run->rows[i] =
          script.work.Value(r, i / kWords / script.work.tokens, i / kWords % script.work.tokens, i % kWords);
    }
    if (script.work.by_ring && script.work.pushes) {
      run->ring.InitPush(run->numbers(), peers, script.work.waves);
    } else if (script.work.by_ring) {
      run->ring.InitPull(run->numbers(), peers, script.work.waves, script.work.in_waves, run->active,
                         1 + static_cast<int>(script.work.number % 4));
    }
    emulation::Launch& launch = run->launch;
    launch.rank = r;
    launch.grid = {static_cast<unsigned>(run->grid != 0 ? run->grid : blocks)};
    launch.block = {static_cast<unsigned>(threads_[r])};
    run->published.assign(launch.grid.x, std::vector<Published>(num_ranks_));
    launch.body = [run = run.get()] { run->work.pushes ? PushKernel(*run) : PullKernel(*run); };
    launch.freezes_at = script.freezes_at;
    launch.freezes_for = script.freezes_for;
    launch.freezes_rank = script.freezes_rank;
    launch.freezes_at_look = script.freezes_at_look;
    run->is_inside = true;
    emulation::Machine::Get().Start(launch);
    Trace(*run, "begins");
    return run;
  }

  // Closes all gates of the next rank, as if an op on another stream had failed on rank 0.
  void CloseNextGates() {
    if (next_gate_ == num_ranks_) return;
    for (Channel& channel : controls_[next_gate_]->channels) {
      if (static_cast<uint32_t>(channel.gate) == 0) channel.gate |= Reason::Of(0, Phase::kWave).word;
    }
    ++next_gate_;
  }

  // Each beginning and end, with TRACE=1 in the environment.
  static void Trace(const Run& run, const char* what) {
    static const bool traces = std::getenv("TRACE") != nullptr;
    if (!traces) return;
    std::printf("%10.3f ms: rank %d %s call %u at site %u: %s%s, %u blocks\n",
                emulation::Machine::Get().now / 1e6, run.peers.rank, what, run.work.number,
                run.work.call.site, run.work.pushes ? "push" : "pull", run.work.in_waves ? " in waves" : "",
                run.launch.grid.x);
  }

  // Of one that does not return.
  void Show(const Run& run) const {
    const Channel& own = run.peers.own();
    std::fprintf(stderr, "rank %d, call %u at site %u (%s%s): gate %llx, opened %llx, epoch %x, ended %u\n",
                 run.peers.rank, run.work.number, run.work.call.site, run.work.pushes ? "push" : "pull",
                 run.work.in_waves ? " in waves" : "", static_cast<unsigned long long>(own.gate),
                 static_cast<unsigned long long>(own.opened), own.epoch, own.ended);
    emulation::ShowBlocks(run.launch);
  }

  // A run returns: nobody may touch its memory from now on, and what is there is whole, or all 0xff.
  void End(Run& run) {
    run.is_inside = false;
    ended_[run.peers.rank] = {emulation::Machine::Get().now, run.launch.frozen_until, run.launch.looks};
    outcome_.longest_ns = std::max(outcome_.longest_ns, emulation::Machine::Get().now - run.launch.began);
    const Work& work = run.work;
    const int me = run.peers.rank;
    if (work.pushes) wait_us_[me] = run.wait_us;
    Trace(run, run.was_filled ? "fails" : "ends");
    ++(run.was_filled ? outcome_.failed : outcome_.good);
    if (run.was_filled) {
      has_failed_ = true;
      for (const auto* array : {&run.out, &run.copies, &run.cleared}) {
        for (const uint32_t word : *array) {
          if (word != 0xffffffffu) Die("rank %d fails, and leaves %x", me, word);
        }
      }
      for (const auto* array : {&run.ring.out, &run.ring.gradients}) {
        for (const float number : *array) {
          if (!std::isnan(number)) Die("rank %d fails, and leaves %f", me, number);
        }
      }
      return;
    }
    if (run.must_fail) Die("rank %d's op goes well after another has failed", me);
    const char* const wrong = !work.by_ring ? nullptr
                              : work.pushes ? run.ring.FindWrongInPush(run.numbers(), me)
                                            : run.ring.FindWrongInPull(run.numbers(), me);
    if (wrong != nullptr) Die("rank %d: %s", me, wrong);
    for (int i = 0; i < run.size() && !work.by_ring; ++i) {
      const int r = i / kWords / work.tokens, t = i / kWords % work.tokens;
      const uint32_t value = work.Value(r, me, t, i % kWords) + (!work.pushes && work.in_waves);
      if (run.out[i] != value) Die("rank %d lacks word %d of rank %d", me, i, r);
      if (work.pushes && work.in_waves && run.copies[i] != value + 1)
        Die("rank %d has not spread word %d", me, i);
    }
    const bool clears = work.pushes && run.active < static_cast<int>(run.launch.grid.x);
    for (const uint32_t word : run.cleared) {
      if (word != (clears ? 1 : 0)) Die("rank %d has cleared a row %u times", me, word);
    }
  }

  std::mt19937& random_;
  int num_ranks_;
  std::vector<Control*> controls_;
  std::vector<Report> reports_;
  std::vector<std::vector<Script>> programs_, strays_;
  std::vector<int> blocks_, threads_;
  std::vector<Ended> ended_;
  std::vector<std::vector<float>> wait_us_;
  bool has_failed_ = false;
  int next_gate_ = 0;
  Outcome outcome_;
};

}  // namespace jax_ep::cuda
