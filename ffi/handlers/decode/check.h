// Checks that all handlers share: error texts, shapes of operands, and the position of the device in its
// group.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/params.h"
#include "core/text.h"
#include "runtime/groups.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep {

namespace ffi = xla::ffi;

template <typename... Parts>
ffi::Error InvalidArgument(const Parts&... parts) {
  return ffi::Error::InvalidArgument(Text(parts...));
}

// Checks a buffer's shape; `what` is the op and the argument.
template <typename Buffer>
ffi::Error CheckShape(const char* what, const Buffer& buffer, const std::vector<int64_t>& expected) {
  const auto dims = buffer.dimensions();
  if (std::vector<int64_t>(dims.begin(), dims.end()) == expected) return ffi::Error::Success();
  const auto list = [](const auto& sizes) {
    std::string text = "[";
    for (size_t i = 0; i < sizes.size(); ++i) text += Text(i ? ", " : "", sizes[i]);
    return text + "]";
  };
  return InvalidArgument(what, ": expected shape ", list(expected), ", got ", list(dims));
}

// Checks that sizes and the product of those that are not 0 fit in int32, as indices and counts must.
// `what` names the product.
inline ffi::Error CheckProduct(const char* op, const char* what, std::initializer_list<int64_t> sizes) {
  int64_t product = 1;
  std::string factors;
  for (const int64_t size : sizes) {
    factors += Text(factors.empty() ? "" : " * ", size);
    product = std::max(product, product > INT32_MAX || size > INT32_MAX ? INT64_MAX : product * size);
  }
  if (product <= INT32_MAX) return ffi::Error::Success();
  return InvalidArgument(op, ": ", what, " must be less than 2**31, got ", factors);
}

// Checks the rows that each of some groups has, 0 if groups follow each other.
inline ffi::Error CheckPadding(const char* op, int64_t rows_per_group, int64_t num_rows, int64_t num_groups) {
  if (rows_per_group == 0 ||
      (rows_per_group > 0 && num_rows / rows_per_group == num_groups && num_rows % rows_per_group == 0)) {
    return ffi::Error::Success();
  }
  return InvalidArgument(op, ": rows_per_group must be 0, or ", num_rows, " rows in ", num_groups,
                         " groups, got ", rows_per_group);
}

// Returns the first failure among several checks.
inline ffi::Error FirstError(std::initializer_list<ffi::Error> errors) {
  for (const ffi::Error& error : errors) {
    if (error.failure()) return error;
  }
  return ffi::Error::Success();
}

inline std::optional<Float> FloatOfType(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F16:
      return Float::kF16;
    case ffi::DataType::BF16:
      return Float::kBF16;
    case ffi::DataType::F32:
      return Float::kF32;
    case ffi::DataType::F64:
      return Float::kF64;
    default:
      return std::nullopt;
  }
}

// Returns whether an array is given. A scalar stands for an operand that is not, no elements for a result.
template <typename Buffer>
bool IsGiven(const Buffer& buffer) {
  return buffer.dimensions().size() > 0 && buffer.element_count() > 0;
}

// Returns the number of elements of one row: the product of all dimensions except the first.
inline int64_t ElementsPerRow(const ffi::AnyBuffer& buffer) {
  int64_t elements = 1;
  const auto dims = buffer.dimensions();
  for (size_t i = 1; i < dims.size(); ++i) elements *= dims[i];
  return elements;
}

// Pairs each operand of `num_in` rows with a result of `num_out` rows of the same bytes. For a push that
// scales, as many operands follow: its factors, floating arrays like the results, all of one type.
ffi::Error DecodePayloads(const char* op, const std::vector<ffi::AnyBuffer>& args,
                          const std::vector<ffi::AnyBuffer>& rets, int64_t num_in, int64_t num_out,
                          std::vector<Payload>& payloads, PushParams* scaled = nullptr);

// Decodes payloads whose rows become FP8 on the way: one operand of 16 or 32 bits, and results of e4m3 values
// and float32 scales.
ffi::Error DecodeQuantized(const char* op, const std::vector<ffi::AnyBuffer>& args,
                           const std::vector<ffi::AnyBuffer>& rets, int64_t num_in, int64_t num_out,
                           std::vector<Payload>& payloads, Float& type);

ffi::Error DecodeIds(const char* what, const ffi::AnyBuffer& buffer, TopkIds& ids);

// Stands for a position that only the kernel can compare, because it lies on the device.
constexpr MeshPosition kPositionOnDevice{-1, 0};

// A device as a member of an open group.
struct GroupMember {
  std::shared_ptr<Group> group;
  Group::Position position;
  int32_t list;  // in the program's mesh, whose lists may be in another order than the group's
};
// Finds a device in the group of a call. `in_program` is its position in the program's mesh, or
// kPositionOnDevice.
ffi::Error FindMember(const char* op, std::string_view group_key, std::shared_ptr<Group> group,
                      int32_t device_ordinal, const MeshPosition& in_program, int32_t num_ranks,
                      GroupMember& member);

}  // namespace jax_ep
