"""The layer in chunks of its tokens against the layer at once."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import assert_close, floats, ranks, same_bits
from chunks import (
    EXPERTS,
    E,
    H,
    K,
    L,
    R,
    T,
    arrays,
    assert_sums,
    cast,
    gradient,
    mapped,
    mlp,
    parameters,
    shard,
    swiglu,
)
from conftest import make_mesh
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_ep

CHUNKS = [2, 3, 4]  # of 5; of 4, 4 and 2; of 3, 3, 3 and 1 tokens


@functools.cache
def at_once(experts):
    x, ids, w = arrays()
    return jax.device_get(gradient(mapped(experts), ids)(x, w, parameters()))


@pytest.mark.parametrize("experts", EXPERTS)
def test_layer_and_gradients(experts, annotated):
    x, ids, w = arrays()
    tolerance = 2e-2 if experts is cast else 1e-5
    for num_chunks in CHUNKS if experts in (mlp, swiglu) else [3]:
        got = gradient(mapped(experts, num_chunks=num_chunks), ids)(x, w, parameters())
        assert_sums(got, at_once(experts), tolerance)


@pytest.mark.parametrize("num_chunks", [2, 4, T, 3 * T])
def test_what_experts_do_row_by_row_has_the_same_bits(num_chunks, implementation):
    """Sums and gradients of tokens and weights; with more chunks than tokens there is one for each.

    XLA's own sums it may fuse in other ways.
    """
    x, ids, w = arrays()
    run = lambda **options: gradient(
        mapped(lambda p, sent: jnp.maximum(sent.x, 0) * 3, implementation=implementation, **options), ids
    )(x, w, {})
    for got, want in zip(jax.tree.leaves(run(num_chunks=num_chunks)), jax.tree.leaves(run()), strict=True):
        if implementation == "ffi":
            assert same_bits(got, want)
        else:
            assert_sums(got, want, 1e-6)


def test_experts_see_a_chunk():
    """Rows of each chunk as a dispatch of that chunk brings them."""
    x, ids, w = arrays()
    size, seen = 4, []

    def experts(_, sent):
        jax.debug.callback(lambda *a: seen.append(jax.tree.map(np.asarray, a)), sent.x, sent.row_weights)
        return sent.x

    jax.block_until_ready(jax.jit(mapped(experts, num_chunks=3))(x, ids, w, {}))
    jax.effects_barrier()
    padded = lambda array, fill: np.pad(
        array.reshape(R, T, -1), ((0, 0), (0, 3 * size - T), (0, 0)), constant_values=fill
    )
    want = []
    for chunk in range(3):
        part = slice(chunk * size, (chunk + 1) * size)
        cut = [padded(array, fill)[:, part] for array, fill in ((x, 0), (ids, -1), (w, 0))]
        want += [(one.x, one.weights) for one in oracle.dispatch(*cut, E, "expert")]
    key = lambda arrays: b"".join(array.tobytes() for array in arrays)
    assert sorted(map(key, seen)) == sorted(map(key, want))


@pytest.mark.parametrize(("capacity", "alignment"), [(17, 1), (16, 8), (None, 8)])
def test_drops_and_counts(capacity, alignment, implementation):
    """Each chunk has an equal share of the capacity, and what is counted adds up."""
    x, ids, w = arrays()
    options = {"capacity": capacity, "expert_alignment": alignment, "implementation": implementation}
    run = mapped(lambda p, sent: sent.x, num_chunks=2, return_stats=True, **options)
    y, stats = jax.jit(run)(x, ids, w, {})
    share = {17: 9, 16: 8, None: None}[capacity]
    halves = [
        oracle.dispatch(np.zeros((R, T // 2, 1)), half, None, E, "expert", share, alignment)
        for half in np.split(ids.reshape(R, T, K), 2, axis=1)
    ]
    assert any(one.num_dropped[0] for half in halves for one in half) == (capacity is not None)
    for rank, both in enumerate(zip(*halves, strict=True)):
        for name in ("tokens_per_expert", "num_tokens", "num_dropped"):
            got = np.asarray(getattr(stats, name)).reshape(R, -1)[rank]
            np.testing.assert_array_equal(got, sum(getattr(one, name) for one in both), strict=True)
    kept = np.zeros((R, 2, T // 2, K))
    for number, half in enumerate(halves):
        for s, t, k in (source for one in half for source in one.sources if source is not None):
            kept[s, number, t, k] = 1
    total = (kept.reshape(-1, K) * w).sum(axis=1, keepdims=True)
    assert_close(y, x * total, terms=K)


@pytest.mark.parametrize("lead", [(2,), (5, 2)])
def test_valid_tokens_and_leading_axes(lead):
    x, ids, w = arrays()
    valid = (np.arange(R, dtype=np.int32) * 3) % (T + 1)

    def run(num_chunks):
        def one(x, ids, w, p, valid):
            apart = lambda array: array.reshape(*lead, -1, array.shape[-1])
            y = jax_ep.moe(
                *map(apart, (x, ids, w)),
                lambda sent: swiglu(p, sent),
                group=ranks(R).group,
                num_experts=E,
                num_valid_tokens=valid,
                num_chunks=num_chunks,
            )
            assert y.shape == (*lead, T // np.prod(lead), H)
            return y.reshape(x.shape)

        function = jax.shard_map(one, mesh=ranks(R).mesh, in_specs=P("ep"), out_specs=P("ep"))
        return gradient(lambda x, ids, w, p: function(x, ids, w, p, valid), ids)(x, w, parameters())

    assert_sums(run(4), run(1))


@pytest.mark.parametrize("quantize", ["fp8_dequantize", "fp8"])
def test_rows_that_travel_as_fp8(quantize):
    _, ids, w = arrays()
    x = floats((R * T, 128))
    up = floats((E, 128, 128), seed=4)

    def experts(p, sent):
        x = sent.x if quantize == "fp8_dequantize" else jax_ep.dequantize_fp8(sent.x, jnp.float32)
        return jnp.tanh(jax_ep.grouped_dot(x, p["up"], sent.group_sizes))

    def run(num_chunks, argnums):
        function = mapped(experts, quantize=quantize, num_chunks=num_chunks)
        loss = lambda x, w, p: jnp.sum(function(x, ids, w, p) ** 2)
        return jax.jit(jax.value_and_grad(loss, argnums=argnums))(x, w, {"up": up})

    argnums = (0, 1, 2) if quantize == "fp8_dequantize" else (1, 2)
    assert_sums(run(2, argnums), run(1, argnums))
    if quantize == "fp8":
        with pytest.raises(TypeError, match="quantize='fp8' gives rows without a gradient"):
            run(2, (0,))


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("policy", [None, "save"])
def test_scan_and_checkpoint(policy, check_vma, annotated):
    """Layers in a loop, computed again in the backward pass; with the policy nothing is sent again."""
    x, ids, w = arrays()
    p = parameters()
    layers = jax.tree.map(lambda array: np.stack([array, 0.5 * array], axis=1), p)
    policy = jax_ep.save_ep_residuals if policy else None

    def run(num_chunks):
        def stack(x, ids, w, layers):
            def step(x, p):
                out = shard(ranks(R).group, swiglu, x, ids, w, p, num_chunks=num_chunks)
                return jnp.tanh(out), None

            by_layer = jax.tree.map(lambda array: array.swapaxes(0, 1), layers)
            return jax.lax.scan(jax.checkpoint(step, policy=policy), x, by_layer)[0]

        spec = {"in_specs": P("ep"), "out_specs": P("ep"), "check_vma": check_vma}
        return gradient(jax.shard_map(stack, mesh=ranks(R).mesh, **spec), ids)

    assert_sums(run(3)(x, w, layers), run(1)(x, w, layers), 1e-4)
    text = run(3).lower(x, w, layers).as_text()
    assert len(re.findall(r"@jax_ep_route\b", text)) == (3 if policy else 6)
    assert text.count("call @jax_ep_weight_product") == 3


def test_vmap():
    x, ids, w = arrays()
    batch = [np.stack([array, np.roll(array, T, axis=0)]) for array in (x, ids, w)]

    def run(num_chunks):
        def one(x, ids, w, p):
            layer = functools.partial(shard, ranks(R).group, mlp, num_chunks=num_chunks)
            return jax.vmap(layer, in_axes=(0, 0, 0, None))(x, ids, w, p)

        specs = (P(None, "ep"), P(None, "ep"), P(None, "ep"), P("ep"))
        function = jax.shard_map(one, mesh=ranks(R).mesh, in_specs=specs, out_specs=P(None, "ep"))
        return gradient(function, batch[1])(batch[0], batch[2], parameters())

    assert_sums(run(2), run(1))


def test_eager_mode():
    x, ids, w = (array[: 2 * T] for array in arrays())
    on = ranks(2)

    def run(num_chunks):
        function = functools.partial(shard, on.group, mlp, num_chunks=num_chunks)
        layer = jax.shard_map(function, mesh=on.mesh, in_specs=P("ep"), out_specs=P("ep"))
        value, transposed = jax.vjp(lambda *a: layer(a[0], ids, *a[1:]), x, w, parameters())
        return value, transposed(value)

    assert_sums(run(2), jax.jit(run, static_argnums=0)(1))


@pytest.mark.parametrize("axes", ["tensor", "data"])
def test_other_axes_of_the_mesh(axes):
    """Weights split over another axis, whose parts are added inside the experts; or copied along it."""
    mesh = make_mesh((R // 2, 2), ("ep", "other"))
    x, ids, w = arrays()
    tokens = P("ep") if axes == "tensor" else P(("ep", "other"))
    split = {"up": P("ep", None, "other"), "down": P("ep", "other")} if axes == "tensor" else P("ep")
    p = {name: parameters()[name] for name in ("up", "down")}

    def experts(p, sent):
        y = mlp(p, sent)
        return jax.lax.psum(y, "other") if axes == "tensor" else y

    with jax_ep.Group(mesh, "ep") as group:

        def run(num_chunks):
            function = functools.partial(shard, group, experts, num_chunks=num_chunks)
            specs = (
                tokens,
                tokens,
                tokens,
                {"up": split["up"], "down": split["down"]} if axes == "tensor" else split,
            )
            layer = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=tokens)
            return gradient(layer, ids)(x, w, p)

        assert_sums(run(2), run(1))


@pytest.mark.filterwarnings("ignore:jax_ep. this shard_map leaves the mesh axes")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_another_axis_that_is_not_manual(kind):
    mesh = make_mesh((R // 2, 2), ("ep", "other"), kind)
    with jax_ep.Group(mesh, "ep") as group, jax.set_mesh(mesh):
        spread = lambda tree, *spec: jax.device_put(tree, jax.NamedSharding(mesh, P("ep", *spec)))
        p = {"up": spread(parameters()["up"], None, "other"), "down": spread(parameters()["down"])}
        x, ids, w = spread(arrays())

        def run(num_chunks):
            function = functools.partial(shard, group, mlp, num_chunks=num_chunks)
            specs = {"in_specs": P("ep"), "out_specs": P("ep"), "axis_names": {"ep"}}
            return gradient(jax.shard_map(function, mesh=mesh, **specs), ids)(x, w, p)

        assert_sums(run(2), run(1))


def test_gradient_of_a_gradient():
    x, ids, w = arrays()

    def run(num_chunks):
        function = mapped(mlp, num_chunks=num_chunks)
        first = jax.grad(lambda x, p: jnp.sum(jnp.sin(function(x, ids, w, p))))
        return jax.jit(jax.grad(lambda p: jnp.sum(first(x, p) ** 2)))(parameters())

    got, want = run(2), run(1)
    for name in ("up", "down"):
        assert_sums(got[name], want[name], 1e-4)


@pytest.mark.parametrize("num_chunks", [0, -1, 1.5, None, "2"])
def test_a_number_of_chunks_that_is_none(num_chunks):
    x, ids, w = arrays()
    with pytest.raises(ValueError, match="moe: num_chunks must be an int between 1 and"):
        jax.eval_shape(mapped(mlp, num_chunks=num_chunks), x, ids, w, parameters())


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"capacity": 3, "expert_alignment": 4}, ValueError, "moe: a capacity of 3 rows cannot hold"),
        ({"capacity": 2.5}, ValueError, "moe: capacity counts rows"),
        ({"num_valid_tokens": 1.0}, TypeError, "moe: num_valid_tokens must be"),
        ({"quantize": "fp4"}, ValueError, "quantize must be None, 'fp8'"),
        ({"quantize": np.ones(2)}, ValueError, "quantize must be None, 'fp8'"),
    ],
)
def test_bad_arguments(change, error, text):
    x, ids, w = arrays()
    with pytest.raises(error, match=text):
        jax.eval_shape(mapped(mlp, num_chunks=2, **change), x, ids, w, parameters())


def test_experts_that_return_other_rows():
    x, ids, w = arrays()
    rows = R * T // 2 * min(K, L)
    with pytest.raises(ValueError, match=f"return a row for each of the {rows} rows"):
        jax.eval_shape(mapped(lambda p, sent: sent.x[1:], num_chunks=2), x, ids, w, {})


def test_outside_of_shard_map():
    x, ids, w = arrays()
    with pytest.raises(ValueError, match=r"moe communicates, so it must be called inside jax\.shard_map"):
        shard(ranks(R).group, mlp, x, ids, w, parameters(), num_chunks=2)
