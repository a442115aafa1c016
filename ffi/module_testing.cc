// Functions of the Python extension that no op calls. Tests inject faults and check how many SMs an op takes,
// and the benchmark prints that number.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include "kernels/launch/plan.h"
#include "runtime/switches.h"

#if defined(JAX_EP_WITH_CUDA)
#include "kernels/products/products.h"
#include "runtime/gpu/driver.h"
#include "runtime/gpu/peers.h"
#endif

namespace nb = nanobind;

namespace jax_ep {
namespace {

// `sizes` are R, T, K, E and C; `op` is push, scaled push, FP8 push, pull or FP8 pull, of bfloat16 sums.
// `row_bytes` are those on the links.
std::pair<int, int> PlanOpSms(const std::string& op, bool by_expert, const std::array<int32_t, 5>& sizes,
                              double row_bytes, int num_sms, int budget, int compute_capability) {
  const auto [ranks, tokens, top_k, experts, capacity] = sizes;
  const Shape shape{by_expert ? Order::kExpert : Order::kRank, ranks, tokens, top_k, experts, capacity, 1};
  const PushWork kind = op == "scaled push" ? PushWork::kScale
                        : op == "FP8 push"  ? PushWork::kQuantize
                                            : PushWork::kMove;
  const bool rings = !PlainCopies() && SuitsRings(shape, row_bytes, kind == PushWork::kScale);
  const Card card{num_sms, budget, RatesOf(compute_capability)};
  const auto plan = [&] {
    if (op == "pull") return PlanPull(shape, row_bytes, shape.shares_rows(), rings, card);
    const double values = row_bytes * kFp8Block / static_cast<double>(Fp8Bytes(kFp8Block));
    if (op == "FP8 pull") return PlanPullFp8(shape, values, 2 * values, card);
    return PlanPush(shape, row_bytes, kind, rings && kind == PushWork::kScale, card);
  }();
  return {plan.links, plan.local};
}

#if defined(JAX_EP_WITH_CUDA)
void InjectStall(const std::string& key, int rank_index, int phase, double seconds) {
  const auto peers = FindDevicePeers(key);
  if (peers != nullptr) peers->Stall(rank_index, static_cast<Phase>(phase), seconds);
}

// Returns the error, the tolerance and the failure of each product.
nb::dict CheckProductEngine(const std::string& engine, int64_t device) {
  std::vector<cuda::ProductCheck> checks;
  {
    nb::gil_scoped_release unlocked;
    checks = OnDevice(device, [&] { return cuda::CheckProducts(engine); });
  }
  nb::dict results;
  for (const cuda::ProductCheck& check : checks) {
    if (!check.is_supported) continue;
    results[check.product.c_str()] = nb::make_tuple(check.error, check.tolerance, check.failure);
  }
  return results;
}
#endif

}  // namespace

void DefineTestHooks(nb::module_& m) {
  m.def("plan_sms", &PlanOpSms, nb::arg("op"), nb::arg("by_expert"), nb::arg("sizes"), nb::arg("row_bytes"),
        nb::arg("num_sms"), nb::arg("budget"), nb::arg("compute_capability") = 90,
        "Returns the SMs that an op takes for the links and for local work");
#if defined(JAX_EP_WITH_CUDA)
  m.def("inject_stall", &InjectStall, nb::arg("key"), nb::arg("rank_index"), nb::arg("phase"),
        nb::arg("seconds"), "Delays a rank's ops on the device before they enter (1) or inside (2)");
  m.def(
      "check_products", &CheckProductEngine, nb::arg("engine"), nb::arg("device"),
      "Compares an engine for grouped products with the plain one. Returns the error relative to the largest "
      "value, the tolerance and the reason of a failure for each product");
#endif
}

}  // namespace jax_ep
