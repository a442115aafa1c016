// Conversion of rows and matrices to FP8, as they lie and transposed, in one pass over memory. The bits are
// those of jax_ep/_transport/fp8.py.
#include "kernels/kernels.h"
#include "kernels/launch/launch.h"
#include "kernels/rows/quantize.cuh"
#include "kernels/threads.cuh"

namespace jax_ep::cuda {
namespace {

// A block converts a tile of 128 x 128 elements. Its warps are two wide and eight high, so a thread has two
// neighboring columns of 16 rows.
constexpr int kTile = kFp8Block;
constexpr int kWarpsWide = 2, kWarpsHigh = 8;
constexpr int kThreads = kWarpsWide * kWarpsHigh * kWarp;
constexpr int kRows = kTile / kWarpsHigh;
constexpr int kVectorsPerBlock = 4 * kThreads;  // of 16 bytes, of a block that converts rows
static_assert(kTile == kWarpsWide * 2 * kWarp);

// FP8 with scales, whose type a Float does not name.
struct Scaled {};

// Two neighboring elements of a row, in as few registers as they need.
template <typename T>
struct Pair {  // of 16 bits
  uint32_t bits;
  static __device__ Pair Load(const QuantizeParams& params, int64_t row, int64_t column) {
    const auto* const x = static_cast<const uint16_t*>(params.x);
    return {*reinterpret_cast<const uint32_t*>(x + row * params.width + column)};
  }
  // Keeps the compiler from holding the wide numbers of an earlier use, for which it lacks registers.
  __device__ void Pin() { asm volatile("" : "+r"(bits)); }
  __device__ float first() const { return Of(bits & 0xffff); }
  __device__ float second() const { return Of(bits >> 16); }

 private:
  static __device__ float Of(uint32_t half) {
    const auto narrow = static_cast<uint16_t>(half);
    T value;
    memcpy(&value, &narrow, sizeof(value));
    return Widen(value);
  }
};
template <>
struct Pair<float> {
  float2 values;
  static __device__ Pair Load(const QuantizeParams& params, int64_t row, int64_t column) {
    const auto* const x = static_cast<const float*>(params.x);
    return {*reinterpret_cast<const float2*>(x + row * params.width + column)};
  }
  __device__ void Pin() {}
  __device__ float first() const { return values.x; }
  __device__ float second() const { return values.y; }
};
template <>
struct Pair<Scaled> {
  __nv_fp8x2_storage_t bits;
  float scale;
  static __device__ Pair Load(const QuantizeParams& params, int64_t row, int64_t column) {
    const auto* const x = static_cast<const uint8_t*>(params.x);
    return {*reinterpret_cast<const __nv_fp8x2_storage_t*>(x + row * params.width + column),
            params.x_scales[row * (params.width / kTile) + column / kTile]};
  }
  __device__ void Pin() { asm volatile("" : "+h"(bits)); }
  __device__ float first() const { return __fmul_rn(values().x, scale); }
  __device__ float second() const { return __fmul_rn(values().y, scale); }

 private:
  __device__ float2 values() const {
    return __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(bits, __NV_E4M3)));
  }
};

__device__ inline uint32_t Magnitude(float v) { return __float_as_uint(v) & 0x7fffffffu; }

struct TileRows {
  int64_t first;
  int count;  // at most 128; fewer at the end of a group or of all rows
};

// Returns the rows of a tile. With groups, each begins with a new tile. Called by a warp.
__device__ TileRows FindRows(const QuantizeParams& params, int tile) {
  const auto limited = [&](int64_t first, int64_t count) -> TileRows {
    return {first,
            static_cast<int>(max(int64_t{0}, min(min(count, int64_t{kTile}), params.num_rows - first)))};
  };
  if (params.group_sizes == nullptr) return limited(int64_t{tile} * kTile, kTile);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  int64_t rows = 0;  // before the 32 groups
  int tiles = 0;
  for (int base = 0; base < params.num_groups; base += kWarp) {
    const int size = base + lane < params.num_groups ? max(params.group_sizes[base + lane], 0) : 0;
    const int own = (size + kTile - 1) / kTile;
    long long end = size;
    int last = own;
    for (int step = 1; step < kWarp; step *= 2) {
      const long long rows_before = __shfl_up_sync(kAllLanes, end, step);
      const int tiles_before = __shfl_up_sync(kAllLanes, last, step);
      if (lane >= step) end += rows_before, last += tiles_before;
    }
    const int index = tile - tiles - (last - own);  // among the tiles of this lane's group
    const unsigned found = __ballot_sync(kAllLanes, index >= 0 && index < own);
    if (found != 0) {
      const int from = __ffs(static_cast<int>(found)) - 1;
      const long long first = rows + end - size + int64_t{index} * kTile;
      return limited(__shfl_sync(kAllLanes, first, from),
                     __shfl_sync(kAllLanes, static_cast<long long>(size) - int64_t{index} * kTile, from));
    }
    rows += __shfl_sync(kAllLanes, end, kWarp - 1);
    tiles += __shfl_sync(kAllLanes, last, kWarp - 1);
  }
  return {0, 0};
}

