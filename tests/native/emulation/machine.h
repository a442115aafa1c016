// Devices in one host thread: the CUDA threads of all blocks of all ranks are fibers, and a scheduler with a
// seed decides which goes on. Time is counted, not measured, so that a run repeats, and time-outs cost
// nothing.
//
// A fiber may be interrupted before each access to memory that the protocol makes (Access). Atomics whose
// results are not awaited yet, stores that nothing orders, and bulk loads take effect later (Delay). What is
// __shared__ is thread-local here, and there is one thread: its storage is exchanged when another block goes
// on.
#pragma once

#include <link.h>
#include <sys/mman.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "fiber.h"

namespace emulation {

constexpr int kMostThreads = 64;  // of a block

struct Dim {
  unsigned x;
};

struct Launch;
struct Block;

// An access that has been issued and has not taken effect.
struct Delayed {
  uint64_t number, due;
  std::function<void()> act;
  Launch* launch;
  const Block* block;
  int thread;
  bool is_before_barrier;  // the block has met since, so that a release of any of its threads orders it
};

// Threads that wait for each other: a block's, or a warp's.
struct Barrier {
  uint64_t members = 0, arrived = 0;
  int line = 0;           // of the source, where those that have arrived wait
  unsigned gathered = 0;  // from those that have arrived: an or, or a ballot
  unsigned result = 0;
  uint32_t values[32], shown[32];  // of a warp's lanes
  std::atomic<unsigned> order{0};  // for ThreadSanitizer
};

// Some threads of a block that wait for each other, or only arrive: bar.sync and bar.arrive of a number.
struct NamedBarrier {
  unsigned arrived = 0, threads = 0;
  int work = 0;  // what those that have arrived meet for
  uint64_t waiting = 0;
  std::atomic<unsigned> order{0};  // for ThreadSanitizer
};
constexpr int kNamedBarriers = 16;

struct Block {
  Launch* launch = nullptr;
  Dim index{};
  std::unique_ptr<Fiber[]> fibers;
  uint64_t alive = 0, ready = 0;  // threads that have not ended; those that do not wait at a barrier
  Barrier all, warps[kMostThreads / 32];
  NamedBarrier named[kNamedBarriers];
  unsigned stands_for[kMostThreads] = {};  // added to the thread's index: see ActAs
  std::vector<char> shared;
  uint64_t frozen_until = 0;
};

// One kernel of one rank.
struct Launch {
  std::function<void()> body;
  int rank = 0;
  Dim grid{}, block{};
  std::vector<Block*> blocks;
  int running = 0;  // blocks
  int delayed = 0;  // accesses that have not taken effect; the kernel ends after them
  uint64_t began = 0, accesses = 0;
  // A fault: at this access (0: never) its block, or all of its rank, goes on only so much later.
  uint64_t freezes_at = 0, freezes_for = 0;
  bool freezes_rank = false, frozen = false;
  // The same where a thread is about to look at the clock for this time.
  uint64_t looks = 0, freezes_at_look = 0, frozen_until = 0;
  std::atomic<int> order{0};  // for ThreadSanitizer
};

// Shows where the blocks of a launch stand that does not return.
inline void ShowBlocks(const Launch& launch) {
  for (const Block* block : launch.blocks) {
    if (block->launch != &launch) continue;
    std::fprintf(stderr, "  block %u: threads left %llx, not at a barrier %llx\n", block->index.x,
                 static_cast<unsigned long long>(block->alive),
                 static_cast<unsigned long long>(block->ready));
  }
}

// How the scheduler behaves.
struct Manner {
  int budget = 8;            // most accesses before another thread's turn
  int skip_percent = 0;      // of the turns that a block misses
  uint64_t most_ns = 20000;  // that a round takes, when nobody writes anything
  uint64_t alone = 30;       // so many times as long, while no block has two threads that go on
  uint64_t delay_ns = 4000;  // most that an access takes effect later
};

class Machine {
 public:
  uint64_t now = 1;
  Manner manner;
  std::mt19937 random;
  uint64_t rank_frozen_until[128] = {};
  std::function<void(int rank)> on_trap;
  // Reports threads of a block that wait for each other at different places, or for nothing.
  std::function<void(int rank, const char* what)> on_mismatch;
  uint64_t next_event = 0;  // a round does not pass over this time

  static Machine& Get() {
    static Machine machine;
    return machine;
  }

