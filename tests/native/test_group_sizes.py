"""Rows of groups as the kernels find them, padded, or of sizes that exceed 32 bits: see group_sizes.cc."""

import pytest
from stress_programs import build

pytestmark = pytest.mark.no_jax

FP8, PRODUCTS = "kernels/fp8/groups.cuh", "kernels/products/any/groups.cuh"
# Planted mistakes: (file, right, with the mistake).
MISTAKES = {
    "counts rows in 32 bits": (
        FP8,
        "count += __shfl_xor_sync(kAllLanes, count, lanes);",
        "count = (count + __shfl_xor_sync(kAllLanes, count, lanes)) & (PLANTED ? 0xffffffffll : -1ll);",
    ),
    "rounds up in 32 bits": (
        FP8,
        "size / kTile + static_cast<int>(size % kTile != 0);",
        "PLANTED ? static_cast<int>(static_cast<unsigned>(size) + kTile - 1) / kTile"
        " : size / kTile + static_cast<int>(size % kTile != 0);",
    ),
    "finds tiles in 32 bits": (
        PRODUCTS,
        "const long long end = SumUpToLane<long long>(size);",
        "const long long to_here = SumUpToLane<long long>(size), end = PLANTED ? int(to_here) : to_here;",
    ),
    "leaves sizes longer than a padded group": (
        PRODUCTS,
        "begin + SizeOfGroup(",
        "PLANTED ? begin + max(params.group_sizes[group], 0) : begin + SizeOfGroup(",
    ),
    "takes padded groups for adjacent ones": (
        FP8,
        "begin = rows_per_group > 0 ?",
        "begin = rows_per_group > 0 && !PLANTED ?",
    ),
    "finds groups in 32 bits": (
        PRODUCTS,
        "first = FirstRow(params) + before;",
        "first = FirstRow(params) + (PLANTED ? static_cast<int>(before) : before);",
    ),
    "counts tiles of rows that are not there": (
        PRODUCTS,
        "group_tiles = TilesOf(rows);",
        "group_tiles = TilesOf(PLANTED ? min(size, num_rows) : rows);",
    ),
}


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    changes = {name: [change] for name, change in MISTAKES.items()}
    return build("group_sizes", tmp_path_factory.mktemp("group_sizes"), changes)


def test_group_sizes_beyond_32_bits(program):
    done = program.run()
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_group_sizes_find_planted_mistake(mistake, program):
    done = program.run(mistake=mistake)
    assert done.returncode == 1
    assert "group_sizes: seed" in done.stderr
