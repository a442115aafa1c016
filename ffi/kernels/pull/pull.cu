// Pull: loads each token's rows from the peers' buffers and sums them. By expert, a rank first sums ("folds")
// its rows of a token, so that only the sum travels.
#include "kernels/launch/launch.h"
#include "kernels/launch/plan.h"
#include "kernels/launches.h"
#include "kernels/pull/by_ring.cuh"

namespace jax_ep::cuda {
namespace {

constexpr int kRingWave = 384;
constexpr int kStaticBytes = 15 * 1024;  // at most, of the shared memory of a block

// Pulls one slice of a token's sum, given the first kWarp of its rows. kRows and kVectors are as in SumSlice.
template <typename T, int N, int kRows, int kVectors>
__device__ void PullSlice(const PullArgs& args, const Published* published, SumInputs<T> inputs, int index,
                          int t, int first, int lane) {
  const Summand& summand = args.summands[index];
  const int width = static_cast<int>(summand.num_elements);
  typename Sum<T>::Acc total[kVectors][N] = {};
  for (int first_row = 0;;) {
    SumSlice<T, N, kRows>(inputs, first, width, lane, total);
    first_row += kWarp;
    if (kRows == kFewRows || first_row >= args.shape.rows_per_token()) break;
    const Destination destination = FindDestination(args.shape, args.handle, t, lane, first_row);
    inputs = FindSumSources<T>(args, published, index, t, destination, lane).Load();
  }
  AddBiases<T, N>(args.biases, args.num_biases, t, first, width, lane, total);
  StoreSlice<T, N>(static_cast<T*>(summand.out) + int64_t{t} * width, first, width, lane, total);
}

// Pulls the tokens in order, ticket by ticket. `requested` is the ticket that this warp has already
// requested. The last request may be in flight at the end, as in PullByRing.
template <typename T, int N, int kRows, int kVectors>
__device__ void PullArray(const PullArgs& args, const Session& session, const Published* published, int index,
                          unsigned requested) {
  const int lane = threadIdx.x % kWarp;
  const int width = static_cast<int>(args.summands[index].num_elements), num_tokens = args.shape.num_tokens;
  // Warps that share the slices of a token. They are few enough that looking up its rows costs little.
  const int max_warps = kTickets * args.num_pullers / max(num_tokens, 1);
  constexpr int kColumns = kSlice<N, kVectors>;
  const int warps_per_token = max(1, min((width + kColumns - 1) / kColumns, max_warps));
  const TicketCounter tickets{&args.peers.own().sent[index]};
  int awaited_wave = -1;  // the wave waited for last; later tickets are never of an earlier wave
  while (true) {
    const int ticket = TicketCounter::Broadcast(requested);
    const int t = ticket / warps_per_token;
    if (t >= num_tokens) break;
    requested = tickets.Request(lane);
    if (args.folds && args.waves.Of(t) != awaited_wave) {
      awaited_wave = args.waves.Of(t);
      if (!session.AwaitWave(awaited_wave)) return;
    }
    const Destination destination = FindDestination(args.shape, args.handle, t, lane);
    const SumInputs<T> inputs = FindSumSources<T>(args, published, index, t, destination, lane).Load();
    if (inputs.lanes == 0 && args.adds_in_place && args.shape.rows_per_token() <= kWarp) continue;
    for (int first = ticket % warps_per_token * kColumns; first < width;
         first += warps_per_token * kColumns) {
      PullSlice<T, N, kRows, kVectors>(args, published, inputs, index, t, first, lane);
    }
  }
}

// Returns each choice's weight from the row that it was sent with. The addresses of arrived_weights are
// published in place of those of row_weights, because no op has both.
__device__ void ReturnWeights(const PullArgs& args, const Published* published) {
  const Shape& shape = args.shape;
  const int width = shape.rows_per_token();
  const bool by_rank = !shape.has_row_per_choice();
  const int64_t choices = int64_t{shape.num_tokens} * shape.top_k;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < choices;
       i += int64_t{args.num_pullers} * blockDim.x) {
    const int64_t t = i / shape.top_k, k = i % shape.top_k;
    const int expert = args.handle.topk_idx[i];
    float weight = 0.0f;
    if (IsExpert(expert, shape.num_experts)) {
      const int rank = shape.rank_of(expert);
      const int64_t row = args.handle.sent_rows[t * width + (by_rank ? rank : k)];
      if (IsRow(row, shape.capacity)) {
        weight = __ldcg(static_cast<const float*>(published[rank].weights) +
                        (by_rank ? row * shape.top_k + k : row));
      }
    }
    args.topk_weights[i] = weight;
  }
}

// Fills the results of an op that failed. Called by the last block.
JAX_EP_RARE void FillSums(const PullArgs& args) {
  const int64_t tokens = args.shape.num_tokens;
  for (int i = 0; i < args.num_summands; ++i) {
    const Summand& summand = args.summands[i];
    FillResult(summand.out, tokens * summand.num_elements * BytesOf(summand.type));
  }
  if (args.arrived_weights != nullptr) {
    FillResult(args.topk_weights, tokens * args.shape.top_k * sizeof(float));
  }
}

// The way rows are read: through rings, by loads tuned for at most kFewRows ranks, or by loads tuned for any
// number. Each is a kernel of its own because they need different numbers of registers.
enum class SumEngine { kRing, kFewRanks, kAnyRanks };
template <SumEngine kEngine>
constexpr int kThreads = kEngine == SumEngine::kRing ? kMaxTeamWarps * kWarp : 512;

// Fills in the addresses that this rank publishes. Called by one thread.
__device__ void DescribeBuffers(const PullArgs& args, Published& outgoing) {
  for (int i = 0; i < args.num_summands; ++i) {
    outgoing.buffers[i] = const_cast<void*>(args.summands[i].rows);
    outgoing.partials[i] = args.summands[i].partial;
  }
  outgoing.weights =
      const_cast<float*>(args.row_weights != nullptr ? args.row_weights : args.arrived_weights);
  outgoing.routing = nullptr;
}

// Sums arrays of one type. Steps from top to bottom:
//
//           | pullers                                           | other blocks
//   open    | block 0 opens the op and publishes its buffers    | -
//   fold    | by expert: their share of the first wave          | by expert: their share of all waves
//   meet    | wait for the buffers of all ranks                 | the same
//   pull    | sum each token's rows, or what ranks have folded  | -
//           | of them; then return the weights                  |
//   leave   | each block reports to the peers that it no longer accesses their memory
//   wait    | the last block waits until all blocks have left
//   close   | the last block frees the channel for the next op
template <typename T, SumEngine kEngine>
__global__ void __launch_bounds__(kThreads<kEngine>, 1) PullKernel(const __grid_constant__ PullArgs args) {
  constexpr bool kByRing = kEngine == SumEngine::kRing, kFew = kEngine == SumEngine::kFewRanks;
  extern __shared__ __align__(128) std::byte shared[];  // what the ranks publish, the rings
  __shared__ Published outgoing;
  __shared__ RingMemory memory[kByRing ? kMaxTeams : 1];
  const Opening opening(args.peers, args.position_operand);
  Session session(args.peers, Op::kCombine, false);
  Published* const published = reinterpret_cast<Published*>(shared);
  Ring ring(args.ring, memory, shared + PublishedBytes(args.shape.num_ranks));
  if constexpr (kByRing) ring.Init();
  if (threadIdx.x == 0) DescribeBuffers(args, outgoing);
  const bool pulls = static_cast<int>(blockIdx.x) < args.num_pullers;
  const auto request_ticket = [&](int i) {
    return TicketCounter{&args.peers.own().sent[i]}.Request(threadIdx.x % kWarp);
  };
  unsigned requested = 0;
  bool has_ticket = false, alive = session.Open(opening);
  if (alive) {
    if (blockIdx.x == 0) session.Publish(outgoing, args.num_summands);
    if (args.folds) {
      if constexpr (kByRing) {
        FoldByRing<T>(args, session, ring);
      } else {
        Fold<T>(args, session);
      }
    }
    // The first ticket is requested while the peers arrive. An op that finds the channel in use must not take
    // one.
    has_ticket = !kByRing && pulls && session.IsOpenedNow();
    if (has_ticket) requested = request_ticket(0);
    alive = session.Meet(args.num_summands, published);
  }
  const auto fill = [&] { FillSums(args); };
  if (!alive) return session.Abort(fill);
  if (pulls) {
    if constexpr (kByRing) {
      PullByRing<T>(args, session, ring, published);
    } else {
      for (int i = 0; i < args.num_summands; ++i) {
        if (i > 0 || !has_ticket) requested = request_ticket(i);
        WithVector<T>(args.summands[i].num_elements, [&](auto vector) {
          constexpr int N = decltype(vector)::value;
          PullArray<T, N, kFew ? kFewRows : kSumRows, kFew ? kFewRowsVectors : kSumVectors>(
              args, session, published, i, requested);
        });
      }
    }
    if (args.arrived_weights != nullptr) ReturnWeights(args, published);
  }
  session.Leave();
  if (blockIdx.x == gridDim.x - 1) (void)session.AwaitLeft(published);
  session.Close(fill);
}

}  // namespace

