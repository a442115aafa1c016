// The placement of redundant experts: which rows of hot experts are computed on which rank. The host and the
// kernel share this algorithm. tests/support/balance_oracle.py specifies its results, including all ties.
//
// Notation: R ranks, E logical experts, L = E / R home experts and S redundant experts a rank,
// P = R * (L + S) physical experts.
//
// Several threads compute it together: one thread on the host, a block on a device. Threads has
//   kLanes                         the threads of a warp
//   thread(), num_threads()        this thread among all
//   warp(), num_warps(), lane()    this thread's warp, and this thread within its warp
//   Sync(), SyncWarp()             barriers, after which all threads see what each has written before
//   Sum(value, period)             sum over the lanes of a warp that are equal modulo `period`
//   PrefixSum(value)               sum over the lanes up to this one
//   Max(candidates)                replaces each candidate by the best of those of all lanes. The array holds
//                                  several searches, because together they take little longer than one.
//   CountBits(bits)                number of bits that are set
// All lanes of a warp call Sum, PrefixSum and Max together, and every lane gets the result.
#pragma once

#include "core/balance_state.h"

// nvcc compiles this file only for kernels, so that Threads may use device functions.
#if defined(__CUDACC__)
#define JAX_EP_ON_THREADS __device__
#define JAX_EP_UNROLL _Pragma("unroll 8")
#else
#define JAX_EP_ON_THREADS
#define JAX_EP_UNROLL
#endif

namespace jax_ep {

// Places redundant experts. All threads call Run.
template <typename Threads>
class Balancer {
 public:
  JAX_EP_ON_THREADS Balancer(const BalanceParams& params, const BalanceState& state, const Threads& threads)
      : params_(params),
        state_(state),
        threads_(threads),
        R(params.num_ranks),
        E(params.num_experts),
        L(params.num_local_experts()),
        S(params.num_redundant_experts),
        P(params.num_physical_experts()),
        W(BalanceState::WordsPerExpert(params)),
        least_rows_(params.min_rows > 1 ? params.min_rows : 1) {}

  JAX_EP_ON_THREADS void Run() {
    SumRows();
    threads_.Sync();
    InitializeRanks();
    threads_.Sync();
    // Every move depends on the one before it, so one warp makes all of them.
    if (threads_.warp() == 0) {
      target_ = Target();
      if (S == L) {
        Fill();
      } else {
        Spread();
      }
    }
    threads_.Sync();
    CountInstances();
    threads_.Sync();
    PlaceInstances();
    threads_.Sync();
    DivideRows();
    threads_.Sync();
    PrefixSums(
        P, [&](int32_t i) { return state_.sends[i]; },
        [&](int32_t i, int32_t end) { params_.ends[i] = end; });
  }

 private:
  // Returns the rows that a source has for an expert.
  JAX_EP_ON_THREADS int32_t Count(int32_t source, int32_t expert) const {
    const int32_t count = params_.counts[source * E + expert];
    return count > 0 ? count : 0;
  }

  // Returns a sum as int32. Larger sums are not supported, but must not do any harm.
  JAX_EP_ON_THREADS static int32_t Saturate(int64_t sum) {
    return sum < INT32_MAX ? static_cast<int32_t>(sum) : INT32_MAX;
  }

  JAX_EP_ON_THREADS static int32_t Min(int32_t a, int32_t b) { return a < b ? a : b; }

  // Returns the rank whose rows `ends` divides.
  JAX_EP_ON_THREADS int32_t Source() const {
    const int32_t source = *params_.source;
    return source < 0 ? 0 : Min(source, R - 1);
  }

  // Sums the rows of each expert. A warp reads the counts of neighboring experts at several sources at once,
  // because many small loads in flight take less time than a few long chains.
  JAX_EP_ON_THREADS void SumRows() const {
    constexpr int32_t kSources = Threads::kLanes == 1 ? 1 : 4, kExperts = Threads::kLanes / kSources;
    constexpr int32_t kSteps = Threads::kLanes == 1 ? 1 : 8;
    const int32_t source = Source();
    for (int32_t first = threads_.warp() * kExperts; first < E; first += threads_.num_warps() * kExperts) {
      const int32_t expert = first + threads_.lane() % kExperts;
      int64_t sum = 0, before = 0;
      for (int32_t s = threads_.lane() / kExperts; s < R; s += kSteps * kSources) {
        int32_t counts[kSteps];
        JAX_EP_UNROLL
        for (int32_t j = 0; j < kSteps; ++j) {
          const int32_t other = s + j * kSources;
          counts[j] = other < R && expert < E ? Count(other, expert) : 0;
        }
        JAX_EP_UNROLL
        for (int32_t j = 0; j < kSteps; ++j) {
          sum += counts[j];
          before += s + j * kSources < source ? counts[j] : 0;
        }
      }
      sum = threads_.Sum(sum, kExperts);
      before = threads_.Sum(before, kExperts);
      if (expert < E && threads_.lane() < kExperts) {
        state_.rows[expert] = Saturate(sum);
        state_.rows_before[expert] = Saturate(before);
      }
    }
  }