// Stores a thread's 16 rows of one column as FP8: 16 neighboring bytes of the transpose.
template <typename Element>
__device__ void StoreColumn(uint8_t* at, float factor, Element&& element) {
#pragma unroll
  for (int vector = 0; vector < kRows; vector += 16) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = vector + 4 * i;
      words[i] = ConvertPair(element(r), element(r + 1), factor) |
                 ConvertPair(element(r + 2), element(r + 3), factor) << 16;
    }
    *reinterpret_cast<uint4*>(at + vector) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// What a block shares: the largest magnitudes that its warps find, and then the factors.
struct Shared {
  uint32_t of_rows[kTile][kWarpsWide];
  uint32_t of_columns[kWarpsHigh][kTile];
  uint32_t of_warps[kWarpsWide * kWarpsHigh];
  float row_factors[kTile];
};

// Converts rows as they lie, of which only the order of blocks matters. Each warp loads several vectors
// before it converts the first one.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    QuantizeRowsKernel(const __grid_constant__ QuantizeParams params) {
  using Block = Quantized<T>;
  constexpr int kVectors = kVectorsPerBlock / kThreads;
  const int64_t total = int64_t{params.num_rows} * params.width / Block::kElements;
  const int64_t first = (int64_t{blockIdx.x} * kThreads + (threadIdx.x & ~(kWarp - 1))) * kVectors;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  uint4 vectors[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int64_t at = first + v * kWarp + lane;
    vectors[v] = at < total ? static_cast<const uint4*>(params.x)[at] : uint4{};
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int64_t at = first + v * kWarp + lane;
    const uint4 one[1] = {vectors[v]};
    const Block block = QuantizeBlock<T>(one, params.rounds, params.floor);
    if (at >= total) continue;
    reinterpret_cast<typename Block::Values*>(params.values)[at] = block.values[0];
    if (lane % Block::kLanes == 0) params.scales[at / Block::kLanes] = block.scale;
  }
}

// Which results a kernel makes of a tile: rows transposed, also as they lie, or matrices.
enum class Makes { kColumns, kBoth, kMatrices };

template <typename T, Makes kMakes>
__global__ void __launch_bounds__(kThreads, 2) QuantizeKernel(const __grid_constant__ QuantizeParams params) {
  constexpr bool kRowScales = kMakes == Makes::kBoth;
  constexpr bool kColumnScales = kMakes != Makes::kMatrices;
  __shared__ Shared shared;
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const int wide = warp % kWarpsWide, high = warp / kWarpsWide;
  const int tile = static_cast<int>(blockIdx.x), matrix = static_cast<int>(blockIdx.z);
  const TileRows rows = FindRows(params, tile);
  if (rows.count == 0) return;
  const int in_tile = wide * 2 * kWarp + 2 * lane;
  const int64_t column = int64_t{blockIdx.y} * kTile + in_tile, width = params.width;
  const int64_t blocks = width / kTile;
  const int64_t first_of_tile = int64_t{matrix} * params.num_rows + rows.first;
  const int64_t first = first_of_tile + high * kRows;
  const int count = rows.count - high * kRows;  // of this thread's rows; may be more, or negative

  Pair<T> x[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) x[r] = r < count ? Pair<T>::Load(params, first + r, column) : Pair<T>{};

  uint32_t mine = 0;                     // of the row of this lane's number
  uint32_t of_first = 0, of_second = 0;  // of the thread's two columns
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const uint32_t one = Magnitude(x[r].first()), other = Magnitude(x[r].second());
    of_first = max(of_first, one), of_second = max(of_second, other);
    if constexpr (kRowScales) {
      const uint32_t largest = WarpMax(max(one, other));
      if (lane == r) mine = largest;
    }
  }
  if constexpr (kRowScales) {
    if (lane < kRows) shared.of_rows[high * kRows + lane][wide] = mine;
  }
  if constexpr (kMakes == Makes::kMatrices) {
    const uint32_t largest = WarpMax(max(of_first, of_second));
    if (lane == 0) shared.of_warps[warp] = largest;
  }
  if constexpr (kColumnScales) {
    *reinterpret_cast<uint2*>(&shared.of_columns[high][in_tile]) = make_uint2(of_first, of_second);
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < kRows; ++r) x[r].Pin();
  if constexpr (kRowScales) {
    if (const int row = static_cast<int>(threadIdx.x); row < rows.count) {
      const float scale =
          ScaleOf(max(shared.of_rows[row][0], shared.of_rows[row][1]), params.rounds, params.floor);
      shared.row_factors[row] = Reciprocal(scale);
      params.scales[(first_of_tile + row) * blocks + blockIdx.y] = scale;
    }
    __syncthreads();
  }

  // Steps of rows are computed again, because registers would not suffice to hold them since the loads.
  int64_t step = width;
  asm volatile("" : "+l"(step));
  uint8_t* const values = params.values + first * step + column;
  const auto store_row = [&](int r, float factor) {
    *reinterpret_cast<uint16_t*>(values + r * step) =
        static_cast<uint16_t>(ConvertPair(x[r].first(), x[r].second(), factor));
  };
  uint8_t* const transposed = params.transposed + (int64_t{matrix} * width + column) * params.num_columns +
                              int64_t{tile} * kTile + high * kRows;
  const auto store_columns = [&](float first_factor, float second_factor) {
    StoreColumn(transposed, first_factor, [&](int r) { return x[r].first(); });
    StoreColumn(transposed + params.num_columns, second_factor, [&](int r) { return x[r].second(); });
  };
  if constexpr (kMakes == Makes::kMatrices) {
    uint32_t largest = 0;
    for (uint32_t other : shared.of_warps) largest = max(largest, other);
    const float scale = ScaleOf(largest, params.rounds, params.floor), factor = Reciprocal(scale);
    if (threadIdx.x == 0) params.scales[(int64_t{matrix} * gridDim.x + tile) * blocks + blockIdx.y] = scale;
    if (params.values != nullptr) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) store_row(r, factor);
    }
    if (params.transposed != nullptr) store_columns(factor, factor);
  }
  if constexpr (kRowScales) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r < count) store_row(r, shared.row_factors[high * kRows + r]);
    }
  }
  if constexpr (kColumnScales) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) x[r].Pin();
    uint2 largest{};
