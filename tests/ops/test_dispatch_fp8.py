"""Rows that travel as FP8, and batches with fewer tokens than their shapes."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import count_calls, dequantize, floats, more_on_gpus, pairwise, quantize, ranks
from devices import most_ranks
from jax.sharding import PartitionSpec as P

import jax_ep

pytestmark = [pytest.mark.processes, pytest.mark.moves_rows]

R, T, K, E, H = min(most_ranks(), 4), 24, 3, 16, 256
IMPLEMENTATIONS = ["ffi", "xla"]
CAPACITIES = {"rank": 70, "expert": 150, "expert_padded": None}


def arrays(dtype="float32", seed=0, tokens=T, width=H):
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=(R * tokens, width)) * np.exp(rng.normal(size=(R * tokens, 1)))).astype(np.float32)
    ids = rng.integers(-1, E, (R * tokens, K)).astype(np.int32)
    return jnp.asarray(x, dtype), ids, rng.random((R * tokens, K), np.float32)


def mapped(function, count=3):
    on = ranks(R)
    return jax.jit(
        jax.shard_map(
            functools.partial(function, on.group),
            mesh=on.mesh,
            in_specs=(P("ep"),) * count,
            out_specs=P("ep"),
        )
    )


def sent_by(group, x, ids, weights, **options):
    return jax_ep.dispatch(x, ids, weights, group=group, num_experts=E, **options)


def cleared(sent):
    """With zeros in the slots of padded experts that no row fills, which may hold anything."""
    if sent.handle.routing.order != "expert_padded":
        return sent
    clear = lambda leaf: jnp.where(sent.is_row()[:, :, None], leaf, jnp.zeros((), leaf.dtype))
    return dataclasses.replace(sent, x=jax.tree.map(clear, sent.x))


def assert_same(got, want):
    """Bit for bit, but any NaN as the same one: its sign is nobody's promise. Without the carriers of x."""
    if isinstance(getattr(got, "x", None), jax_ep.QuantizedArray):
        got = dataclasses.replace(got, x=dataclasses.replace(got.x, carrier=None))

    def bits(array):
        array = np.array(array)
        if jnp.issubdtype(array.dtype, jnp.floating):
            array[np.isnan(array)] = np.nan
        return array.tobytes()

    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert bits(one) == bits(other)


@pytest.mark.one_jax
@pytest.mark.parametrize(
    ("order", "dtype", "round_scale", "implementation"),
    more_on_gpus(
        [
            ("rank", "float32", False, "ffi"),
            ("rank", "float16", False, "xla"),
            ("expert", "float32", True, "xla"),
            ("expert", "float16", True, "ffi"),
            ("expert_padded", "bfloat16", True, "ffi"),
            ("expert_padded", "bfloat16", True, "xla"),
        ],
        [("rank", "bfloat16", True, "ffi"), ("expert", "bfloat16", False, "ffi")],
    ),
)
def test_rows_are_those_of_quantize_fp8(order, dtype, round_scale, implementation):
    """As if values and scales had been sent as a payload; dropped, padding and tail rows included."""
    shared = {"order": order, "capacity": CAPACITIES[order], "implementation": implementation}
    x, *rest = arrays(dtype)
    x = np.array(x)
    x[1, 3], x[2, 200], x[-1, 0] = np.nan, np.inf, -np.inf

    def shard(group, x, *a):
        as_payload = jax_ep.quantize_fp8(x, round_scale=round_scale)
        options = shared | {"round_scale": round_scale}
        return [
            cleared(sent_by(group, x, *a, **options, quantize="fp8")),
            cleared(sent_by(group, as_payload, *a, **shared)),
            cleared(sent_by(group, x, *a, **options, quantize="fp8_dequantize")),
        ]

    got, want, wide = mapped(shard)(x, *rest)
    assert_same(got, want)
    assert isinstance(got.x, jax_ep.QuantizedArray)
    assert wide.x.dtype == dtype
    assert_same(wide.x, dequantize(got.x, dtype=dtype))
    scales = np.asarray(got.x.scales)
    blocks = np.asarray(wide.x, np.float32).reshape(*scales.shape, -1)
    assert np.isnan(scales).any()
    for nan in (np.isnan(blocks).any(axis=-1), np.isnan(blocks).all(axis=-1)):
        np.testing.assert_array_equal(nan, np.isnan(scales))
    if round_scale:
        assert np.isin(np.frexp(scales[scales > 0])[0], [0.5]).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "dtype", "width"),
    more_on_gpus(
        [("rank", "float32", 1152), ("expert", "float16", 1152), ("expert_padded", "bfloat16", 1152)],
        [
            ("rank", "bfloat16", 128),
            ("rank", "bfloat16", 16512),
            ("expert", "bfloat16", 128),
            ("expert", "bfloat16", 16512),
            ("expert_padded", "float32", 16512),
        ],
    ),
)
def test_rows_of_many_tokens(order, dtype, width):
    """More than the arena takes; rows of one block, of several, and of more than a stage of the kernel."""
    tokens = 140
    capacity = None if order == "expert_padded" else R * tokens * (1 if order == "rank" else K) * 3 // 4
    options = {"order": order, "capacity": capacity, "implementation": "ffi"}
    x, *rest = arrays(dtype, tokens=tokens, width=width)
    x = x.at[7].set(0).at[8, 5].set(jnp.nan)
    valid = np.maximum(tokens - 50 * np.arange(R), 1).astype(np.int32)

    def run(before, **quantize):
        def shard(group, x, ids, weights, valid):
            sent = sent_by(group, before(x), ids, weights, num_valid_tokens=valid, **options, **quantize)
            return cleared(sent)

        return mapped(shard, 4)(x, *rest, valid)

    assert_same(run(lambda x: x, quantize="fp8"), run(jax_ep.quantize_fp8))


