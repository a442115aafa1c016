// The queue of a cluster's tiles: one warp of the first block hands them out, and the loading and multiplying
// warps of both blocks receive all of them.
#pragma once

#include "kernels/products/sm90/tiles.cuh"
#include "kernels/ptx/hopper.cuh"

namespace jax_ep::cuda::sm90 {

constexpr int kTileSlots = 2;

// In the shared memory of each block.
struct TileQueue {
  uint64_t full[kTileSlots], empty[kTileSlots];
  Tile tiles[kTileSlots];

  // Called by one thread. `receivers`: warps of a block that receive tiles.
  __device__ void Init(int receivers) {
    for (uint64_t& barrier : full) InitBarrier(&barrier, 1);
    for (uint64_t& barrier : empty) InitBarrier(&barrier, kCluster * receivers);
  }
};

// The sequence of a cluster's tiles, as a warp receives it.
struct TileReceiver {
  TileQueue& queue;
  unsigned lanes;  // the lanes of the warp that receive
  int count = 0;

  // Called by these lanes together.
  __device__ Tile Next() {
    const int slot = count % kTileSlots;
    WaitForLoad(&queue.full[slot], count / kTileSlots % 2);
    const Tile tile = queue.tiles[slot];
    const bool is_loaded = __all_sync(lanes, IsLoaded(tile.bits()));
    ArriveInBlock(&queue.empty[slot], 0, is_loaded && threadIdx.x % kWarp == 0);
    ++count;
    // The compiler must know that all lanes have the same numbers.
    const auto common = [&](int number) { return __shfl_sync(lanes, number, 0); };
    return {common(tile.group),   common(tile.first_row), common(tile.end_row), common(tile.column),
            common(tile.is_wide), common(tile.begin),     common(tile.end)};
  }
};

// Hands out tiles to both blocks. Called by one warp of the cluster.
template <bool kOfWeights>
__device__ void HandOut(const GroupedDotParams& params, const GroupArrays& groups, int64_t row_bytes,
                        TileQueue& queue) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  TileFinder<kOfWeights> finder(params, groups, row_bytes);
  // The first tile is the cluster's own.
  int index = static_cast<int>(blockIdx.x) / kCluster;
  for (int count = 0;; ++count) {
    const Tile tile = finder.Find(index);
    const int slot = count % kTileSlots;
    WaitForLoad(&queue.empty[slot], count / kTileSlots % 2 ^ 1);
    if (lane < kCluster) SendToBlock(&queue.tiles[slot], tile, &queue.full[slot], lane);
    if (tile.is_end()) return;
    if (lane == 0) index = atomicAdd(groups.next_tile, 1) + static_cast<int>(gridDim.x) / kCluster;
    index = __shfl_sync(kAllLanes, index, 0);
  }
}

}  // namespace jax_ep::cuda::sm90