  // Sets the state to that without redundant experts. A warp does it for a rank at a time.
  JAX_EP_ON_THREADS void InitializeRanks() const {
    for (int32_t rank = threads_.warp(); rank < R; rank += threads_.num_warps()) {
      int64_t sum = 0;
      for (int32_t expert = rank * L + threads_.lane(); expert < rank * L + L; expert += Threads::kLanes) {
        sum += state_.rows[expert];
        state_.is_blocked[expert] = 0;
        state_.num_instances[expert] = 1;
        for (int32_t w = 0; w < W; ++w) state_.hosts[expert * W + w] = w == Word(rank) ? Bit(rank) : 0;
      }
      sum = threads_.Sum(sum, 1);
      const Candidate largest = FindLargestExpert(rank);
      if (threads_.lane() == 0) {
        state_.load[rank] = Saturate(sum);
        state_.largest[rank] = largest;
        state_.num_open[rank] = L;
        state_.num_used[rank] = 0;
      }
    }
  }

  // Returns the number of rows above which a rank has too many. If the total does not fit in int32, the
  // target is so large that nothing moves.
  JAX_EP_ON_THREADS int32_t Target() const {
    int64_t total = 0;
    for (int32_t rank = threads_.lane(); rank < R; rank += Threads::kLanes) total += state_.load[rank];
    total = threads_.Sum(total, 1);
    if (total > INT32_MAX) return INT32_MAX;
    // Devices divide 32-bit numbers much faster than 64-bit ones.
    const uint32_t mean = (static_cast<uint32_t>(total) + R - 1) / static_cast<uint32_t>(R);
    const uint32_t tolerance = params_.tolerance;
    return Saturate(int64_t{mean} + mean / 1000 * tolerance + mean % 1000 * tolerance / 1000);
  }

  // Returns where the bit of a rank is among the words of an expert.
  JAX_EP_ON_THREADS static int32_t Word(int32_t rank) {
    return static_cast<int32_t>(static_cast<uint32_t>(rank) / 32);
  }

  JAX_EP_ON_THREADS static uint32_t Bit(int32_t rank) {
    return uint32_t{1} << (static_cast<uint32_t>(rank) % 32);
  }

  JAX_EP_ON_THREADS bool Hosts(int32_t rank, int32_t expert) const {
    return (state_.hosts[expert * W + Word(rank)] & Bit(rank)) != 0;
  }

  // Returns true if a rank has, or can have, a redundant instance of an expert of another rank.
  JAX_EP_ON_THREADS bool Takes(int32_t rank, int32_t expert) const {
    return state_.num_used[rank] < S || Hosts(rank, expert);
  }

  // Calls visit(i) for the items 0 ... n - 1 of a search, n > 0. Lanes without an item visit the last one, so
  // that the lanes stay together. A search is not changed by items that it sees twice.
  template <typename F>
  JAX_EP_ON_THREADS void VisitItems(int32_t n, F&& visit) const {
    constexpr int32_t kSteps = Threads::kLanes == 1 ? 1 : 2;
    for (int32_t first = threads_.lane(); first - threads_.lane() < n; first += kSteps * Threads::kLanes) {
      JAX_EP_UNROLL
      for (int32_t j = 0; j < kSteps; ++j) visit(Min(first + j * Threads::kLanes, n - 1));
    }
  }

  // Improves the best candidate by an item. value < 0: it is no item.
  JAX_EP_ON_THREADS static void Improve(Candidate* best, int32_t value, int32_t index) {
    if (value > best->value) *best = {value, index};
  }

  JAX_EP_ON_THREADS Candidate Best(Candidate candidate) const {
    Candidate best[] = {candidate};
    threads_.Max(best);
    return best[0];
  }

  // The following functions named LaneBest search only the items of a lane.

  // Finds the donor: the fullest rank above the target whose experts are not all blocked, and its load. Finds
  // the emptiest rank below the target, and its room.
  JAX_EP_ON_THREADS void LaneBestRanks(Candidate* donor, Candidate* emptiest) const {
    VisitItems(R, [&](int32_t rank) {
      const int32_t load = state_.load[rank], num_open = state_.num_open[rank];
      Improve(donor, (load > target_) & (num_open > 0) ? load : -1, rank);
      Improve(emptiest, load < target_ ? target_ - load : -1, rank);
    });
  }

