"""order="expert_padded": C rows for each expert, R * T or a capacity.

Empty rows of a dispatch may hold anything, NaN too: the filled ones are compared and multiplied. The weights
and cotangents of empty rows are zero.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import count_calls, floats, quantize, ranks
from devices import most_ranks
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep._transport import ffi
from jax_ep._transport.routing import row_experts

pytestmark = [pytest.mark.processes, pytest.mark.moves_rows]

R, T, K, E, H = min(most_ranks(), 4), 6, 3, 8, 16
L, CAPACITY = E // R, R * T
IMPLEMENTATIONS = ["ffi", "xla"]


def routing(seed=0, repeated=False):
    rng = np.random.default_rng(seed)
    ids = rng.integers(-1, E, (R * T, K)) if repeated else np.argsort(rng.random((R * T, E)), axis=1)[:, :K]
    ids = np.where(rng.random(ids.shape) < 0.2, -1, ids).astype(np.int32)
    return floats((R * T, H), seed=1), ids, floats((R * T, K), seed=2)


def oracle(x, ids, weights, num_rows=CAPACITY):
    """Rows and weights [E, num_rows] and what each expert got, by a loop; what does not fit is left out."""
    rows, row_weights = np.zeros((E, num_rows, x.shape[1]), x.dtype), np.zeros((E, num_rows), np.float32)
    counts = np.zeros(E, np.int32)
    for t in range(len(x)):
        for k in range(ids.shape[1]):
            e = ids[t, k]
            if e >= 0:
                if counts[e] < num_rows:
                    rows[e, counts[e]], row_weights[e, counts[e]] = x[t], weights[t, k]
                counts[e] += 1
    return rows, row_weights, counts


def kept_choices(ids, num_rows):
    """Bool [R * T, K]: which choices have a row."""
    earlier = np.cumsum(ids.reshape(-1, 1) == np.arange(E), axis=0)
    place = np.take_along_axis(earlier, np.maximum(ids.reshape(-1, 1), 0), axis=1)
    return (ids >= 0) & (place <= num_rows).reshape(ids.shape)


def assert_rows(got, want, ids):
    """Equal in the filled rows, of which `oracle` counts `ids`."""
    _, _, counts = oracle(np.zeros((R * T, 0)), ids, np.zeros(ids.shape))
    filled = np.arange(want.shape[1]) < counts[:, None]
    np.testing.assert_array_equal(np.asarray(got)[filled], np.asarray(want)[filled])


def mapped(function, count=3):
    on = ranks(R)
    shard = functools.partial(function, on.group)
    return jax.jit(jax.shard_map(shard, mesh=on.mesh, in_specs=(P("ep"),) * count, out_specs=P("ep")))


def sent_by(group, x, ids, weights, **options):
    return jax_ep.dispatch(x, ids, weights, group=group, num_experts=E, order="expert_padded", **options)


@pytest.mark.one_jax
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", ["distinct", "repeated", "few rows"])
def test_rows_lie_in_their_expert_s_block(implementation, case):
    x, ids, weights = routing(repeated=case == "repeated")
    if case == "repeated":
        ids[: R * T // 2] = 2  # more choices than rows; those of expert 3 follow
    capacity = np.bincount(ids[ids >= 0]).max() - 1 if case == "few rows" else None
    num_rows = capacity or CAPACITY
    rows, row_weights, counts = oracle(x, ids, weights, num_rows)

    def shard(group, *a):
        sent = sent_by(group, *a, capacity=capacity, implementation=implementation)
        sums = jax_ep.combine(
            sent.x, sent.handle, row_weights=sent.row_weights, implementation=implementation
        )
        return sent, sent.row_experts(), sent.is_row(), sent.dropped_per_expert(), sums

    got, experts, is_row, dropped, sums = jax.device_get(mapped(shard)(x, ids, weights))
    kept = np.minimum(counts, num_rows)
    assert (counts.max() > num_rows) == (case != "distinct")
    assert got.x.shape == (E, num_rows, H)
    np.testing.assert_array_equal(dropped, counts - kept)
    total = np.where(kept_choices(ids, num_rows), weights, 0).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(sums, x * total, rtol=1e-4, atol=1e-5)
    assert_rows(got.x, rows, ids)
    np.testing.assert_array_equal(got.row_weights, row_weights)
    for sizes in (got.group_sizes, got.tokens_per_expert):
        np.testing.assert_array_equal(sizes, kept)
    np.testing.assert_array_equal(got.num_tokens, kept.reshape(R, L).sum(axis=1))
    np.testing.assert_array_equal(got.num_dropped, (counts - kept).reshape(R, L).sum(axis=1))
    filled = np.arange(num_rows) < kept[:, None]
    np.testing.assert_array_equal(is_row, filled)
    np.testing.assert_array_equal(experts, np.where(filled, np.arange(E)[:, None] % L, -1))


def layer(order, implementation, group, x, ids, weights, w):
    """Each expert's rows times its matrix."""
    shared = {"order": order, "implementation": implementation}
    sent = jax_ep.dispatch(x, ids, weights, group=group, num_experts=E, **shared)
    y = jnp.tanh(jax_ep.grouped_dot(sent.x, w, sent.group_sizes))
    if order == "expert_padded":
        y = jnp.where(sent.is_row()[:, :, None], y, jnp.nan)  # which must not matter
    return jax_ep.combine(y, sent.handle, row_weights=sent.row_weights, implementation=implementation)


