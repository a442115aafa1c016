// Two ops for the emulation, which call a Session in the same order as PushKernel (a push, which may be
// spread) and PullKernel (a pull, which may be folded). They check what they may assume on the way. Those by
// rings scale or sum rows in the kernels' own loops.
#pragma once

#include "die.h"
#include "kernels/protocol/session.cuh"
#include "rings.h"

namespace jax_ep::cuda {

constexpr int kWords = 4;  // of a row
constexpr int kBins = 40;

// A call, equal on all ranks that are to meet.
struct Work {
  uint32_t number;  // of the call: what is sent depends on it
  Call call;
  bool pushes;
  bool in_waves;  // spread, or folded
  bool by_ring;   // a push in waves, which then scales, or a pull
  bool counts;    // a push with a routing of its own
  int32_t tokens;
  Waves waves;

  Shape shape(int num_ranks) const { return {Order::kRank, num_ranks, tokens, 1, num_ranks, 0, 1}; }
  // What rank `from` sends to rank `to`.
  uint32_t Value(int from, int to, int token, int word) const {
    return (number * 0x9e3779b1u ^ static_cast<uint32_t>(from << 18 | to << 11 | token << 4 | word)) &
           0x7fffffffu;
  }
};

// One rank's part in it: a launch, with memory of its own.
struct Run {
  Work work;
  Peers peers;
  MeshPosition position_operand;
  int active;                            // blocks that send, or pull; the others help
  Batches batches;                       // that they send: each rank has its own
  std::vector<uint32_t> out;             // [R, T, kWords]: what has come
  std::vector<uint32_t> copies;          // likewise: spread
  std::vector<uint32_t> rows, partials;  // pull: [R, T, kWords], to each rank; folded
  std::vector<uint32_t> cleared;         // [R * T]
  RingArrays ring;                       // of an op by rings, in place of the first four
  // Of each block: what all ranks publish. Not in shared memory, which is exchanged with each turn.
  std::vector<std::vector<Published>> published;
  std::vector<float> wait_us;  // until each rank arrived, as the first block of a push logs it
  bool is_inside = false;      // between its launch and its return
  bool was_filled = false, must_fail = false;
  int lane = 0, grid = 0;
  uint64_t gone_after = 0, frozen_at = 0;
  uint32_t epoch_before = 0;  // of the channel
  emulation::Launch launch;

