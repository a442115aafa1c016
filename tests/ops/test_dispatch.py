"""Dispatch moves rows: everything is compared bit for bit with the oracle."""

import functools
import re

import hypothesis
import hypothesis.strategies as st
import jax
import ml_dtypes
import numpy as np
import oracle
import pytest
from cases import (
    BF16,
    FP8,
    ROUTINGS,
    assert_close,
    floats,
    more_on_gpus,
    pairwise,
    ranks,
    routing,
    same_bits,
    tagged_rows,
    weights_of,
)
from devices import most_ranks

import jax_ep
from jax_ep.bench.shapes import MODELS

pytestmark = [pytest.mark.processes, pytest.mark.moves_rows]

MANY = most_ranks()


def run_dispatch(x, ids, weights, num_experts, implementation="ffi", per_domain=None, **options):
    program = compiled(len(ids), per_domain, num_experts, implementation, **options)
    return ranks(len(ids), per_domain).apply(program, x, ids, weights)


@functools.lru_cache(64)
def compiled(num_ranks, per_domain, num_experts, implementation, **options):
    """Returns a dispatch that tests of other routings and contents share."""
    on = ranks(num_ranks, per_domain)

    def shard(x, ids, weights):
        return jax_ep.dispatch(
            x, ids, weights, group=on.group, num_experts=num_experts, implementation=implementation, **options
        )

    return jax.jit(on.map(shard))


def check(got, expected, payload):
    """got: dispatched, with a leading rank axis; expected: the oracle's list; payload: the rows of got."""
    by_rank = isinstance(got, jax_ep.DispatchedByRank)
    for rank, want in enumerate(expected):
        assert same_bits(payload[rank], want.x), f"rows at rank {rank}"

        def same(name, actual, wanted, rank=rank):
            np.testing.assert_array_equal(actual[rank], wanted, f"{name} at rank {rank}", strict=True)

        for name in ("tokens_per_expert", "num_tokens", "num_dropped"):
            same(name, getattr(got, name), getattr(want, name))
        weights = weights_of(got)
        if want.weights is None:
            assert weights is None
        else:
            same("weights", weights, want.weights)
        if by_rank:
            same("topk_idx", got.topk_idx, want.topk_idx)
            continue
        same("group_sizes", got.group_sizes, want.group_sizes)
        received_rows = np.full((len(expected), *got.handle.topk_idx.shape[1:]), -1, np.int32)
        for c, source in enumerate(want.sources):
            if source is not None:
                received_rows[source] = c
        same("received_rows", got.handle.received_rows, received_rows.reshape(-1, received_rows.shape[-1]))


@pytest.mark.one_jax
@pytest.mark.parametrize("order", ["rank", "expert"])
@pytest.mark.parametrize("kind", ROUTINGS)
def test_every_routing_on_every_number_of_ranks(kind, order, num_ranks, implementation):
    tokens, k, experts = 13, 3, 16
    ids = routing(kind, num_ranks, tokens, k, experts)
    x = tagged_rows(num_ranks, tokens, 6, BF16)
    weights = floats((num_ranks, tokens, k))
    got = run_dispatch(x, ids, weights, experts, implementation, order=order)
    check(got, oracle.dispatch(x, ids, weights, experts, order), got.x)
    matrix = oracle.rank_prefix_matrix(ids, experts, order)
    for rank in range(num_ranks):
        np.testing.assert_array_equal(got.handle.rank_prefix_matrix[rank], matrix, strict=True)


@pytest.mark.one_jax
@pytest.mark.parametrize(
    ("size", "per_domain", "order"),
    more_on_gpus(
        [(3, None, "rank"), (7, None, "expert"), (6, 3, "expert"), (6, 2, "rank"), (6, 1, "expert")],
        [(3, None, "expert"), (7, None, "rank"), (6, 3, "rank"), (6, 2, "expert"), (6, 1, "rank")],
    ),
)
def test_dispatch_accepts_any_number_of_ranks(size, per_domain, order):
    tokens, k, experts = 130, 4, 6 * size
    ids, weights = routing("sprinkled", size, tokens, k, experts), floats((size, tokens, k))
    x = tagged_rows(size, tokens, 200, BF16)
    got = run_dispatch(x, ids, weights, experts, per_domain=per_domain, order=order)
    check(got, oracle.dispatch(x, ids, weights, experts, order), got.x)


# Tokens, choices and experts.
EXTREME_SIZES = {
    "T1_K1": (1, 1, 8),
    "T1_K16": (1, 16, 64),
    "K_exceeds_E": (5, 16, 8),
    "E_equals_R": (9, 1, 8),
    "E512": (4, 4, 512),
    "T33": (33, 8, 64),
    "K20_E1024": (70, 20, 1024),
    "several_waves": (1300, 3, 16),
}