  // Finds the home expert of a rank that has the most rows there and is not blocked.
  JAX_EP_ON_THREADS Candidate LaneBestExpert(int32_t rank) const {
    Candidate best;
    VisitItems(L, [&](int32_t i) {
      const int32_t expert = rank * L + i, rows = state_.rows[expert];
      Improve(&best, state_.is_blocked[expert] ? -1 : rows, expert);
    });
    return best;
  }

  JAX_EP_ON_THREADS Candidate FindLargestExpert(int32_t rank) const { return Best(LaneBestExpert(rank)); }

  // Returns the emptiest rank below the target that takes rows of an expert, and its room.
  JAX_EP_ON_THREADS Candidate FindReceiver(int32_t expert) const {
    Candidate best;
    VisitItems(R, [&](int32_t rank) {
      const int32_t load = state_.load[rank];
      Improve(&best, load < target_ && Takes(rank, expert) ? target_ - load : -1, rank);
    });
    return Best(best);
  }

  // Moves rows of an expert from its home to an instance on another rank that takes them. The whole warp
  // calls it. It reads everything before it writes anything, so that the reads do not wait for each other.
  JAX_EP_ON_THREADS void Move(int32_t expert, int32_t home, int32_t receiver, int32_t number) const {
    const int32_t word = expert * W + Word(receiver);
    const uint32_t hosts = state_.hosts[word];
    const int32_t rows = state_.rows[expert], num_instances = state_.num_instances[expert];
    const int32_t home_load = state_.load[home], load = state_.load[receiver];
    const int32_t num_used = state_.num_used[receiver];
    const bool is_new = (hosts & Bit(receiver)) == 0;
    const int32_t redundant = receiver * S + (is_new ? num_used : FindRedundant(receiver, expert));
    const int32_t redundant_rows = is_new ? 0 : state_.redundant_rows[redundant];
    threads_.SyncWarp();
    if (threads_.lane() == 0) {
      state_.load[home] = home_load - number;
      state_.load[receiver] = load + number;
      state_.rows[expert] = rows - number;
      state_.redundant_rows[redundant] = redundant_rows + number;
      if (is_new) {
        state_.num_used[receiver] = num_used + 1;
        state_.hosts[word] = hosts | Bit(receiver);
        state_.num_instances[expert] = num_instances + 1;
        state_.redundant_experts[redundant] = expert;
        state_.redundant_homes[redundant] = home;
      }
    }
    threads_.SyncWarp();
  }

  // Returns the index among a rank's redundant experts of the one that is an instance of `expert`.
  JAX_EP_ON_THREADS int32_t FindRedundant(int32_t rank, int32_t expert) const {
    int32_t i = 0;
    while (state_.redundant_experts[rank * S + i] != expert) ++i;
    return i;
  }

  // With as many redundant experts as home experts, fills the emptiest rank from the fullest one. A rank that
  // is full neither gives nor receives rows, so there are fewer than R steps.
  JAX_EP_ON_THREADS void Fill() const {
    for (int32_t step = 1; step < R; ++step) {
      Candidate best[2];
      LaneBestRanks(&best[0], &best[1]);
      threads_.Max(best);
      const Candidate donor = best[0], receiver = best[1];
      if (donor.value - target_ < least_rows_) return;
      int32_t need = receiver.value;
      for (int32_t i = 0; i < L && need > 0; ++i) {
        const Candidate expert = FindLargestExpert(donor.index);
        const int32_t number = Min(need, expert.value);
        Move(expert.index, donor.index, receiver.index, number);
        need -= number;
      }
    }
  }

  // Moves rows of the largest expert of the fullest rank, as long as a redundant expert can take them. Each
  // step either empties a donor down to the target, fills a receiver up to it, takes the last rows of an
  // expert from its home, or gives up an expert or a rank. Each of these happens at most once, which bounds
  // the number of steps.
  JAX_EP_ON_THREADS void Spread() const {
    const int32_t max_steps = 2 * (R + E);
    int32_t changed =
        0;  // The rank whose experts the last step changed. Its largest one must be found again.
    for (int32_t step = 0; step < max_steps; ++step) {
      Candidate best[3];
      LaneBestRanks(&best[0], &best[1]);
      best[2] = LaneBestExpert(changed);
      threads_.Max(best);
      const Candidate donor = best[0], emptiest = best[1], largest = best[2];
      if (donor.index < 0) return;
      const Candidate expert = donor.index == changed ? largest : state_.largest[donor.index];
      if (threads_.lane() == 0) state_.largest[changed] = largest;
      const int32_t amount = Min(donor.value - target_, expert.value);
      if (amount < least_rows_) {
        BlockAll(donor.index);  // the rank's other experts have even fewer rows
        continue;
      }
      changed = donor.index;
      if (!MoveToEmptiest(donor.index, expert.index, amount, emptiest) &&
          !Relay(donor.index, expert.index, amount)) {
        Block(donor.index, expert.index);
      }
    }
  }