  void Start(Launch& launch) {
    launch.began = now;
    launch.running = static_cast<int>(launch.grid.x);
    launch.order.store(1, std::memory_order_release);
    for (unsigned b = 0; b < launch.grid.x; ++b) {
      Block* const block = TakeBlock();
      block->launch = &launch;
      block->index = {b};
      block->frozen_until = 0;
      block->alive = block->ready = launch.block.x == 64 ? ~0ull : (1ull << launch.block.x) - 1;
      Reset(block->all, block->alive);
      for (unsigned w = 0; w < launch.block.x / 32; ++w) Reset(block->warps[w], 0xffffffffull);
      for (NamedBarrier& named : block->named) named.arrived = 0, named.waiting = 0;
      for (unsigned& index : block->stands_for) index = 0;
      launch.blocks.push_back(block);
      live_.push_back(block);
    }
  }

  // Every block has a turn, or misses it. Returns the launches that have ended.
  std::vector<Launch*> Round() {
    std::vector<Launch*> ended;
    wrote_ = is_busy_ = false;
    const size_t first = live_.empty() ? 0 : random() % live_.size();
    for (size_t i = 0; i < live_.size(); ++i) {
      Block& block = *live_[(first + i) % live_.size()];
      if (IsFrozen(block)) continue;
      if ((block.ready & (block.ready - 1)) != 0) is_busy_ = true;
      if (static_cast<int>(random() % 100) < manner.skip_percent) continue;
      Turn(block);
    }
    for (size_t i = 0; i < live_.size();) {
      Block* const block = live_[i];
      if (block->alive != 0) {
        // Only threads of this block could release each other.
        if (block->ready == 0) Report(*block, "the threads of a block wait for each other");
        ++i;
        continue;
      }
      live_[i] = live_.back();
      live_.pop_back();
      free_.push_back(block);
      if (--block->launch->running == 0) draining_.push_back(block->launch);
    }
    for (size_t i = 0; i < delayed_.size();) {
      if (delayed_[i].due > now) {
        ++i;
        continue;
      }
      Perform(i);
    }
    for (size_t i = 0; i < draining_.size();) {
      Launch* const launch = draining_[i];
      if (launch->delayed != 0) {
        ++i;
        continue;
      }
      draining_.erase(draining_.begin() + static_cast<std::ptrdiff_t>(i));
      launch->order.load(std::memory_order_acquire);
      ended.push_back(launch);
    }
    // Where single threads wait for the time to pass (StopGpu), it passes faster.
    const uint64_t most = is_busy_ ? manner.most_ns : manner.alone * manner.most_ns;
    tick_ = wrote_ ? 500 : std::min(tick_ + tick_ / 4, most);
    uint64_t next = now + tick_;
    if (next_event > now) next = std::min(next, next_event);
    for (const Delayed& delayed : delayed_) next = std::min(next, std::max(delayed.due, now + 1));
    now = next;
    return ended;
  }

  // Forgets all that still runs, as the end of a process does.
  void Abandon() {
    for (Block* block : live_) {
      for (int i = 0; i < kMostThreads; ++i) Prepare(*block, i);
      free_.push_back(block);
    }
    live_.clear();
    delayed_.clear();
    draining_.clear();
    loaded_ = nullptr;
    tick_ = 1000;
    for (uint64_t& until : rank_frozen_until) until = 0;
  }

  // As a fiber: before an access.
  void Access(bool writes) {
    Quiet quiet;
    Block& block = *block_;
    Launch& launch = *block.launch;
    if (writes) wrote_ = true;
    if (++launch.accesses == launch.freezes_at) {
      launch.frozen = true;
      launch.frozen_until = now + launch.freezes_for;
      (launch.freezes_rank ? rank_frozen_until[launch.rank] : block.frozen_until) = launch.frozen_until;
    }
    if (--budget_ <= 0 || IsFrozen(block)) Pause();
  }

  // As a fiber: issues an access that takes effect at any time from now on. Returns its number.
  uint64_t Delay(std::function<void()> act) {
    Access(false);
    Quiet quiet;
    ++block_->launch->delayed;
    const uint64_t due = now + random() % manner.delay_ns;
    delayed_.push_back({++last_delayed_, due, std::move(act), block_->launch, block_, thread_, false});
    return last_delayed_;
  }
  // As a fiber: waits for a delayed access.
  void Await(uint64_t number) {
    Access(false);
    Quiet quiet;
    for (size_t i = 0; i < delayed_.size(); ++i) {
      if (delayed_[i].number == number) return Perform(i);
    }
  }
  // As a fiber: before a release. What this thread has issued takes effect, and what others of its block have
  // issued before the block met.
  void Release() {
    Quiet quiet;
    for (size_t i = 0; i < delayed_.size();) {
      const Delayed& delayed = delayed_[i];
      if (delayed.block == block_ && (delayed.thread == thread_ || delayed.is_before_barrier)) {
        Perform(i);
      } else {
        ++i;
      }
    }
  }
  // Whether memory is __shared__: only the present block has it, so its accesses are not delayed.
  bool IsShared(const void* at) const { return at >= tls_ && at < tls_ + tls_bytes_; }

