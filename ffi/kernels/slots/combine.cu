// A combine of few tokens, through the arena: each rank sums the rows that it holds of a token, and writes
// the sum to the slot that the token's rank has for it, which adds up what arrives.
#include "kernels/kernels.h"
#include "kernels/launch.h"
#include "kernels/rows/sum.cuh"
#include "kernels/slots/meet.cuh"
#include "kernels/slots/plan.h"

namespace jax_ep::cuda {
namespace {

// Of a block, that begin with sums to be sent; the others add up what arrives. Sums take longer.
constexpr int kSummingWarps = 12;

// By value in the kernel's parameters.
struct SlotPullArgs : SlotArgs {
  Summand summand;
  const float* row_weights;
  Bias biases[kMaxBiases];
  int32_t num_biases;
};

// What the sum in a slot is yet to be multiplied by: a rank's only row of a token travels as it is, so that
// its product is not rounded.
__device__ float& FactorIn(std::byte* slot) { return *reinterpret_cast<float*>(slot); }

template <typename T>
__device__ T* RowIn(std::byte* slot) {
  return reinterpret_cast<T*>(slot + kSlotHeadBytes);
}

// The rows here of the token that slot `index` of rank `source` stands for: by expert of its choices, in the
// lanes; by rank the index-th row that has come from there.
template <typename T>
__device__ Terms<T> FindRowsHere(const SlotPullArgs& args, int source, int index, int lane) {
  const Shape& shape = args.shape;
  int row = -1;
  if (shape.has_row_per_choice()) {
    const int64_t token = int64_t{source} * shape.num_tokens + index;
    if (lane < shape.top_k) row = args.handle.received_rows[token * shape.top_k + lane];
  } else if (lane == 0) {
    const int32_t* const to_here = args.handle.rank_prefix_matrix + args.peers.rank;
    row = (source == 0 ? 0 : to_here[(source - 1) * shape.num_ranks]) + index;
    if (row >= to_here[source * shape.num_ranks]) row = -1;
  }
  if (!IsRow(row, shape.capacity)) row = -1;
  Terms<T> terms{nullptr, 1.0f, __ballot_sync(kAllLanes, row >= 0)};
  if (row >= 0) {
    terms.row = static_cast<const T*>(args.summand.rows) + row * args.summand.num_elements;
    if (args.row_weights != nullptr) terms.factor = args.row_weights[row];
  }
  return terms;
}

// The slot that a team fills in its n-th turn: of which rank, and which one. Ranks behind this one come
// first, so that the ranks do not all write to the same one.
struct Target {
  int rank;
  int index;
};

__device__ Target TargetOf(const SlotPullArgs& args, int i) {
  const int R = args.shape.num_ranks, behind = args.peers.rank + 1 + i % R;
  return {behind < R ? behind : behind - R, i / R};
}

// Sums what this rank holds of each token, and sends the sums. Team by team of the summing warps; the rows of
// a team's first token were found before.
template <typename T, int N>
__device__ void SendSums(const SlotPullArgs& args, const Visit& visit, const RowTeam& team, Terms<T> terms) {
  const int width = static_cast<int>(args.summand.num_elements), me = args.peers.rank;
  const int tokens = args.shape.num_ranks * args.shape.num_tokens;
  for (int i = team.index; i < tokens; i += team.count) {
    const Target target = TargetOf(args, i);
    if (i > team.index) terms = FindRowsHere<T>(args, target.rank, target.index, team.lane);
    if (terms.lanes == 0 || (visit.writable >> target.rank & 1) == 0) continue;
    std::byte* const slot = args.slot(target.rank, me, target.index, visit.epoch);
    if ((terms.lanes & (terms.lanes - 1)) == 0) {
      if (team.warp == 0 && terms.row != nullptr) FactorIn(slot) = terms.factor;
      terms.factor = 1.0f;
    } else if (team.warp == 0 && team.lane == 0) {
      FactorIn(slot) = 1.0f;
    }
    for (int first = team.warp * kSlice<N>; first < width; first += team.warps * kSlice<N>) {
      typename Sum<T>::Acc total[kSumVectors][N] = {};
      SumSlice<T, N>(terms, first, width, team.lane, total);
      StoreSlice<T, N>(RowIn<T>(slot), first, width, team.lane, total);
    }
    team.Sync();
    if (team.warp == 0 && team.lane == 0) {
      StoreStampedRelease(&args.mail(target.rank, me, visit.epoch).arrived[target.index], 1, visit.epoch);
    }
  }
}

// Where a sum of token t comes from: lane r says whether rank r sends one, and to which slot here.
struct Sender {
  bool sends;
  int index;
};

__device__ Sender FindSender(const SlotPullArgs& args, uint32_t ranks, int t, int lane) {
  const Shape& shape = args.shape;
  const Place place = FindPlace(shape, args.handle, t, lane);
  if (shape.has_row_per_choice()) {
    const unsigned all = __reduce_or_sync(kAllLanes, place.row < 0 ? 0 : 1u << place.rank) & ranks;
    return {(all >> lane & 1) != 0, t};
  }
  int index = place.row;
  if (index >= 0 && args.peers.rank > 0) {
    index -= args.handle.rank_prefix_matrix[(args.peers.rank - 1) * shape.num_ranks + lane];
  }
  return {place.row >= 0 && (ranks >> lane & 1) != 0 && index >= 0 && index < shape.num_tokens, index};
}

// Waits for the sums of token t. One warp; bit r: rank r was missed.
__device__ uint32_t AwaitSums(const SlotPullArgs& args, const Visit& visit, const Sender& sender, int lane) {
  if (!sender.sends) return 0;
  const Stamped* const arrived = &args.mail(args.peers.rank, lane, visit.epoch).arrived[sender.index];
  return AwaitWordOf(args.peers, arrived, visit.epoch) ? 0 : 1u << lane;
}

// Adds up what arrives, in the order of the ranks: of every gridDim-th slice of a token, a warp the one that
// it gets a ticket for. Returns the ranks that this thread has missed.
template <typename T, int N>
__device__ uint32_t AddUp(const SlotPullArgs& args, const Visit& visit, const Dealer& dealer) {
  const int lane = threadIdx.x % kWarp, width = static_cast<int>(args.summand.num_elements);
  const int slices = (width + kSlice<N> - 1) / kSlice<N>;
  while (true) {
    const int ticket = Dealer::Show(dealer.Take(lane));
    const int i = static_cast<int>(blockIdx.x) + ticket * static_cast<int>(gridDim.x);
    if (i >= args.shape.num_tokens * slices) return 0;
    const int t = i / slices, first = i % slices * kSlice<N>;
    const Sender sender = FindSender(args, visit.ranks, t, lane);
    const uint32_t missing = AwaitSums(args, visit, sender, lane);
    if (__any_sync(kAllLanes, missing != 0)) return missing;
    __syncwarp();  // what each lane has acquired is there for all
    Terms<T> terms{nullptr, 1.0f, __ballot_sync(kAllLanes, sender.sends)};
    if (sender.sends) {
      std::byte* const slot = args.slot(args.peers.rank, lane, sender.index, visit.epoch);
      terms = {RowIn<T>(slot), __ldcg(&FactorIn(slot)), terms.lanes};
    }
    typename Sum<T>::Acc total[kSumVectors][N] = {};
    SumSlice<T, N>(terms, first, width, lane, total);
    AddBiases<T, N>(args.biases, args.num_biases, t, first, width, lane, total);
    StoreSlice<T, N>(static_cast<T*>(args.summand.out) + int64_t{t} * width, first, width, lane, total);
  }
}

// Waits for all sums of `ranks`. The whole block; bit r: rank r was missed.
__device__ uint32_t AwaitAll(const SlotPullArgs& args, const Visit& visit, uint32_t ranks) {
  const int lane = threadIdx.x % kWarp;
  uint32_t missing = 0;
  for (int t = threadIdx.x / kWarp; t < args.shape.num_tokens; t += kSlotWarps) {
    missing |= AwaitSums(args, visit, FindSender(args, ranks, t, lane), lane);
    __syncwarp();
  }
  return missing;
}

// The summing warps of a block begin with what this rank sends, the others with what it receives; in the end
// all do the latter.
template <typename T>
__global__ void __launch_bounds__(kSlotThreads, 1) SlotPullKernel(const __grid_constant__ SlotPullArgs args) {
  constexpr Op op = Op::kCombine;
  __shared__ unsigned next;
  const Summand& summand = args.summand;
  const WaitLog log = WaitLog::From(args.attendance.wait_us);
  const auto fill = [&] {
    FillResult(summand.out, int64_t{args.shape.num_tokens} * summand.num_elements * sizeof(T));
    FillAttendance(args);
  };
  const int warp = threadIdx.x / kWarp;
  const RowTeam team = TeamOf(0, args.num_senders, args.team_warps, kSummingWarps);
  const bool sums = warp < kSummingWarps;
  Terms<T> terms{};
  if (sums && team.index < args.shape.num_ranks * args.shape.num_tokens) {
    const Target first = TargetOf(args, team.index);
    terms = FindRowsHere<T>(args, first.rank, first.index, team.lane);
  }
  if (threadIdx.x == 0) next = 0;
  Visit visit = OpenSlots(args, op);
  if (!visit.open) return EndUnopened(args, op, visit, fill);
  if (args.presides()) TellCall(args, visit);
  if (sums) {
    WithVector<T>(summand.num_elements,
                  [&](auto vector) { SendSums<T, decltype(vector)::value>(args, visit, team, terms); });
  }
  uint32_t missing = 0;
  if (args.attendance.masks) {
    AgreeOnRanks(args, op, visit, log, [&](uint32_t ranks) { return AwaitAll(args, visit, ranks); });
  } else if (args.presides() && warp == kSlotWarps - 1) {
    // Also of ranks that send no row: half of the arena may be written again once all ranks have come.
    missing = AwaitCall(args, op, visit, threadIdx.x % kWarp, log);
    __syncwarp();
  }
  if (!visit.failed) {
    WithVector<T>(summand.num_elements, [&](auto vector) {
      missing |= AddUp<T, decltype(vector)::value>(args, visit, Dealer{&next});
    });
  }
  missing = BlockOr(missing);
  if (missing != 0) {
    visit.failed = true;
    const uint32_t ranks = missing & ~kKeptOut;
    if (threadIdx.x == 0 && ranks != 0) Fail(args.peers, op, Phase::kWave, visit.epoch, ranks);
  }
  const int r = threadIdx.x;
  if (args.presides() && r < args.shape.num_ranks && args.attendance.active_after != nullptr) {
    const bool asked = args.attendance.active_ranks[r] != 0;
    args.attendance.active_after[r] = visit.ranks == 0 ? asked : visit.ranks >> r & 1;
  }
  EndSlots(args, op, visit, fill);
}

template <typename F>
cudaError_t WithKernel(Float type, F&& f) {
  switch (type) {
    case Float::kF16:
      return f(SlotPullKernel<__half>);
    case Float::kBF16:
      return f(SlotPullKernel<__nv_bfloat16>);
    default:
      return f(SlotPullKernel<float>);
  }
}

}  // namespace

cudaError_t LaunchSlotPull(const PullParams& params, const Peers& peers, const Device& device,
                           cudaStream_t stream) {
  SlotPullArgs args{};
  args.shape = params.shape;
  args.peers = peers;
  args.rank_operand = params.rank_operand;
  args.attendance = params.attendance;
  args.handle = params.handle;
  args.summand = params.summands[0];
  args.slots = SlotsOf(args.shape, AlignUp(args.summand.num_elements * BytesOf(args.summand.type), 16));
  args.row_weights = params.row_weights;
  for (int i = 0; i < params.num_biases; ++i) args.biases[i] = params.biases[i];
  args.num_biases = params.num_biases;
  const int tokens = args.shape.num_ranks * args.shape.num_tokens;
  args.num_senders = std::min(tokens, MostBlocks(device));
  args.team_warps = TeamWarps(tokens, args.num_senders, kSummingWarps);
  return WithKernel(args.summand.type, [&](auto* kernel) {
    return Launch(kernel, args.num_senders, kSlotThreads, 0, stream, true, args);
  });
}

cudaError_t PreloadSlotPull() {
  cudaFuncAttributes attributes;
  for (Float type : {Float::kF16, Float::kBF16, Float::kF32}) {
    const cudaError_t error =
        WithKernel(type, [&](auto* kernel) { return cudaFuncGetAttributes(&attributes, kernel); });
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace jax_ep::cuda
