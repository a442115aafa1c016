"""Rows of groups as the kernels find them, padded, or of sizes that exceed 32 bits: see group_sizes.cc."""

import pytest
from stress_programs import build, run

pytestmark = pytest.mark.no_jax

FP8, PRODUCTS = "kernels/fp8/groups.cuh", "kernels/products/any/groups.cuh"
# Planted mistakes: (file, right, wrong).
MISTAKES = {
    "counts rows in 32 bits": (
        FP8,
        "count += __shfl_xor_sync(kAllLanes, count, lanes);",
        "count = static_cast<unsigned>(count + __shfl_xor_sync(kAllLanes, count, lanes));",
    ),
    "rounds up in 32 bits": (
        FP8,
        "size / kTile + static_cast<int>(size % kTile != 0);",
        "static_cast<int>(static_cast<unsigned>(size) + kTile - 1) / kTile;",
    ),
    "finds tiles in 32 bits": (PRODUCTS, "long long end = size;", "int end = size;"),
    "leaves sizes longer than a padded group": (
        PRODUCTS,
        "begin + SizeOfGroup(params.group_sizes, group, rows)};",
        "begin + max(params.group_sizes[group], 0)};",
    ),
    "takes padded groups for adjacent ones": (
        FP8,
        "rows_per_group > 0 ? int64_t{base + lane} * rows_per_group : rows + end - size;",
        "rows + end - size;",
    ),
    "finds groups in 32 bits": (PRODUCTS, "long long before = 0;", "int before = 0;"),
    "counts tiles of rows that are not there": (
        PRODUCTS,
        "group_tiles = TilesOf(rows);",
        "group_tiles = TilesOf(min(size, num_rows));",
    ),
}


def test_group_sizes_beyond_32_bits(tmp_path):
    done = run(build("group_sizes", tmp_path / "group_sizes", options=("-O1",)))
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_group_sizes_find_planted_mistake(mistake, tmp_path, build_with_mistake):
    done = run(build_with_mistake("group_sizes", [MISTAKES[mistake]], tmp_path))
    assert done.returncode == 1
    assert "group_sizes: seed" in done.stderr
