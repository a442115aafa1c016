// Grouped products on GPUs, for handlers that compute one.
#pragma once

#include <optional>

#include "handlers/decode/arrays.h"
#include "handlers/gpu/launch.h"

namespace jax_ep {

// The members are in the order of their registration below.
struct ProductAttributes {
  int64_t product;  // GroupedDot
  int64_t allow_tf32;
  int64_t num_sms;
  int64_t rows_per_group;
  int64_t first_column;  // of the matrices, from which on the result has as many as it is wide
  int64_t clears_rows;   // GroupedDotParams
};

// Decodes a product, which is in FP8 if its rows are. Returns in `params` none if it has no elements.
ffi::Error DecodeGroupedDot(Arrays in, Arrays out, const ProductAttributes& attributes,
                            std::optional<GroupedDotParams>& params);

// Launches a product that was decoded.
ffi::Error RunGroupedDot(const std::optional<GroupedDotParams>& params, cudaStream_t stream);

}  // namespace jax_ep

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_ep::ProductAttributes, StructMember<int64_t>("product"),
                                      StructMember<int64_t>("allow_tf32"), StructMember<int64_t>("num_sms"),
                                      StructMember<int64_t>("rows_per_group"),
                                      StructMember<int64_t>("first_column"),
                                      StructMember<int64_t>("clears_rows"));
