// Switches of a process, for tests: environment variables, read once.
#pragma once

#include <cstdint>

namespace jax_ep {

// JAX_EP_PLAIN_COPIES=1: ops move rows by loads and stores where they could use bulk copies.
bool PlainCopies();

// JAX_EP_NO_ARENA=1: ops of few tokens, and of short rows, go the way of those of many.
bool NoArena();

// JAX_EP_NO_RAILS=1: hops between hosts go by XLA's collectives, also where NCCL's kernels could do them.
bool NoRails();

// JAX_EP_STRESS_US=n: each rank of an op on GPUs waits up to n microseconds before it enters and before it
// leaves, and outputs are first filled with a poison pattern. 0 if not set.
int64_t StressNanoseconds();

}  // namespace jax_ep
