"""Debug mode: numbers of a running program raise, with op, rank and counts, on all devices at once."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ranks

import jax_ep

pytestmark = pytest.mark.no_gpu

R, T, K, E, H = 4, 4, 2, 8, 4
X = np.ones((R * T, H), np.float32)
IDS = np.arange(R * T * K, dtype=np.int32).reshape(-1, K) % E
W = np.ones((R * T, K), np.float32)
BAD = IDS.copy()
BAD[13, 1] = 99  # on rank 3
PLACEMENT = np.arange(E).reshape(R, -1)[:, [0, 1, 0]]  # experts twice on a rank


def dispatch(x, ids, w=None, **options):
    return jax_ep.dispatch(x, ids, w, group=ranks(R).group, num_experts=E, **options)


def layer(x, ids, w, extra=0, **options):
    matrices = jnp.ones((E // R, H, H))
    experts = lambda sent: jax_ep.grouped_dot(sent.x, matrices, sent.group_sizes + extra)
    return jax_ep.moe(x, ids, w, experts, group=ranks(R).group, num_experts=E, **options)


def balanced(x, ids, w):
    placement = jnp.asarray(PLACEMENT.reshape(-1), jnp.int32) + 0 * ids[0, 0]  # traced
    return jax_ep.balance(ids, group=ranks(R).group, num_experts=E, physical_to_logical=placement).topk_idx


def padded(x, ids, w):
    sent = dispatch(x, ids, w, order="expert_padded")
    rows = sent.x - jnp.mean(sent.x, axis=1, keepdims=True)  # over empty slots too
    return jax_ep.combine(rows, sent.handle, row_weights=sent.row_weights)


def masked(x, ids, w):
    sent = dispatch(x, ids, w, order="expert_padded")
    rows = jnp.where(sent.is_row()[..., None], sent.x, 0)
    return jax_ep.combine(rows, sent.handle, row_weights=sent.row_weights)


WRONG = {
    "ids": (layer, BAD, r"dispatch on rank 3: 1 of 8 ids in topk_idx .* from 0 to 99"),
    "drops": (
        lambda *given: layer(*given, capacity=5),
        IDS,
        r"dispatch on ranks 0, 1, 2, 3: 3 rows of 8 were dropped .*\(capacity 5\); raise capacity",
    ),
    "sizes": (
        lambda *given: layer(*given, extra=100),
        IDS,
        r"grouped_dot at ep=0 .* of which there are 32, but they sum to 208",
    ),
    "valid tokens": (
        lambda x, ids, w: dispatch(x, ids, num_valid_tokens=ids[0, 0] + 50).x,
        IDS,
        r"dispatch on ranks 0, 1, 2, 3: num_valid_tokens must be from 0 to 4, got 50",
    ),
    "holes": (balanced, IDS, r"balance on ranks 0, 1, 2, 3: .* 4 experts twice on a rank"),
    "slots": (padded, IDS, r"combine on ranks 0, 1, 2, 3: 8 of 8 rows that hold tokens are NaN"),
    "permuted ids": (
        lambda x, ids, w: jax_ep.permute(x, ids, num_local_experts=E).row_map,
        BAD,
        r"permute at ep=3: 1 of 8 ids",
    ),
}


def raised(program, *arrays):
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError)) as error:
        jax.block_until_ready(program(*arrays))
    return str(error.value)


@pytest.mark.parametrize("name", WRONG)
def test_debug_mode_raises(name, monkeypatch):
    function, ids, text = WRONG[name]
    monkeypatch.setenv("JAX_EP_DEBUG", "1")
    assert re.search("JAX_EP_DEBUG: " + text, raised(jax.jit(ranks(R).map(function)), X, ids, W))


TRANSFORMED = {
    "grad": lambda f: jax.grad(lambda x, ids: jnp.sum(f(x, ids, W))),
    "remat": lambda f: jax.grad(
        lambda x, ids: jnp.sum(jax.checkpoint(f, policy=jax_ep.save_ep_residuals)(x, ids, W))
    ),
    "scan": lambda f: lambda x, ids: jax.lax.scan(lambda c, _: (f(c, ids, W), None), x, None, length=2)[0],
    "vmap": lambda f: lambda x, ids: jax.vmap(lambda x: f(x, ids, W))(jnp.stack([x, x])),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_debug_mode_under_transformations(name, monkeypatch):
    monkeypatch.setenv("JAX_EP_DEBUG", "1")
    program = jax.jit(TRANSFORMED[name](ranks(R).map(layer)))
    jax.block_until_ready(program(X, IDS))
    assert "JAX_EP_DEBUG: dispatch on rank 3: 1 of 8 ids" in raised(program, X, BAD)


def test_debug_mode_checks_what_it_is_asked_for(monkeypatch):
    monkeypatch.setenv("JAX_EP_DEBUG", "ids,slots")
    jax.block_until_ready(jax.jit(ranks(R).map(lambda *given: layer(*given, capacity=5)))(X, IDS, W))
    assert np.isfinite(np.asarray(jax.jit(ranks(R).map(masked))(X, IDS, W))).all()
    monkeypatch.setenv("JAX_EP_DEBUG", "everything")
    with pytest.raises(ValueError, match="JAX_EP_DEBUG must be 1, 0, or some of drops"):
        jax.jit(ranks(R).map(layer)).trace(X, IDS, W)


def test_debug_mode_adds_nothing_when_it_is_off(monkeypatch):
    def text():
        return jax.jit(ranks(R).map(masked)).lower(X, IDS, W).as_text()

    monkeypatch.setenv("JAX_EP_DEBUG", "1")
    assert "callback" in text()
    monkeypatch.setenv("JAX_EP_DEBUG", "0")
    off = text()
    monkeypatch.delenv("JAX_EP_DEBUG")
    assert off == text()
    assert "callback" not in off
