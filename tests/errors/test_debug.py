"""Debug mode: numbers of a running program raise, with op, rank and counts, on all devices at once."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ranks

import jax_ep

pytestmark = pytest.mark.no_gpu

R, T, K, E, H = 2, 4, 2, 4, 4
IDS = np.arange(R * T * K, dtype=np.int32).reshape(-1, K) % E
BAD = IDS.copy()
BAD[5, 1] = 99  # on rank 1
CAPACITY = 8  # rows that each rank receives of IDS
RIGHT = {
    "x": np.ones((R * T, H), np.float32),
    "ids": IDS,
    "weights": np.ones((R * T, K), np.float32),
    "local_ids": IDS,
    "extra_rows": np.zeros(R, np.int32),
    "num_valid": np.full(R, T, np.int32),
    "keeps_padding": np.zeros(R, bool),
    "placement": np.tile(np.array([0, 1, -1, 2, 3, -1], np.int32), R),
}


def layer(x, ids, weights, extra_rows=0):
    matrices = jnp.ones((E // R, H, H))
    experts = lambda sent: jax_ep.grouped_dot(sent.x, matrices, sent.group_sizes + extra_rows)
    return jax_ep.moe(x, ids, weights, experts, group=ranks(R).group, num_experts=E, capacity=CAPACITY)


def padded(x, ids, keeps_padding, num_valid=None):
    """Subtracts means over all rows; the empty ones are NaN or, as it should be, zeros."""
    options = {"order": "expert_padded", "num_valid_tokens": num_valid}
    sent = jax_ep.dispatch(x, ids, group=ranks(R).group, num_experts=E, **options)
    rows = jnp.where(sent.is_row()[..., None] | keeps_padding[0], sent.x, 0)
    return jax_ep.combine(rows - jnp.mean(rows, axis=1, keepdims=True), sent.handle)


def all_checks(given):
    """Runs one op after another. Each needs a result of the one before."""
    ids = given["ids"]
    x = layer(given["x"], ids, given["weights"], given["extra_rows"])
    x = padded(x, ids, given["keeps_padding"], given["num_valid"][0])
    x = jax_ep.permute(x, given["local_ids"], num_local_experts=E).x
    ids = jnp.where(jnp.isnan(x[0, 0]), -1, ids)
    placement = jax_ep.Placement.from_map(given["placement"], num_logical_experts=E, num_ranks=R)
    return jax_ep.balance(ids, group=ranks(R).group, placement=placement).topk_idx


@functools.cache
def program():
    """Returns `all_checks`, compiled in debug mode."""
    return jax.jit(ranks(R).map(all_checks)).lower(RIGHT).compile()


WRONG = {
    "ids": ({"ids": BAD}, r"moe on rank 1: 1 of 8 ids in topk_idx .* from 0 to 99"),
    "drops": (
        {"ids": IDS % (E // R)},
        r"moe on rank 0: 8 rows of 16 were dropped .*\(capacity 8\); raise capacity",
    ),
    "sizes": (
        {"extra_rows": np.full(R, 100, np.int32)},
        r"grouped_dot at ep=0 .* of which there are 8, but they sum to 208",
    ),
    "valid tokens": (
        {"num_valid": np.array([T, 50], np.int32)},
        r"dispatch on rank 1: num_valid_tokens must be from 0 to 4, got 50",
    ),
    "nan": (
        {"keeps_padding": np.array([True, True])},
        r"combine on ranks 0, 1: 8 of 8 rows that hold tokens are NaN",
    ),
    "permuted ids": ({"local_ids": BAD}, r"permute at ep=1: 1 of 8 ids"),
    "holes": (
        {"placement": np.tile(np.array([0, 1, 0, 2, 3, 2], np.int32), R)},
        r"Placement.from_map at ep=0 and at ep=1: .* 2 experts twice on a rank",
    ),
}


def raised(program, *arrays):
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError)) as error:
        jax.block_until_ready(program(*arrays))
    return str(error.value)


@pytest.mark.parametrize("name", WRONG)
def test_debug_mode_raises(name, monkeypatch):
    monkeypatch.setenv("JAX_EP_DEBUG", "1")
    jax.block_until_ready(program()(RIGHT))
    wrong, text = WRONG[name]
    assert re.search("JAX_EP_DEBUG: " + text, raised(program(), RIGHT | wrong))


def test_debug_mode_checks_sizes_of_padded_experts(monkeypatch):
    monkeypatch.setenv("JAX_EP_DEBUG", "1")
    rows, matrices = jnp.ones((2, 4, H)), jnp.ones((2, H, H))
    product = jax.jit(lambda sizes: jax_ep.grouped_dot(rows, matrices, sizes))
    jax.block_until_ready(product(np.array([4, 0], np.int32)))
    text = raised(product, np.array([5, -1], np.int32))
    assert "group_sizes must be numbers of rows from 0 to 4, but are from -1 to 5" in text


TRANSFORMED = {
    "grad of a scan of remat": lambda f: jax.grad(
        lambda x, ids, w: jnp.sum(
            jax.lax.scan(
                lambda c, _: (jax.checkpoint(f, policy=jax_ep.save_ep_residuals)(c, ids, w), None),
                x,
                length=2,
            )[0]
        )
    ),
    "vmap": lambda f: lambda x, ids, w: jax.vmap(f, (0, None, None))(jnp.stack([x, x]), ids, w),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_debug_mode_under_transformations(name, monkeypatch):
    monkeypatch.setenv("JAX_EP_DEBUG", "1")
    program = jax.jit(TRANSFORMED[name](ranks(R).map(layer)))
    x, weights = RIGHT["x"], RIGHT["weights"]
    jax.block_until_ready(program(x, IDS, weights))
    assert "JAX_EP_DEBUG: moe on rank 1: 1 of 8 ids" in raised(program, x, BAD, weights)


def test_debug_mode_checks_what_it_is_asked_for(monkeypatch):
    given = RIGHT["x"], IDS % (E // R), RIGHT["weights"]  # drops rows
    monkeypatch.setenv("JAX_EP_DEBUG", "ids,nan")
    jax.block_until_ready(jax.jit(ranks(R).map(layer))(*given))
    monkeypatch.setenv("JAX_EP_DEBUG", "everything")
    with pytest.raises(ValueError, match="JAX_EP_DEBUG must be 1, 0, or some of drops"):
        jax.jit(ranks(R).map(layer)).trace(*given)


def test_debug_mode_adds_nothing_when_it_is_off(monkeypatch):
    def text():
        return jax.jit(ranks(R).map(padded)).lower(RIGHT["x"], IDS, RIGHT["keeps_padding"]).as_text()

    monkeypatch.setenv("JAX_EP_DEBUG", "1")
    assert "callback" in text()
    monkeypatch.setenv("JAX_EP_DEBUG", "0")
    off = text()
    monkeypatch.delenv("JAX_EP_DEBUG")
    assert off == text()
    assert "callback" not in off