@pytest.mark.one_jax
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_layer_and_its_gradients_are_those_of_expert_order(implementation):
    x, ids, weights = routing()
    w = floats((E, H, H), seed=3)

    def value_and_gradients(order):
        run = mapped(functools.partial(layer, order, implementation), 4)
        loss = lambda x, weights, w: jnp.sum(jnp.sin(run(x, ids, weights, w)))
        return run(x, ids, weights, w), *jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(x, weights, w)

    for got, want in zip(value_and_gradients("expert_padded"), value_and_gradients("expert"), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-3)
        assert np.asarray(want).any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_redispatch_and_payloads(implementation):
    x, ids, weights = routing()
    payload = {"a": x, "b": np.arange(R * T, dtype=np.int32)[:, None, None]}

    def shard(group, payload, ids, weights):
        sent = sent_by(group, payload, ids, weights, implementation=implementation)
        again = jax_ep.redispatch(payload, sent.handle, topk_weights=weights, implementation=implementation)
        y = {"a": sent.x["a"]}
        sums = jax_ep.combine(y, sent.handle, row_weights=None, implementation=implementation)["a"]
        return (sent.x, sent.row_weights), again, sums

    first, again, sums = jax.device_get(mapped(shard)(payload, ids, weights))
    assert first[0]["b"].shape == (E, CAPACITY, 1, 1)
    for name, rows in first[0].items():
        assert_rows(rows, again[0][name], ids)
    np.testing.assert_array_equal(first[1], again[1])
    np.testing.assert_allclose(sums, x * (ids >= 0).sum(axis=1, keepdims=True), rtol=1e-5, atol=1e-5)


@pytest.mark.one_jax
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_of_fp8(implementation):
    _, ids, weights = routing()
    x = floats((R * T, 256), seed=4)
    sent = mapped(lambda group, *a: sent_by(group, *a, quantize="fp8", implementation=implementation).x)
    got = jax.device_get(sent(x, ids, weights))
    want = jax.device_get(quantize(x))
    values, *_ = oracle(want.values.view(np.uint8), ids, weights)
    scales, *_ = oracle(want.scales, ids, weights)
    assert_rows(got.values.view(np.uint8), values, ids)
    assert_rows(got.scales, scales, ids)


def test_remat_sends_nothing_twice():
    x, ids, weights = routing()
    w = floats((E, H, H), seed=3)

    def shard(group, x, ids, weights, w):
        body = functools.partial(layer, "expert_padded", None, group)
        return jax.checkpoint(body, policy=jax_ep.save_ep_residuals)(x, ids, weights, w)

    run = mapped(shard, 4)
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(run(x, ids, weights, w) ** 2)))
    assert count_calls(gradient.lower(x).compile().as_text())["route"] == 1


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_tokens(implementation):
    def shard(group, x, ids, weights):
        sent = sent_by(group, x[:0], ids[:0], weights[:0], implementation=implementation)
        return sent.x, sent.group_sizes, jax_ep.combine(sent.x, sent.handle, row_weights=sent.row_weights)

    rows, sizes, sums = mapped(shard)(*routing())
    assert (rows.shape, sums.shape) == ((E, 0, H), (0, H))
    assert not np.asarray(sizes).any()


def test_rejects_an_alignment():
    with pytest.raises(ValueError, match="so it takes no expert_alignment, got 4"):
        mapped(lambda group, *a: sent_by(group, *a, expert_alignment=4).num_tokens)(*routing())


