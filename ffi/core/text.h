// Error texts without iostreams: their locales break where a module carries its own C++ library.
#pragma once

#include <cstdio>
#include <string>
#include <string_view>
#include <type_traits>

namespace jax_ep {

template <typename Part>
void AppendTo(std::string& text, const Part& part) {
  if constexpr (std::is_convertible_v<Part, std::string_view>) {
    text += std::string_view(part);
  } else if constexpr (std::is_same_v<Part, char>) {
    text += part;
  } else if constexpr (std::is_floating_point_v<Part>) {
    char digits[32];
    std::snprintf(digits, sizeof(digits), "%g", static_cast<double>(part));
    text += digits;
  } else {
    text += std::to_string(part);
  }
}

// The parts one after another.
template <typename... Parts>
std::string Text(const Parts&... parts) {
  std::string text;
  (AppendTo(text, parts), ...);
  return text;
}

}  // namespace jax_ep
