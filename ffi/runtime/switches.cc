#include "runtime/switches.h"

#include <algorithm>
#include <cstdlib>

namespace jax_ep {

static int64_t ReadNumber(const char* name) {
  const char* text = std::getenv(name);
  return text == nullptr ? 0 : std::max(0LL, std::atoll(text));
}

bool PlainCopies() {
  static const bool value = ReadNumber("JAX_EP_PLAIN_COPIES") != 0;
  return value;
}

bool NoArena() {
  static const bool value = ReadNumber("JAX_EP_NO_ARENA") != 0;
  return value;
}

bool NoRails() {
  static const bool value = ReadNumber("JAX_EP_NO_RAILS") != 0;
  return value;
}

int64_t StressNanoseconds() {
  static const int64_t value = std::min<int64_t>(ReadNumber("JAX_EP_STRESS_US"), 1'000'000) * 1000;
  return value;
}

const std::string& ProductEngineName() {
  static const std::string* const value = [] {
    const char* text = std::getenv("JAX_EP_PRODUCTS");
    return new std::string(text == nullptr ? "" : text);
  }();
  return *value;
}

}  // namespace jax_ep