@pytest.mark.one_jax
@pytest.mark.parametrize(
    ("order", "implementation"), [*((order, "ffi") for order in CAPACITIES), ("expert", "xla")]
)
def test_gradients_are_those_of_rows_as_they_are(implementation, order):
    """Straight through: the backward pass is that of a dispatch that does not quantise."""
    x, ids, weights = arrays()
    capacity = CAPACITIES[order]
    y = floats((R * (capacity or E * T), H), seed=3)  # as many rows as the dispatch has

    def loss(quantize):
        def shard(group, x, ids, weights, y):
            sent = sent_by(
                group,
                x,
                ids,
                weights,
                order=order,
                capacity=capacity,
                quantize=quantize,
                implementation=implementation,
            )
            arrived = sent.topk_weights.sum(axis=1) if order == "rank" else sent.row_weights.reshape(-1)
            return jnp.sum(sent.x.reshape(y.shape) * y * 0.1)[None] + jnp.sum(arrived * y[:, 0])[None]

        run = mapped(shard, 4)
        return jax.jit(jax.grad(lambda x, w: jnp.sum(run(x, ids, w, y)), argnums=(0, 1)))

    quantized = loss("fp8_dequantize")
    for got, want in zip(quantized(x, weights), loss(None)(x, weights), strict=True):
        assert np.asarray(got).tobytes() == np.asarray(want).tobytes()
        assert np.asarray(got).any()
    if implementation == "ffi":
        text = quantized.lower(x, weights).compile().as_text()
        assert count_calls(text) == {"route": 1, "pull": 1}


def test_weights_have_gradients_beside_fp8_rows():
    x, ids, weights = arrays()

    def shard(group, x, ids, weights):
        sent = sent_by(group, x, ids, weights, quantize="fp8")
        return jnp.sum(sent.row_weights**2)[None]

    run = mapped(shard)
    got = jax.jit(jax.grad(lambda w: jnp.sum(run(x, ids, w))))(weights)
    np.testing.assert_allclose(got, np.where(ids >= 0, 2 * weights, 0), rtol=1e-6)


def test_fp8_rows_have_no_gradient():
    x, ids, weights = arrays()

    def shard(group, x, ids, weights):
        sent = sent_by(group, x, ids, weights, quantize="fp8")
        return jnp.sum(sent.x.values.astype(jnp.float32))[None]

    run = mapped(shard)
    with pytest.raises(TypeError, match=r"have a gradient only in gated_mlp.*fp8_dequantize.*to train"):
        jax.grad(lambda x: jnp.sum(run(x, ids, weights)))(x)


