"""The protocol of an op holds in every order of its steps, and what is planted into it is found."""

import gc

import pytest
from protocol_model import FAULTS, Protocol, search

pytestmark = pytest.mark.no_jax

ALIKE = ("dispatch", "combine")


@pytest.fixture(autouse=True)
def no_garbage():
    """A search makes no cycles, and looking for them would take a third of its time."""
    gc.disable()
    yield
    gc.enable()


def assert_holds(protocol, at_least):
    """`at_least` states: a model that can do nothing breaks nothing."""
    states, broken = search(protocol)
    assert broken is None, f"{broken.invariant}: {'; '.join(broken.steps)}"
    assert states > at_least


# A rank that may stop may also go on: what is searched without it is in there.
@pytest.mark.parametrize(("blocks", "may_stop"), [((1, 1), 1), ((2, 1), 0), ((2, 1), 1), ((2, 2), 1)])
def test_two_ranks_and_two_ops(blocks, may_stop):
    assert_holds(Protocol(blocks, 2, (ALIKE, ALIKE), may_stop), 1_500)


@pytest.mark.parametrize(("blocks", "may_stop"), [((2, 1), 0), ((2, 1), 1)])
def test_blocks_that_wait_after_they_have_left(blocks, may_stop):
    assert_holds(Protocol(blocks, 2, (ALIKE, ALIKE), may_stop, spreads=True), 15_000)


@pytest.mark.parametrize(
    ("blocks", "may_stop"), [((1, 1, 1), 2), pytest.param((2, 1, 1), -1, marks=pytest.mark.slow)]
)
def test_three_ranks(blocks, may_stop):
    assert_holds(Protocol(blocks, 1, (ALIKE,) * 3, may_stop), 30_000)


@pytest.mark.slow
def test_three_ranks_and_two_ops():
    assert_holds(Protocol((1, 1, 1), 2, (ALIKE,) * 3), 100_000)


@pytest.mark.parametrize("other", [("combine", "combine"), ("dispatch", "dispatch"), ALIKE[::-1]])
def test_ranks_that_run_different_ops(other):
    """In the first op, in the second, in both; nothing is touched, and everybody returns."""
    assert_holds(Protocol((2, 1), 2, (ALIKE, other), 1), 1_000)
    assert_holds(Protocol((1, 1, 1), 1, (ALIKE, ALIKE, other)), 3_000)


# By which invariant each is found, and where: some show only where a rank has several blocks.
ONE_BLOCK = ((1, 1), (2, 1))
SEVERAL_BLOCKS = ((2, 1), (2, 2))
CAUGHT_BY = {
    "opens in two steps": ("I1", ONE_BLOCK),
    "keeps what it added": ("I3", ONE_BLOCK),
    "publishes before it opens": ("I1", ONE_BLOCK),
    "publishes in part": ("I1", SEVERAL_BLOCKS),
    "touches on some words": ("I1", ONE_BLOCK),
    "gives up silently": ("I1", ONE_BLOCK),
    "returns at once": ("I1", ONE_BLOCK),
    "waits for first blocks": ("I1", SEVERAL_BLOCKS),
    "reads before it closes": ("I1", ONE_BLOCK),
    "reads the word first": ("I1", SEVERAL_BLOCKS),
    "waits before it leaves": ("I3", ONE_BLOCK),
    "leaves unbroken": ("I2", ONE_BLOCK),
    "leaves without a word": ("I3", ONE_BLOCK),
    "leaves unopened": ("I3", ONE_BLOCK),
    "looks before it closes": ("I3", SEVERAL_BLOCKS),
    "forgets what it lost": ("I2", SEVERAL_BLOCKS),
    "ignores signatures": ("I4", ONE_BLOCK),
}


@pytest.mark.parametrize(
    ("fault", "blocks"), [(fault, blocks) for fault in FAULTS for blocks in CAUGHT_BY[fault][1]]
)
def test_each_planted_fault_is_found(fault, blocks):
    # One rank runs something else where that is what must be noticed.
    last = ("combine", "combine") if fault == "ignores signatures" else ALIKE
    signatures = (*(ALIKE,) * (len(blocks) - 1), last)
    spreads = fault == "forgets what it lost"
    _, broken = search(Protocol(blocks, 2, signatures, spreads=spreads, fault=fault))
    assert broken is not None, FAULTS[fault]
    assert broken.invariant.startswith(CAUGHT_BY[fault][0]), broken