  // As a fiber: the time.
  uint64_t Look() {
    Launch& launch = *block_->launch;
    {
      Quiet quiet;
      if (++launch.looks == launch.freezes_at_look) launch.freezes_at = launch.accesses + 1;
    }
    Access(false);
    Quiet quiet;
    return now;
  }

  // As a fiber: waits until all members have come. `mine` is added to what is gathered. All must wait at the
  // same line of the source.
  unsigned Wait(Barrier& barrier, unsigned mine, int line) {
    const uint64_t bit = 1ull << (&barrier == &block_->all ? thread_ : thread_ % 32);
    barrier.order.fetch_add(1, std::memory_order_acq_rel);
    {
      Quiet quiet;
      if (barrier.arrived == 0) barrier.line = line;
      if (barrier.line != line) Report(*block_, "threads wait for each other at different places");
      barrier.gathered |= mine;
      barrier.arrived |= bit;
      if (!Complete(barrier)) {
        block_->ready &= ~(1ull << thread_);
        Pause();
      }
    }
    barrier.order.load(std::memory_order_acquire);
    Quiet quiet;
    return barrier.result;
  }

  // As a fiber: arrives at a named barrier that `threads` are to reach, each for the same work, and waits for
  // them unless it `only_arrives`.
  void Meet(int number, unsigned threads, int work, bool only_arrives = false) {
    Access(false);
    NamedBarrier& barrier = block_->named[number];
    barrier.order.fetch_add(1, std::memory_order_acq_rel);
    {
      Quiet quiet;
      if (barrier.arrived == 0) barrier.threads = threads, barrier.work = work;
      if (barrier.threads != threads || barrier.work != work) {
        Report(*block_, "threads meet at a named barrier for different work");
      }
      if (!only_arrives) barrier.waiting |= 1ull << thread_;
      if (++barrier.arrived == barrier.threads) {
        block_->ready |= barrier.waiting;
        barrier.arrived = 0, barrier.waiting = 0;
        wrote_ = true;
      } else if (!only_arrives) {
        block_->ready &= ~(1ull << thread_);
        Pause();
      }
    }
    barrier.order.load(std::memory_order_acquire);
  }

  // As a fiber: the thread's index is so much higher from now on, so that few threads can act as many, one
  // part after the other. A multiple of a warp's threads.
  void ActAs(unsigned higher) {
    Quiet quiet;
    block_->stands_for[thread_] = higher;
  }

  Barrier& block_barrier() { return block_->all; }
  Barrier& warp_barrier() { return block_->warps[thread_ / 32]; }
  Dim thread_index() const { return {static_cast<unsigned>(thread_) + block_->stands_for[thread_]}; }
  Dim block_index() const { return block_->index; }
  Dim block_dim() const { return block_->launch->block; }
  Dim grid_dim() const { return block_->launch->grid; }

  // As a fiber: the rank's device stops for good.
  void Trap() {
    Quiet quiet;
    rank_frozen_until[block_->launch->rank] = ~0ull;
    on_trap(block_->launch->rank);
    Pause();
  }