@pytest.mark.one_jax
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_layer_of_fp8_products(implementation):
    """Rows and scales arrive as the products take them."""
    rng = np.random.default_rng(5)
    x, ids, weights = arrays("bfloat16")
    w = jnp.asarray(rng.normal(size=(E, H, 128)) / 16, jnp.bfloat16)

    def shard(group, x, ids, weights, w):
        matrices = jax_ep.quantize_fp8(w, block=(128, 128))
        experts = lambda sent: jax_ep.grouped_dot(sent.x, matrices, sent.group_sizes)
        return jax_ep.moe(
            x,
            ids,
            weights,
            experts,
            group=group,
            num_experts=E,
            quantize="fp8",
            implementation=implementation,
        )

    got = np.asarray(mapped(shard, 4)(x, ids, weights, w), np.float32)
    rows = np.asarray(dequantize(quantize(x), dtype=jnp.float32))
    matrices = np.asarray(dequantize(quantize(w, block=(128, 128)), dtype=jnp.float32))
    want = np.zeros((R * T, 128))
    for t in range(R * T):
        for k in range(K):
            if ids[t, k] >= 0:
                want[t] += weights[t, k] * (rows[t] @ matrices[ids[t, k]])
    np.testing.assert_allclose(got, want, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("mode", "scanned"), [pytest.param("fp8_dequantize", False, marks=pytest.mark.one_jax), ("payload", True)]
)
def test_remat_keeps_what_travelled(mode, scanned, capsys):
    """What `save_ep_residuals` keeps are the values and scales, as they are; nothing is sent again."""
    x, ids, weights = arrays("bfloat16")
    scale = jnp.full((R,), 1.5, jnp.bfloat16)

    def shard(group, policy, x, ids, weights, scale):
        def layer(x, scale):
            if mode == "payload":
                payload = jax_ep.quantize_fp8(jax.lax.stop_gradient(x))
                sent = sent_by(group, payload, ids, weights)
                rows = jax_ep.dequantize_fp8(jax.lax.stop_gradient(sent.x))
            else:
                sent = sent_by(group, x, ids, weights, quantize=mode)
                rows = sent.x
            y = jnp.tanh(rows * scale[0]) * scale[0]
            return jax_ep.combine(y, sent.handle, row_weights=sent.row_weights)

        kept = layer if policy is None else jax.checkpoint(layer, policy=policy)
        if not scanned:
            return kept(x, scale)
        return jax.lax.scan(lambda x, _: (kept(x, scale), None), x, length=2)[0]

    def gradient(policy):
        run = mapped(lambda group, *a: shard(group, policy, *a), 4)
        loss = lambda x, scale: jnp.sum(run(x, ids, weights, scale).astype(jnp.float32) ** 2)
        return loss, jax.jit(jax.grad(loss, argnums=(0, 1)))

    loss, kept = gradient(jax_ep.save_ep_residuals)
    for got, want in zip(kept(x, scale), gradient(None)[1](x, scale), strict=True):
        np.testing.assert_allclose(
            np.asarray(got, np.float32), np.asarray(want, np.float32), rtol=0.02, atol=0.02
        )
    assert len(re.findall(r"@jax_ep_route\b", kept.lower(x, scale).as_text())) == 1
    jax.ad_checkpoint.print_saved_residuals(loss, x, scale)
    assert "u8[" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("x", "quantize", "error", "text"),
    [
        (jnp.ones((T, H)), "fp4", ValueError, "must be None, 'fp8' or 'fp8_dequantize', got 'fp4'"),
        ({"a": jnp.ones((T, H))}, "fp8", ValueError, "needs x to be one array, not a pytree"),
        (
            jnp.ones((T, H), jnp.int32),
            "fp8",
            TypeError,
            r"floating rows of 16 bits or more, got int32\[24, 256\]",
        ),
        (jnp.ones((T, 100)), "fp8", ValueError, r"is a multiple of 128, got float32\[24, 100\]; pad them"),
        (jnp.ones((T,)), "fp8_dequantize", ValueError, r"is a multiple of 128, got float32\[24\]"),
    ],
)
def test_what_cannot_travel_so(x, quantize, error, text):
    shard = lambda group, ids: sent_by(group, x, ids, None, quantize=quantize).num_tokens
    with pytest.raises(error, match=text):
        mapped(shard, 1)(np.zeros((R * T, K), np.int32))


