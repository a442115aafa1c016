// Switches of a process: environment variables, read once. All but JAX_EP_PRODUCTS are for tests.
#pragma once

#include <cstdint>
#include <string>

namespace jax_ep {

// Returns whether JAX_EP_PLAIN_COPIES=1: ops move rows by loads and stores instead of bulk copies.
bool PlainCopies();

// Returns whether JAX_EP_NO_ARENA=1: ops of few tokens or short rows take the path of large ops.
bool NoArena();

// Returns whether JAX_EP_NO_RAILS=1: hops between domains use XLA's collectives even if NCCL's device API
// works.
bool NoRails();

// Returns JAX_EP_STRESS_US in nanoseconds, 0 if it is not set. Each rank of an op on GPUs waits up to that
// long before it enters and before it leaves, and outputs are first filled with a poison pattern.
int64_t StressNanoseconds();

// Returns JAX_EP_PRODUCTS, the name of the engine for grouped products on GPUs. Empty: the fastest one.
const std::string& ProductEngineName();

}  // namespace jax_ep
