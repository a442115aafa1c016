// Rings of slots in shared memory, through which rows stream: one warp of a team loads rows by bulk copies,
// and the others process them. Many more bytes are in flight than registers could hold.
#pragma once

#include "kernels/rows/ring_partition.cuh"
#include "kernels/rows/sum.cuh"

namespace jax_ep::cuda {

// The result that a sum is stored to; or, if rows are scaled, the row that the factors in the slot belong to.
struct alignas(16) Target {
  int32_t array;
  int32_t first;   // column
  int32_t number;  // of the sum or of the row; it determines the destination
  int32_t wave;    // fold: the wave that this part of a sum completes; or -1
};

// The metadata of a row in a slot. If rows are scaled, a token's row comes first, with kRow alone. The
// factors follow, each with kLast, because each yields its own dot product.
struct alignas(16) SlotHeader {
  enum Flag : int32_t {
    kRow = 1,   // the slot has a row; a sum of no rows has only a header
    kLast = 2,  // the sum ends here, and `target` is valid
    kEnd = 4,   // no more rows until the next phase
  };
  int32_t flags;
  float factor;
  int32_t vectors;  // of 16 bytes each
  Target target;
};

struct RingMemory {
  uint64_t full[kMaxSlots], empty[kMaxSlots];
  SlotHeader headers[kMaxSlots];
};

// One warp's view of its team's ring. All warps of a team visit the slots in the same order.
class Ring {
 public:
  __device__ Ring(const RingPartition& partition, RingMemory* memory, std::byte* shared)
      : partition_(partition),
        lane_(threadIdx.x % kWarp),
        team_(threadIdx.x / kWarp / (partition.summers + 1)),
        warp_in_team_(threadIdx.x / kWarp % (partition.summers + 1)),
        memory_(memory[is_used() ? team_ : 0]),
        bytes_(shared + int64_t{partition.slots} * partition.slot_bytes * team_) {}

  // Initializes the barriers. Called by the whole block, which synchronizes before it uses the ring.
  __device__ void Init() {
    if (is_used() && loads() && lane_ == 0) {
      for (int i = 0; i < partition_.slots; ++i) {
        InitBarrier(&memory_.full[i], 1);
        InitBarrier(&memory_.empty[i], partition_.summers);
      }
      FenceBarriers();
    }
  }

  // Returns true if this warp belongs to a team. A block may have warps left over.
  __device__ bool is_used() const { return team_ < partition_.teams; }
  // Returns true if this warp loads rows, false if it processes them.
  __device__ bool loads() const { return warp_in_team_ == partition_.summers; }
  __device__ int team() const { return team_; }
  // Return the index in the team of a warp that processes rows, and the first of its vectors in each part of
  // a row.
  __device__ int warp_in_team() const { return warp_in_team_; }
  __device__ int first_vector() const { return warp_in_team_ * kRingVectors * kWarp; }
  __device__ const RingPartition& partition() const { return partition_; }

  // Fills the next slots, one for each lane in `lanes`, in the order of the lanes: each lane puts its header
  // and, if it has a row, starts the load of `bytes` bytes from `row`. Unless `weight` is null, the number
  // there becomes the header's factor. Called by the warp that loads.
  __device__ void Put(unsigned lanes, const SlotHeader& header, const void* row, uint32_t bytes,
                      const float* weight = nullptr) {
    const int count = __popc(lanes), index = __popc(lanes & ((1u << lane_) - 1));
    for (int done = 0; done < count; done += partition_.slots) {  // at most all slots at a time
      const int ahead = index - done;
      if ((lanes >> lane_ & 1) != 0 && ahead >= 0 && ahead < partition_.slots) {
        const bool wraps = slot_ + ahead >= partition_.slots;
        const int slot = slot_ + ahead - (wraps ? partition_.slots : 0);
        WaitForLoad(&memory_.empty[slot], phase_ ^ 1 ^ static_cast<uint32_t>(wraps));
        if (weight == nullptr) {
          memory_.headers[slot] = header;
        } else {
          SlotHeader& slot_header = memory_.headers[slot];
          slot_header.flags = header.flags;
          slot_header.vectors = header.vectors;
          slot_header.target = header.target;
          CopyFloat(&slot_header.factor, weight);
          HoldForCopies(&memory_.full[slot]);
        }
        if ((header.flags & SlotHeader::kRow) != 0) {
          BulkLoad(bytes_ + slot * partition_.slot_bytes, row, bytes, &memory_.full[slot]);
        } else {
          Arrive(&memory_.full[slot]);
        }
      }
      __syncwarp();
      Step(min(count - done, partition_.slots));
    }
  }

