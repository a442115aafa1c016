#include "core/balance.h"

#include <vector>

#include "host/ops.h"

namespace jax_ep::host {
namespace {

// One thread as the Threads of core/balance.h.
struct SingleThread {
  static constexpr int32_t kLanes = 1;

  int32_t thread() const { return 0; }
  int32_t num_threads() const { return 1; }
  int32_t warp() const { return 0; }
  int32_t num_warps() const { return 1; }
  int32_t lane() const { return 0; }
  void Sync() const {}
  void SyncWarp() const {}
  template <typename Value>
  Value Sum(Value value, int32_t) const {
    return value;
  }
  uint32_t PrefixSum(uint32_t value) const { return value; }
  template <int kNumber>
  void Max(Candidate (&)[kNumber]) const {}
  static int32_t CountBits(uint32_t bits) { return __builtin_popcount(bits); }
};

}  // namespace

void Balance(const BalanceParams& params) {
  std::vector<int32_t> words(BalanceStateBytes(params) / sizeof(int32_t));
  BalanceState state;
  state.Assign(params, words.data());
  Balancer<SingleThread>(params, state, SingleThread()).Run();
}

}  // namespace jax_ep::host
