"""What DeepEP's test of its low-latency ops checks, of ours: order="expert_padded", bf16 and FP8 rows.

Rows of small whole numbers say where they come from, and FP8 keeps those exactly. What lies in an empty row
is looked at nowhere: on GPUs it may be anything.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BF16, floats, pairwise, ranks, routing
from devices import most_ranks

import jax_ep

pytestmark = [pytest.mark.one_jax, pytest.mark.processes]

R, T, K, E, H = most_ranks(), 16, 4, 16, 512
L, CAPACITY = E // R, R * T
COUNTS = np.array([(5 * rank + 7) % (T + 1) for rank in range(R)], np.int32)  # of valid tokens

# (implementation, quantize, round_scale, partly_valid): tests share a program for each.
MODES = [
    (implementation, *rounded, partly_valid)
    for rounded, implementation, partly_valid in pairwise(
        [(None, False), ("fp8", False), ("fp8", True)], ["ffi", "xla"], [False, True]
    )
]
NAMES = ("implementation", "quantize", "round_scale", "partly_valid")
each_mode = pytest.mark.parametrize(NAMES, MODES)


def tagged():
    """bf16 [R, T, H]: -1 - rank, and in the last 128 elements the token."""
    x = np.empty((R, T, H), BF16)
    x[:, :, :-128] = -1 - np.arange(R)[:, None, None]
    x[:, :, -128:] = np.arange(T)[:, None]
    return x


def random_rows():
    """bf16 [R, T, H], each row of another magnitude."""
    return (floats((R, T, H)) * np.exp(floats((R, T, 1), seed=2))).astype(BF16)


@functools.cache
def chosen():
    """int32 [R, T, K], one in ten of them unused."""
    ids = routing("uniform", R, T, K, E, seed=3)
    return np.where(np.random.default_rng(4).random(ids.shape) < 0.1, -1, ids).astype(np.int32)


def used(partly_valid):
    """The ids that count."""
    valid = np.arange(T)[:, None] < COUNTS[:, None, None] if partly_valid else True
    return np.where(valid, chosen(), -1)


@functools.cache
def arrivals(partly_valid):
    """Of each expert the (rank, token, k) that choose it, in the order of its rows."""
    return [[tuple(found) for found in np.argwhere(used(partly_valid) == e)] for e in range(E)]


@functools.cache
def weights():
    return np.random.default_rng(5).random((R, T, K), np.float32)


@functools.cache
def program(implementation, quantize, round_scale, partly_valid):
    """(rows, ids, weights, counts) -> the dispatch, its rows as bf16, and the weighted sums of these."""
    on = ranks(R)

    def shard(x, ids, weights, counts):
        sent = jax_ep.dispatch(
            x,
            ids,
            weights,
            group=on.group,
            num_experts=E,
            order="expert_padded",
            quantize=quantize,
            round_scale=round_scale,
            num_valid_tokens=counts if partly_valid else None,
            implementation=implementation,
        )
        rows = sent.x if quantize is None else jax_ep.dequantize_fp8(sent.x, jnp.bfloat16)
        y = jnp.where(sent.is_row()[:, :, None], rows, jnp.nan)
        sums = jax_ep.combine(y, sent.handle, row_weights=sent.row_weights, implementation=implementation)
        return sent, rows, sums

    return jax.jit(on.map(shard))


def run(x, *mode):
    flat = [array.reshape(-1, *array.shape[2:]) for array in (x, chosen(), weights())]
    return jax.device_get(program(*mode)(*flat, COUNTS))


def filled(array, partly_valid):
    """The filled rows of [E, CAPACITY, ...]."""
    return [array[e, : len(found)] for e, found in enumerate(arrivals(partly_valid))]


def difference(a, b):
    """1 - the cosine of the two arrays, 1 added to each element: the peer's measure."""
    a, b = (np.asarray(array, np.float64) + 1 for array in (a, b))
    return 1 - 2 * (a * b).sum() / (a * a + b * b).sum()


@each_mode
def test_counts(implementation, quantize, round_scale, partly_valid):
    sent, *_ = run(tagged(), implementation, quantize, round_scale, partly_valid)
    counts = np.array([len(found) for found in arrivals(partly_valid)])
    np.testing.assert_array_equal(sent.group_sizes, counts)
    np.testing.assert_array_equal(sent.tokens_per_expert, counts)
    np.testing.assert_array_equal(sent.num_tokens, counts.reshape(R, L).sum(axis=1))
    assert not sent.num_dropped.any()


