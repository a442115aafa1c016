"""The argument `implementation` of every op: equal results, and the errors of a wrong one."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import assert_close, floats, ranks, routing
from devices import most_ranks

import jax_ep
from jax_ep import _extension
from jax_ep._rows import quantize

R, T, K, E, H = most_ranks(), 16, 2, 16, 128
L = E // R
SIZES = np.array([3, 0, 5], np.int32)

# Ops that communicate: functions of (x, ids, weights) of one rank and the implementation.


def dispatch(x, ids, weights, by, order="expert", **options):
    options = {"num_experts": E, "order": order, "implementation": by, **options}
    return jax_ep.dispatch(x, ids, weights, group=ranks(R).group, **options)


def arrived(x, ids, weights, by, **options):
    sent = dispatch(x, ids, weights, by, **options)
    return sent.x, sent.tokens_per_expert, sent.num_tokens


def combine(x, ids, weights, by):
    sent = dispatch(x, ids, weights, None)
    return jax_ep.combine(sent.x, sent.handle, row_weights=sent.row_weights, implementation=by)


def started(x, ids, weights, by):
    group = ranks(R).group
    pending = jax_ep.dispatch_start(x, ids, weights, group=group, num_experts=E, implementation=by)
    sent = pending.done()
    sums = jax_ep.combine_start(sent.x, sent.handle, row_weights=sent.row_weights, implementation=by)
    return sums.done()


def moe(x, ids, weights, by):
    experts = lambda sent: jnp.tanh(sent.x)
    return jax_ep.moe(x, ids, weights, experts, group=ranks(R).group, num_experts=E, implementation=by)


def balance(x, ids, weights, by):
    options = {"num_experts": E, "num_redundant_experts": 1, "implementation": by}
    return jax_ep.balance(ids, group=ranks(R).group, **options)


def replicate(x, ids, weights, by, start=False):
    plan = balance(x, ids, weights, None)
    if start:
        w = jax_ep.replicate_start(x[:L], plan, group=ranks(R).group, implementation=by).done()
    else:
        w = jax_ep.replicate(x[:L], plan, group=ranks(R).group, implementation=by)
    return jnp.asarray(w)


def redispatch(x, ids, weights, by):
    return jax_ep.redispatch(x, dispatch(x, ids, None, None).handle, implementation=by)


COMMUNICATING = {
    "dispatch": arrived,
    "dispatch, rank": functools.partial(arrived, order="rank"),
    "dispatch, FP8": functools.partial(arrived, quantize="fp8"),
    "combine": combine,
    "dispatch_start, combine_start": started,
    "redispatch": redispatch,
    "moe": moe,
    "balance": balance,
    "replicate": replicate,
    "replicate_start": functools.partial(replicate, start=True),
}

# Ops of one device: functions of the implementation, and of arrays, because XLA cannot fold all constants.
ROWS, MATRICES = floats((10, H)), floats((3, H, H), seed=2)
UP = floats((3, H, 2, H), seed=3)
IDS = routing("sprinkled", 1, 10, K, 3)[0]


def unpermute(by, rows, sizes):
    row_map = jax_ep.permute(rows, IDS, num_local_experts=3).row_map
    return jax_ep.unpermute(floats((row_map.size, H)), row_map, implementation=by)


def gated_mlp(by, rows, sizes, **options):
    return jax_ep.gated_mlp(rows, UP, MATRICES, sizes, precision="highest", implementation=by, **options)


LOCAL = {
    "get_dispatch_layout": lambda by, rows, sizes: jax_ep.get_dispatch_layout(
        IDS, num_experts=4, num_ranks=2, ranks_per_domain=1, implementation=by
    ),
    "permute": lambda by, rows, sizes: jax_ep.permute(rows, IDS, num_local_experts=3, implementation=by),
    "unpermute": unpermute,
    "plan_redundant_experts": lambda by, rows, sizes: jax_ep.plan_redundant_experts(
        np.array([[9, 1, 0, 0], [8, 0, 2, 1]], np.int32), num_redundant_experts=1, implementation=by
    ),
    "grouped_dot": lambda by, rows, sizes: jax_ep.grouped_dot(
        rows, MATRICES, sizes, precision="highest", implementation=by
    ),
    "gated_mlp": gated_mlp,
    "gated_mlp, FP8": functools.partial(gated_mlp, quantize="fp8_all"),
    "quantize_fp8": lambda by, rows, sizes: jax_ep.quantize_fp8(rows, implementation=by),
    "quantize_weights": lambda by, rows, sizes: [
        jax_ep.quantize_weights(UP, gradients=gradients, implementation=by) for gradients in (True, False)
    ],
}


def assert_equal(results, expected):
    for got, want in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        got, want = np.asarray(got), np.asarray(want)
        if got.dtype == jnp.float8_e4m3fn or not np.issubdtype(got.dtype, np.floating):
            np.testing.assert_array_equal(got, want)
        else:
            assert_close(got, want, jnp.bfloat16 if got.dtype == jnp.bfloat16 else None, terms=H)


@pytest.mark.one_jax
@pytest.mark.parametrize("op", COMMUNICATING)
def test_implementations_of_communicating_ops_agree(op):
    on, given = ranks(R), (floats((R, T, H)), routing("sprinkled", R, T, K, E), floats((R, T, K), seed=4))
    run = lambda by: on.run(lambda *shards: COMMUNICATING[op](*shards, by), *given)
    assert_equal(run("ffi"), run("xla"))


@pytest.mark.one_jax
@pytest.mark.parametrize("op", LOCAL)
def test_implementations_of_local_ops_agree(op):
    run = lambda by: jax.jit(functools.partial(LOCAL[op], by))(ROWS, SIZES)
    # XLA:GPU may leave out that numbers between products are rounded to FP8. The norms differed by 0.045.
    if op == "gated_mlp, FP8" and jax.default_backend() == "gpu":
        got, want = (np.asarray(run(by))[: SIZES.sum()] for by in ("ffi", "xla"))
        assert np.linalg.norm(got - want) < 0.08 * np.linalg.norm(want)
    else:
        assert_equal(run("ffi"), run("xla"))
    assert_equal(run(None), run("ffi"))


def test_table_has_every_op():
    ops = [getattr(jax_ep, name) for name in jax_ep.__all__ if inspect.isfunction(getattr(jax_ep, name))]
    names = {op.__name__ for op in ops if "implementation" in inspect.signature(op).parameters}
    names -= {"dispatch_start", "combine_start"}  # "dispatch_start, combine_start"
    assert names <= {*COMMUNICATING, *LOCAL}


@pytest.mark.one_jax
@pytest.mark.parametrize("op", [*COMMUNICATING, *LOCAL])
@pytest.mark.parametrize("given", ["cuda", 1, ("ffi",)], ids=str)
def test_rejects_unknown_implementation(op, given):
    text = rf"^implementation must be None, 'ffi' or 'xla', got {re.escape(repr(given))}(\n|$)"
    shapes = [((R * T, H), jnp.float32), ((R * T, K), jnp.int32), ((R * T, K), jnp.float32)]
    shapes = [jax.ShapeDtypeStruct(*shape) for shape in shapes]

    def call():
        if op in LOCAL:
            return LOCAL[op](given, ROWS, SIZES)
        return jax.eval_shape(ranks(R).map(lambda *shards: COMMUNICATING[op](*shards, given)), *shapes)

    with pytest.raises(ValueError, match=text):
        call()


PRODUCTS = ["grouped_dot", "gated_mlp", "gated_mlp, FP8", "quantize_fp8", "quantize_weights"]


@pytest.mark.one_jax
@pytest.mark.no_gpu
@pytest.mark.parametrize("op", PRODUCTS)
def test_products_choose_kernels_by_implementation(op, monkeypatch):
    monkeypatch.setattr(_extension, "current_platform", lambda: "gpu")
    monkeypatch.setattr(_extension, "reason_against_ffi", lambda platform: "")
    monkeypatch.setattr(_extension, "has_fp8_products", lambda: True)
    monkeypatch.setattr(quantize, "is_per_device", lambda: True)

    def calls_kernels(by):
        traced = jax.jit(lambda: LOCAL[op](by, ROWS, SIZES)).trace()
        return "jax_ep_" in traced.lower(lowering_platforms=("cuda",)).as_text()

    assert calls_kernels("ffi")
    assert calls_kernels(None)
    assert not calls_kernels("xla")
    monkeypatch.setenv("JAX_EP_IMPLEMENTATION", "xla")
    assert not calls_kernels(None)
    assert calls_kernels("ffi")


@pytest.mark.no_gpu
@pytest.mark.parametrize("op", PRODUCTS)
def test_products_reject_handlers_that_cannot_run(op, monkeypatch):
    monkeypatch.setattr(_extension, "current_platform", lambda: "tpu")
    with pytest.raises(ValueError, match=r"^implementation='ffi' cannot run here: there are no handlers for"):
        LOCAL[op]("ffi", ROWS, SIZES)
    jax.eval_shape(functools.partial(LOCAL[op], None), ROWS, SIZES)