@pytest.mark.one_jax
@pytest.mark.parametrize(
    ("implementation", "order", "quantize"),
    pairwise(IMPLEMENTATIONS, ["rank", "expert"], [None, "fp8_dequantize"]),
)
def test_tokens_that_are_not_valid(implementation, order, quantize):
    """Each rank has another number of tokens, one none; the rest are as if all their ids were -1.

    Rows and weights of the rest are NaN, which nothing shows: neither sums nor gradients.
    """
    x, ids, weights = arrays()
    counts = np.array([T, 0, 5, T - 1], np.int32)[:R]
    is_valid = (np.arange(T) < counts[:, None]).reshape(R * T, 1)

    def shard(group, x, ids, weights, counts=None):
        shared = {"order": order, "quantize": quantize, "implementation": implementation}

        def sums(x, weights):
            sent = sent_by(group, x, ids, weights, **shared, num_valid_tokens=counts)
            arrived = sent.topk_weights.sum(axis=1) if order == "rank" else sent.row_weights
            y = jax_ep.combine(jnp.tanh(sent.x) * arrived[:, None], sent.handle, row_weights=None)
            return jnp.sum(y**2), (sent, y)

        gradients, (sent, y) = jax.grad(sums, argnums=(0, 1), has_aux=True)(x, weights)
        counted = jax_ep.get_dispatch_layout(
            ids, num_experts=E, num_ranks=R, num_valid_tokens=None if counts is None else counts[0]
        )
        return (sent, counted.num_tokens_per_expert), y, gradients

    unseen = jnp.where(is_valid, x, jnp.nan), ids, jnp.where(is_valid, weights, jnp.nan)
    got = mapped(shard, 4)(*unseen, counts)
    want = mapped(shard)(x, np.where(is_valid, ids, -1), weights)
    assert all(np.isfinite(leaf).all() and np.asarray(leaf).any() for leaf in jax.tree.leaves(want[1:]))
    jax.tree.map(np.testing.assert_array_equal, got[0], want[0])
    # What XLA sums, it may sum in another order in another program.
    close = lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-5)
    jax.tree.map(close, got[1:], want[1:])
    for gradient in got[2]:
        assert not np.asarray(gradient)[~is_valid[:, 0]].any()
    assert not np.asarray(got[1]).reshape(R, T, H)[counts == 0].any()


def test_a_layer_with_a_number_of_valid_tokens():
    x, ids, weights = arrays()

    def shard(group, x, ids, weights):
        experts = lambda sent: sent.x
        run = functools.partial(jax_ep.moe, group=group, num_experts=E)
        part = run(x, ids, weights, experts, num_valid_tokens=7)
        return part, run(x[:7], ids[:7], weights[:7], experts)

    part, whole = (np.asarray(a).reshape(R, -1, H) for a in mapped(shard)(x, ids, weights))
    np.testing.assert_array_equal(part[:, :7], whole)
    assert not part[:, 7:].any()


@pytest.mark.parametrize(
    ("count", "error", "text"),
    [
        (T + 1, ValueError, "num_valid_tokens must be from 0 to T = 24, got 25"),
        (-1, ValueError, "num_valid_tokens must be from 0 to T = 24, got -1"),
        (np.ones(2, np.int32), TypeError, r"an integer scalar or \[1\], got int32\[2\]; shard an array"),
        (np.float32(3), TypeError, r"an integer scalar or \[1\], got float32\[\]"),
        (np.array([T + 1]), ValueError, "num_valid_tokens must be from 0 to T = 24, got 25"),
    ],
)
def test_numbers_of_valid_tokens_that_cannot_be(count, error, text):
    shard = lambda group, x, ids, w: sent_by(group, x, ids, w, num_valid_tokens=count).num_tokens
    with pytest.raises(error, match=text):
        mapped(shard)(*arrays())


def test_scales_are_rounded_only_where_rows_are_quantised():
    shard = lambda group, *a: sent_by(group, *a, round_scale=True).num_tokens
    with pytest.raises(ValueError, match="round_scale needs quantize"):
        mapped(shard)(*arrays())