  // Waits for the row of the next slot and returns its header. Called by a warp that processes rows.
  __device__ const SlotHeader& Await() const {
    WaitForLoad(&memory_.full[slot_], phase_);
    return memory_.headers[slot_];
  }
  __device__ const std::byte* row() const { return bytes_ + slot_ * partition_.slot_bytes; }
  // Releases the slot.
  __device__ void Release() {
    __syncwarp();
    if (lane_ == 0) Arrive(&memory_.empty[slot_]);
    Step(1);
  }

 private:
  __device__ void Step(int slots) {
    slot_ += slots;
    if (slot_ < partition_.slots) return;
    slot_ -= partition_.slots;
    phase_ ^= 1;
  }

  const RingPartition& partition_;
  int lane_, team_, warp_in_team_;
  RingMemory& memory_;
  std::byte* bytes_;
  int slot_ = 0;
  uint32_t phase_ = 0;
};

// Ends the phase: no more rows come. Called by the warp that loads.
__device__ inline void EndPhase(Ring& ring) { ring.Put(1, {SlotHeader::kEnd, 0, 0, {}}, nullptr, 0); }

// Loads the rows of one sum of an array. `inputs` are as in SumSlice. Unless `weight` is null, the number
// there replaces the factor of the lane's row. `sum` and `wave` go to the Target of the sum's last part.
// A sum without rows puts one header if `puts_empty`, or else nothing.
template <typename T>
__device__ void PutSum(Ring& ring, const SumInputs<T>& inputs, const float* weight, int array, int64_t width,
                       int sum, int wave, bool puts_empty = true) {
  constexpr int N = 16 / sizeof(T);
  const int columns = ring.partition().vectors() * N, lane = threadIdx.x % kWarp;
  const unsigned lanes = inputs.lanes == 0 && puts_empty ? 1 : inputs.lanes;
  const int flags =
      (inputs.lanes == 0 ? 0 : SlotHeader::kRow) | (lane == 31 - __clz(lanes) ? SlotHeader::kLast : 0);
  for (int first = 0; first < width; first += columns) {
    const int vectors = static_cast<int>(min(int64_t{columns}, width - first)) / N;
    const SlotHeader header{
        flags, inputs.factor, vectors, {array, first, sum, first + columns < width ? -1 : wave}};
    ring.Put(lanes, header, inputs.row + first, vectors * 16, weight);
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
  // A multiplication by 1 would not change the value.
  if (factor == 1) {
    add([](Acc value, Acc sum) { return sum + value; });
  } else {
    add([&](Acc value, Acc sum) { return MultiplyAdd(static_cast<Acc>(factor), value, sum); });
  }
}

// The contents of a slot, as one thread has loaded them into registers.
template <typename T>
struct SlotData {
  Vector<T, 16 / sizeof(T)> vectors[kRingVectors];
  float factor;
  int flags;
  Target target;  // valid if the row is the last of a sum

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

// Processes rows until the phase ends. Calls work(data, next_flags) for each row, with the flags of the row
// after it. That row is loaded before the present one is processed, so that the loads overlap with the work.
// Called by a warp that processes rows.
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

// Sums rows until the phase ends. Calls store(target, first, total) with this warp's columns of each sum,
// which begin at `first`. Called by a warp that sums.
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