// Calls f with the kernel for arrays of a type.
template <typename F>
static cudaError_t WithPullKernel(Float type, SumEngine engine, F&& f) {
  return WithType(type, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    return engine == SumEngine::kRing       ? f(PullKernel<T, SumEngine::kRing>)
           : engine == SumEngine::kFewRanks ? f(PullKernel<T, SumEngine::kFewRanks>)
                                            : f(PullKernel<T, SumEngine::kAnyRanks>);
  });
}

constexpr Float kTypes[] = {Float::kF16, Float::kBF16, Float::kF32, Float::kF64};

cudaError_t LaunchPull(const PullParams& params, const Peers& peers, const Device& device,
                       cudaStream_t stream) {
  PullArgs args{params};
  args.peers = peers;
  for (int i = 0; i < params.num_biases; ++i) args.biases[i] = params.biases[i];
  // One launch for each type among the arrays; nearly always there is one. The first launch returns the
  // weights.
  for (Float type : kTypes) {
    args.num_summands = 0;
    for (int i = 0; i < params.num_summands; ++i) {
      if (params.summands[i].type == type) args.summands[args.num_summands++] = params.summands[i];
    }
    const bool weights_alone = params.num_summands == 0 && type == Float::kF32;
    if (args.num_summands == 0 && !weights_alone) continue;
    args.adds_in_place =
        args.num_biases == 1 && args.biases[0].data == args.summands[0].out && args.biases[0].type == type;
    RowBytes rows;
    for (int i = 0; i < args.num_summands; ++i) rows.Add(args.summands[i].num_elements * BytesOf(type));
    args.folds = params.folds && rows.sum > 0;
    // Waves are equal on all ranks, although some ranks may use rings while others do not.
    const bool suits_rings = SuitsRings(args.shape, static_cast<double>(rows.shortest), false);
    args.waves = PlanWaves(args.shape, kFirstWave, suits_rings ? kRingWave : kWave, 1);
    const int dynamic_bytes = device.shared_bytes - kStaticBytes;
    const int64_t published_bytes = PublishedBytes(args.shape.num_ranks);
    const int ring_bytes = dynamic_bytes - static_cast<int>(published_bytes);
    args.ring = PartitionForRings(args.shape, rows, ring_bytes, false, device);
    const bool by_ring = args.ring.teams > 0;
    const SmPlan plan =
        PlanPull(args.shape, static_cast<double>(rows.sum), args.folds, by_ring, CardOf(device));
    args.num_pullers = plan.links;
    args.sums_per_ticket = args.folds ? std::min(PlanSumsPerTicket(args.shape), kWarp / args.shape.top_k) : 1;
    const SumEngine engine = by_ring                            ? SumEngine::kRing
                             : args.shape.num_ranks <= kFewRows ? SumEngine::kFewRanks
                                                                : SumEngine::kAnyRanks;
    const int num_threads = by_ring ? args.ring.threads() : kThreads<SumEngine::kFewRanks>;
    const cudaError_t error = WithPullKernel(type, engine, [&](auto* kernel) {
      // This must be the same for all shapes, because another thread may be about to launch the same kernel.
      const cudaError_t error =
          by_ring ? cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, dynamic_bytes)
                  : cudaSuccess;
      if (error != cudaSuccess) return error;
      return Launch(kernel, plan.total(), num_threads, published_bytes + args.ring.bytes(), stream, true,
                    args);
    });
    if (error != cudaSuccess) return error;
    args.arrived_weights = nullptr;
  }
  return cudaSuccess;
}

cudaError_t PreloadPull() {
  cudaFuncAttributes attributes;
  for (Float type : kTypes) {
    for (SumEngine engine : {SumEngine::kRing, SumEngine::kFewRanks, SumEngine::kAnyRanks}) {
      const cudaError_t error = WithPullKernel(
          type, engine, [&](auto* kernel) { return cudaFuncGetAttributes(&attributes, kernel); });
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

}  // namespace jax_ep::cuda
