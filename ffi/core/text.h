// Error texts without iostreams, whose locales break if a module carries its own copy of the C++ library.
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

// Returns the concatenation of the parts.
template <typename... Parts>
std::string Text(const Parts&... parts) {
  std::string text;
  (AppendTo(text, parts), ...);
  return text;
}

}  // namespace jax_ep
