// Domains with a few ranks each, which run hops between domains over emulated networks and ops within their
// domain, and what each rank must find at the end of one.
#pragma once

#include <deque>

#include "die.h"
#include "kernels/hop/exchange.cuh"
#include "kernels/protocol/session.cuh"
#include "network.h"

namespace jax_ep::cuda {

using Random = std::mt19937;
using emulation::Machine;
constexpr uint64_t kForEver = 1'000'000'000'000;
constexpr int kMostRanks = 3;  // of a domain

struct EmulatedNet {
  emulation::Network* network;
  int domain;

  void Put(int to, int64_t there, int64_t here, int64_t bytes, uint32_t signal) const {
    network->Put(domain, to, there, here, bytes, signal);
  }
  void Signal(int to, uint32_t signal, uint64_t number) const { network->Signal(domain, to, signal, number); }
  uint64_t ReadSignal(uint32_t signal) const {
    Machine::Get().Access(false);
    return network->ReadSignal(domain, signal);
  }
};

// One op, as a rank calls it: a hop, or an op among the ranks of its domain.
struct HopCall {
  int number = 0;
  bool is_within = false;
  int64_t block_bytes = 16;
  uint32_t word = 1;     // HopParams::call
  int shift = 0;         // of the arrays, from where 16-byte words begin
  uint64_t late_by = 0;  // it begins so much later than the one before has ended
  bool misplaced = false;
  bool refused = false;
  int list = 0;  // of the ranks in the mesh of the program
};

// What domain `from` sends to domain `to`.
inline std::byte ByteOf(int call, int from, int to, int64_t at) {
  uint32_t hash = static_cast<uint32_t>(call * 7919 + from * 131 + to * 17 + at * 2654435761u);
  hash ^= hash >> 13;
  return static_cast<std::byte>(hash * 0x9e3779b1u >> 24 & 0x7f);  // never as a failed hop leaves it
}

struct Run {
  HopCall call;
  HopParams hop{};
  MeshPosition place{};
  std::vector<uint4> in, out;
  emulation::Launch launch;
  EmulatedNet net{};
  bool is_inside = false;  // between its launch and its return
  uint32_t said = 0;       // within a domain: what it tells its peers
  std::byte* rows() { return reinterpret_cast<std::byte*>(out.data()) + call.shift; }
};

// An op among the ranks of a domain, by the protocol of such ops: each takes what its peers say.
inline void ShareWithin(Run& run) {
  __shared__ Published mine, published[kMostRanks];
  const Peers& peers = run.hop.peers;
  const Opening opening(peers, &run.place);
  Session session(peers, Op::kGather, false);
  if (threadIdx.x == 0) mine.buffers[0] = &run, mine.weights = mine.routing = nullptr;
  bool alive = session.Open(opening);
  if (alive && blockIdx.x == 0) session.Publish(mine, 1);
  alive = alive && session.Meet(1, published);
  const auto fill = [&] { FillResult(run.out.data(), peers.num_ranks * sizeof(uint32_t)); };
  if (!alive) return session.Abort(fill);
  for (int r = static_cast<int>(threadIdx.x); r < peers.num_ranks; r += static_cast<int>(blockDim.x)) {
    const Run& peer = *static_cast<const Run*>(published[r].buffers[0]);
    if (!peer.is_inside) Die("a rank reads one that has returned");
    reinterpret_cast<uint32_t*>(run.out.data())[r] = peer.said;
  }
  session.Leave();
  if (blockIdx.x == gridDim.x - 1) (void)session.AwaitLeft(published);
  session.Close(fill);
}

// A rank of a domain.
struct Member {
  int domain = 0, rail = 0;
  std::vector<uint4> slots;
  HopState state{};
  HopReport report{};
  std::unique_ptr<Control, decltype(&std::free)> control{
      static_cast<Control*>(std::calloc(1, ControlBytes(kMaxRanks))), &std::free};
  Report within{};
  std::deque<HopCall> calls, strays;
  std::vector<std::unique_ptr<Run>> running;
  uint64_t since = 0;       // when its last op ended
  uint64_t held_until = 0;  // in that op
  int ended = 0, failed = 0;
  bool hop_failed = false, gone = false;
};

// The ranks of one index on all domains are on a network of their own.
class World {
 public:
  uint64_t max_pieces = ~uint64_t{0};
  uint64_t longest_ns = 0;

