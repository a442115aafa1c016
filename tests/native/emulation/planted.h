// The planted mistake that this run of a program makes (tests/support/stress_programs.py).
#pragma once

#include <cstdlib>

// From PLANTED in the environment; -1: none.
inline const int planted = std::getenv("PLANTED") == nullptr ? -1 : std::atoi(std::getenv("PLANTED"));
