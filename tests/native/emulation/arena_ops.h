// Two ops through the arena for the emulation. They call an ArenaSession in the same order as
// FewTokensPushKernel and FewTokensPullKernel. A row has a few words, which depend on the op and the ranks,
// so that a wrong row is never mistaken for the right one.
#pragma once

#include "die.h"
#include "kernels/few_tokens/chunk.cuh"
#include "kernels/few_tokens/route.cuh"
#include "kernels/protocol/arena_session.cuh"

namespace jax_ep::cuda {

constexpr int kArenaThreads = 64;  // of a block
constexpr int kArenaWarps = kArenaThreads / kWarp;
constexpr int kWords = 4;  // of a row
constexpr uint32_t kUntouched = 0x7ddddddd, kFilled = 0xffffffff;

// An op of the program, equal on all ranks.
struct ArenaWork {
  uint32_t number;  // of the op; rows depend on it
  Call call;
  bool pushes;
  int32_t tokens, top_k, row_bytes;
  bool has_attendance;  // it is given active ranks
  bool masks;
  bool in_lines;  // rows travel as lines; not with masks, and in sessions of one word only
  RankSet active;

  Shape shape(int num_ranks) const {
    return {pushes ? Order::kExpert : Order::kRank, num_ranks, tokens, top_k, 2 * num_ranks, 0, 1};
  }
  uint32_t Hash(uint32_t a, uint32_t b) const {
    uint32_t hash = number * 0x9e3779b1u ^ a * 0x27d4eb2fu ^ b * 0x85ebca77u;
    hash = (hash ^ hash >> 15) * 0xc2b2ae3du;
    return (hash ^ hash >> 13) & 0x7fffffffu;
  }
  // Returns word `word` of the row that rank `from` sends to rank `to` in slot `token`.
  uint32_t Value(int from, int to, int token, int word) const {
    return Hash(static_cast<uint32_t>(from << 8 | to), static_cast<uint32_t>(token << 8 | word));
  }
  // Returns the expert of a choice of rank `from` in a push, -1 if it is unused.
  int Expert(int from, int token, int k, int num_ranks) const {
    const uint32_t hash = Hash(static_cast<uint32_t>(1 << 16 | from), static_cast<uint32_t>(token << 8 | k));
    return static_cast<int>(hash % static_cast<uint32_t>(2 * num_ranks + 1)) - 1;
  }
  // Returns whether rank `from` sends a row to rank `to` in slot `token`.
  bool Sends(int from, int to, int token, int num_ranks) const {
    if (!pushes)
      return Hash(static_cast<uint32_t>(1 << 17 | from), static_cast<uint32_t>(token << 8 | to)) % 4 != 0;
    for (int k = 0; k < top_k; ++k) {
      const int expert = Expert(from, token, k, num_ranks);
      if (expert >= 0 && expert / 2 == to) return true;
    }
    return false;
  }
};

// One rank's part of an op: a launch with its own memory.
struct ArenaRun {
  // A thread's view of the session at one place of the kernel. The first thread of a block that comes there
  // sets it, and the others must have the same.
  struct View {
    bool is_set = false;
    bool is_open = false, has_failed = false;
    uint32_t epoch = 0;
    RankSet ranks{}, writable{};
  };
  enum Place { kAfterOpening, kAfterAgreement, kAtEnd, kNumPlaces };

  ArenaWork work;
  PushArgs args;  // also used for a pull
  MeshPosition position_operand;
  int summing_warps = 1;
  int rank_words = 1;  // of its session
  std::vector<int32_t> topk_idx, active_ranks, active_after;
  std::vector<float> wait_us;
  std::vector<std::vector<int16_t>> choices;  // by block: all ranks' choices, as read there
  std::vector<uint32_t> rows;                 // [R, T, kWords]: the rows that arrived
  std::vector<View> views;                    // [blocks, kNumPlaces]
  bool was_filled = false, must_fail = false, is_stray = false;
  emulation::Launch launch;