  World(Random& random, int domains, int ranks, uint64_t timeout)
      : random_(random),
        networks_(ranks, emulation::Network(domains)),
        members_(domains * ranks),
        window_{domains, 1 + static_cast<int>(random() % 3), 0} {
    window_.piece_bytes = 16 << random() % 4;
    threads_ = random() % 2 == 0 ? 32 : 64;
    for (int i = 0; i < num_members(); ++i) {
      Member& member = members_[i];
      member.domain = i / ranks, member.rail = i % ranks;
      member.slots.resize(window_.bytes() / 16);
      member.within.timeout_ns = timeout;
      networks_[member.rail].Attach(member.domain, reinterpret_cast<std::byte*>(member.slots.data()),
                                    window_.num_signals());
      for (Channel& channel : member.control->channels) {
        channel.epoch = 1;
        channel.gate = channel.opened = Pack(0, 1);
      }
    }
    Machine::Get().on_trap = [](int rank) { Die("rank %d is stopped", rank); };
  }

  Member& member(int i) { return members_[i]; }
  emulation::Network& network(int rail) { return networks_[rail]; }
  int num_domains() const { return window_.domains; }
  int num_ranks() const { return static_cast<int>(networks_.size()); }
  int num_members() const { return static_cast<int>(members_.size()); }
  const HopWindow& window() const { return window_; }

  // Until every rank that is not gone has run its ops. `freeze` may hold one of them up.
  void RunAll(const std::function<void(int, Run&)>& freeze) {
    Machine& machine = Machine::Get();
    const uint64_t last = machine.now + 2'000'000'000;
    for (Member& member : members_) member.since = machine.now;
    while (true) {
      bool done = true;
      for (int i = 0; i < num_members(); ++i) {
        Member& member = members_[i];
        if (member.gone) continue;
        if (!member.calls.empty() && member.running.empty() &&
            machine.now >= member.since + member.calls.front().late_by) {
          Begin(i, member.calls, freeze);
        }
        if (!member.strays.empty() && !member.running.empty() && !member.running[0]->call.is_within) {
          Begin(i, member.strays, freeze);
        }
        done = done && member.calls.empty() && member.running.empty();
      }
      if (done) return;
      for (emulation::Network& network : networks_) network.Deliver();
      for (emulation::Launch* launch : machine.Round()) {
        Member& member = members_[launch->rank];
        for (size_t i = 0; i < member.running.size(); ++i) {
          if (&member.running[i]->launch != launch) continue;
          End(launch->rank, *member.running[i]);
          member.running.erase(member.running.begin() + i);
          member.since = machine.now;
          break;
        }
      }
      for (int i = 0; i < num_members(); ++i) {
        Member& member = members_[i];
        if (member.gone || machine.rank_frozen_until[i] < machine.now + kForEver / 2) continue;
        member.gone = true;
        networks_[member.rail].CutOff(member.domain);
        for (Member& peer : members_) {
          if (peer.domain == member.domain) peer.within.gone.Add(RankBits::Of(member.rail));
        }
      }
      if (machine.now > last) Die("ops do not return");
    }
  }

 private:
  // What a rank says in an op within its domain, if all that it has done before went well.
  static uint32_t WordOf(int number, int domain, int rail) {
    return static_cast<uint32_t>(number * 7919 + domain * 131 + rail) & 0x7fffffff;
  }