  // Moves at most `amount` rows of an expert to the emptiest rank that takes them, which nearly always is the
  // emptiest of all. Returns false if that would be too few.
  JAX_EP_ON_THREADS bool MoveToEmptiest(int32_t home, int32_t expert, int32_t amount,
                                        Candidate emptiest) const {
    if (emptiest.index < 0) return false;
    const Candidate receiver = Takes(emptiest.index, expert) ? emptiest : FindReceiver(expert);
    const int32_t number = Min(amount, receiver.value);
    if (number < least_rows_) return false;
    Move(expert, home, receiver.index, number);
    return true;
  }

  // Moves at most `amount` rows of an expert to a rank without room. In exchange, that rank moves as many
  // rows of one of its home experts to its own instance of this home expert. Returns false if that
  // would be too few rows.
  JAX_EP_ON_THREADS bool Relay(int32_t donor, int32_t expert, int32_t amount) const {
    Candidate best;
    for (int32_t rank = threads_.lane(); rank < R; rank += Threads::kLanes) {
      const int32_t room = Min(amount, target_ - state_.load[rank]);
      if (room < least_rows_) continue;
      for (int32_t i = rank * S; i < rank * S + state_.num_used[rank]; ++i) {
        const int32_t home = state_.redundant_homes[i];
        if (home == donor || !Takes(home, expert)) continue;
        Improve(&best, Min(room, state_.rows[state_.redundant_experts[i]]), i);
      }
    }
    best = Best(best);
    if (best.value < least_rows_) return false;
    const int32_t other = state_.redundant_experts[best.index], relay = state_.redundant_homes[best.index];
    Move(other, relay, best.index / S, best.value);
    const Candidate largest = FindLargestExpert(relay);
    if (threads_.lane() == 0) state_.largest[relay] = largest;
    Move(expert, donor, relay, best.value);
    return true;
  }

  JAX_EP_ON_THREADS void Block(int32_t rank, int32_t expert) const {
    threads_.SyncWarp();
    if (threads_.lane() == 0) {
      state_.is_blocked[expert] = 1;
      --state_.num_open[rank];
    }
    threads_.SyncWarp();
  }

  JAX_EP_ON_THREADS void BlockAll(int32_t rank) const {
    threads_.SyncWarp();
    if (threads_.lane() == 0) state_.num_open[rank] = 0;
    threads_.SyncWarp();
  }

  // Counts instances and unused redundant experts, from which their positions in `order` follow.
  JAX_EP_ON_THREADS void CountInstances() const {
    PrefixSums(
        E, [&](int32_t e) { return state_.num_instances[e]; },
        [&](int32_t e, int32_t end) { state_.instance_ends[e] = end; });
    PrefixSums(
        R, [&](int32_t rank) { return S - state_.num_used[rank]; },
        [&](int32_t rank, int32_t end) { state_.unused_ends[rank] = end; });
  }

  // Returns the number of instances of an expert on the ranks below `end`.
  JAX_EP_ON_THREADS int32_t NumInstances(int32_t expert, int32_t end) const {
    const uint32_t* const hosts = state_.hosts + expert * W;
    int32_t number = 0;
    for (int32_t w = 0; w < Word(end); ++w) number += Threads::CountBits(hosts[w]);
    // The last word may be missing if `end` is a multiple of 32.
    if (end % 32 != 0) number += Threads::CountBits(hosts[Word(end)] & (Bit(end) - 1));
    return number;
  }

  JAX_EP_ON_THREADS int32_t FirstInstance(int32_t expert) const {
    return expert == 0 ? 0 : state_.instance_ends[expert - 1];
  }

