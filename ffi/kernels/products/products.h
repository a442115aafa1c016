// The choice of an engine for grouped products, and the check of engines that nobody has executed.
#pragma once

#include <string>
#include <vector>

namespace jax_ep::cuda {

// Returns the names of the engines in this build, fastest first, separated by commas.
std::string BuiltProductEngines();

// Returns whether PrepareProducts has succeeded on a device.
bool AreProductsPrepared(int device);

struct ProductPreparation {
  std::string error;    // products cannot run; otherwise empty
  std::string warning;  // a slower engine computes some products; otherwise empty. Reported once per device
};

// Chooses the engine for the products of the current device, once. `requested` is an engine's name, or empty
// to choose the fastest one. An engine that was never executed is first compared with the plain one, which
// takes its place in products that differ. The calling thread must not be capturing a CUDA graph. Nothing
// here waits for other ranks.
ProductPreparation PrepareProducts(const std::string& requested);

// The comparison of an engine with the plain one, for one product.
struct ProductCheck {
  std::string product;
  double error;         // largest difference, relative to the largest value
  double tolerance;     // largest error that rounding explains
  bool is_supported;    // the engine has a kernel for the product
  std::string failure;  // reason why the engine did not compute the product; otherwise empty
  bool is_fatal;        // the GPU is no longer usable in this process

  bool passed() const { return is_supported && failure.empty() && error <= tolerance; }
};

// Computes a small product of each kind on the current device, by the named engine and by the plain one.
// Throws std::runtime_error if the device cannot run the engine.
std::vector<ProductCheck> CheckProducts(const std::string& engine);

}  // namespace jax_ep::cuda