@pytest.mark.one_jax
@pytest.mark.parametrize(
    ("size", "order", "implementation"),
    [
        *((size, "expert", "ffi") for size in EXTREME_SIZES),
        *((size, "rank", "ffi") for size in more_on_gpus([*EXTREME_SIZES][::2], [*EXTREME_SIZES][1::2])),
        *((size, "expert", "xla") for size in ("T1_K16", "K_exceeds_E", "K20_E1024")),
    ],
)
def test_extreme_sizes(size, order, implementation):
    tokens, k, experts = EXTREME_SIZES[size]
    ids = routing("sprinkled", MANY, tokens, k, experts)
    x = tagged_rows(MANY, tokens, 4, np.float32)
    got = run_dispatch(x, ids, None, experts, implementation, order=order)
    check(got, oracle.dispatch(x, ids, None, experts, order), got.x)


@pytest.mark.one_jax
@pytest.mark.parametrize(
    ("aligned", "size", "implementation"),
    pairwise(
        [("rank", 1), ("expert", 1), ("expert", 4)], ["half", "one_short", "exact", "least"], ["ffi", "xla"]
    ),
)
def test_capacity(aligned, size, implementation):
    order, alignment = aligned
    tokens, k, experts = 24, 4, 16
    ids = routing("uniform", MANY, tokens, k, experts)
    x, weights = tagged_rows(MANY, tokens, 3, np.int32), floats((MANY, tokens, k))
    free = oracle.dispatch(x, ids, weights, experts, order, alignment=alignment)
    most = max(max(c for c, row in enumerate(one.sources) if row) + 1 for one in free)
    capacity = {"half": most // 2, "one_short": most - 1, "exact": most, "least": alignment}[size]
    expected = oracle.dispatch(x, ids, weights, experts, order, capacity, alignment)
    dropped = sum(one.num_dropped[0] for one in expected)
    assert (dropped == 0) == (size == "exact")
    options = {"order": order, "capacity": capacity, "expert_alignment": alignment}
    got = run_dispatch(x, ids, weights, experts, implementation, **options)
    check(got, expected, got.x)


@pytest.mark.one_jax
@pytest.mark.parametrize("alignment", [2, 8, 128])
def test_blocks_start_at_multiples_of_the_alignment(alignment, implementation):
    ids = routing("empty_experts", 4, 11, 2, 16)
    x = tagged_rows(4, 11, 5, np.uint8)
    got = run_dispatch(x, ids, None, 16, implementation, order="expert", expert_alignment=alignment)
    check(got, oracle.dispatch(x, ids, None, 16, "expert", alignment=alignment), got.x)
    assert (got.group_sizes % alignment == 0).all()
    assert got.x.shape[1] == oracle.worst_case("expert", 4 * 11, 2, 4, alignment)


DTYPES = [
    BF16,
    np.float16,
    np.float32,
    FP8,
    ml_dtypes.float8_e5m2,
    np.int8,
    np.uint16,
    np.int32,
    np.bool_,
    np.complex64,
]


@pytest.mark.parametrize(
    ("width", "order", "per_domain", "implementation"),
    more_on_gpus(
        [
            (1, "rank", None, "ffi"),
            pytest.param(1, "rank", None, "xla", marks=pytest.mark.one_jax),
            pytest.param(5, "expert", 2, "ffi", marks=pytest.mark.one_jax),
        ],
        [(16, "rank", None, "ffi")],
    ),
)
def test_any_dtype_and_row_size_bit_for_bit(width, order, per_domain, implementation):
    """Each dtype by a dispatch of its own, all in one program."""
    ids, on = routing("uniform", 4, 6, 2, 8), ranks(4, per_domain)
    x = [tagged_rows(4, 6, width, dtype) for dtype in DTYPES]

    def shard(x, ids):
        options = {"group": on.group, "num_experts": 8, "order": order, "implementation": implementation}
        return [jax_ep.dispatch(rows, ids, **options) for rows in x]

    for got, rows in zip(on.run(shard, x, ids), x, strict=True):
        check(got, oracle.dispatch(rows, ids, None, 8, order), got.x)


@pytest.mark.one_jax
@pytest.mark.parametrize(
    ("dtypes", "order", "per_domain"),
    [
        (("int2", "uint2", "int4", "uint4", "float4_e2m1fn"), "rank", None),
        (("int4",), "expert", None),
        (("uint2",), "rank", 2),
    ],
)
def test_sub_byte_elements_arrive_unchanged(dtypes, order, per_domain, implementation):
    """Every pattern of bits, each dtype by a dispatch of its own."""
    on = ranks(4, per_domain)
    ids = routing("sprinkled", 4, 6, 2, 8)
    bits = {dtype: "uint2" if dtype.endswith("int2") else "uint4" for dtype in dtypes}
    x = {dtype: tagged_rows(4, 6, 7, np.uint8) % (1 << int(name[-1])) for dtype, name in bits.items()}

    def shard(x, ids):
        arrived = {}
        for dtype, array in x.items():
            rows = jax.lax.bitcast_convert_type(array.astype(bits[dtype]), dtype)
            options = {"group": on.group, "num_experts": 8, "order": order, "implementation": implementation}
            sent = jax_ep.dispatch(rows, ids, **options)
            assert sent.x.dtype == rows.dtype
            arrived[dtype] = jax.lax.bitcast_convert_type(sent.x, bits[dtype]).astype(np.uint8)
        return arrived

    for dtype, got in on.run(shard, x, ids).items():
        for rank, one in enumerate(oracle.dispatch(x[dtype], ids, None, 8, order)):
            assert same_bits(got[rank], one.x)


@pytest.mark.one_jax
@pytest.mark.parametrize("order", ["rank", "expert"])
@pytest.mark.parametrize(
    "rows",
    [
        [(np.uint8, 256)],
        [(BF16, 7168)],
        [(np.uint8, 16384 + 16)],  # one slice that GPUs copy at a time, and a bit
        [(np.float32, 9001)],  # not of 16-byte vectors
        [(FP8, 7168), (np.float32, 56), (np.int8, 3), (BF16, 128)],
    ],
    ids=lambda rows: "+".join(f"{np.dtype(dtype).name}x{width}" for dtype, width in rows),
)
def test_every_copy_path_moves_rows_bit_for_bit(rows, order):
    """Dispatches and redispatches rows of each copy path on GPUs: bulk, in slices, bytewise."""
    ids = routing("sprinkled", MANY, 70, 3, 16)
    x = tuple(tagged_rows(MANY, 70, width, dtype) for dtype, width in rows)
    on = ranks(MANY)

    def shard(x, ids):
        sent = jax_ep.dispatch(x, ids, group=on.group, num_experts=16, order=order, capacity=150)
        return sent.x, jax_ep.redispatch(x, sent.handle)

    for got in on.run(shard, x, ids):
        for leaf, sent in zip(got, x, strict=True):
            expected = oracle.dispatch(sent, ids, None, 16, order, capacity=150)
            for rank in range(MANY):
                assert same_bits(leaf[rank], expected[rank].x), rank


def test_a_payload_is_a_pytree(implementation):
    ids = routing("sprinkled", MANY, 10, 3, 16)
    x = {
        "values": tagged_rows(MANY, 10, 32, FP8),
        "scales": (tagged_rows(MANY, 10, 2, np.float32), tagged_rows(MANY, 10, 1, np.int32)[..., 0]),
    }
    got = run_dispatch(x, ids, None, 16, implementation, order="expert")
    for name, leaf, rows in [
        ("values", x["values"], got.x["values"]),
        ("scales", x["scales"][0], got.x["scales"][0]),
        ("one number a row", x["scales"][1], got.x["scales"][1]),
    ]:
        expected = oracle.dispatch(leaf, ids, None, 16, "expert")
        for rank in range(MANY):
            assert same_bits(rows[rank], expected[rank].x), name


@pytest.mark.one_jax
@pytest.mark.parametrize("order", ["rank", "expert"])
@pytest.mark.parametrize("capacity", [None, 20])
def test_redispatch_follows_the_handle(order, capacity, implementation):
    ids = routing("uniform", MANY, 12, 3, 16)
    x, other = tagged_rows(MANY, 12, 4, BF16), tagged_rows(MANY, 12, 9, np.float32)
    alignment = 4 if order == "expert" else 1
    on = ranks(MANY)

    def shard(x, other, ids):
        first = jax_ep.dispatch(
            x,
            ids,
            group=on.group,
            num_experts=16,
            order=order,
            capacity=capacity,
            expert_alignment=alignment,
            implementation=implementation,
        )
        # Handles are interchangeable between implementations.
        swapped = {"ffi": "xla", "xla": "ffi"}[implementation]
        same = jax_ep.redispatch(other, first.handle, implementation=implementation)
        swap = jax_ep.redispatch(other, first.handle, implementation=swapped)
        return same, swap

    same, swap = on.run(shard, x, other, ids)
    expected = oracle.dispatch(other, ids, None, 16, order, capacity, alignment)
    for rank in range(MANY):
        assert same_bits(same[rank], expected[rank].x)
        assert same_bits(swap[rank], expected[rank].x)


def test_int64_ids(implementation):
    ids = routing("sprinkled", 4, 9, 3, 8).astype(np.int64)
    ids[1, 2, 0] = 2**32 + 1  # out of range, though 1 in its lower half
    x = tagged_rows(4, 9, 3, np.float32)
    with jax.enable_x64(True):
        got = run_dispatch(x, ids, None, 8, implementation, order="expert")
    check(got, oracle.dispatch(x, ids, None, 8, "expert"), got.x)


@pytest.mark.one_jax
@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float64], ids=lambda d: np.dtype(d).name)
def test_weights_of_other_dtypes_become_float32(dtype, implementation):
    ids = routing("uniform", 2, 5, 2, 4)
    weights = floats((2, 5, 2)).astype(dtype)
    x = tagged_rows(2, 5, 3, np.float32)
    with jax.enable_x64(dtype == np.float64):
        got = run_dispatch(x, ids, weights, 4, implementation, order="rank")
    check(got, oracle.dispatch(x, ids, weights.astype(np.float32), 4, "rank"), got.x)