  void Begin(int i, std::deque<HopCall>& calls, const std::function<void(int, Run&)>& freeze) {
    Member& member = members_[i];
    member.running.push_back(std::make_unique<Run>());
    Run& run = *member.running.back();
    run.call = calls.front();
    calls.pop_front();
    const int h = member.domain;
    Peers peers{};
    for (Member& peer : members_) {
      if (peer.domain == h) {
        peers.channel[peer.rail] = &peer.control->channels[run.call.number % kChannels];
      }
    }
    peers.channel_number = run.call.number % kChannels;
    peers.report = &member.within;
    peers.call = {run.call.word, static_cast<uint32_t>(run.call.number)};
    peers.rank = member.rail, peers.num_ranks = num_ranks();
    run.is_inside = true;
    run.launch.rank = i;
    if (run.call.is_within) {
      run.hop.peers = peers;
      run.call.shift = 0;
      run.place = {member.rail, 0};
      run.out.assign(num_ranks() / 4 + 1, uint4{0, 0, 0, 0});
      run.said = member.failed == 0 ? WordOf(run.call.number, h, member.rail) : 0;
      run.launch.grid = {1 + static_cast<unsigned>(random_() % 2)};
      run.launch.block = {64};
      run.launch.body = [&run] { ShareWithin(run); };
    } else {
      PrepareHop(member, run, peers);
    }
    freeze(i, run);
    Machine::Get().Start(run.launch);
  }

  void PrepareHop(Member& member, Run& run, const Peers& peers) {
    const int h = member.domain;
    const int64_t block = run.call.block_bytes, bytes = block * num_domains();
    run.in.resize((bytes + run.call.shift) / 16 + 1);
    run.out.assign(run.in.size(), uint4{0, 0, 0, 0});
    auto* const in = reinterpret_cast<std::byte*>(run.in.data()) + run.call.shift;
    for (int64_t i = 0; i < bytes; ++i) {
      in[i] = ByteOf(run.call.number, h, static_cast<int>(i / block), i % block);
      if (member.failed != 0) in[i] = std::byte{0x80};  // what nobody may take for a row
    }
    const int domain = run.call.misplaced ? (h + 1) % num_domains() : h;
    run.place = {domain * num_ranks() + member.rail, run.call.list};
    run.hop = {window_,
               h,
               &run.place,
               in,
               run.rows(),
               block,
               run.call.word,
               reinterpret_cast<std::byte*>(member.slots.data()),
               &member.state,
               &member.report,
               &member.within.timeout_ns,
               max_pieces,
               peers,
               run.call.refused};
    run.net = {&networks_[member.rail], h};
    run.launch.grid = {static_cast<unsigned>(window_.tracks)};
    run.launch.block = {static_cast<unsigned>(threads_)};
    run.launch.body = [&run] { Exchange(run.hop, run.net); };
  }

  // What has come is whole and of ranks that have not failed, or all 0xff; and an op that follows a failed
  // one has failed.
  void End(int i, Run& run) {
    Member& member = members_[i];
    run.is_inside = false;
    member.held_until = run.launch.frozen_until;
    longest_ns = std::max(longest_ns, Machine::Get().now - run.launch.began);
    const bool within = run.call.is_within;
    const int64_t block = run.call.block_bytes;
    const int64_t bytes = within ? num_ranks() * sizeof(uint32_t) : block * num_domains();
    const std::byte* const rows = run.rows();
    const bool filled = std::all_of(rows, rows + bytes, [](std::byte b) { return b == std::byte{0xff}; });
    ++member.ended;
    if (filled) {
      ++member.failed;
      member.hop_failed = member.hop_failed || !within;
      return;
    }
    if (member.failed != 0) Die("rank %d's op %d goes well after one has failed", i, run.call.number);
    for (int r = 0; within && r < num_ranks(); ++r) {
      if (reinterpret_cast<const uint32_t*>(rows)[r] != WordOf(run.call.number, member.domain, r)) {
        Die("rank %d takes part in op %d with rank %d, which has failed", i, run.call.number, r);
      }
    }
    for (int64_t k = 0; !within && k < bytes; ++k) {
      if (rows[k] != ByteOf(run.call.number, static_cast<int>(k / block), member.domain, k % block)) {
        Die("rank %d, hop %d: byte %d from domain %d is not what it sent", i, run.call.number,
            static_cast<int>(k % block), static_cast<int>(k / block));
      }
    }
  }

  Random& random_;
  std::vector<emulation::Network> networks_;
  std::vector<Member> members_;
  HopWindow window_;
  int threads_;
};

}  // namespace jax_ep::cuda
