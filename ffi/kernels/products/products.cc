// Selection of the engine for a grouped product.
#include "kernels/products/products.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <stdexcept>

#include "core/text.h"
#include "kernels/launches.h"
#include "kernels/products/engines.h"

namespace jax_ep::cuda {
namespace {

constexpr const ProductEngine* kEngines[] = {
#ifdef JAX_EP_PRODUCTS_SM120
    &kSm120Engine,
#endif
#ifdef JAX_EP_PRODUCTS_SM100
    &kSm100Engine,
#endif
#ifdef JAX_EP_PRODUCTS_SM90
    &kSm90Engine,
#endif
    &kAnyEngine,
};
constexpr const char* kEngineNames[] = {"sm120", "sm100", "sm90", "any"};

struct Capability {
  int major = 0, minor = 0;

  std::string Name() const { return Text("sm_", major, minor); }
};

Capability CapabilityOf(int device) {
  Capability capability;
  (void)cudaDeviceGetAttribute(&capability.major, cudaDevAttrComputeCapabilityMajor, device);
  (void)cudaDeviceGetAttribute(&capability.minor, cudaDevAttrComputeCapabilityMinor, device);
  return capability;
}

int ThisDeviceIndex() {
  int device = 0;
  (void)cudaGetDevice(&device);
  return device;
}

// The engine of a device: `engine` for the kinds of products that it `computes`, the plain one for all
// others.
struct DeviceProducts {
  std::mutex mutex;
  std::string error;  // of a check after which the GPU cannot be used
  std::atomic<bool> is_prepared{false};
  const ProductEngine* engine = &kAnyEngine;
  std::array<bool, kNumProductKinds> computes{};
};

constexpr int kMaxDevices = 64;

DeviceProducts* ProductsOf(int device) {
  static auto* const products = new std::array<DeviceProducts, kMaxDevices>;
  return device < 0 || device >= kMaxDevices ? nullptr : &(*products)[device];
}

const ProductEngine& FastestVerified(Capability capability) {
  for (const ProductEngine* engine : kEngines) {
    if (engine->is_verified && engine->runs_on(capability.major, capability.minor)) return *engine;
  }
  return kAnyEngine;
}

// Returns the engine to use, or null and sets the error.
const ProductEngine* FindEngine(const std::string& requested, int device, std::string& error) {
  const Capability capability = CapabilityOf(device);
  std::string usable;
  const ProductEngine* fastest = nullptr;
  for (const ProductEngine* engine : kEngines) {
    if (!engine->runs_on(capability.major, capability.minor)) continue;
    if (engine->name == requested) return engine;
    if (fastest == nullptr) fastest = engine;
    usable += Text(usable.empty() ? "" : ", ", engine->name);
  }
  if (requested.empty()) return fastest;
  const bool is_name =
      std::find(std::begin(kEngineNames), std::end(kEngineNames), requested) != std::end(kEngineNames);
  error =
      is_name
          ? Text("grouped_dot: engine '", requested, "', which JAX_EP_PRODUCTS chooses, cannot run on GPU ",
                 device, " (", capability.Name(), ") with this build, which has ", BuiltProductEngines(),
                 "; set it to one of ", usable, ", or unset it")
          : Text(
                "grouped_dot: the environment variable JAX_EP_PRODUCTS must be sm120, sm100, sm90, any or "
                "unset, got '",
                requested, "'");
  return nullptr;
}

// Describes the products in which an engine failed its check. Empty: none.
std::string DescribeFailures(const std::vector<ProductCheck>& checks) {
  std::string failures;
  for (const ProductCheck& check : checks) {
    if (check.passed() || !check.is_supported) continue;
    failures += Text(failures.empty() ? "" : "; ", check.product, ": ");
    failures += check.failure.empty() ? Text("differs by ", check.error, " of the largest value, at most ",
                                             check.tolerance, " expected")
                                      : check.failure;
  }
  return failures;
}

}  // namespace

std::string BuiltProductEngines() {
  std::string names;
  for (const ProductEngine* engine : kEngines) names += Text(names.empty() ? "" : ",", engine->name);
  return names;
}

bool AreProductsPrepared(int device) {
  const DeviceProducts* const products = ProductsOf(device);
  return products != nullptr && products->is_prepared.load(std::memory_order_acquire);
}

ProductPreparation PrepareProducts(const std::string& requested) {
  const int device = ThisDeviceIndex();
  DeviceProducts* const products = ProductsOf(device);
  if (products == nullptr) return {};  // a verified engine computes all products
  // Held only while this device works on a stream that nothing else uses. Other devices have other locks.
  std::lock_guard<std::mutex> lock(products->mutex);
  if (AreProductsPrepared(device) || !products->error.empty()) return {products->error, ""};
  std::string error, warning;
  const ProductEngine* const engine = FindEngine(requested, device, error);
  if (engine == nullptr) return {error, ""};
  std::vector<ProductCheck> checks;
  if (!engine->is_verified) checks = CompareEngines(*engine, kAnyEngine);
  for (int kind = 0; kind < kNumProductKinds; ++kind) {
    products->computes[kind] =
        engine->is_verified || (kind < static_cast<int>(checks.size()) && checks[kind].passed());
  }
  if (const std::string failures = DescribeFailures(checks); !failures.empty()) {
    const std::string text = Text("grouped_dot: engine ", engine->name, " failed its check on GPU ", device,
                                  " (", CapabilityOf(device).Name(), "): ", failures, ". ");
    if (checks.back().is_fatal) {
      products->error =
          text +
          "This process cannot use the GPU any more. Set JAX_EP_PRODUCTS=any before the program "
          "starts, which chooses the plain engine";
      return {products->error, ""};
    }
    warning =
        text +
        "The plain engine computes these products instead, at a lower speed. JAX_EP_PRODUCTS=any chooses "
        "it for all products, without a check";
  }
  products->engine = engine;
  products->is_prepared.store(true, std::memory_order_release);
  return {"", warning};
}

std::vector<ProductCheck> CheckProducts(const std::string& name) {
  std::string error;
  const ProductEngine* const engine = FindEngine(name, ThisDeviceIndex(), error);
  if (engine == nullptr) throw std::runtime_error(error);
  return CompareEngines(*engine, kAnyEngine);
}

Operands OperandsOf(const GroupedDotParams& params) {
  if (params.row_scales != nullptr) return Operands::kFp8;
  return params.type == Float::kF16 ? Operands::kF16 : Operands::kBF16;
}

bool SuitsTma(const GroupedDotParams& params) {
  const auto aligned = [](const void* data) {
    return reinterpret_cast<uintptr_t>(data) % kProductAlignment == 0;
  };
  const int vector = params.row_scales != nullptr ? kFp8Block : kProductAlignment / sizeof(uint16_t);
  return (params.type == Float::kF16 || params.type == Float::kBF16) && params.num_rows > 0 &&
         params.num_groups > 0 && params.inner > 0 && params.inner % vector == 0 && params.outer > 0 &&
         params.outer % vector == 0 && params.matrix_width % vector == 0 && aligned(params.rows) &&
         aligned(params.others) && aligned(params.row_scales) && aligned(params.other_scales) &&
         aligned(params.out) && aligned(params.redundant) && aligned(params.scratch);
}

// Uses the plain engine for products that the device's engine does not support, or failed to compute.
cudaError_t LaunchGroupedDot(const GroupedDotParams& params, const Device& device, cudaStream_t stream) {
  const int num_sms = params.num_sms > 0 ? std::min(device.num_sms, params.num_sms) : device.num_sms;
  const int index = ThisDeviceIndex();
  DeviceProducts* const products = ProductsOf(index);
  const ProductEngine* engine = &kAnyEngine;
  if (products != nullptr && products->is_prepared.load(std::memory_order_acquire)) {
    for (int kind = 0; kind < kNumProductKinds; ++kind) {
      if (products->computes[kind] && kProductKinds[kind].product == params.product &&
          kProductKinds[kind].operands == OperandsOf(params)) {
        engine = products->engine;
      }
    }
  } else {
    engine = &FastestVerified(CapabilityOf(index));
  }
  if (!engine->supports(params)) engine = &kAnyEngine;
  return engine->launch(params, num_sms, stream);
}

cudaError_t PreloadGroupedDot() {
  const Capability capability = CapabilityOf(ThisDeviceIndex());
  for (const ProductEngine* engine : kEngines) {
    if (!engine->runs_on(capability.major, capability.minor)) continue;
    const cudaError_t error = engine->preload();
    // An engine that was never executed may fail here too. Its check then reports the error.
    if (error != cudaSuccess && engine->is_verified) return error;
    (void)cudaGetLastError();
  }
  return cudaSuccess;
}

}  // namespace jax_ep::cuda
