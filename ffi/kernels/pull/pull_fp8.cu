// Pull of sums that travel as FP8. Each rank first sums its rows of a token and converts the sum, also if it
// is of one row. By rank it converts each row. The token's rank then adds these parts. `partial` holds their
// values, and then their scales.
#include "kernels/fp8/parts.cuh"
#include "kernels/launch/launch.h"
#include "kernels/launch/plan.h"
#include "kernels/launches.h"
#include "kernels/pull/fold.cuh"
#include "kernels/pull/sources.cuh"

namespace jax_ep::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kElements = 16;  // FP8 values that a thread loads at a time
constexpr int kVectors = 3;    // loads per part and thread
constexpr int kParts = 2;      // parts of a sum whose loads are in flight at a time
constexpr int kColumns = kSlice<kElements, kVectors>;
constexpr int kFp8Tickets = 256;  // per block that pulls

// The parts of a rank, in the summand's `partial`.
struct Fp8Parts {
  std::byte* values;  // [num_partials, width]
  float* scales;      // [num_partials, width / kFp8Block]
  int width;

  __device__ static Fp8Parts In(const PullArgs& args, void* partial) {
    const int64_t width = args.summands[0].num_elements;
    auto* const values = static_cast<std::byte*>(partial);
    return {values, reinterpret_cast<float*>(values + args.shape.num_partials() * width),
            static_cast<int>(width)};
  }
  __device__ Fp8Part operator[](int64_t number) const {
    return {values + number * width, scales + number * (width / kFp8Block)};
  }
};

// Folds this block's share of all waves, as Fold does, and converts the sums.
template <typename T>
__device__ void FoldAsFp8(const PullArgs& args, const Session& session) {
  constexpr int N = 16 / sizeof(T), kFoldColumns = kSlice<N, kFewRowsVectors>;
  __shared__ FoldCounts counts;
  const int lane = threadIdx.x % kWarp;
  const Summand& summand = args.summands[0];
  const int width = static_cast<int>(summand.num_elements);
  const Fp8Parts parts = Fp8Parts::In(args, summand.partial);
  const bool rounded = args.quantize == Quantize::kFp8Rounded;
  counts.Init(args, kFoldWarps);
  FoldTasks<kFoldWarps, true> tasks(args, counts, 1);
  FoldTask task, following;
  for (bool more = tasks.Take(&following, lane); more;) {
    task = following;
    more = tasks.Take(&following, lane);
    const int row = IsRow(task.row, args.shape.capacity) ? task.row : -1;
    SumInputs<T> inputs{nullptr, 1.0f, __ballot_sync(kAllLanes, row >= 0)};
    if (row >= 0) {
      inputs.row = static_cast<const T*>(summand.rows) + int64_t{row} * width;
      if (args.row_weights != nullptr) inputs.factor = args.row_weights[row];
    }
    const int64_t number =
        args.shape.has_row_per_choice() ? task.global_token : __shfl_sync(kAllLanes, row, 0);
    for (int first = task.part * kFoldColumns; first < width && inputs.lanes != 0;
         first += kFoldWarps * kFoldColumns) {
      float total[kFewRowsVectors][N] = {};
      SumSlice<T, N, kFewRows>(inputs, first, width, lane, total);
      StoreSliceOfPart(parts[number], first, width, lane, ConvertSlice(total, rounded));
    }
    CountFolds(args, session, counts, task.wave, 1);
  }
}

// The parts of a token's sum. Each lane in `lanes` holds one; they are added in the order of the lanes.
struct Fp8Sources {
  Fp8Part part;
  unsigned lanes;
};

// Returns the parts of a token's sum, given its destinations, of which the lanes hold up to kWarp.
__device__ Fp8Sources FindParts(const PullArgs& args, const Published* published, int t,
                                const Destination& destination, int lane) {
  const Source source = FindSource(args, destination, lane);
  const bool has_part = source.row >= 0 || source.is_folded;
  Fp8Sources sources{{}, __ballot_sync(kAllLanes, has_part)};
  if (!has_part) return sources;
  const int64_t number =
      args.shape.has_row_per_choice() ? int64_t{args.peers.rank} * args.shape.num_tokens + t : source.row;
  sources.part = Fp8Parts::In(args, published[source.rank].partials[0])[number];
  return sources;
}

// Pulls one slice of a token's sum, given its first parts.
template <typename T>
__device__ void PullSlice(const PullArgs& args, const Published* published, Fp8Sources sources, int t,
                          int first, int lane) {
  constexpr int N = 16 / sizeof(T);
  const Summand& summand = args.summands[0];
  const int width = static_cast<int>(summand.num_elements);
  float total[kVectors][kElements] = {};
  for (int first_row = 0;;) {
    AddSliceOfParts<kParts>(sources.part, sources.lanes, first, width, lane, total);
    first_row += kWarp;
    if (first_row >= args.shape.rows_per_token()) break;
    sources =
        FindParts(args, published, t, FindDestination(args.shape, args.handle, t, lane, first_row), lane);
  }
  AddBiases<float, kElements, kVectors>(args.biases, args.num_biases, t, first, width, lane, total);
  T* const out = static_cast<T*>(summand.out) + int64_t{t} * width;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = first + (v * kWarp + lane) * kElements;
    if (column >= width) continue;
#pragma unroll
    for (int j = 0; j < kElements; j += N) {
      float numbers[N];
#pragma unroll
      for (int i = 0; i < N; ++i) numbers[i] = total[v][j + i];
      Vector<T, N>::Store(out + column + j, numbers);
    }
  }
}

