// The ops and the meeting of the ranks without XLA, for the sanitizers: every rank on a thread of its
// own, as XLA runs them, with random delays, several call sites in flight, and ranks that never come.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>

#include "host/ops.h"
#include "runtime/cpu/deadlines.h"
#include "runtime/cpu/meeting.h"

namespace jax_ep {
namespace {

constexpr int kRanks = 4, kTokens = 16, kTopK = 3, kExperts = 8, kWidth = 5;

void Check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "meeting_stress: %s\n", what);
  std::exit(1);
}

// One rank's dispatch, then the combine of what arrived.
struct Rank {
  Shape shape;
  int rank;
  std::vector<int32_t> ids, topk_idx, sent_rows, prefix, expert_counts, received_rows, arrived_idx,
      tokens_per_expert, sizes;
  std::vector<float> x, rows, sums;
  int32_t num_tokens = 0, num_dropped = 0;

  Rank(Order order, int rank, unsigned seed) : rank(rank) {
    const int capacity = order == Order::kRank ? kRanks * kTokens : kRanks * kTokens * 2;
    shape = {order, kRanks, kTokens, kTopK, kExperts, capacity, 1};
    std::mt19937 random(seed * kRanks + rank);
    for (int i = 0; i < kTokens * kTopK; ++i) ids.push_back(int(random() % (kExperts + 2)) - 1);
    for (int i = 0; i < kTokens * kWidth; ++i) x.push_back(float(random() % 100));
    topk_idx.resize(ids.size());
    sent_rows.resize(kTokens * shape.rows_per_token());
    prefix.resize(kRanks * kRanks);
    expert_counts.resize(shape.num_local_experts());
    received_rows.resize(shape.num_ranks * kTokens * shape.top_k);
    arrived_idx.resize(capacity * kTopK);
    tokens_per_expert.resize(shape.num_local_experts());
    sizes.resize(shape.num_local_experts());
    rows.assign(capacity * kWidth, -1.0f);
    sums.assign(kTokens * kWidth, -1.0f);
  }

  HandleArrays handle() {
    return {topk_idx.data(), sent_rows.data(), prefix.data(), expert_counts.data(), received_rows.data()};
  }

  // A token comes back as often as it has rows.
  void CheckSums() const {
    for (int t = 0; t < kTokens; ++t) {
      int copies = 0;
      for (int i = 0; i < shape.rows_per_token(); ++i) {
        copies += sent_rows[t * shape.rows_per_token() + i] >= 0;
      }
      for (int i = 0; i < kWidth; ++i) {
        Check(sums[t * kWidth + i] == copies * x[t * kWidth + i], "wrong sum");
      }
    }
  }
};

struct PushContribution final : Contribution {
  PushParams params{};
  host::SendCounts counts;

  explicit PushContribution(Rank& rank) {
    params.payloads = {{reinterpret_cast<std::byte*>(rank.x.data()),
                        reinterpret_cast<std::byte*>(rank.rows.data()), kWidth * sizeof(float), 0}};
    params.shape = rank.shape;
    params.rank = rank.rank;
    params.topk_idx = {rank.ids.data(), false};
    params.num_payloads = 1;
    params.handle = rank.handle();
    params.arrived_idx = rank.arrived_idx.data();
    params.tokens_per_expert = rank.tokens_per_expert.data();
    params.group_sizes = rank.sizes.data();
    params.num_tokens = &rank.num_tokens;
    params.num_dropped = &rank.num_dropped;
  }

  void SetParticipants(const std::vector<bool>& ranks) override { counts = host::Count(params, ranks); }

  void MoveRows(const std::vector<Contribution*>& contributions) override {
    const host::SendCounts nothing(params.shape);
    std::vector<const PushParams*> ranks;
    std::vector<const host::SendCounts*> all;
    for (Contribution* contribution : contributions) {
      auto* const push = static_cast<PushContribution*>(contribution);
      ranks.push_back(push == nullptr ? nullptr : &push->params);
      all.push_back(push == nullptr ? &nothing : &push->counts);
    }
    host::Push(params, ranks, all);
  }
};

