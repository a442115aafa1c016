// The comparison of an engine with the plain one.
#pragma once

#include <vector>

#include "kernels/products/engines.h"
#include "kernels/products/products.h"

namespace jax_ep::cuda {

// A kind of product that engines other than the plain one may compute.
struct ProductKind {
  Operands operands;
  GroupedDot product;
  const char* name;
  double tolerance;
};

constexpr int kNumProductKinds = 8;
extern const ProductKind kProductKinds[kNumProductKinds];

// Returns the comparison for each kind of product, on the current device, or up to the first fatal one.
std::vector<ProductCheck> CompareEngines(const ProductEngine& engine, const ProductEngine& plain);

}  // namespace jax_ep::cuda
