// Small products with uneven and empty groups, by two engines, and their comparison on the device.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <chrono>
#include <thread>

#include "core/text.h"
#include "kernels/launch/launch.h"
#include "kernels/products/engines.h"

namespace jax_ep::cuda {

// Both engines round their results, so they may differ by one unit in the last place of the largest value.
// Twice that is allowed.
constexpr double kToleranceF16 = 1.0 / 512, kToleranceBF16 = 1.0 / 64;
const ProductKind kProductKinds[kNumProductKinds] = {
    {Operands::kF16, GroupedDot::kRows, "float16 rows", kToleranceF16},
    {Operands::kF16, GroupedDot::kRowsTransposed, "float16 gradient of rows", kToleranceF16},
    {Operands::kF16, GroupedDot::kWeights, "float16 gradient of weights", kToleranceF16},
    {Operands::kBF16, GroupedDot::kRows, "bfloat16 rows", kToleranceBF16},
    {Operands::kBF16, GroupedDot::kRowsTransposed, "bfloat16 gradient of rows", kToleranceBF16},
    {Operands::kBF16, GroupedDot::kWeights, "bfloat16 gradient of weights", kToleranceBF16},
    {Operands::kFp8, GroupedDot::kRowsTransposed, "FP8 rows", kToleranceBF16},
    {Operands::kFp8, GroupedDot::kWeights, "FP8 gradient of weights", kToleranceBF16},
};

namespace {

constexpr int32_t kGroupSizes[] = {130, 0, 71, 900, 1};
constexpr int32_t kGroups = 5, kFirstRow = 16;
// The sums are longer than the pipelines, and the rows cover groups that begin at multiples of 128.
constexpr int32_t kRows = 1664, kInner = 1280, kOuter = 512;
// Few enough that each block computes tiles of several groups.
constexpr int kSms = 8;
constexpr std::chrono::seconds kDeadline{60};

constexpr int kThreads = 256;

__device__ float Uniform(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  x ^= x >> 16;
  return static_cast<float>(x >> 8) * 0x1p-23f - 1.0f;  // [-1, 1)
}

template <typename T>
__global__ void FillKernel(T* data, int size, uint32_t seed, float center, float radius) {
  const int step = static_cast<int>(gridDim.x * blockDim.x);
  for (int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); i < size; i += step) {
    data[i] = T(center + radius * Uniform(seed + static_cast<uint32_t>(i)));
  }
}

// Writes the largest difference and the largest value of `plain`, as bits of floats. NaN counts as infinity.
template <typename T>
__global__ void CompareKernel(const T* result, const T* plain, int size, uint32_t* largest) {
  const int step = static_cast<int>(gridDim.x * blockDim.x);
  for (int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); i < size; i += step) {
    const float value = fabsf(static_cast<float>(plain[i]));
    const float difference = fabsf(static_cast<float>(result[i]) - static_cast<float>(plain[i]));
    atomicMax(&largest[0], __float_as_uint(difference < INFINITY ? difference : INFINITY));
    atomicMax(&largest[1], __float_as_uint(value < INFINITY ? value : INFINITY));
  }
}

// The memory of a check, on a stream of its own.
struct Memory {
  static constexpr int64_t kOperand = int64_t{kRows} * kInner * 2;  // the largest operand, in bytes
  static constexpr int64_t kMatrices = int64_t{kGroups} * kInner * kOuter * 2;
  static constexpr int64_t kResult = kMatrices;  // the largest result
  static constexpr int64_t kScales = int64_t{kRows} * kInner / kFp8Block * 4;

  cudaStream_t stream = nullptr;
  std::byte* base = nullptr;
  std::byte* next = nullptr;

  std::byte* Take(int64_t bytes) {
    std::byte* const at = next;
    next += (bytes + 255) / 256 * 256;
    return at;
  }
};

static_assert(Memory::kOperand <= Memory::kMatrices && int64_t{kRows} * kOuter * 2 <= Memory::kResult);

