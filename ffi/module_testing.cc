// Functions of the Python extension that no op calls. Tests inject faults and check how many SMs an op takes,
// and the benchmark prints that number.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include "kernels/launch/plan.h"
#include "runtime/switches.h"

#if defined(JAX_EP_WITH_CUDA)
#include "runtime/gpu/peers.h"
#endif

namespace nb = nanobind;

namespace jax_ep {
namespace {

// `sizes` are R, T, K, E and C; `op` is push, scaled push, FP8 push or pull.
std::pair<int, int> PlanOpSms(const std::string& op, bool by_expert, const std::array<int32_t, 5>& sizes,
                              double row_bytes, int num_sms, int budget) {
  const auto [ranks, tokens, top_k, experts, capacity] = sizes;
  const Shape shape{by_expert ? Order::kExpert : Order::kRank, ranks, tokens, top_k, experts, capacity, 1};
  const PushWork kind = op == "scaled push" ? PushWork::kScale
                        : op == "FP8 push"  ? PushWork::kQuantize
                                            : PushWork::kMove;
  const bool rings = !PlainCopies() && SuitsRings(shape, row_bytes);
  const SmPlan plan =
      op == "pull" ? PlanPull(shape, row_bytes, by_expert && top_k > 1, rings, num_sms, budget)
                   : PlanPush(shape, row_bytes, kind, rings && kind == PushWork::kScale, num_sms, budget);
  return {plan.links, plan.local};
}

#if defined(JAX_EP_WITH_CUDA)
void InjectStall(const std::string& key, int rank_index, int phase, double seconds) {
  const auto peers = FindDevicePeers(key);
  if (peers != nullptr) peers->Stall(rank_index, static_cast<Phase>(phase), seconds);
}
#endif

}  // namespace

void DefineTestHooks(nb::module_& m) {
  m.def("plan_sms", &PlanOpSms, nb::arg("op"), nb::arg("by_expert"), nb::arg("sizes"), nb::arg("row_bytes"),
        nb::arg("num_sms"), nb::arg("budget"),
        "Returns the SMs that an op takes for the links and for local work");
#if defined(JAX_EP_WITH_CUDA)
  m.def("inject_stall", &InjectStall, nb::arg("key"), nb::arg("rank_index"), nb::arg("phase"),
        nb::arg("seconds"), "Delays a rank's ops on the device before they enter (1) or inside (2)");
#endif
}

}  // namespace jax_ep
