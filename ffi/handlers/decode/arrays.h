// Operands and results, read in order. The order of the Take calls is the only definition of which is which
// in C++, so jax_ep/_transport/ffi.py, _rows/quantize.py and _experts/kernel_engine.py must pass them in this
// order.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "handlers/decode/check.h"

namespace jax_ep {

// Returns all operands or all results of a call.
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

// Takes buffers in their order and stores the first error. After an error it returns only null.
class Arrays {
 public:
  Arrays(const char* op, std::vector<ffi::AnyBuffer> buffers) : op_(op), buffers_(std::move(buffers)) {}

  // Return the next buffer's data, or null for a buffer that is not `used`, and must not be given.
  template <ffi::DataType dtype>
  ffi::NativeType<dtype>* Take(const char* name, const std::vector<int64_t>& shape, bool used = true) {
    const ffi::AnyBuffer* const buffer = TakeOf(dtype, name, shape, used);
    return buffer == nullptr ? nullptr : buffer->typed_data<ffi::NativeType<dtype>>();
  }
  uint8_t* TakeFp8(const char* name, const std::vector<int64_t>& shape, bool used = true) {
    const ffi::AnyBuffer* const buffer = TakeOf(ffi::F8E4M3FN, name, shape, used);
    return buffer == nullptr ? nullptr : static_cast<uint8_t*>(buffer->untyped_data());
  }
  int32_t* TakeInts(const char* name, const std::vector<int64_t>& shape, bool used = true) {
    return Take<ffi::S32>(name, shape, used);
  }
  const MeshPosition* TakePosition() {
    return reinterpret_cast<const MeshPosition*>(TakeInts("position", {2}));
  }
  float* TakeFloats(const char* name, const std::vector<int64_t>& shape, bool used = true) {
    return Take<ffi::F32>(name, shape, used);
  }

  // Return the next buffer, and whether it is given, without taking it.
  const ffi::AnyBuffer* Peek() const { return next_ < buffers_.size() ? &buffers_[next_] : nullptr; }
  bool NextIsGiven() const { return Peek() != nullptr && IsGiven(*Peek()); }

  // Returns the next buffer, of any type and shape, or null.
  const ffi::AnyBuffer* TakeAny(const char* name) { return Next(name); }

  // Takes router output [T, K] of either integer width.
  TopkIds TakeIds(const char* name) {
    TopkIds ids{};
    const ffi::AnyBuffer* const buffer = Next(name);
    if (buffer != nullptr) Keep(DecodeIds((op_ + ": " + name).c_str(), *buffer, ids));
    return ids;
  }

  // Takes all buffers that follow.
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
  const ffi::AnyBuffer* TakeOf(ffi::DataType dtype, const char* name, const std::vector<int64_t>& shape,
                               bool used) {
    const ffi::AnyBuffer* const buffer = Next(name);
    if (buffer == nullptr) return nullptr;
    if (buffer->element_type() != dtype) {
      Keep(InvalidArgument(op_, ": ", name, " has the wrong dtype"));
    } else if (used) {
      Keep(CheckShape((op_ + ": " + name).c_str(), *buffer, shape));
    } else if (IsGiven(*buffer)) {
      Keep(InvalidArgument(op_, ": ", name, " is not used and must not be given"));
    }
    return used && !error_ ? buffer : nullptr;
  }

  std::string op_;
  std::vector<ffi::AnyBuffer> buffers_;
  size_t next_ = 0;
  std::optional<ffi::Error> error_;
};

// Binds all operands, all results and the attributes.
template <typename Attributes, typename Binding>
auto BindArrays(Binding binding) {
  return std::move(binding).RemainingArgs().RemainingRets().template Attrs<Attributes>();
}

}  // namespace jax_ep