template <typename T>
cudaError_t Fill(std::byte* data, int64_t size, uint32_t seed, float center, float radius,
                 cudaStream_t stream) {
  return Launch(FillKernel<T>, dim3(64), kThreads, 0, stream, false, reinterpret_cast<T*>(data),
                static_cast<int>(size), seed, center, radius);
}

// Fills an operand with random values.
cudaError_t FillOperand(Operands operands, std::byte* data, uint32_t seed, cudaStream_t stream) {
  const int64_t size = Memory::kMatrices / 2;
  switch (operands) {
    case Operands::kFp8:
      return Fill<__nv_fp8_e4m3>(data, size, seed, 0.0f, 16.0f, stream);
    case Operands::kF16:
      return Fill<__half>(data, size, seed, 0.0f, 1.0f, stream);
    default:
      return Fill<__nv_bfloat16>(data, size, seed, 0.0f, 1.0f, stream);
  }
}

// Waits for the stream. A kernel that never ends must not block the caller.
std::string Await(cudaStream_t stream) {
  const auto end = std::chrono::steady_clock::now() + kDeadline;
  cudaError_t status;
  while ((status = cudaStreamQuery(stream)) == cudaErrorNotReady) {
    if (std::chrono::steady_clock::now() > end) return Text("did not end within ", kDeadline.count(), " s");
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return status == cudaSuccess ? "" : cudaGetErrorString(status);
}

ProductCheck Failed(const ProductKind& kind, std::string failure, bool is_fatal) {
  return {kind.name, 0.0, kind.tolerance, true, std::move(failure), is_fatal};
}

ProductCheck CompareKind(const ProductEngine& engine, const ProductEngine& plain, const ProductKind& kind,
                         Memory memory) {
  const bool is_fp8 = kind.operands == Operands::kFp8, of_weights = kind.product == GroupedDot::kWeights;
  GroupedDotParams params{};
  params.product = kind.product;
  params.type = kind.operands == Operands::kF16 ? Float::kF16 : Float::kBF16;
  params.num_rows = kRows;
  params.num_groups = params.num_home = kGroups;
  params.inner = kInner;
  params.outer = params.matrix_width = kOuter;
  params.clears_rows = true;
  std::byte* const sizes = memory.Take(sizeof(kGroupSizes));
  std::byte* const first_row = memory.Take(sizeof(kFirstRow));
  std::byte* const largest = memory.Take(2 * sizeof(uint32_t));
  std::byte* const rows = memory.Take(Memory::kMatrices);
  std::byte* const others = memory.Take(Memory::kMatrices);
  std::byte* const row_scales = memory.Take(Memory::kScales);
  std::byte* const other_scales = memory.Take(Memory::kScales);
  std::byte* const results[] = {memory.Take(Memory::kResult), memory.Take(Memory::kResult)};
  params.group_sizes = reinterpret_cast<const int32_t*>(sizes);
  params.rows = rows;
  params.others = others;
  params.scratch = memory.Take(GroupedDotScratchBytes(kGroups, kRows, kInner / kFp8Block));
  if (is_fp8) {
    params.row_scales = reinterpret_cast<const float*>(row_scales);
    params.other_scales = reinterpret_cast<const float*>(other_scales);
  } else {
    params.first_row = reinterpret_cast<const int32_t*>(first_row);
  }
  const int result_size = of_weights ? kGroups * kInner * kOuter : kRows * kOuter;

  cudaStream_t const stream = memory.stream;
  cudaError_t error = cudaSuccess;
  const auto then = [&](auto&& call) {
    if (error == cudaSuccess) error = call();
  };
  const auto copy = [&](std::byte* to, const void* from, size_t bytes) {
    then([&] { return cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream); });
  };
  copy(sizes, kGroupSizes, sizeof(kGroupSizes));
  copy(first_row, &kFirstRow, sizeof(kFirstRow));
  then([&] { return cudaMemsetAsync(largest, 0, 2 * sizeof(uint32_t), stream); });
  then([&] { return FillOperand(kind.operands, rows, 1, stream); });
  then([&] { return FillOperand(kind.operands, others, 1u << 24, stream); });
  then([&] { return Fill<float>(row_scales, Memory::kScales / 4, 1u << 28, 1.0f, 0.5f, stream); });
  then([&] { return Fill<float>(other_scales, Memory::kScales / 4, 1u << 29, 1.0f, 0.5f, stream); });
  for (std::byte* result : results) {
    // All bits set is NaN: an element that an engine does not write is found.
    then([&] { return cudaMemsetAsync(result, 0xff, Memory::kResult, stream); });
  }
  params.out = results[1];
  then([&] { return plain.launch(params, kSms, stream); });
  if (std::string failure = Await(stream); error != cudaSuccess || !failure.empty()) {
    return Failed(kind, Text("cannot be checked: ", failure.empty() ? cudaGetErrorString(error) : failure),
                  !failure.empty());
  }
  params.out = results[0];
  if (!engine.supports(params)) return {kind.name, 0.0, kind.tolerance, false, "", false};
  then([&] { return engine.launch(params, kSms, stream); });
  if (error != cudaSuccess) {
    (void)cudaGetLastError();
    return Failed(kind, Text("the launch failed: ", cudaGetErrorString(error)), false);
  }
  const auto compare = [&](auto type) {
    using T = decltype(type);
    return Launch(CompareKernel<T>, dim3(64), kThreads, 0, stream, false,
                  reinterpret_cast<const T*>(results[0]), reinterpret_cast<const T*>(results[1]), result_size,
                  reinterpret_cast<uint32_t*>(largest));
  };
  then([&] { return params.type == Float::kF16 ? compare(__half{}) : compare(__nv_bfloat16{}); });
  if (std::string failure = Await(stream); !failure.empty()) return Failed(kind, failure, true);
  float values[2] = {};
  then([&] { return cudaMemcpyAsync(values, largest, sizeof(values), cudaMemcpyDeviceToHost, stream); });
  then([&] { return cudaStreamSynchronize(stream); });
  if (error != cudaSuccess) return Failed(kind, cudaGetErrorString(error), false);
  return {
      kind.name, static_cast<double>(values[0]) / static_cast<double>(values[1]), kind.tolerance, true, "",
      false};
}

}  // namespace