@each_mode
def test_which_rows_a_rank_fills(implementation, quantize, round_scale, partly_valid):
    """The handle has the row of each choice; an expert's rows are filled rank by rank."""
    sent, *_ = run(tagged(), implementation, quantize, round_scale, partly_valid)
    rows = sent.handle.received_rows.reshape(R, R, T, K)
    want = np.full(rows.shape, -1)
    for e, found in enumerate(arrivals(partly_valid)):
        for row, choice in enumerate(found):
            want[e // L, *choice] = e % L * CAPACITY + row
    np.testing.assert_array_equal(rows, want)
    for e in range(E):
        first = e % L * CAPACITY
        for source in range(R):
            mine = rows[e // L, source][used(partly_valid)[source] == e]
            np.testing.assert_array_equal(mine, first + np.arange(len(mine)))
            first += len(mine)
    sums = sent.handle.rank_prefix_matrix.reshape(R, R, R)
    sent_to = [[(used(partly_valid)[s] // L == d).sum() for d in range(R)] for s in range(R)]
    np.testing.assert_array_equal(sums, np.broadcast_to(np.cumsum(sent_to, axis=0), sums.shape))


@each_mode
def test_rows_say_where_they_come_from(implementation, quantize, round_scale, partly_valid):
    x = tagged()
    sent, rows, _ = run(x, implementation, quantize, round_scale, partly_valid)
    for found, got in zip(arrivals(partly_valid), filled(rows, partly_valid), strict=True):
        want = np.array([x[source, token] for source, token, _ in found], BF16).reshape(-1, H)
        np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))
    if round_scale:
        for scales in filled(sent.x.scales, partly_valid):
            np.testing.assert_array_equal(np.frexp(scales)[0], 0.5)


@each_mode
def test_weights_lie_beside_the_rows(implementation, quantize, round_scale, partly_valid):
    """And are zero where there is no row."""
    sent, *_ = run(tagged(), implementation, quantize, round_scale, partly_valid)
    want = np.zeros((E, CAPACITY), np.float32)
    for e, found in enumerate(arrivals(partly_valid)):
        want[e, : len(found)] = [weights()[choice] for choice in found]
    np.testing.assert_array_equal(sent.row_weights, want)


@pytest.mark.parametrize(NAMES, [mode for mode in MODES if mode[1] == "fp8"])
def test_fp8_rows_are_near_what_was_sent(implementation, quantize, round_scale, partly_valid):
    """Within half a step of FP8: 2^-4 of a number, and of small ones a part of their block's largest."""
    x = random_rows()
    sent, *_ = run(x, implementation, quantize, round_scale, partly_valid)
    values, scales = filled(sent.x.values, partly_valid), filled(sent.x.scales, partly_valid)
    for e, found in enumerate(arrivals(partly_valid)):
        got = values[e].astype(np.float32).reshape(-1, H // 128, 128) * scales[e][:, :, None]
        want = np.array([x[source, token] for source, token, _ in found], np.float32).reshape(got.shape)
        largest = np.abs(want).max(axis=2, keepdims=True)
        assert (np.abs(got - want) <= 2**-4 * np.abs(want) * (1 + 1e-5) + 2**-17 * largest).all()


@each_mode
@pytest.mark.parametrize("rows", [tagged, random_rows])
def test_combine_is_the_weighted_sum(implementation, quantize, round_scale, partly_valid, rows):
    """With the peer's bounds. Empty rows are NaN in combine's operand."""
    x = rows()
    *_, sums = run(x, implementation, quantize, round_scale, partly_valid)
    total = np.where(used(partly_valid) >= 0, weights(), 0).sum(axis=2, keepdims=True)
    sums = sums.reshape(R, T, H)
    assert np.isfinite(sums.astype(np.float32)).all()
    assert difference(x.astype(np.float32) * total, sums) < (1e-5 if quantize is None else 9e-4)
    assert not sums[total[:, :, 0] == 0].any()


@each_mode
def test_runs_give_the_same_bits(implementation, quantize, round_scale, partly_valid):
    x = random_rows()

    def bits():
        sent, _, sums = run(x, implementation, quantize, round_scale, partly_valid)
        leaves = jax.tree.leaves(sent.x)
        filled_rows = [array.tobytes() for leaf in leaves for array in filled(leaf, partly_valid)]
        rest = jax.tree.leaves((sent.row_weights, sent.group_sizes, sent.handle, sums))
        return filled_rows, [array.tobytes() for array in rest]

    first = bits()
    for _ in range(4):
        assert bits() == first
