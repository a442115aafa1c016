// How a program of tests ends that finds what must not be.
#pragma once

#include <errno.h>

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace jax_ep::cuda {

inline uint64_t seed;          // that repeats what the program does now
inline const char* what = "";  // it does

[[noreturn]] inline void Die(const char* format, ...) {
  std::fflush(stdout);
  std::fprintf(stderr, "%s: seed %llu (%s): ", program_invocation_short_name,
               static_cast<unsigned long long>(seed), what);
  va_list arguments;
  va_start(arguments, format);
  std::vfprintf(stderr, format, arguments);
  va_end(arguments);
  std::fprintf(stderr, "\n");
  std::_Exit(1);
}

}  // namespace jax_ep::cuda