// Pulls the tokens in order, ticket by ticket. `requested` is the ticket that this warp has already
// requested. The last request may be in flight at the end, as in PullByRing.
template <typename T>
__device__ void PullFp8(const PullArgs& args, const Session& session, const Published* published,
                        unsigned requested) {
  const int lane = threadIdx.x % kWarp, num_tokens = args.shape.num_tokens;
  const int width = static_cast<int>(args.summands[0].num_elements);
  // Warps that share the slices of a token, few, because each has to look up the token's parts.
  const int max_warps = kFp8Tickets * args.num_pullers / max(num_tokens, 1);
  const int warps_per_token = max(1, min((width + kColumns - 1) / kColumns, max_warps));
  const TicketCounter tickets{&args.peers.own().sent[0]};
  int awaited_wave = -1;  // the wave waited for last
  int ticket;
  HandleEntry entry;
  // The next token is looked up while this one is summed, as in PullByRing.
  const auto look_up = [&] {
    ticket = TicketCounter::Broadcast(requested);
    requested = tickets.Request(lane);
    const int t = ticket / warps_per_token;
    if (t < num_tokens) entry = LoadHandleEntry(args.shape, args.handle, t, lane);
  };
  look_up();
  while (ticket / warps_per_token < num_tokens) {
    const int t = ticket / warps_per_token, part = ticket % warps_per_token;
    const Destination destination = FindDestination(args.shape, entry, lane);
    look_up();
    // A token's row may have been folded in any wave up to the token's (FindRowToFold).
    while (awaited_wave < args.waves.Of(t)) {
      if (!session.AwaitWave(++awaited_wave)) return;
    }
    const Fp8Sources sources = FindParts(args, published, t, destination, lane);
    for (int first = part * kColumns; first < width; first += warps_per_token * kColumns) {
      PullSlice<T>(args, published, sources, t, first, lane);
    }
  }
}

// Fills the result of an op that failed. Called by the last block.
JAX_EP_RARE void FillSums(const PullArgs& args) {
  const Summand& summand = args.summands[0];
  FillResult(summand.out, args.shape.num_tokens * summand.num_elements * BytesOf(summand.type));
}

// Sums one array. The steps are those of PullKernel (pull.cu).
template <typename T>
__global__ void __launch_bounds__(kThreads, 1) Fp8PullKernel(const __grid_constant__ PullArgs args) {
  extern __shared__ __align__(128) std::byte shared[];  // what the ranks publish
  __shared__ Published outgoing;
  const Opening opening(args.peers, args.position_operand);
  Session session(args.peers, Op::kCombine, false);
  Published* const published = reinterpret_cast<Published*>(shared);
  if (threadIdx.x == 0) {
    outgoing.weights = outgoing.routing = outgoing.buffers[0] = nullptr;  // the peers read the parts only
    outgoing.partials[0] = args.summands[0].partial;
  }
  const bool pulls = static_cast<int>(blockIdx.x) < args.num_pullers;
  const auto request_ticket = [&] {
    return TicketCounter{&args.peers.own().sent[0]}.Request(threadIdx.x % kWarp);
  };
  unsigned requested = 0;
  bool has_ticket = false, alive = session.Open(opening);
  if (alive) {
    if (blockIdx.x == 0) session.Publish(outgoing, args.num_summands);
    FoldAsFp8<T>(args, session);
    has_ticket = pulls && session.IsOpenedNow();  // as in PullKernel
    if (has_ticket) requested = request_ticket();
    alive = session.Meet(args.num_summands, published);
  }
  const auto fill = [&] { FillSums(args); };
  if (!alive) return session.Abort(fill);
  if (pulls) {
    if (!has_ticket) requested = request_ticket();
    PullFp8<T>(args, session, published, requested);
  }
  session.Leave();
  if (blockIdx.x == gridDim.x - 1) (void)session.AwaitLeft(published);
  session.Close(fill);
}

// Calls f with the kernel for rows of a type.
template <typename F>
cudaError_t WithFp8PullKernel(Float type, F&& f) {
  switch (type) {
    case Float::kF16:
      return f(Fp8PullKernel<__half>);
    case Float::kBF16:
      return f(Fp8PullKernel<__nv_bfloat16>);
    default:
      return f(Fp8PullKernel<float>);
  }
}

}  // namespace

cudaError_t LaunchPullFp8(const PullParams& params, const Peers& peers, const Device& device,
                          cudaStream_t stream) {
  PullArgs args{params};
  args.peers = peers;
  args.summands[0] = params.summands[0];
  for (int i = 0; i < params.num_biases; ++i) args.biases[i] = params.biases[i];
  args.waves = PlanWaves(args.shape, kFirstWave, kWave, 1);
  const auto width = static_cast<double>(args.summands[0].num_elements);
  const SmPlan plan = PlanPullFp8(args.shape, width, width * BytesOf(args.summands[0].type), CardOf(device));
  args.num_pullers = plan.links;
  return WithFp8PullKernel(args.summands[0].type, [&](auto* kernel) {
    return Launch(kernel, plan.total(), kThreads, PublishedBytes(args.shape.num_ranks), stream, true, args);
  });
}

cudaError_t PreloadPullFp8() {
  cudaFuncAttributes attributes;
  for (Float type : {Float::kF16, Float::kBF16, Float::kF32}) {
    const cudaError_t error =
        WithFp8PullKernel(type, [&](auto* kernel) { return cudaFuncGetAttributes(&attributes, kernel); });
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace jax_ep::cuda