#pragma unroll
    for (int other = 0; other < kWarpsHigh; ++other) {
      const uint2 found = *reinterpret_cast<const uint2*>(&shared.of_columns[other][in_tile]);
      largest = make_uint2(max(largest.x, found.x), max(largest.y, found.y));
    }
    const float2 scales = {ScaleOf(largest.x, params.rounds, params.floor),
                           ScaleOf(largest.y, params.rounds, params.floor)};
    if (high == 0) *reinterpret_cast<float2*>(params.transposed_scales + tile * width + column) = scales;
    store_columns(Reciprocal(scales.x), Reciprocal(scales.y));
  }
}

}  // namespace

namespace {

// Calls f with the kernel of a call.
template <typename T, typename F>
cudaError_t WithKernel(Makes makes, F&& f) {
  switch (makes) {
    case Makes::kColumns:
      return f(QuantizeKernel<T, Makes::kColumns>);
    case Makes::kBoth:
      return f(QuantizeKernel<T, Makes::kBoth>);
    default:
      return f(QuantizeKernel<T, Makes::kMatrices>);
  }
}
template <typename F>
cudaError_t WithKernel(bool is_scaled, Float type, Makes makes, F&& f) {
  // Only columns are made of rows that are FP8 already.
  if (is_scaled) return f(QuantizeKernel<Scaled, Makes::kColumns>);
  switch (type) {
    case Float::kF16:
      return WithKernel<__half>(makes, f);
    case Float::kBF16:
      return WithKernel<__nv_bfloat16>(makes, f);
    default:
      return WithKernel<float>(makes, f);
  }
}

}  // namespace

cudaError_t LaunchQuantize(const QuantizeParams& params, cudaStream_t stream) {
  if (params.transposed == nullptr && !params.of_matrices) {
    return WithType(params.type, [&](auto* type) {
      using T = std::remove_pointer_t<decltype(type)>;
      if constexpr (std::is_same_v<T, double>) {
        return cudaErrorInvalidValue;
      } else {
        const int64_t vectors = int64_t{params.num_rows} * params.width / Quantized<T>::kElements;
        const int64_t blocks = (vectors + kVectorsPerBlock - 1) / kVectorsPerBlock;
        if (blocks == 0) return cudaSuccess;
        return Launch(QuantizeRowsKernel<T>, dim3(static_cast<unsigned>(blocks)), kThreads, 0, stream, false,
                      params);
      }
    });
  }
  const Makes makes = params.of_matrices ? Makes::kMatrices : params.values ? Makes::kBoth : Makes::kColumns;
  const int tiles = params.of_matrices ? params.num_rows / kTile : params.num_columns / kTile;
  const dim3 grid(tiles, params.width / kTile, params.num_matrices);
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return cudaSuccess;
  return WithKernel(params.x_scales != nullptr, params.type, makes,
                    [&](auto kernel) { return Launch(kernel, grid, kThreads, 0, stream, false, params); });
}

cudaError_t PreloadQuantize() {
  const auto preload = [](auto kernel) {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, kernel);
  };
  cudaError_t error = WithKernel(true, Float::kF32, Makes::kColumns, preload);
  for (Float type : {Float::kF16, Float::kBF16, Float::kF32}) {
    if (error == cudaSuccess) {
      error = WithType(type, [&](auto* name) {
        using T = std::remove_pointer_t<decltype(name)>;
        if constexpr (std::is_same_v<T, double>) {
          return cudaErrorInvalidValue;
        } else {
          return preload(QuantizeRowsKernel<T>);
        }
      });
    }
    for (Makes makes : {Makes::kColumns, Makes::kBoth, Makes::kMatrices}) {
      if (error == cudaSuccess) error = WithKernel(false, type, makes, preload);
    }
  }
  return error;
}

}  // namespace jax_ep::cuda