@pytest.mark.one_jax
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=25)
def test_random_routings(data):
    """Few shapes, so that few programs are compiled; any ids in and out of range."""
    tokens, k, experts, order, capacity, alignment = data.draw(
        st.sampled_from(
            [
                (4, 2, 8, "rank", None, 1),
                (4, 2, 8, "rank", 3, 1),
                (5, 3, 8, "expert", None, 2),
                (5, 3, 8, "expert", 7, 2),
            ]
        )
    )
    count = 4 * tokens * k
    ids = np.array(
        data.draw(st.lists(st.integers(-3, experts + 2), min_size=count, max_size=count)), np.int32
    )
    ids = ids.reshape(4, tokens, k)
    x, weights = tagged_rows(4, tokens, 3, np.float32), floats((4, tokens, k))
    options = {"order": order, "capacity": capacity, "expert_alignment": alignment}
    got = run_dispatch(x, ids, weights, experts, **options)
    check(got, oracle.dispatch(x, ids, weights, experts, order, capacity, alignment), got.x)


@pytest.mark.one_jax
@pytest.mark.parametrize("order", ["rank", "expert"])
@pytest.mark.parametrize("name", MODELS)
def test_models_match_the_oracle(name, order):
    """Each model's experts and choices, with few tokens and a sixteenth of its width."""
    shape, tokens, on = MODELS[name], 5, ranks(4)
    ids = routing("uniform", 4, tokens, shape.top_k, shape.experts)
    x = floats((4, tokens, shape.hidden // 16)).astype(BF16)

    def shard(x, ids):
        sent = jax_ep.dispatch(x, ids, group=on.group, num_experts=shape.experts, order=order)
        return sent, jax_ep.combine(sent.x, sent.handle)

    got, y = on.run(shard, x, ids)
    expected = oracle.dispatch(x, ids, None, shape.experts, order)
    check(got, expected, got.x)
    folds = order == "expert" and jax.default_backend() == "gpu"
    assert_close(y, oracle.combine(got.x, expected, tokens, folds=folds), terms=shape.top_k)


def test_environment_chooses_the_implementation(monkeypatch):
    """For all ops without an `implementation` of their own."""
    on, ids = ranks(4), routing("uniform", 4, 5, 2, 8)

    def calls(implementation=None):
        def shard(x, ids):
            options = {"num_experts": 8, "implementation": implementation}
            per_expert = jax_ep.get_dispatch_layout(ids, num_ranks=4, **options).num_tokens_per_expert
            return jax_ep.dispatch(x, ids, group=on.group, **options).x, per_expert

        arrays = np.zeros((20, 4), np.float32), ids.reshape(20, 2)
        return set(re.findall(r"jax_ep_\w+", jax.jit(on.map(shard)).lower(*arrays).as_text()))

    both = calls("ffi")
    assert "jax_ep_layout" in both
    monkeypatch.setenv("JAX_EP_IMPLEMENTATION", "xla")
    assert calls() == set()
    assert calls("ffi") == both
    monkeypatch.setenv("JAX_EP_IMPLEMENTATION", "")
    assert calls() == both
    monkeypatch.setenv("JAX_EP_IMPLEMENTATION", "XLA")
    with pytest.raises(ValueError, match="JAX_EP_IMPLEMENTATION must be 'ffi', 'xla' or unset, got 'XLA'"):
        calls("ffi")
