"""The whole layer with experts that differ, against the same sum written out for every token."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import floats, ranks, routing
from devices import most_ranks

import jax_ep

pytestmark = pytest.mark.processes

R, T, K, E, H, F = most_ranks(), 10, 3, 16, 6, 5


def layer(x, ids, weights, up, down, **options):
    """[R * T, H]; up [E, H, F] and down [E, F, H] lie with their experts."""
    on = ranks(R)

    def shard(x, ids, weights, up, down):
        def experts(sent):
            hidden = jnp.tanh(jax.lax.ragged_dot(sent.x, up, sent.group_sizes))
            if options.get("experts_apply_weights"):
                hidden = hidden * sent.row_weights[:, None]
            return jax.lax.ragged_dot(hidden, down, sent.group_sizes)

        return jax_ep.moe(x, ids, weights, experts, group=on.group, num_experts=E, **options)

    return on.map(shard)(x, ids, weights, up, down)


def written_out(x, ids, weights, up, down, kept):
    """Every token through all its experts; kept [N, K] says which choices count."""
    safe = jnp.where(kept, ids, 0)
    hidden = jnp.tanh(jnp.einsum("nh,nkhf->nkf", x, up[safe]))
    y = jnp.einsum("nkf,nkfh->nkh", hidden, down[safe])
    return jnp.sum(y * jnp.where(kept, weights, 0)[..., None], axis=1)


def inputs():
    ids = routing("sprinkled", R, T, K, E)
    x, weights = floats((R * T, H)), floats((R * T, K), seed=2)
    return ids, (x, weights, floats((E, H, F), seed=3), floats((E, F, H), seed=4))


def kept_choices(ids, capacity, alignment):
    kept = np.zeros(ids.shape, bool)
    for one in oracle.dispatch(np.zeros((R, T, 1)), ids, None, E, "expert", capacity, alignment):
        for source in one.sources:
            if source is not None:
                kept[source] = True
    return kept.reshape(-1, K)


@pytest.mark.parametrize(
    ("capacity", "alignment", "experts_apply_weights"),
    [
        (None, 1, False),
        pytest.param(None, 8, True, marks=pytest.mark.one_jax),
        pytest.param(20, 1, True, marks=pytest.mark.one_jax),
        pytest.param(40, 8, False, marks=pytest.mark.one_jax),
    ],
)
def test_layer_and_gradients(capacity, alignment, experts_apply_weights, implementation):
    ids, (x, weights, up, down) = inputs()
    kept = kept_choices(ids, capacity, alignment)
    assert kept.all() == (capacity is None and bool((ids >= 0).all()))
    flat = jnp.asarray(ids.reshape(-1, K))
    options = {
        "capacity": capacity,
        "expert_alignment": alignment,
        "experts_apply_weights": experts_apply_weights,
        "implementation": implementation,
    }

    def run(function):
        def loss(x, weights, up, down):
            out = function(x, weights, up, down)
            return jnp.sum(out**2), out

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True))(x, weights, up, down)

    with jax.default_matmul_precision("highest"):
        (_, out), gradients = run(lambda x, w, u, d: layer(x, flat, w, u, d, **options))
        (_, want), wanted = run(lambda x, w, u, d: written_out(x, flat, w, u, d, kept))
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-5)
    for got, expected in zip(gradients, wanted, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=2e-4)


def test_bfloat16_rows_and_a_wider_result():
    """The result has the dtype and the width of what the experts return."""
    ids, (x, weights, *_) = inputs()
    on = ranks(R)

    def shard(x, ids, weights):
        experts = lambda sent: jnp.tile(sent.x.astype(jnp.float32), (1, 2))
        return jax_ep.moe(x, ids, weights, experts, group=on.group, num_experts=E)

    mapped = jax.jit(on.map(shard))
    x = jnp.asarray(x, jnp.bfloat16)
    got = mapped(x, ids.reshape(-1, K), weights)
    total = np.where(kept_choices(ids, None, 1), weights, 0).sum(axis=1, keepdims=True)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, np.tile(np.asarray(x, np.float32), (1, 2)) * total, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lead", [(2,), pytest.param((5, 2), marks=pytest.mark.one_jax)])
def test_leading_axes_are_tokens(lead, implementation):
    ids, (x, weights, *_) = inputs()
    on = ranks(R)

    def shard(x, ids, weights):
        layer = lambda *tokens: jax_ep.moe(
            *tokens,
            lambda sent: jnp.tanh(sent.x)[:, :4],
            group=on.group,
            num_experts=E,
            implementation=implementation,
        )
        apart = lambda array: array.reshape(*lead, -1, array.shape[-1])
        return layer(apart(x), apart(ids), apart(weights)), layer(x, ids, weights)

    split, whole = on.run(shard, x.reshape(R, T, H), ids, weights.reshape(R, T, K))
    assert split.shape == (R, *lead, T // np.prod(lead), 4)
    np.testing.assert_array_equal(split.reshape(whole.shape), whole)


@pytest.mark.one_jax
def test_experts_see_the_rows_weights_and_experts(implementation):
    """Experts that return their own number times the row's weight, which the sum then multiplies again."""
    ids, (x, weights, *_) = inputs()
    on = ranks(R)

    def shard(x, ids, weights):
        def experts(sent):
            first = jax.lax.axis_index("ep") * (E // R)
            return ((sent.row_experts() + first).astype(jnp.float32) * sent.row_weights)[:, None]

        return jax_ep.moe(
            x, ids, weights, experts, group=on.group, num_experts=E, implementation=implementation
        )

    got = on.run(shard, x.reshape(R, T, H), ids, weights.reshape(R, T, K))
    routed = np.stack([oracle.routed(one, E) for one in ids])
    want = (np.where(routed >= 0, routed, 0) * weights.reshape(R, T, K) ** 2).sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.one_jax
def test_stats(implementation):
    ids, (x, weights, *_) = inputs()
    on, capacity = ranks(R), 8

    def shard(x, ids, weights):
        return jax_ep.moe(
            x,
            ids,
            weights,
            lambda sent: sent.x,
            group=on.group,
            num_experts=E,
            capacity_factor=capacity / (T * K),
            return_stats=True,
            implementation=implementation,
        )

    y, stats = on.run(shard, x.reshape(R, T, H), ids, weights.reshape(R, T, K))
    assert y.shape == (R, T, H)
    expected = oracle.dispatch(np.zeros((R, T, 1)), ids, None, E, "expert", capacity)
    assert any(one.num_dropped[0] for one in expected)
    for rank, want in enumerate(expected):
        for name in ("tokens_per_expert", "num_tokens", "num_dropped"):
            np.testing.assert_array_equal(getattr(stats, name)[rank], getattr(want, name), strict=True)
        np.testing.assert_array_equal(stats.dropped_per_expert[rank].sum(), want.num_dropped[0])
        local = np.bincount(ids[(ids >= 0) & (ids < E)], minlength=E).reshape(R, -1)[rank]
        np.testing.assert_array_equal(stats.dropped_per_expert[rank], local - want.tokens_per_expert)
    np.testing.assert_array_equal(stats.num_invalid[:, 0], ((ids < -1) | (ids >= E)).sum(axis=(1, 2)))


@pytest.mark.parametrize("shapes", [((4, H), (5, K), (5, K)), ((4, H), (4, K), (4, 1)), ((H,), (K,), (K,))])
def test_shapes_that_do_not_fit(shapes):
    x, ids, weights = (np.zeros(shape, np.float32) for shape in shapes)
    with pytest.raises(ValueError, match=r"moe: x must be \[\.\.\., T, H\].*got \["):
        jax_ep.moe(x, ids.astype(np.int32), weights, None, group=ranks(R).group, num_experts=E)


@pytest.mark.parametrize(
    ("weights", "experts", "error", "text"),
    [
        (None, lambda sent: sent.x, TypeError, "moe: topk_weights must be an array .*, got NoneType"),
        ("right", lambda sent: sent.x[1:], ValueError, r"expert_fn must return a row for each of the \d+"),
        ("right", lambda sent: sent.x.astype(int), TypeError, "moe: what expert_fn returns .*floating"),
        ("right", lambda sent: None, TypeError, "moe: expert_fn must return the experts' rows, got None"),
        (
            "right",
            "experts",
            TypeError,
            "moe: expert_fn must be GatedExperts or a function of the dispatched rows, got str",
        ),
    ],
)
def test_what_does_not_fit(weights, experts, error, text):
    ids, (x, right, *_) = inputs()
    on = ranks(R)

    def shard(x, ids, given):
        return jax_ep.moe(x, ids, given if weights else None, experts, group=on.group, num_experts=E)

    with pytest.raises(error, match=text):
        on.run(shard, x.reshape(R, T, H), ids, right.reshape(R, T, K))