  uint64_t frozen_since(uint64_t now) { return frozen_at != 0 ? frozen_at : frozen_at = now; }
  int size() const { return peers.num_ranks * work.tokens * kWords; }
  int At(int rank, int token, int word) const { return (rank * work.tokens + token) * kWords + word; }
  RingNumbers numbers() const { return {work.number, peers.num_ranks, work.tokens}; }
};

inline void AccessRow(bool writes) { emulation::Machine::Get().Access(writes); }

// Another rank's memory, which may be touched only while that rank is inside.
inline Run& Touch(const Run& run, const Published* published, int rank) {
  Run& peer = *static_cast<Run*>(published[rank].buffers[0]);
  peer.launch.order.load(std::memory_order_acquire);  // the peer's earlier kernels have ended
  emulation::Quiet quiet;
  if (!peer.is_inside) Die("rank %d touches rank %d, which has returned", run.peers.rank, rank);
  if (peer.work.number != run.work.number) Die("rank %d touches another op of rank %d", run.peers.rank, rank);
  return peer;
}

inline void FillResults(Run& run) {
  for (std::vector<uint32_t>* result : {&run.out, &run.copies, &run.cleared}) {
    FillResult(result->data(), static_cast<int64_t>(result->size()) * 4);
  }
  for (std::vector<float>* result : {&run.ring.out, &run.ring.gradients}) {
    FillResult(result->data(), static_cast<int64_t>(result->size()) * 4);
  }
  emulation::Quiet quiet;
  run.was_filled = true;
}

// As PublishCounts and ReadCounts do.
inline void PublishNumbers(const Run& run, const Session& session) {
  const Peers& peers = run.peers;
  if (blockIdx.x > 0 && !session.AwaitOpened()) return;
  for (int bin = blockIdx.x; bin < kBins; bin += run.active) {
    for (int r = threadIdx.x; r < peers.num_ranks; r += blockDim.x) {
      StoreWord(&peers.mailbox(r, peers.rank).counts[bin], run.work.Value(peers.rank, 0, bin, 0),
                session.epoch());
    }
  }
}

inline int ReadNumbers(const Run& run, const Session& session) {
  const Peers& peers = run.peers;
  for (int i = threadIdx.x; i < kBins * peers.num_ranks; i += blockDim.x) {
    const int r = i / kBins, bin = i % kBins;
    const EpochWord* const word = &peers.mailbox(peers.rank, r).counts[bin];
    if (!session.Await([&] { return HasEpoch(LoadRelaxed(word), session.epoch()); })) return r;
  }
  return kNone;
}

// What the counts say, once all ranks have met.
inline void CheckNumbers(const Run& run) {
  for (int i = threadIdx.x; i < kBins * run.peers.num_ranks; i += blockDim.x) {
    const uint32_t seen =
        static_cast<uint32_t>(LoadRelaxed(&run.peers.mailbox(run.peers.rank, i / kBins).counts[i % kBins]));
    if (seen != run.work.Value(i / kBins, 0, i % kBins, 0))
      Die("rank %d reads a wrong count", run.peers.rank);
  }
}

inline void SendBatches(Run& run, const Published* published, const Session& session) {
  __shared__ int dealt;
  const Work& work = run.work;
  const Peers& peers = run.peers;
  const int R = peers.num_ranks, count = run.batches.Count(work.shape(R), work.waves);
  for (int number = blockIdx.x; number < count;) {
    const Batch batch = run.batches.Find(work.shape(R), work.waves, number);
    if (threadIdx.x == 0) {
      dealt = run.active + number;
      if (count > run.active) dealt = run.active + static_cast<int>(atomicAdd(&peers.own().sent[0], 1u));
    }
    for (int i = threadIdx.x; i < (batch.end - batch.begin) * R * kWords; i += blockDim.x) {
      const int t = batch.begin + i / (R * kWords), r = i / kWords % R, word = i % kWords;
      AccessRow(true);
      Run& peer = Touch(run, published, r);
      if (work.by_ring) {
        const int row = kRingChoices * (peers.rank * work.tokens + t);
        peer.ring.out[row * kRingColumns + word] = run.numbers().Token(peers.rank, r, t, word);
        continue;
      }
      peer.out[run.At(peers.rank, t, word)] = work.Value(peers.rank, r, t, word);
    }
    __syncthreads();
    number = dealt;
    __syncthreads();
    const int wave = work.waves.Of(batch.begin);
    if (work.in_waves && threadIdx.x < kWarp) {
      session.FinishShare(wave, run.batches.CountIn(work.shape(R), work.waves, wave));
    }
  }
}

// As ClearGaps deals.
inline void Clear(Run& run) {
  const int lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
  const TicketCounter tickets{&run.peers.own().cleared};
  const int count = (static_cast<int>(gridDim.x) - run.active) * warps;
  int unit = (static_cast<int>(blockIdx.x) - run.active) * warps + static_cast<int>(threadIdx.x) / kWarp;
  while (unit < static_cast<int>(run.cleared.size())) {
    const unsigned taken = tickets.Request(lane);
    AccessRow(true);
    if (lane == 0) ++run.cleared[unit];
    unit = count + TicketCounter::Broadcast(taken);
  }
}

inline void SpreadTokens(Run& run, const Session& session) {
  const TicketCounter tickets{&run.peers.own().spread};
  const int lane = threadIdx.x % kWarp, R = run.peers.num_ranks;
  int come = -1;
  while (true) {
    const int i = TicketCounter::Broadcast(tickets.Request(lane)), t = i / R, r = i % R;
    if (t >= run.work.tokens) return;
    if (run.work.waves.Of(t) != come) {
      come = run.work.waves.Of(t);
      if (!session.AwaitWave(come)) return;
    }
    AccessRow(true);
    if (lane < kWords) run.copies[run.At(r, t, lane)] = run.out[run.At(r, t, lane)] + 1;
  }
}

inline void PushKernel(Run& run) {
  __shared__ Published mine;
  Published* const published = run.published[blockIdx.x].data();
  const Peers& peers = run.peers;
  const Work& work = run.work;
  const Op op = work.counts ? Op::kDispatch : Op::kRedispatch;
  const bool sends = static_cast<int>(blockIdx.x) < run.active;
  const Opening opening(peers, &run.position_operand);
  Session session(peers, op, true);
  if (work.by_ring) run.ring.RingOf(kRingPartition, blockIdx.x).Init();
  if (threadIdx.x == 0) {
    mine.buffers[0] = &run;
    mine.weights = mine.routing = nullptr;
  }
  const WaitLog log = WaitLog::From(blockIdx.x == 0 ? run.wait_us.data() : nullptr);
  bool alive = session.Open(opening);
  if (alive && blockIdx.x == 0) session.Publish(mine, 1);
  if (alive && work.counts && sends) PublishNumbers(run, session);
  alive = alive &&
          session.Meet(1, published, log, [&] { return work.counts ? ReadNumbers(run, session) : kNone; });
  const auto fill = [&] { FillResults(run); };
  if (!alive) return session.Abort(fill);
  if (work.counts) CheckNumbers(run);
  if (sends) SendBatches(run, published, session);
  session.Leave();
  if (!sends) Clear(run);
  if (work.by_ring) {
    ScaleByRing<float>(run.ring.push, session, run.ring.RingOf(kRingPartition, blockIdx.x));
  } else if (work.in_waves) {
    SpreadTokens(run, session);
  }
  if (blockIdx.x == gridDim.x - 1) (void)session.AwaitLeft(published);
  session.Close(fill);
}

// This block's share of all waves, as Fold divides them: the first one among all blocks, the others among
// those that do not pull.
inline void FoldTokens(Run& run, const Session& session) {
  __shared__ unsigned done;
  const Work& work = run.work;
  const int R = run.peers.num_ranks, lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
  const bool pulls = static_cast<int>(blockIdx.x) < run.active;
  for (int wave = 0; wave < (pulls ? 1 : work.waves.count); ++wave) {
    const int skipped = wave == 0 ? 0 : run.active;
    const int begin = work.waves.First(work.shape(R), wave), end = work.waves.First(work.shape(R), wave + 1);
    const int block = static_cast<int>(blockIdx.x) - skipped, blocks = static_cast<int>(gridDim.x) - skipped;
    const int sums = (end - begin) * R, mine = block < sums ? (sums - block - 1) / blocks + 1 : 0;
    __syncthreads();
    if (threadIdx.x == 0) done = 0;
    __syncthreads();
    for (int unit = threadIdx.x / kWarp; unit < mine; unit += warps) {
      const int i = block + unit * blocks, r = i % R, t = begin + i / R;
      AccessRow(true);
      if (lane < kWords) run.partials[run.At(r, t, lane)] = run.rows[run.At(r, t, lane)] + 1;
      __syncwarp();
      bool last = false;
      // Fold has a fence before an atomicAdd here; this one is taken for both (cuda_runtime.h).
      if (lane == 0) last = atomicInc(&done, ~0u) == static_cast<unsigned>(mine) - 1;
      if (last) session.FinishShare(wave, std::min(blocks, sums));
    }
  }
}

inline void PullTokens(Run& run, const Published* published, unsigned number, const Session& session) {
  const Work& work = run.work;
  const Peers& peers = run.peers;
  const TicketCounter tickets{&peers.own().sent[0]};
  const int lane = threadIdx.x % kWarp;
  int folded = -1;
  while (true) {
    const int t = TicketCounter::Broadcast(number);
    if (t >= work.tokens) return;
    number = tickets.Request(lane);
    if (work.in_waves && work.waves.Of(t) != folded) {
      folded = work.waves.Of(t);
      if (!session.AwaitWave(folded)) return;
    }
    for (int i = lane; i < peers.num_ranks * kWords; i += kWarp) {
      AccessRow(false);
      Run& peer = Touch(run, published, i / kWords);
      const std::vector<uint32_t>& from = work.in_waves ? peer.partials : peer.rows;
      run.out[run.At(i / kWords, t, i % kWords)] = from[run.At(peers.rank, t, i % kWords)];
    }
  }
}

inline void PullKernel(Run& run) {
  __shared__ Published mine;
  Published* const published = run.published[blockIdx.x].data();
  const Peers& peers = run.peers;
  const Opening opening(peers, &run.position_operand);
  Session session(peers, Op::kCombine, false);
  const bool by_ring = run.work.by_ring;
  Ring ring = run.ring.RingOf(kRingPartition, by_ring ? blockIdx.x : 0);
  if (by_ring) ring.Init();
  if (threadIdx.x == 0) {
    mine.buffers[0] = by_ring ? static_cast<void*>(run.ring.rows.data()) : &run;
    mine.partials[0] = by_ring ? static_cast<void*>(run.ring.partials.data()) : &run;
    mine.weights = mine.routing = nullptr;
  }
  const bool pulls = static_cast<int>(blockIdx.x) < run.active;
  const TicketCounter tickets{&peers.own().sent[0]};
  unsigned number = 0;
  bool taken = false, alive = session.Open(opening);
  if (alive) {
    if (blockIdx.x == 0) session.Publish(mine, 1);
    if (run.work.in_waves && by_ring) FoldByRing<float>(run.ring.pull, session, ring);
    if (run.work.in_waves && !by_ring) FoldTokens(run, session);
    taken = !by_ring && pulls && session.IsOpenedNow();
    if (taken) number = tickets.Request(threadIdx.x % kWarp);
    alive = session.Meet(1, published);
  }
  const auto fill = [&] { FillResults(run); };
  if (!alive) return session.Abort(fill);
  if (pulls && by_ring) {
    PullByRing<float>(run.ring.pull, session, ring, published);
  } else if (pulls) {
    if (!taken) number = tickets.Request(threadIdx.x % kWarp);
    PullTokens(run, published, number, session);
  }
  session.Leave();
  if (blockIdx.x == gridDim.x - 1) (void)session.AwaitLeft(published);
  session.Close(fill);
}

}  // namespace jax_ep::cuda
