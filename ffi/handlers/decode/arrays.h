// Operands and results, read one after the other. In C++ only the order of these Take calls says which is
// which; jax_ep/_ffi.py must pass them so.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "handlers/decode/check.h"

namespace jax_ep {

// All operands, or all results, of a call.
inline std::vector<ffi::AnyBuffer> BuffersOf(const ffi::RemainingArgs& args) {
  std::vector<ffi::AnyBuffer> buffers;
  for (size_t i = 0; i < args.size(); ++i) buffers.push_back(*args.get<ffi::AnyBuffer>(i));
  return buffers;
}
inline std::vector<ffi::AnyBuffer> BuffersOf(const ffi::RemainingRets& rets) {
  std::vector<ffi::AnyBuffer> buffers;
  for (size_t i = 0; i < rets.size(); ++i) buffers.push_back(**rets.get<ffi::AnyBuffer>(i));
  return buffers;
}

// Takes buffers in their order, and keeps the first error. After one, everything it gives is null.
class Arrays {
 public:
  Arrays(const char* op, std::vector<ffi::AnyBuffer> buffers) : op_(op), buffers_(std::move(buffers)) {}

  // The next buffer's data. A buffer that is not `used` has no elements, and is null.
  template <ffi::DataType dtype>
  ffi::NativeType<dtype>* Take(const char* name, const std::vector<int64_t>& shape, bool used = true) {
    const ffi::AnyBuffer* const buffer = Next(name);
    if (buffer == nullptr) return nullptr;
    if (buffer->element_type() != dtype) {
      return Fail<dtype>(InvalidArgument(op_, ": ", name, " has the wrong dtype"));
    }
    if (!used) {
      if (buffer->element_count() == 0) return nullptr;
      return Fail<dtype>(InvalidArgument(op_, ": ", name, " is not used, and must have no elements"));
    }
    if (auto error = CheckShape((op_ + ": " + name).c_str(), *buffer, shape); error.failure()) {
      return Fail<dtype>(std::move(error));
    }
    return buffer->typed_data<ffi::NativeType<dtype>>();
  }
  int32_t* TakeInts(const char* name, const std::vector<int64_t>& shape, bool used = true) {
    return Take<ffi::S32>(name, shape, used);
  }
  const MeshPlace* TakePlace() { return reinterpret_cast<const MeshPlace*>(TakeInts("place", {2})); }
  float* TakeFloats(const char* name, const std::vector<int64_t>& shape, bool used = true) {
    return Take<ffi::F32>(name, shape, used);
  }

  // The next buffer as it is, and whether there are elements in it; it is taken by what follows.
  const ffi::AnyBuffer* Peek() const { return next_ < buffers_.size() ? &buffers_[next_] : nullptr; }
  bool HasElements() const { return Peek() != nullptr && Peek()->element_count() > 0; }

  // Router output [T, K] of either integer width.
  TopkIds TakeIds(const char* name) {
    TopkIds ids{};
    const ffi::AnyBuffer* const buffer = Next(name);
    if (buffer != nullptr) Keep(DecodeIds((op_ + ": " + name).c_str(), *buffer, ids));
    return ids;
  }

  // All that follow.
  std::vector<ffi::AnyBuffer> Rest() {
    std::vector<ffi::AnyBuffer> rest(buffers_.begin() + static_cast<std::ptrdiff_t>(next_), buffers_.end());
    next_ = buffers_.size();
    return rest;
  }

  ffi::Error error() const { return error_ ? *error_ : ffi::Error::Success(); }

 private:
  const ffi::AnyBuffer* Next(const char* name) {
    if (error_) return nullptr;
    if (next_ == buffers_.size()) Keep(InvalidArgument(op_, ": ", name, " is missing"));
    return error_ ? nullptr : &buffers_[next_++];
  }
  void Keep(ffi::Error error) {
    if (error.failure() && !error_) error_ = std::move(error);
  }
  template <ffi::DataType dtype>
  ffi::NativeType<dtype>* Fail(ffi::Error error) {
    Keep(std::move(error));
    return nullptr;
  }

  std::string op_;
  std::vector<ffi::AnyBuffer> buffers_;
  size_t next_ = 0;
  std::optional<ffi::Error> error_;
};

}  // namespace jax_ep
