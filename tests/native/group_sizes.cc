// The rows of groups, as the kernels find them (ffi/kernels/fp8/groups.cuh,
// ffi/kernels/products/any/groups.cuh), for sizes whose sums exceed 32 bits, and for groups that have as many
// rows each. Compares them with plain sums.
#include "kernels/fp8/groups.cuh"
#include "kernels/products/any/groups.cuh"
#include "warp.h"

namespace jax_ep::cuda {
namespace {

constexpr int kMost = 0x7fffffff;

struct Case {
  const char* name;
  int num_rows, first_row;
  std::vector<int32_t> sizes;
};

const Case kCases[] = {
    {"plain", 1000, 16, {130, 0, 71, 500, 1}},
    {"most rows", kMost, 0, {kMost - 3, 3}},
    {"many large groups", kMost, 5, std::vector<int32_t>(40, kMost / 40)},
    {"a sum of 2^32", 700, 0, {300, kMost, kMost, 2, 50}},
    {"a sum above 2^32", 700, 600, {300, kMost, kMost, kMost}},
    {"negative sizes", 700, -3, {-kMost, 300, -1, -kMost, 100}},
    {"more than 32 large ones", 9000, 9, std::vector<int32_t>(200, kMost)},
};

int64_t Up(int64_t size) { return (size + 127) / 128 * 128; }

void Check(bool is_right, const char* of, int number) {
  if (!is_right) Die("%s %d is wrong", of, number);
}

void CheckConversion(const Case& c) {
  const int count = static_cast<int>(c.sizes.size());
  const int32_t* const sizes = c.sizes.data();
  int64_t row = 0, tile = 0;
  for (int group = 0; group < count; ++group) {
    const int64_t size = std::max(c.sizes[group], 0), tiles = Up(size) / 128;
    for (const int64_t i : {int64_t{0}, tiles / 2, tiles - 1}) {
      if (tiles == 0 || tile + i >= 1 << 24) continue;  // more than a result has
      const TileRows rows =
          InWarp([&] { return FindRows(sizes, count, 0, c.num_rows, static_cast<int>(tile + i)); });
      const int64_t first = row + i * 128, end = std::min({first + 128, row + size, int64_t{c.num_rows}});
      Check(rows.first == first && rows.count == std::max(int64_t{0}, end - first), "tile of group", group);
    }
    row += size;
    tile += tiles;
  }
  const int64_t total = InWarp([&] { return CountRows(sizes, count, c.num_rows); });
  Check(total == std::min(row, int64_t{c.num_rows}), "the number of rows of groups", count);
}

void CheckProducts(const Case& c) {
  GroupedDotParams params{};
  params.num_rows = c.num_rows;
  params.num_groups = static_cast<int32_t>(c.sizes.size());
  params.group_sizes = c.sizes.data();
  params.first_row = &c.first_row;
  const int64_t all = c.num_rows;
  const auto find = [&](int64_t tile) {
    return InWarp([&] { return FindTile(params, static_cast<int>(tile)); });
  };
  const int64_t before = std::min(std::max(int64_t{c.first_row}, int64_t{0}), all);
  int64_t row = before, tile = 0;
  for (const int multiple : {1, 128}) {
    row = before, tile = 0;
    for (int group = 0; group < params.num_groups; ++group) {
      const int64_t size = std::max(c.sizes[group], 0), taken = multiple == 1 ? size : Up(size);
      const int64_t begin = std::min(row, all), end = std::min(row + taken, all);
      const RowRange range = InWarp([&] { return FindRows(params, group, multiple); });
      Check(range.begin == begin && range.rows == end - begin, "the rows of group", group);
      const int64_t tiles = Up(end - begin) / 128;
      for (const int64_t i : {int64_t{0}, tiles / 2, tiles - 1}) {
        if (tiles == 0 || multiple != 1) continue;
        const TileOfRows at = find(tile + i);
        Check(at.group == group && at.first == begin + i * 128 && at.last == end, "tile of group", group);
      }
      row += taken;
      tile += tiles;
    }
    if (multiple != 1) continue;
    // Then the rows after and before all groups, and no more.
    row = std::min(row, all);
    for (const auto& [first, last] : {std::pair{row, all}, std::pair{int64_t{0}, before}}) {
      for (int64_t at = first; at < last; at += std::max(int64_t{128}, (last - first) / 256 * 128)) {
        const TileOfRows rows = find(tile + (at - first) / 128);
        Check(rows.group == params.num_groups && rows.first == at && rows.last == last, "tile of no group",
              0);
      }
      tile += Up(last - first) / 128;
    }
    const int64_t blocks = all / kTileM + params.num_groups + 2;
    Check(tile <= blocks, "the number of tiles", 0);
    if (tile < blocks) {
      const TileOfRows rows = find(blocks - 1);
      Check(rows.first >= rows.last, "a tile past all", 0);
    }
  }
}

// Groups of `per_group` rows each, of which they fill the first ones.
void CheckPadded(const std::vector<int32_t>& sizes, int per_group) {
  GroupedDotParams params{};
  params.num_groups = static_cast<int32_t>(sizes.size());
  params.num_rows = params.num_groups * per_group;
  params.group_sizes = sizes.data();
  params.rows_per_group = per_group;
  int converted = 0, multiplied = 0;  // tiles
  for (int group = 0; group < params.num_groups; ++group) {
    const int begin = group * per_group, end = begin + std::min(std::max(sizes[group], 0), per_group);
    for (int first = begin; first < end; first += 128, ++converted) {
      const TileRows rows = InWarp([&] {
        return FindRows(params.group_sizes, params.num_groups, per_group, params.num_rows, converted);
      });
      Check(rows.first == first && rows.count == std::min(128, end - first), "padded tile of group", group);
    }
    for (int first = begin; first < begin + per_group; first += 128, ++multiplied) {
      const TileOfRows at = InWarp([&] { return FindTile(params, multiplied); });
      Check(at.group == group && at.first == first && at.last == begin + per_group && at.filled_end == end,
            "padded tile of group", group);
    }
  }
  const TileRows rows = InWarp(
      [&] { return FindRows(params.group_sizes, params.num_groups, per_group, params.num_rows, converted); });
  Check(rows.first < 0, "a padded tile past all", 0);
  for (int tile = multiplied; tile < params.num_rows / kTileM + params.num_groups + 2; ++tile) {
    const TileOfRows at = InWarp([&] { return FindTile(params, tile); });
    Check(at.first >= at.last, "a padded tile past all", tile);
  }
}

}  // namespace
}  // namespace jax_ep::cuda

int main() {
  using namespace jax_ep::cuda;
  for (const Case& c : kCases) {
    what = c.name;
    CheckConversion(c);
    CheckProducts(c);
  }
  for (const int per_group : {1, 127, 128, 300}) {
    what = "padded groups";
    CheckPadded({130, 0, -5, kMost, 1, 128}, per_group);
    CheckPadded(std::vector<int32_t>(70, 129), per_group);
  }
  return 0;
}