  // Writes everything about the physical experts: a rank's home experts, then its redundant
  // experts in use by logical expert, then its unused ones.
  JAX_EP_ON_THREADS void PlaceInstances() const {
    for (int32_t rank = threads_.warp(); rank < R; rank += threads_.num_warps()) {
      const int32_t first = rank * (L + S), first_redundant = rank * S, num_used = state_.num_used[rank];
      for (int32_t i = threads_.lane(); i < L + S; i += Threads::kLanes) {
        const int32_t redundant = i - L;
        if (redundant < 0) {
          const int32_t expert = rank * L + i;
          PlaceInstance(first + i, rank, expert, state_.rows[expert]);
        } else if (redundant < num_used) {
          const int32_t expert = state_.redundant_experts[first_redundant + redundant];
          PlaceInstance(first + L + NumRedundantBefore(rank, expert), rank, expert,
                        state_.redundant_rows[first_redundant + redundant]);
        } else {
          PlaceUnused(first + i, state_.instance_ends[E - 1] + state_.unused_ends[rank] - (S - redundant));
        }
      }
    }
  }

  JAX_EP_ON_THREADS void PlaceInstance(int32_t physical, int32_t rank, int32_t expert, int32_t rows) const {
    const int32_t position = FirstInstance(expert) + NumInstances(expert, rank);
    const int32_t from_rank = Min(Count(rank, expert), rows);
    params_.physical_to_logical[physical] = expert;
    params_.quotas[physical] = rows;
    params_.order[position] = physical;
    state_.ranks[position] = rank;
    state_.quotas[position] = rows - from_rank;
    state_.sends[position] = from_rank;
  }

  JAX_EP_ON_THREADS void PlaceUnused(int32_t physical, int32_t position) const {
    params_.physical_to_logical[physical] = -1;
    params_.quotas[physical] = 0;
    params_.order[position] = physical;
    state_.sends[position] = 0;
  }

  // Returns the number of a rank's redundant experts whose logical expert comes before this one.
  JAX_EP_ON_THREADS int32_t NumRedundantBefore(int32_t rank, int32_t expert) const {
    int32_t number = 0;
    for (int32_t j = 0; j < state_.num_used[rank]; ++j) {
      number += state_.redundant_experts[rank * S + j] < expert;
    }
    return number;
  }

  // Divides the source's rows of each expert among the expert's instances. Each rank's rows go first to the
  // instance there, if any. The remaining rows, by rank, fill what remains of the quotas, by instance.
  JAX_EP_ON_THREADS void DivideRows() const {
    const int32_t source = Source();
    for (int32_t expert = threads_.thread(); expert < E; expert += threads_.num_threads()) {
      const int32_t first = FirstInstance(expert), end = state_.instance_ends[expert];
      int32_t rows = Count(source, expert), before = state_.rows_before[expert];
      for (int32_t i = first; i < end; ++i) {
        const int32_t rank = state_.ranks[i], from_rank = state_.sends[i];
        before -= rank < source ? from_rank : 0;
        rows -= rank == source ? from_rank : 0;
      }
      for (int32_t i = first; i < end; ++i) {
        const int32_t quota = state_.quotas[i], skipped = Min(before, quota);
        const int32_t number = Min(rows, quota - skipped);
        state_.sends[i] = number + (state_.ranks[i] == source ? state_.sends[i] : 0);
        before -= skipped;
        rows -= number;
      }
    }
  }

  // Calls store(i, value(0) + ... + value(i)) for each i < n. All threads call it. Each warp sums everything
  // before its parts, so that no warp waits for another. Wraps around if a sum does not fit.
  template <typename Value, typename Store>
  JAX_EP_ON_THREADS void PrefixSums(int32_t n, Value&& value, Store&& store) const {
    constexpr int32_t kSteps = Threads::kLanes == 1 ? 1 : 8;
    int32_t summed = 0;   // the values before this one are in `before`
    uint32_t before = 0;  // this lane's part of their sum
    for (int32_t first = threads_.warp() * Threads::kLanes; first < n;
         first += threads_.num_warps() * Threads::kLanes) {
      for (; summed < first; summed += kSteps * Threads::kLanes) {
        JAX_EP_UNROLL
        for (int32_t j = 0; j < kSteps; ++j) {
          const int32_t i = summed + j * Threads::kLanes + threads_.lane();
          before += i < first ? static_cast<uint32_t>(value(i)) : 0;
        }
      }
      summed = first;
      const int32_t i = first + threads_.lane();
      const uint32_t sum = threads_.PrefixSum(i < n ? static_cast<uint32_t>(value(i)) : 0);
      const uint32_t end = threads_.Sum(before, 1) + sum;
      if (i < n) store(i, static_cast<int32_t>(end));
    }
  }

  const BalanceParams& params_;
  const BalanceState state_;
  const Threads threads_;
  const int32_t R, E, L, S, P;
  const int32_t W;            // words of an expert in state_.hosts
  const int32_t least_rows_;  // of a move
  int32_t target_ = 0;        // set only in the warp that moves rows
};

}  // namespace jax_ep