std::vector<ProductCheck> CompareEngines(const ProductEngine& engine, const ProductEngine& plain) {
  // A capture of another thread must neither fail nor forbid the calls below.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  (void)cudaThreadExchangeStreamCaptureMode(&mode);
  constexpr int64_t kBytes = 2 * Memory::kMatrices + 2 * Memory::kResult + 2 * Memory::kScales + (1 << 20);
  Memory memory;
  cudaError_t error = cudaStreamCreateWithFlags(&memory.stream, cudaStreamNonBlocking);
  if (error == cudaSuccess) {
    error = cudaMallocAsync(reinterpret_cast<void**>(&memory.base), kBytes, memory.stream);
  }
  memory.next = memory.base;
  std::vector<ProductCheck> checks;
  for (const ProductKind& kind : kProductKinds) {
    checks.push_back(error == cudaSuccess
                         ? CompareKind(engine, plain, kind, memory)
                         : Failed(kind, Text("cannot be checked: ", cudaGetErrorString(error)), false));
    if (checks.back().is_fatal) break;
  }
  if (!checks.back().is_fatal) {  // otherwise these calls could block
    if (memory.base != nullptr) (void)cudaFreeAsync(memory.base, memory.stream);
    if (memory.stream != nullptr) (void)cudaStreamDestroy(memory.stream);
  }
  (void)cudaGetLastError();
  (void)cudaThreadExchangeStreamCaptureMode(&mode);
  return checks;
}

}  // namespace jax_ep::cuda
