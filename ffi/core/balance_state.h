// The state while redundant experts are placed (balance.h), and its size.
#pragma once

#include "core/params.h"

namespace jax_ep {

// The best item of a search: the one with the largest value, among equal ones the first. If there is no item,
// both are -1.
struct Candidate {
  int32_t value = -1;
  int32_t index = -1;
};

// The state of a placement, which lies in shared memory on devices.
struct BalanceState {
  Candidate* largest;          // [R] home expert with the most rows at home among those that are not blocked
  int32_t* rows;               // [E] rows that stay at home
  int32_t* rows_before;        // [E] rows of the sources below `source`
  int32_t* is_blocked;         // [E] 1: no rank can take rows of this expert
  int32_t* num_instances;      // [E]
  int32_t* instance_ends;      // [E] instances of experts 0..e
  uint32_t* hosts;             // [E, W] bits of the ranks that have an instance, with W = ceil(R / 32)
  int32_t* load;               // [R] rows that a rank computes
  int32_t* num_open;           // [R] home experts that are not blocked
  int32_t* num_used;           // [R] redundant experts in use
  int32_t* unused_ends;        // [R] unused redundant experts of ranks 0..r
  int32_t* redundant_experts;  // [R, S] logical experts, in the order in which they came into use
  int32_t* redundant_homes;    // [R, S] home ranks of these experts
  int32_t* redundant_rows;     // [R, S]
  int32_t* ranks;              // [P] rank of each instance, by its position in `order`
  int32_t* quotas;             // [P] rows that each instance takes from other ranks, likewise
  int32_t* sends;  // [P] rows that each instance takes from its own rank, later from `source`, likewise

  // Sets each array to take(its number of words).
  template <typename Take>
  JAX_EP_HD void AssignFrom(const BalanceParams& params, Take&& take) {
    const int64_t R = params.num_ranks, E = params.num_experts, S = params.num_redundant_experts;
    static_assert(sizeof(Candidate) == 2 * sizeof(int32_t));
    largest = reinterpret_cast<Candidate*>(take(2 * R));
    rows = take(E);
    rows_before = take(E);
    is_blocked = take(E);
    num_instances = take(E);
    instance_ends = take(E);
    hosts = reinterpret_cast<uint32_t*>(take(E * WordsPerExpert(params)));
    load = take(R);
    num_open = take(R);
    num_used = take(R);
    unused_ends = take(R);
    redundant_experts = take(R * S);
    redundant_homes = take(R * S);
    redundant_rows = take(R * S);
    ranks = take(params.num_physical_experts());
    quotas = take(params.num_physical_experts());
    sends = take(params.num_physical_experts());
  }

  // Divides `words` among the arrays.
  JAX_EP_HD void Assign(const BalanceParams& params, int32_t* words) {
    AssignFrom(params, [&](int64_t count) {
      int32_t* const array = words;
      words += count;
      return array;
    });
  }

  JAX_EP_HD static int32_t WordsPerExpert(const BalanceParams& params) {
    return (params.num_ranks + 31) / 32;
  }
};

JAX_EP_HD inline int64_t BalanceStateBytes(const BalanceParams& params) {
  int64_t words = 0;
  BalanceState{}.AssignFrom(params, [&](int64_t count) -> int32_t* {
    words += count;
    return nullptr;
  });
  return words * int64_t{sizeof(int32_t)};
}

}  // namespace jax_ep
