// Rows on their way through shared memory: one warp of a team has them loaded by bulk copies, the others work
// on them. Many more bytes are under way than registers could hold.
#pragma once

#include "kernels/rows/ring_plan.cuh"
#include "kernels/rows/sum.cuh"

namespace jax_ep::cuda {

// What becomes of a sum; or of a row that is scaled, to which the factors in the slot belong.
struct alignas(16) Target {
  int32_t array;
  int32_t first;   // column
  int32_t number;  // of the sum, or of the row, which says where it goes
  int32_t wave;    // folds: the wave of which all of a sum is done then; or -1
};

// What stands beside a row in its slot. Rows that are scaled: a token's row, kRow alone, and then the
// factors, each with kLast, for each is a dot product of its own.
struct alignas(16) SlotHeader {
  enum Flag : int32_t {
    kRow = 1,   // the slot has a row; a sum of no rows has a note alone
    kLast = 2,  // the sum ends, and the goal counts
    kEnd = 4,   // no more rows, until the next phase
  };
  int32_t flags;
  float factor;
  int32_t vectors;  // 16 bytes each
  Target target;
};

struct RingMemory {
  uint64_t full[kMaxSlots], empty[kMaxSlots];
  SlotHeader headers[kMaxSlots];
};

// One warp's view of its team's ring. All of a team's warps go through the slots in the same order.
class Ring {
 public:
  __device__ Ring(const RingPlan& plan, RingMemory* memory, std::byte* shared)
      : plan_(plan),
        lane_(threadIdx.x % kWarp),
        team_(threadIdx.x / kWarp / (plan.summers + 1)),
        warp_in_team_(threadIdx.x / kWarp % (plan.summers + 1)),
        memory_(memory[is_used() ? team_ : 0]),
        bytes_(shared + int64_t{plan.slots} * plan.slot_bytes * team_) {}

  // By the whole block, which synchronises before it uses the ring.
  __device__ void Init() {
    if (is_used() && loads() && lane_ == 0) {
      for (int i = 0; i < plan_.slots; ++i) {
        InitBarrier(&memory_.full[i], 1);
        InitBarrier(&memory_.empty[i], plan_.summers);
      }
      FenceBarriers();
    }
  }

  // Whether this warp belongs to a team; a block may have warps left.
  __device__ bool is_used() const { return team_ < plan_.teams; }
  // Whether this warp has rows loaded, or works on them.
  __device__ bool loads() const { return warp_in_team_ == plan_.summers; }
  __device__ int team() const { return team_; }
  // Of a warp that works on rows: its number in the team, and the first of its vectors of each part of a row.
  __device__ int warp_in_team() const { return warp_in_team_; }
  __device__ int first_vector() const { return warp_in_team_ * kRingVectors * kWarp; }
  __device__ const RingPlan& plan() const { return plan_; }

  // As the warp that loads: puts notes into the next slots, each of the lanes one, in their order; and where
  // it has a row, that from `row` on.
  __device__ void Put(unsigned lanes, const SlotHeader& header, const void* row, uint32_t bytes) {
    const int count = __popc(lanes), index = __popc(lanes & ((1u << lane_) - 1));
    for (int done = 0; done < count; done += plan_.slots) {  // as many at a time as there are slots
      const int ahead = index - done;
      if ((lanes >> lane_ & 1) != 0 && ahead >= 0 && ahead < plan_.slots) {
        const bool wraps = slot_ + ahead >= plan_.slots;
        const int slot = slot_ + ahead - (wraps ? plan_.slots : 0);
        WaitForLoad(&memory_.empty[slot], phase_ ^ 1 ^ static_cast<uint32_t>(wraps));
        memory_.headers[slot] = header;
        if ((header.flags & SlotHeader::kRow) != 0) {
          BulkLoad(bytes_ + slot * plan_.slot_bytes, row, bytes, &memory_.full[slot]);
        } else {
          Arrive(&memory_.full[slot]);
        }
      }
      __syncwarp();
      Step(min(count - done, plan_.slots));
    }
  }

  // As a warp that sums: the next slot's note, once its row has come.
  __device__ const SlotHeader& Await() const {
    WaitForLoad(&memory_.full[slot_], phase_);
    return memory_.headers[slot_];
  }
  __device__ const std::byte* row() const { return bytes_ + slot_ * plan_.slot_bytes; }
  // Done with the slot.
  __device__ void Release() {
    __syncwarp();
    if (lane_ == 0) Arrive(&memory_.empty[slot_]);
    Step(1);
  }

 private:
  __device__ void Step(int slots) {
    slot_ += slots;
    if (slot_ < plan_.slots) return;
    slot_ -= plan_.slots;
    phase_ ^= 1;
  }