 private:
  Machine() {
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* machine) {
          for (int i = 0; i < info->dlpi_phnum; ++i) {
            if (info->dlpi_phdr[i].p_type != PT_TLS) continue;
            static_cast<Machine*>(machine)->tls_ = static_cast<char*>(info->dlpi_tls_data);
            static_cast<Machine*>(machine)->tls_bytes_ = info->dlpi_phdr[i].p_memsz;
          }
          return 1;  // the program itself comes first
        },
        this);
    IgnoreRaces(tls_, tls_bytes_);
  }

  static void Reset(Barrier& barrier, uint64_t members) {
    barrier.members = members;
    barrier.arrived = barrier.gathered = 0;
  }

  Block* TakeBlock() {
    if (free_.empty()) {
      blocks_.push_back(std::make_unique<Block>());
      Block& block = *blocks_.back();
      block.fibers = std::make_unique<Fiber[]>(kMostThreads);
      block.shared.assign(tls_bytes_, static_cast<char>(0xa5));
      for (int i = 0; i < kMostThreads; ++i) Prepare(block, i);
      free_.push_back(&block);
    }
    Block* const block = free_.back();
    free_.pop_back();
    return block;
  }

  static void Prepare(Block& block, int i) { block.fibers[i].Prepare(&Machine::RunThreads); }

  // What a fiber does: the same thread of one launch after the other.
  static void RunThreads() {
    Machine& machine = Get();
    while (true) {
      Block* block;
      {
        Quiet quiet;
        block = machine.block_;
      }
      block->launch->order.load(std::memory_order_acquire);
      block->launch->body();
      block->launch->order.fetch_add(1, std::memory_order_release);
      Quiet quiet;
      machine.EndThread(*block);
      machine.Pause();
    }
  }

  void EndThread(Block& block) {
    const uint64_t bit = 1ull << thread_;
    block.alive &= ~bit;
    block.ready &= ~bit;
    wrote_ = true;
    // Whoever has ended is not waited for.
    block.all.members &= ~bit;
    block.warps[thread_ / 32].members &= ~(1ull << thread_ % 32);
    if (block.all.arrived != 0) Complete(block.all);
    if (block.warps[thread_ / 32].arrived != 0) Complete(block.warps[thread_ / 32]);
  }

  void Perform(size_t i) {
    const Delayed delayed = std::move(delayed_[i]);
    delayed_.erase(delayed_.begin() + static_cast<std::ptrdiff_t>(i));
    --delayed.launch->delayed;
    wrote_ = true;
    delayed.act();
  }

  bool Complete(Barrier& barrier) {
    if (barrier.arrived != barrier.members) return false;
    if (&barrier == &block_->all) {
      for (Delayed& delayed : delayed_) delayed.is_before_barrier |= delayed.block == block_;
    }
    barrier.result = barrier.gathered;
    std::memcpy(barrier.shown, barrier.values, sizeof(barrier.shown));
    const int first = &barrier == &block_->all ? 0 : static_cast<int>(&barrier - block_->warps) * 32;
    block_->ready |= barrier.arrived << first;
    barrier.arrived = barrier.gathered = 0;
    wrote_ = true;
    return true;
  }

  void Report(const Block& block, const char* what) const {
    if (on_mismatch != nullptr) return on_mismatch(block.launch->rank, what);
    std::fprintf(stderr, "rank %d: %s\n", block.launch->rank, what);
    std::abort();
  }

  bool IsFrozen(const Block& block) const {
    return block.frozen_until > now || rank_frozen_until[block.launch->rank] > now;
  }

  void Turn(Block& block) {
    if (loaded_ != &block) {
      if (loaded_ != nullptr) Copy(loaded_->shared.data(), tls_);
      Copy(tls_, block.shared.data());
      loaded_ = &block;
    }
    block_ = &block;
    const int threads = static_cast<int>(block.launch->block.x), first = static_cast<int>(random() % threads);
    for (int i = 0; i < threads && !IsFrozen(block); ++i) {
      thread_ = (first + i) % threads;
      if ((block.ready >> thread_ & 1) == 0) continue;
      budget_ = 1 + static_cast<int>(random() % manner.budget);
      Fiber::Switch(scheduler_, block.fibers[thread_]);
    }
  }

  void Pause() { Fiber::Switch(block_->fibers[thread_], scheduler_); }

  JAX_EP_UNWATCHED void Copy(char* to, const char* from) {
    for (size_t i = 0; i + 8 <= tls_bytes_; i += 8) {
      uint64_t word;
      __builtin_memcpy(&word, from + i, 8);
      __builtin_memcpy(to + i, &word, 8);
    }
  }

  std::vector<std::unique_ptr<Block>> blocks_;
  std::vector<Block*> live_, free_;
  std::vector<Delayed> delayed_;
  std::vector<Launch*> draining_;  // their blocks have ended
  uint64_t last_delayed_ = 0;
  Block *block_ = nullptr, *loaded_ = nullptr;
  int thread_ = 0, budget_ = 0;
  bool wrote_ = false, is_busy_ = false;
  uint64_t tick_ = 1000;
  Fiber scheduler_;
  char* tls_ = nullptr;
  size_t tls_bytes_ = 0;
};

}  // namespace emulation