  int num_ranks() const { return args.peers.num_ranks; }
  int At(int rank, int token, int word) const { return (rank * work.tokens + token) * kWords + word; }
  View& ViewOf(unsigned block, Place place) { return views[block * kNumPlaces + place]; }
  template <int kRankWords>
  ArenaSession<kRankWords> session(Op op) const {
    return {args.peers, op, args.attendance, args.few_tokens.slots};
  }
};

template <int kRankWords>
RankSet SetOf(const RankWords<kRankWords>& ranks) {
  RankSet set{};
  for (int w = 0; w < kRankWords; ++w) set.words[w] = ranks.words[w];
  return set;
}

// Called when threads of a block of a rank disagree.
inline std::function<void(int rank, const char* what)> on_disagreement;

// Checks that all threads of a block have the same view of the session. A thread may be late right after
// Open. By then thread 0 may have updated the ranks (AgreeOnRanks) or the epoch (SettleWithoutClaim), which
// no thread reads before the block synchronizes again.
template <int kRankWords>
void CheckAgreement(ArenaRun& run, ArenaRun::Place place, const ArenaSession<kRankWords>& session,
                    bool is_open) {
  emulation::Quiet quiet;
  ArenaRun::View& first = run.ViewOf(blockIdx.x, place);
  const ArenaRun::View view{true,
                            is_open,
                            session.has_failed(),
                            session.epoch(),
                            SetOf(session.ranks()),
                            SetOf(session.writable())};
  if (!first.is_set) first = view;
  const int rank = run.args.peers.rank;
  const bool is_early = place == ArenaRun::kAfterOpening;
  if (view.is_open != first.is_open) on_disagreement(rank, "open");
  if (!(view.writable == first.writable)) on_disagreement(rank, "writable");
  if ((is_open || !is_early) && view.epoch != first.epoch) on_disagreement(rank, "epoch");
  if (is_early && run.work.masks) return;
  if (!(view.ranks == first.ranks)) on_disagreement(rank, "ranks");
  if (view.has_failed != first.has_failed) on_disagreement(rank, "has_failed");
}

inline uint32_t* WordsOf(std::byte* slot, const ArenaWork& work, int word) {
  return reinterpret_cast<uint32_t*>(slot + kSlotHeadBytes + word * work.row_bytes / kWords);
}

// Stops if a place at rank `to` is not in this rank's region of the present half.
template <int kRankWords>
void CheckRegion(const ArenaRun& run, const ArenaSession<kRankWords>& session, int to, const void* there,
                 const char* what) {
  const Peers& peers = run.args.peers;
  const Slots& slots = run.args.few_tokens.slots;
  const int64_t offset = static_cast<const std::byte*>(there) -
                         reinterpret_cast<const std::byte*>(&ArenaOf(peers, to)) - slots.first;
  if (offset / slots.region != 2 * peers.rank + session.epoch() % 2) {
    Die("rank %d writes outside of its %s at rank %d", peers.rank, what, to);
  }
}

// Stores one word of a row in its slot.
template <int kRankWords>
void StoreRowWord(const ArenaRun& run, const ArenaSession<kRankWords>& session, int to, int token, int word) {
  const int me = run.args.peers.rank;
  uint32_t* const there = WordsOf(session.half().slot(to, me, token), run.work, word);
  CheckRegion(run, session, to, there, "slots");
  emulation::Machine::Get().Access(true);
  *there = run.work.Value(me, to, token, word);
}

template <int kRankWords>
void LoadRowWord(ArenaRun& run, const ArenaSession<kRankWords>& session, int from, int token, int word) {
  emulation::Machine::Get().Access(false);
  run.rows[run.At(from, token, word)] =
      *WordsOf(session.half().slot(run.args.peers.rank, from, token), run.work, word);
}

// Rows that travel as lines. Word w of a row is what lane w / chunks of chunk w % chunks carries, once in
// each of its lines.
inline ChunkPart PartTo(const ArenaRun& run, int to, int token, int chunk, int lane) {
  const int chunks = run.args.few_tokens.chunks, word = chunk + lane * chunks;
  if (word >= kWords) return {};
  const uint32_t value = run.work.Value(run.args.peers.rank, to, token, word);
  return {{{value, 0, 0, value}, {}}, value};
}

template <int kRankWords>
void SendChunk(const ArenaRun& run, const ArenaSession<kRankWords>& session, int to, int token, int chunk) {
  const int me = run.args.peers.rank, lane = threadIdx.x % kWarp;
  uint4* const there = session.half().chunk(to, me, token, chunk);
  CheckRegion(run, session, to, there, "lines");
  StoreChunk(there, PartTo(run, to, token, chunk, lane), session.epoch());
}

// Waits for a chunk as the ops do, and returns false if it is missed.
template <int kRankWords>
bool ReceiveChunk(ArenaRun& run, const ArenaSession<kRankWords>& session, int from, int token, int chunk) {
  const uint4* const here = session.half().chunk(run.args.peers.rank, from, token, chunk);
  ChunkLines lines = ChunkLines::Load(here);
  if (!AwaitChunk(session, here, lines)) return false;
  const ChunkPart part = PartOf(lines);
  const int chunks = run.args.few_tokens.chunks, lane = threadIdx.x % kWarp, word = chunk + lane * chunks;
  if (word >= kWords) return true;
  // If its lines are of several ops, the words differ.
  const uint32_t value = part.row[0].x;
  const bool is_whole = part.row[0].w == value && part.beside == value;
  run.rows[run.At(from, token, word)] = is_whole ? value : kUntouched - 1;
  return true;
}

inline void FillRun(ArenaRun& run) {
  FillResult(run.rows.data(), static_cast<int64_t>(run.rows.size()) * 4);
  emulation::Quiet quiet;
  run.was_filled = true;
}

// Stores rows in the first warp and flags them in the last one, as SendTokens and SendArrivalFlags do.
constexpr int kStored = 1, kFlagged = 3;

template <int kRankWords>
void SendRows(const ArenaRun& run, const ArenaSession<kRankWords>& session) {
  emulation::Machine& machine = emulation::Machine::Get();
  const int lane = threadIdx.x % kWarp, R = run.num_ranks(), senders = run.args.few_tokens.num_senders;
  for (int t = blockIdx.x, turn = 0; t < run.work.tokens; t += senders, ++turn) {
    if (turn >= 2) machine.Meet(kFlagged + turn % 2, kArenaThreads, turn);
    for (int i = lane; i < R * kWords; i += kWarp) {
      const int to = i / kWords;
      if (!session.may_write(to) || !run.work.Sends(run.args.peers.rank, to, t, R)) continue;
      StoreRowWord(run, session, to, t, i % kWords);
    }
    machine.Meet(kStored + turn % 2, kArenaThreads, turn, true);
  }
}

// Sends chunks, each by one warp, as SendChunks of a dispatch does.
template <int kRankWords>
void SendRowsAsLines(const ArenaRun& run, const ArenaSession<kRankWords>& session) {
  const FewTokensPartition& partition = run.args.few_tokens;
  const int R = run.num_ranks(), me = run.args.peers.rank;
  const int warp = static_cast<int>(threadIdx.x) / kWarp, senders = partition.num_senders;
  for (int i = warp * senders + static_cast<int>(blockIdx.x); i < run.work.tokens * partition.chunks;
       i += kArenaWarps * senders) {
    const int t = i / partition.chunks, chunk = i % partition.chunks;
    for (int to = 0; to < R; ++to) {
      if (session.may_write(to) && run.work.Sends(me, to, t, R)) SendChunk(run, session, to, t, chunk);
    }
  }
}

template <int kRankWords>
void FlagRows(const ArenaRun& run, const ArenaSession<kRankWords>& session) {
  emulation::Machine& machine = emulation::Machine::Get();
  const PushArgs& args = run.args;
  const int lane = threadIdx.x % kWarp, R = run.num_ranks(), me = args.peers.rank;
  for (int t = blockIdx.x, turn = 0; t < run.work.tokens; t += args.few_tokens.num_senders, ++turn) {
    machine.Meet(kStored + turn % 2, kArenaThreads, turn);
    for (int to = lane; to < R; to += kWarp) {
      if (!session.may_write(to) || !run.work.Sends(me, to, t, R)) continue;
      StoreWordRelease(&session.half().mailbox(to, me).arrived[t], 1, session.epoch());
    }
    __syncwarp();
    if (t + 2 * args.few_tokens.num_senders < run.work.tokens) {
      machine.Meet(kFlagged + turn % 2, kArenaThreads, turn + 2, true);
    }
  }
}

// Publishes this rank's choices. Its few threads stand for all threads of a real block.
template <int kRankWords>
void ShowChoices(const ArenaRun& run, const ArenaSession<kRankWords>& session) {
  const PushArgs& args = run.args;
  const TopkIds ids{run.topk_idx.data(), false};
  const int words = ChoiceWords(args.shape);
  for (int first = 0; first < kFewTokensThreads; first += kArenaThreads) {
    emulation::Machine::Get().ActAs(first);
    const bool has_word = FirstWord(args) < words * args.shape.num_ranks;
    const uint32_t choices = has_word ? LoadChoices(args.shape, ids, FirstWord(args) % words) : 0;
    PublishChoices(args, ids, session, choices);
  }
  emulation::Machine::Get().ActAs(0);
}

// Waits for the choices of `ranks` and stores them for this block, as ShowChoices publishes them. Returns
// true if this thread has missed a rank.
template <int kRankWords>
bool TakeChoices(ArenaRun& run, const ArenaSession<kRankWords>& session, const RankWords<kRankWords>& ranks) {
  const int choices = run.work.tokens * run.work.top_k;
  std::vector<int16_t>& found = run.choices[blockIdx.x];
  bool has_missed = false;
  for (int first = 0; first < kFewTokensThreads; first += kArenaThreads) {
    emulation::Machine::Get().ActAs(first);
    has_missed |= AwaitChoices(run.args, session, ranks, [&](int rank, int word, uint32_t two) {
      for (int i = 2 * word; i < std::min(2 * word + 2, choices); ++i, two >>= 16)
        found[rank * choices + i] = static_cast<int16_t>(two & 0xffff);
    });
  }
  emulation::Machine::Get().ActAs(0);
  return has_missed;
}

// Returns whether a token of rank `source` comes here, according to the choices that this block has read.
inline bool Comes(const ArenaRun& run, int source, int token) {
  const int K = run.work.top_k;
  const std::vector<int16_t>& found = run.choices[blockIdx.x];
  for (int k = 0; k < K; ++k) {
    const int expert = found[(source * run.work.tokens + token) * K + k];
    if (expert >= 0 && expert / 2 == run.args.peers.rank) return true;
  }
  return false;
}

template <int kRankWords>
bool AwaitRow(const ArenaRun& run, const ArenaSession<kRankWords>& session, int source, int token) {
  return session.AwaitWord(&session.half().mailbox(run.args.peers.rank, source).arrived[token]);
}

// Waits for all rows that `ranks` send here, as AwaitAllRows of a dispatch does.
template <int kRankWords>
void AwaitRows(ArenaRun& run, const ArenaSession<kRankWords>& session, RankWords<kRankWords> ranks) {
  const bool has_missed = TakeChoices(run, session, ranks);
  if (session.HasAnyMissed(has_missed)) ranks = ranks.Without(session.Missed());
  for (int t = threadIdx.x; t < run.num_ranks() * run.work.tokens; t += kArenaThreads) {
    const int source = t / run.work.tokens, token = t % run.work.tokens;
    if (!ranks.Has(source) || !Comes(run, source, token)) continue;
    if (!AwaitRow(run, session, source, token)) (void)session.Miss(source);
  }
}

// Receives rows, one warp each, as ReceiveToken does. Returns true if a rank was missed.
template <int kRankWords>
bool ReceiveRows(ArenaRun& run, const ArenaSession<kRankWords>& session) {
  const PushArgs& args = run.args;
  const int R = run.num_ranks();
  const RowWarps row_warps =
      RowWarpsOf(args.few_tokens.num_senders, args.few_tokens.first_metadata_block(), 1, kArenaWarps);
  const ChunkShares shares(R * run.work.tokens, std::max(args.few_tokens.chunks, 1),
                           {row_warps.index, row_warps.count});
  for (int i = row_warps.index; i < shares.num_shares; i += row_warps.count) {
    const Chunks chunks = shares.At(i);
    const int source = chunks.row % R, token = chunks.row / R;
    if (!session.ranks().Has(source) || !Comes(run, source, token)) continue;
    if (run.work.in_lines) {
      for (int chunk = chunks.first; chunk < chunks.last; ++chunk) {
        if (!ReceiveChunk(run, session, source, token, chunk)) return session.Miss(source);
      }
      continue;
    }
    const bool late = row_warps.lane == 0 && !AwaitRow(run, session, source, token);
    if (__shfl_sync(kAllLanes, late, 0)) return session.Miss(source);
    __syncwarp();
    if (row_warps.lane < kWords) LoadRowWord(run, session, source, token, row_warps.lane);
  }
  return false;
}

// Reads choices and receives rows, as Receive of a dispatch does. `has_missed`: this thread has missed a
// call. Returns true if it has missed rows.
template <int kRankWords>
bool Receive(ArenaRun& run, const ArenaSession<kRankWords>& session, bool has_missed) {
  has_missed |= session.HasAnyMissed(TakeChoices(run, session, session.ranks()));
  if (session.RecordMissing(Phase::kEnter, has_missed)) return false;
  if (!run.args.few_tokens.writes_metadata()) return ReceiveRows(run, session);
  if (session.is_leader()) session.WriteActive();
  return false;
}

template <int kRankWords>
void ArenaPushKernel(ArenaRun& run) {
  const PushArgs& args = run.args;
  const ArenaOpening<kRankWords> opening(args.peers, args.position_operand, args.attendance);
  auto session = run.session<kRankWords>(Op::kDispatch);
  const WaitLog log = WaitLog::From(args.attendance.wait_us);
  const auto fill = [&] {
    FillRun(run);
    FillAttendance(args.attendance, args.shape.num_ranks);
  };
  const bool is_open = session.Open(opening);
  CheckAgreement(run, ArenaRun::kAfterOpening, session, is_open);
  if (is_open) {
    if (session.is_leader()) session.PublishCall();
    if (args.few_tokens.writes_metadata()) ShowChoices(run, session);
    if (args.few_tokens.sends() && run.work.in_lines) {
      SendRowsAsLines(run, session);
    } else if (args.few_tokens.sends()) {
      threadIdx.x < kWarp ? SendRows(run, session) : FlagRows(run, session);
    }
    bool has_missed = false;
    if (args.attendance.masks) {
      session.AgreeOnRanks(log, [&](const auto& ranks) { AwaitRows(run, session, ranks); });
    } else if (session.is_leader()) {
      has_missed = session.AwaitCalls(threadIdx.x, kArenaThreads, log);
    }
    CheckAgreement(run, ArenaRun::kAfterAgreement, session, is_open);
    if (!args.few_tokens.sends() && !session.has_failed()) {
      has_missed = Receive(run, session, has_missed);
      (void)session.RecordMissing(Phase::kWave, has_missed);
    }
  }
  session.Close(fill);
  CheckAgreement(run, ArenaRun::kAtEnd, session, is_open);
}

// Stores rows and flags them by a few warps for each row, as SendSums does.
template <int kRankWords>
void SendSums(const ArenaRun& run, const ArenaSession<kRankWords>& session, const RowWarps& row_warps) {
  const PushArgs& args = run.args;
  const int R = run.num_ranks(), me = args.peers.rank;
  for (int i = row_warps.index; i < R * run.work.tokens; i += row_warps.count) {
    const int to = (me + 1 + i % R) % R, token = i / R;
    if (!run.work.Sends(me, to, token, R) || !session.may_write(to)) continue;
    const int word = row_warps.warp + row_warps.lane * row_warps.size;
    if (word < kWords) StoreRowWord(run, session, to, token, word);
    emulation::Machine::Get().Meet(row_warps.barrier, row_warps.size * kWarp, i);
    if (row_warps.warp == 0 && row_warps.lane == 0) {
      StoreWordRelease(&session.half().mailbox(to, me).arrived[token], 1, session.epoch());
    }
  }
}

// Sends chunks, each by one warp, as SendChunks of a combine does.
template <int kRankWords>
void SendSumsAsLines(const ArenaRun& run, const ArenaSession<kRankWords>& session) {
  const PushArgs& args = run.args;
  const int R = run.num_ranks(), me = args.peers.rank, warp = static_cast<int>(threadIdx.x) / kWarp;
  const int blocks = args.few_tokens.num_senders;
  const ChunkShares shares(R * run.work.tokens, args.few_tokens.chunks,
                           {warp * blocks + static_cast<int>(blockIdx.x), run.summing_warps * blocks});
  for (int i = shares.warps.index; i < shares.num_shares; i += shares.warps.count) {
    const Chunks chunks = shares.At(i);
    const int to = (me + 1 + chunks.row % R) % R, token = chunks.row / R;
    if (!run.work.Sends(me, to, token, R) || !session.may_write(to)) continue;
    for (int chunk = chunks.first; chunk < chunks.last; ++chunk) SendChunk(run, session, to, token, chunk);
  }
}

// Waits for the rows of token t that `ranks` send here. One warp. Returns true if this lane has missed a
// rank.
template <int kRankWords>
bool AwaitSums(const ArenaRun& run, const ArenaSession<kRankWords>& session,
               const RankWords<kRankWords>& ranks, int t, int lane) {
  const int me = run.args.peers.rank, R = run.num_ranks();
  bool has_missed = false;
  for (int from = lane; from < R; from += kWarp) {
    if (!ranks.Has(from) || !run.work.Sends(from, me, t, R)) continue;
    if (!AwaitRow(run, session, from, t)) has_missed = session.Miss(from);
  }
  return has_missed;
}

template <int kRankWords>
bool AddUp(ArenaRun& run, const ArenaSession<kRankWords>& session, const TicketCounter& tickets, int i) {
  const int lane = threadIdx.x % kWarp, me = run.args.peers.rank, R = run.num_ranks();
  while (true) {
    const int t = static_cast<int>(blockIdx.x) + i * static_cast<int>(gridDim.x);
    if (t >= run.work.tokens) return false;
    if (run.work.in_lines) {
      const int chunks = run.args.few_tokens.chunks;
      for (int j = 0; j < R * chunks; ++j) {
        const int from = j / chunks, chunk = j % chunks;
        if (!session.ranks().Has(from) || !run.work.Sends(from, me, t, R)) continue;
        if (!ReceiveChunk(run, session, from, t, chunk)) return session.Miss(from);
      }
      i = TicketCounter::Broadcast(tickets.Request(lane));
      continue;
    }
    if (__any_sync(kAllLanes, AwaitSums(run, session, session.ranks(), t, lane))) return true;
    for (int j = lane; j < R * kWords; j += kWarp) {
      const int from = j / kWords;
      if (!session.ranks().Has(from) || !run.work.Sends(from, me, t, R)) continue;
      LoadRowWord(run, session, from, t, j % kWords);
    }
    i = TicketCounter::Broadcast(tickets.Request(lane));
  }
}

template <int kRankWords>
void ArenaPullKernel(ArenaRun& run) {
  __shared__ unsigned next;
  const PushArgs& args = run.args;
  const ArenaOpening<kRankWords> opening(args.peers, args.position_operand, args.attendance);
  auto session = run.session<kRankWords>(Op::kCombine);
  const WaitLog log = WaitLog::From(args.attendance.wait_us);
  const auto fill = [&] {
    FillRun(run);
    FillAttendance(args.attendance, args.shape.num_ranks);
  };
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = threadIdx.x % kWarp;
  const RowWarps row_warps =
      RowWarpsOf(0, args.few_tokens.num_senders, args.few_tokens.warps_per_row, run.summing_warps);
  if (threadIdx.x == 0) next = kArenaWarps - run.summing_warps;
  const bool is_open = session.Open(opening);
  CheckAgreement(run, ArenaRun::kAfterOpening, session, is_open);
  if (is_open) {
    if (session.is_leader()) session.PublishCall();
    const TicketCounter tickets{&next};
    int first = warp - run.summing_warps;
    if (warp < run.summing_warps) {
      run.work.in_lines ? SendSumsAsLines(run, session) : SendSums(run, session, row_warps);
      first = TicketCounter::Broadcast(tickets.Request(lane));
    }
    bool has_missed = false;
    if (args.attendance.masks) {
      session.AgreeOnRanks(log, [&](const auto& ranks) {
        for (int t = warp; t < run.work.tokens; t += kArenaWarps) {
          (void)AwaitSums(run, session, ranks, t, lane);
          __syncwarp();
        }
      });
    } else if (session.is_leader() && warp == kArenaWarps - 1) {
      has_missed = session.AwaitCalls(lane, kWarp, log);
      __syncwarp();
    }
    CheckAgreement(run, ArenaRun::kAfterAgreement, session, is_open);
    if (!session.has_failed()) has_missed |= AddUp(run, session, tickets, first);
    (void)session.RecordMissing(Phase::kWave, has_missed);
    if (session.is_leader()) session.WriteActive();
  }
  session.Close(fill);
  CheckAgreement(run, ArenaRun::kAtEnd, session, is_open);
}

}  // namespace jax_ep::cuda