struct PullContribution final : Contribution {
  PullParams params{};

  explicit PullContribution(Rank& rank) {
    params.summands = {{rank.rows.data(), rank.sums.data(), kWidth, Float::kF32, nullptr}};
    params.shape = rank.shape;
    params.rank = rank.rank;
    params.handle = rank.handle();
    params.num_summands = 1;
  }

  void MoveRows(const std::vector<Contribution*>& contributions) override {
    std::vector<const PullParams*> ranks;
    for (Contribution* contribution : contributions) {
      ranks.push_back(contribution == nullptr ? nullptr
                                              : &static_cast<PullContribution*>(contribution)->params);
    }
    host::Pull(params, ranks);
  }
};

// Waits for one rank's op. XLA does not wait, but goes on in the callback.
class Waiter {
 public:
  Done done() {
    return [this](const Failure* failure) {
      std::lock_guard<std::mutex> lock(mutex_);
      error_ = failure == nullptr ? "" : failure->text;
      finished_ = true;
      wake_.notify_one();
    };
  }

  std::string Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    wake_.wait(lock, [this] { return finished_; });
    return error_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable wake_;
  bool finished_ = false;
  std::string error_;
};

void Delay(std::mt19937& random) {
  if (random() % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
}

// One run of a program of two call sites, executed `steps` times as in a scan.
void Run(const std::shared_ptr<Group>& group, MeetingPoint& dispatch, MeetingPoint& combine, int64_t run_id,
         int steps) {
  std::vector<std::thread> devices;
  for (int rank = 0; rank < kRanks; ++rank) {
    devices.emplace_back([&, rank] {
      std::mt19937 random(unsigned(run_id) * 97u + rank);
      for (int step = 0; step < steps; ++step) {
        const Order order = (run_id + step) % 2 ? Order::kRank : Order::kExpert;
        Rank data(order, rank, unsigned(run_id * 1000 + step));
        Waiter sent, summed;
        Delay(random);
        dispatch.Arrive(
            {run_id, group, {0, rank}, 0, std::make_unique<PushContribution>(data), {}, sent.done()});
        Check(sent.Wait().empty(), "dispatch failed");
        Delay(random);
        combine.Arrive(
            {run_id, group, {0, rank}, 0, std::make_unique<PullContribution>(data), {}, summed.done()});
        Check(summed.Wait().empty(), "combine failed");
        data.CheckSums();
      }
    });
  }
  for (std::thread& device : devices) device.join();
}

// Rank 2 refuses while others wait, or before they come, or it comes from another list of ranks; the op of
// another run is not concerned.
void RunWithRefusal(const std::shared_ptr<Group>& group, int64_t run_id) {
  MeetingPoint dispatch("dispatch");
  std::vector<std::thread> devices;
  for (int rank = 0; rank < kRanks; ++rank) {
    devices.emplace_back([&, rank] {
      std::mt19937 random(unsigned(run_id * kRanks + rank));
      Rank data(Order::kRank, rank, 1), others(Order::kRank, rank, 2);
      Waiter sent, sent_by_others;
      Delay(random);
      const bool comes = run_id % 2 == 0;
      if (rank == 2 && !comes) {
        FailRun(run_id, "rank 2 is of another mesh");
      } else {
        const int32_t list = rank == 2 ? 1 : 0;
        dispatch.Arrive(
            {run_id, group, {0, rank}, list, std::make_unique<PushContribution>(data), {}, sent.done()});
        Check(sent.Wait().find("another mesh") != std::string::npos, "the refusal did not come");
      }
      dispatch.Arrive({-run_id,
                       group,
                       {0, rank},
                       0,
                       std::make_unique<PushContribution>(others),
                       {},
                       sent_by_others.done()});
      Check(sent_by_others.Wait().empty(), "another run failed");
    });
  }
  for (std::thread& device : devices) device.join();
  Check(!group->TakeExpired().has_value(), "a refusal was recorded as an expired wait");
}

void RunWithMissingRank(const std::shared_ptr<Group>& group, int64_t run_id) {
  MeetingPoint dispatch("dispatch");
  std::vector<std::thread> devices;
  for (int rank = 0; rank < kRanks; ++rank) {
    devices.emplace_back([&, rank] {
      Rank data(Order::kRank, rank, 1);
      Waiter sent;
      // Rank 2 comes when the others have long gone.
      if (rank == 2) std::this_thread::sleep_for(std::chrono::milliseconds(400));
      dispatch.Arrive(
          {run_id, group, {0, rank}, 0, std::make_unique<PushContribution>(data), {}, sent.done()});
      Check(sent.Wait().find("rank(s) 2 did not arrive") != std::string::npos, "missing rank not named");
    });
  }
  for (std::thread& device : devices) device.join();
  Check(group->TakeExpired().has_value(), "expired wait not recorded");
}

// Two steps, of which rank 2 comes too late to the first one, and nobody is told to wait for rank 3. Now and
// then rank 2 comes just when the time is up.
void RunWithMaskedRanks(const std::shared_ptr<Group>& group, int64_t run_id) {
  MeetingPoint dispatch("dispatch"), combine("combine");
  std::vector<std::thread> devices;
  for (int rank = 0; rank < kRanks; ++rank) {
    devices.emplace_back([&, rank] {
      std::vector<int32_t> active = {1, 1, 1, 0}, after(kRanks, -1);
      std::vector<float> wait_us(kRanks, -1.0f);
      for (int step = 0; step < 2; ++step) {
        Rank data(step ? Order::kRank : Order::kExpert, rank, unsigned(run_id));
        Waiter sent, summed;
        if (rank == 2 && step == 0) std::this_thread::sleep_for(std::chrono::milliseconds(298 + run_id % 5));
        dispatch.Arrive({run_id,
                         group,
                         {0, rank},
                         0,
                         std::make_unique<PushContribution>(data),
                         {active.data(), after.data(), true, wait_us.data()},
                         sent.done()});
        Check(sent.Wait().empty(), "masked dispatch failed");
        const bool left = after == std::vector<int32_t>{1, 1, 0, 0};
        const bool alone = after == std::vector<int32_t>{0, 0, 1, 0};
        Check(after == active || (rank == 2 ? alone : left), "wrong active ranks");
        for (float wait : wait_us) Check(wait >= 0, "negative wait");
        active = after;
        combine.Arrive({run_id,
                        group,
                        {0, rank},
                        0,
                        std::make_unique<PullContribution>(data),
                        {active.data(), after.data(), true, nullptr},
                        summed.done()});
        Check(summed.Wait().empty(), "masked combine failed");
        Check(after == active, "a rank was lost in the combine");
        data.CheckSums();
        if (rank == 3) Check(data.num_tokens == 0, "rows came to a rank that is not active");
      }
    });
  }
  for (std::thread& device : devices) device.join();
  Check(!group->TakeExpired().has_value(), "a masked wait was recorded");
}

int Main() {
  OpenGroup("stress", "stress", {0, 1, 2, 3}, kRanks, false, {60.0, 0});
  const auto group = FindGroup("stress");
  MeetingPoint dispatch("dispatch"), combine("combine");
  // Several runs of one program in flight at once.
  std::vector<std::thread> programs;
  for (int64_t program = 0; program < 3; ++program) {
    programs.emplace_back([&, program] {
      for (int64_t run = 0; run < 20; ++run) Run(group, dispatch, combine, program * 100 + run, 10);
    });
  }
  for (std::thread& program : programs) program.join();
  for (int64_t run = 0; run < 100; ++run) RunWithRefusal(group, 500 + run);
  group->set_options({0.2, 0});
  RunWithMissingRank(group, 1000);
  group->set_options({0.3, 0});
  for (int64_t run = 0; run < 20; ++run) RunWithMaskedRanks(group, 1001 + run);
  group->set_options({60.0, 0});
  Run(group, dispatch, combine, 2000, 5);
  CloseGroup("stress");
  Check(FindGroup("stress") == nullptr, "the group outlived its last close");
  std::puts("meeting_stress: 605 dispatches and combines on 4 ranks, all sums right");
  return 0;
}

}  // namespace
}  // namespace jax_ep

int main() { return jax_ep::Main(); }