@pytest.mark.parametrize(
    ("y", "row_weights", "text"),
    [
        ((L * CAPACITY, H), None, rf"L, C = \[{L}, {CAPACITY}\].*got float32\[{L * CAPACITY}, 16\]"),
        (
            (L, CAPACITY, H),
            (L * CAPACITY,),
            rf"be floating .* = \[{L}, {CAPACITY}\], got float32\[{L * CAPACITY}\]",
        ),
    ],
)
def test_shapes_that_combine_does_not_take(y, row_weights, text):
    def shard(group, *a):
        sent = sent_by(group, *a)
        given = None if row_weights is None else jnp.zeros(row_weights)
        return jax_ep.combine(jnp.zeros(y), sent.handle, row_weights=given)

    with pytest.raises(ValueError, match=text):
        mapped(shard)(*routing())


def poison_empty_rows(monkeypatch):
    """What GPUs may leave in empty rows, on every platform."""
    route = ffi.Ffi.route

    def poisoned(self, routing, *arguments, **options):
        out = route(self, routing, *arguments, **options)
        real = row_experts(out.handle) >= 0

        def poison(row):
            if not jnp.issubdtype(row.dtype, jnp.floating):
                return row
            return jnp.where(jax.lax.expand_dims(real, range(1, row.ndim)), row, jnp.nan)

        return out._replace(rows=tuple(map(poison, out.rows)))

    monkeypatch.setattr(ffi.Ffi, "route", poisoned)


@pytest.mark.one_jax
@pytest.mark.parametrize("rematerialised", [False, True])
@pytest.mark.parametrize("through", ["rows", "weights"])
def test_empty_rows_are_zero_where_a_gradient_goes_through_them(through, rematerialised, monkeypatch):
    poison_empty_rows(monkeypatch)
    x, ids, weights = routing()
    w = floats((E, H, H), seed=3)

    def unmasked(group, x, ids, weights, w):
        sent = sent_by(group, x, ids, weights, implementation="ffi")
        y = jnp.einsum("lsh,lhn->lsn", sent.x, w)
        return jax_ep.combine(y, sent.handle, row_weights=sent.row_weights, implementation="ffi")

    run = mapped(jax.checkpoint(unmasked, static_argnums=0) if rematerialised else unmasked, 4)
    loss = lambda moving, w: jnp.sum(
        jnp.sin(run(moving, ids, weights, w) if through == "rows" else run(x, ids, moving, w))
    )
    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))(x if through == "rows" else weights, w)
    for gradient in gradients:
        assert np.isfinite(gradient).all()
        assert np.asarray(gradient).any()


def test_a_gradient_leaves_the_dtypes_of_a_payload_as_they_are():
    x, ids, weights = routing()

    def shard(group, x, ids, weights):
        sent = sent_by(group, {"x": x, "is_positive": x > 0}, ids, weights, implementation="ffi")
        assert sent.x["is_positive"].dtype == bool
        return sent.x["x"].sum(axis=(0, 1))

    run = mapped(shard)
    gradient = jax.jit(jax.grad(lambda x: run(x, ids, weights).sum()))(x)
    assert np.isfinite(gradient).all()


@pytest.mark.one_jax
@pytest.mark.parametrize("dtype", ["float8_e8m0fnu", "float8_e5m2", "bfloat16", "float4_e2m1fn"])
def test_a_gradient_leaves_the_bits_of_a_payload_as_they_are(dtype, implementation):
    """NaNs of all kinds among them. Empty rows have no bit set, also where a dtype has no zero."""
    x, ids, weights = routing()
    size = jnp.finfo(dtype).bits
    bits = np.random.default_rng(4).integers(0, 2**size, (*x.shape[:-1], 16))
    raw = jnp.dtype(f"uint{size}")

    def shard(group, x, bits, ids, weights):
        payload = jax.lax.bitcast_convert_type(bits.astype(raw), jnp.dtype(dtype))

        def loss(x):
            sent = sent_by(group, {"x": x, "payload": payload}, ids, weights, implementation=implementation)
            found = jax.lax.bitcast_convert_type(sent.x["payload"], raw).astype(jnp.int32)
            return jnp.sum(sent.x["x"]), (found, jnp.where(sent.is_row()[..., None], found, 0))

        return *loss(x)[1], *jax.grad(loss, has_aux=True)(x)[1]

    found = mapped(shard, 4)(x, bits.astype(np.int32), ids, weights)
    _, plain, with_gradient, _ = map(np.asarray, found)
    assert plain.any()
    np.testing.assert_array_equal(with_gradient, plain)