  const RingPlan& plan_;
  int lane_, team_, warp_in_team_;
  RingMemory& memory_;
  std::byte* bytes_;
  int slot_ = 0;
  uint32_t phase_ = 0;
};

// As the warp that loads: no more rows come in this phase.
__device__ inline void EndPhase(Ring& ring) { ring.Put(1, {SlotHeader::kEnd, 0, 0, {}}, nullptr, 0); }

// Puts the notes of one sum of rows of an array. `terms`: as those of SumSlice. `sum` and `wave`: as in the
// Goal of its last part.
template <typename T>
__device__ void PutSum(Ring& ring, const SumInputs<T>& inputs, int array, int64_t width, int sum, int wave) {
  constexpr int N = 16 / sizeof(T);
  const int columns = ring.plan().vectors() * N, lane = threadIdx.x % kWarp;
  const unsigned lanes = inputs.lanes == 0 ? 1 : inputs.lanes;
  const int flags =
      (inputs.lanes == 0 ? 0 : SlotHeader::kRow) | (lane == 31 - __clz(lanes) ? SlotHeader::kLast : 0);
  for (int first = 0; first < width; first += columns) {
    const int vectors = static_cast<int>(min(int64_t{columns}, width - first)) / N;
    const SlotHeader header{
        flags, inputs.factor, vectors, {array, first, sum, first + columns < width ? -1 : wave}};
    ring.Put(lanes, header, inputs.row + first, vectors * 16);
  }
}

// Adds a row's vectors to their sums.
template <typename T, int N>
__device__ void AddRow(const Vector<T, N> (&vectors)[kRingVectors], float factor,
                       typename Sum<T>::Acc (&total)[kRingVectors][N]) {
  using Acc = typename Sum<T>::Acc;
  const auto add = [&](auto weigh) {
#pragma unroll
    for (int v = 0; v < kRingVectors; ++v) {
#pragma unroll
      for (int j = 0; j < N; ++j) total[v][j] = weigh(static_cast<Acc>(vectors[v][j]), total[v][j]);
    }
  };
  // One times a number is the number.
  if (factor == 1) {
    add([](Acc value, Acc sum) { return sum + value; });
  } else {
    add([&](Acc value, Acc sum) { return MultiplyAdd(static_cast<Acc>(factor), value, sum); });
  }
}

// What a thread has taken from a slot.
template <typename T>
struct SlotData {
  Vector<T, 16 / sizeof(T)> vectors[kRingVectors];
  float factor;
  int flags;
  Target target;  // if the row is the last of a sum

  __device__ void Load(Ring& ring, int first) {
    const SlotHeader& header = ring.Await();
    flags = header.flags;
    factor = header.factor;
    const int remaining = header.vectors - first;
    if ((flags & SlotHeader::kLast) != 0) target = header.target;
#pragma unroll
    for (int v = 0; v < kRingVectors; ++v) {
      if (v * kWarp < remaining)
        vectors[v].bits = reinterpret_cast<const uint4*>(ring.row())[first + v * kWarp];
    }
    ring.Release();
  }
};

// As a warp that works on rows: takes them until the phase ends. Calls work(taken, next) with each and the
// flags of the one after it, which is taken before the present one is worked on: one comes meanwhile.
template <typename T, typename Work>
__device__ void ConsumeRows(Ring& ring, Work&& work) {
  const int first = ring.first_vector() + threadIdx.x % kWarp;
  const auto step = [&](const SlotData<T>& data, SlotData<T>& next) {
    if ((data.flags & SlotHeader::kEnd) != 0) return false;
    next.Load(ring, first);
    work(data, next.flags);
    return true;
  };
  SlotData<T> even, odd;
  even.Load(ring, first);
  while (step(even, odd) && step(odd, even)) {
  }
}

// As a warp that sums: store(goal, first, total) is called with each sum's columns from `first` on that are
// this warp's.
template <typename T, typename Store>
__device__ void SumRows(Ring& ring, Store&& store) {
  constexpr int N = 16 / sizeof(T);
  typename Sum<T>::Acc total[kRingVectors][N] = {};
  ConsumeRows<T>(ring, [&](const SlotData<T>& data, int) {
    if ((data.flags & SlotHeader::kRow) != 0) AddRow<T, N>(data.vectors, data.factor, total);
    if ((data.flags & SlotHeader::kLast) == 0) return;
    store(data.target, data.target.first + ring.first_vector() * N, total);
#pragma unroll
    for (int v = 0; v < kRingVectors; ++v) {
#pragma unroll
      for (int j = 0; j < N; ++j) total[v][j] = 0;
    }
  });
}

}  // namespace jax_ep::cuda
