"""Ranks of tokens and of sums in ops of few tokens, in groups of up to 128 ranks: see many_ranks.cc."""

import pytest
from stress_programs import build

pytestmark = pytest.mark.no_jax

RANKS, ROUTE = "kernels/few_tokens/ranks.cuh", "kernels/few_tokens/route.cuh"
RANK_SET, COUNT = "kernels/protocol/rank_set.h", "kernels/routing/count.cuh"
# Planted mistakes: (file, right, with the mistake).
MISTAKES = {
    "takes senders for those of the first word": (
        RANKS,
        "rank = w * kRankBits + __ffs(ranks) - 1;",
        "rank = (PLANTED ? 0 : w * kRankBits) + __ffs(ranks) - 1;",
    ),
    "forgets the senders of earlier words": (RANKS, "before += count;", "before += PLANTED ? 0 : count;"),
    "visits its own word's ranks twice": (RANKS, "if (i == 0) bits", "if (i == 0 && !PLANTED) bits"),
    "counts tokens by the first word": (
        ROUTE,
        "ranks + rank / kRankBits *",
        "ranks + (PLANTED ? 0 : rank / kRankBits) *",
    ),
    "adds pairs of the first word": (
        ROUTE,
        "source * R + word * kRankBits +",
        "source * R + (PLANTED ? 0 : word * kRankBits) +",
    ),
    "finds a rank's bit in each word": (
        RANK_SET,
        "return rank / kRankBits == index ?",
        "return PLANTED || rank / kRankBits == index ?",
    ),
    "counts choices past its own": (COUNT, "left >= 2 ? ~0u", "left >= 2 || PLANTED ? ~0u"),
    "counts for its own choice where lanes share": (
        ROUTE,
        "counted_expert = __shfl_sync(kAllLanes, expert, source_lane);",
        "counted_expert = __shfl_sync(kAllLanes, expert, PLANTED ? lane : source_lane);",
    ),
}


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    changes = {name: [change] for name, change in MISTAKES.items()}
    return build("many_ranks", tmp_path_factory.mktemp("many_ranks"), changes)


def test_ranks_of_tokens_and_sums(program):
    done = program.run()
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_finds_planted_mistake(mistake, program):
    done = program.run(mistake=mistake)
    assert done.returncode == 1
    assert "many_ranks: seed" in done.stderr
