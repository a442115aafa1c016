// The same as ffi/kernels/threads.cuh, for the host: found before it. A request for a ticket takes effect
// some time after it, or when it is awaited.
#pragma once

#include <cuda_runtime.h>

#include "core/index.h"

namespace jax_ep::cuda {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

template <typename T>
T SumUpToLane(T value) {
  for (int step = 1; step < kWarp; step *= 2) {
    const T before = __shfl_up_sync(kAllLanes, value, step);
    if (static_cast<int>(threadIdx.x) % kWarp >= step) value += before;
  }
  return value;
}

struct ThreadGroup {
  int thread;
  int threads;
  int barrier;

  void Sync(int line = __builtin_LINE()) const {
    emulation::Machine::Get().Meet(barrier, static_cast<unsigned>(threads), line);
  }
};

struct TicketCounter {
  unsigned* next;

  // Returns the number of the request, by which Broadcast finds the ticket.
  unsigned Request(int lane) const {
    if (lane != 0) return 0;
    Requested& requested = RequestOf(++LastRequest());
    requested = {0, 0};
    const auto add = [next = next, &requested] {
      requested.ticket = __atomic_fetch_add(next, 1u, __ATOMIC_RELAXED);
    };
    emulation::Machine& machine = emulation::Machine::Get();
    const unsigned number = LastRequest();
    if (machine.IsShared(next)) {
      machine.Access(true);
      add();
    } else {
      requested.delayed = machine.Delay(add);
    }
    return number;
  }
  static int Broadcast(unsigned request) {
    unsigned ticket = 0;
    if (threadIdx.x % kWarp == 0) {
      const Requested& requested = RequestOf(request);
      if (requested.delayed != 0) emulation::Machine::Get().Await(requested.delayed);
      ticket = requested.ticket;
    }
    return static_cast<int>(__shfl_sync(kAllLanes, ticket, 0));
  }
  static void Settle(unsigned request) { (void)Broadcast(request); }
  void Reset() const {
    emulation::Machine::Get().Delay([next = next] { __atomic_store_n(next, 0u, __ATOMIC_RELAXED); });
  }

 private:
  struct Requested {
    unsigned ticket;
    uint64_t delayed;
  };
  static unsigned& LastRequest() {
    static unsigned last = 0;
    return last;
  }
  // Of a request that is not long ago.
  static Requested& RequestOf(unsigned number) {
    static Requested requests[1 << 20];
    return requests[number % (1 << 20)];
  }
};

}  // namespace jax_ep::cuda
