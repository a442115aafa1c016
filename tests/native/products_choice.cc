// The choice of an engine for grouped products, with engines and a check that are made up: argv[1] says what
// the check finds. Prints the error and the warning of two calls, then the engine that computes each kind of
// product.
#include <cstdio>
#include <cstring>

#include "kernels/launches.h"
#include "kernels/products/engines.h"

namespace jax_ep::cuda {
namespace {

const char* g_computed_by = "";
const char* g_found = "";

template <bool kFast>
constexpr ProductEngine kMadeUp{
    kFast ? "sm90" : "any",
    !kFast,  // nobody has executed the fast one
    [](int, int) { return true; },
    [](const GroupedDotParams&) { return true; },
    [](const GroupedDotParams&, int, cudaStream_t) {
      g_computed_by = kFast ? "sm90" : "any";
      return cudaSuccess;
    },
    [] { return cudaSuccess; },
};

}  // namespace

const ProductEngine kSm90Engine = kMadeUp<true>, kAnyEngine = kMadeUp<false>;

const ProductKind kProductKinds[kNumProductKinds] = {
    {Operands::kF16, GroupedDot::kRows, "float16 rows", 0.1},
    {Operands::kF16, GroupedDot::kRowsTransposed, "float16 gradient of rows", 0.1},
    {Operands::kF16, GroupedDot::kWeights, "float16 gradient of weights", 0.1},
    {Operands::kBF16, GroupedDot::kRows, "bfloat16 rows", 0.1},
    {Operands::kBF16, GroupedDot::kRowsTransposed, "bfloat16 gradient of rows", 0.1},
    {Operands::kBF16, GroupedDot::kWeights, "bfloat16 gradient of weights", 0.1},
    {Operands::kFp8, GroupedDot::kRowsTransposed, "FP8 rows", 0.1},
    {Operands::kFp8, GroupedDot::kWeights, "FP8 gradient of weights", 0.1},
};

std::vector<ProductCheck> CompareEngines(const ProductEngine&, const ProductEngine&) {
  std::vector<ProductCheck> checks;
  for (const ProductKind& kind : kProductKinds)
    checks.push_back({kind.name, 0, kind.tolerance, true, "", false});
  if (std::strcmp(g_found, "differences") == 0) {
    checks[3].error = 0.5;
    checks[6].failure = "the launch failed: out of resources";
  } else if (std::strcmp(g_found, "no kernels") == 0) {
    for (ProductCheck& check : checks) check.is_supported = false;
  } else if (std::strcmp(g_found, "a hang") == 0) {
    checks.resize(2);
    checks[1].failure = "did not end within 60 s";
    checks[1].is_fatal = true;
  }
  return checks;
}

int Run(const char* found) {
  g_found = found;
  for (int call = 0; call < 2; ++call) {
    const ProductPreparation preparation = PrepareProducts("");
    std::printf("%s\n%s\n", preparation.error.c_str(), preparation.warning.c_str());
  }
  float scales = 1;
  for (const ProductKind& kind : kProductKinds) {
    GroupedDotParams params{};
    params.product = kind.product;
    params.type = kind.operands == Operands::kF16 ? Float::kF16 : Float::kBF16;
    params.row_scales = kind.operands == Operands::kFp8 ? &scales : nullptr;
    if (LaunchGroupedDot(params, Device{}, nullptr) != cudaSuccess) return 1;
    std::printf("%s: %s\n", kind.name, g_computed_by);
  }
  return 0;
}

}  // namespace jax_ep::cuda

int main(int, char** argv) { return jax_ep::cuda::Run(argv[1]); }
