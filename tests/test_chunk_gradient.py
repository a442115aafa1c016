"""What a layer in chunks computes and sends how often, and in which order."""

import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ranks, routing, same_bits
from chunks import EXPERTS, F, H, K, L, R, T, arrays, assert_sums, gradient, mapped, mlp, parameters, shard
from conftest import need_gpu
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep import _joint_rows
from jax_ep._grouped_dot import is_weight_product


def weight_products(jaxpr):
    """How often there is a product for the gradient of weights, by how many rows it has."""
    found = Counter()
    for equation in jaxpr.eqns:
        if is_weight_product(equation):
            found[equation.invars[0].aval.shape[0]] += 1
            continue
        for inner in jaxprs_in_params(equation.params):
            found += weight_products(inner)
    return found


@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("num_chunks", [2, 3])
def test_one_product_for_the_gradient_of_each_matrix(experts, num_chunks):
    x, ids, w = arrays()
    function = gradient(mapped(experts, num_chunks=num_chunks), ids)
    rows = R * -(-T // num_chunks) * min(K, L)
    of_chunks, of_all = EXPERTS[experts]
    want = {rows: of_chunks * num_chunks, rows * num_chunks: of_all}
    found = weight_products(jax.make_jaxpr(function)(x, w, parameters()).jaxpr)
    assert found == {rows: count for rows, count in want.items() if count}


@pytest.mark.parametrize("kind", ["uniform", "empty_experts", "one_rank", "unused"])
def test_joint_rows(kind):
    """Rows by expert, then chunk; group sizes that leave a tail in each chunk."""
    rng = np.random.default_rng(0)
    sizes = [
        np.bincount(routing(kind, 1, 9, 3, 8, seed)[routing(kind, 1, 9, 3, 8, seed) >= 0], minlength=8)
        for seed in range(3)
    ]
    sizes = [one.astype(np.int32) for one in sizes]
    chunks = [rng.standard_normal((int(one.sum()) + 4, 5)).astype(np.float32) for one in sizes]
    index = _joint_rows.joint_index(sizes, sum(map(len, chunks)))
    got = np.asarray(_joint_rows.joint_rows(chunks, index))
    pieces = [np.split(rows, np.cumsum(one))[:-1] for rows, one in zip(chunks, sizes, strict=True)]
    want = np.concatenate([pieces[chunk][expert] for expert in range(8) for chunk in range(3)])
    assert same_bits(got[: len(want)], want)
    assert got.shape == (len(want) + 12, 5)


def test_what_is_not_trained_needs_no_gradient():
    """The layer in chunks asks for no gradient that nobody asks it for."""
    x, ids, w = arrays()
    p = parameters()
    quantised = jax.jit(lambda up: jax_ep.quantize_fp8(up, block=(128, 128)))(
        jnp.pad(p["up"], [(0, 0), (0, 128 - H), (0, 128 - F)])
    )

    def experts(p, sent):
        up = jax_ep.dequantize_fp8(p["quantised"], jnp.float32)
        rows = jnp.pad(sent.x, [(0, 0), (0, 128 - H)])
        return jax_ep.grouped_dot(rows, up, sent.group_sizes)[:, :H] * p["scale"].mean()

    def loss(w, scale, num_chunks):
        layer = mapped(experts, num_chunks=num_chunks)
        return jnp.sum(layer(x, ids, w, {"quantised": quantised, "scale": scale}) ** 2)

    of = jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=2)
    for got, want in zip(of(w, p["scale"], 2), of(w, p["scale"], 1), strict=True):
        assert_sums(got, want)


@pytest.mark.parametrize("on_gpus", [False, True])
def test_nothing_is_left_of_a_trace(on_gpus, gpu_group):
    """What `jax.checking_leaks` finds would be the library's, not the user's."""
    x, ids, w = arrays()
    group = gpu_group if on_gpus else ranks(R).group
    function = functools.partial(shard, group, mlp, num_chunks=2)
    layer = jax.shard_map(function, mesh=ranks(R).mesh, in_specs=P("ep"), out_specs=P("ep"))
    with jax.checking_leaks():
        traced = gradient(layer, ids).trace(x, w, parameters())
        traced.lower(lowering_platforms=("cuda",) if on_gpus else None)


def test_a_ref_from_outside():
    x, ids, w = arrays()

    def experts(p, sent):
        p["ref"][...] += 1
        return sent.x

    def layer(num_chunks, x, ids, w):
        p = {"ref": jax.new_ref(jax.lax.pcast(jnp.zeros(()), ("ep",), to="varying"))}
        return shard(ranks(R).group, experts, x, ids, w, p, num_chunks=num_chunks)

    run = lambda n: jax.jit(
        jax.shard_map(functools.partial(layer, n), mesh=ranks(R).mesh, in_specs=P("ep"), out_specs=P("ep"))
    )(x, ids, w)
    run(1)
    with pytest.raises(TypeError, match=r"moe: with num_chunks > 1, expert_fn .* must not read or write a"):
        run(2)


@pytest.mark.parametrize("num_chunks", [2, 3, 4])
def test_what_is_apart(gpu_group, num_chunks):
    """The rows of each chunk, its sums, and the gradients of its rows, in the order of the chunks."""
    x, ids, w = arrays()
    function = functools.partial(shard, gpu_group, mlp, num_chunks=num_chunks)
    layer = jax.shard_map(function, mesh=ranks(R).mesh, in_specs=P("ep"), out_specs=P("ep"))
    text = gradient(layer, ids).trace(x, w, parameters()).lower(lowering_platforms=("cuda",)).as_text()
    annotated = re.findall(r'call @(\w+)\(.*_xla_stream_annotation = "collective"', text)
    bodies = dict(re.findall(r"func\.func private @(\w+)\((.*?)\n  }", text, re.DOTALL))
    ops = [re.findall(r"@jax_ep_(\w+)\(", bodies[name]) for name in annotated]
    between = [["push"], ["pull"]] * (num_chunks - 2)
    forward = [["push"], ["push"], *between, ["pull"], ["pull"]]
    assert ops == forward + [["pull"]] * num_chunks


def test_products_run_beside_communication():
    """In what XLA has scheduled, products lie between start and done of what is sent meanwhile."""
    need_gpu()
    assert ranks(R).group.stats().implementation == "ffi"
    shapes = {"x": (4096, 2048), "ids": (4096, 8), "up": (L, 2048, 1024), "down": (L, 1024, 2048)}
    spread = jax.NamedSharding(ranks(R).mesh, P("ep"))

    def array(name, dtype=jnp.float32):
        first, *rest = shapes[name]
        return jax.ShapeDtypeStruct((R * first, *rest), dtype, sharding=spread)

    x, ids, w, p = array("x"), array("ids", jnp.int32), array("ids"), {n: array(n) for n in ("up", "down")}
    run = mapped(mlp, num_chunks=2)

    def with_gradients(x, ids, w, p):
        y, transposed = jax.vjp(lambda x, w, p: run(x, ids, w, p), x, w, p)
        return y, transposed(y)

    text = jax.jit(with_gradients).lower(x, ids, w, p).compile().as_text()
    assert "is_scheduled=true" in text
    (lines,) = [part.splitlines() for part in text.split("\n}") if re.search(r"\w-start\(", part)]
    starts = [(i, re.search(r"%(\S+) = ", line)[1]) for i, line in enumerate(lines) if "-start(" in line]
    filled = []
    for begin, name in starts:
        done = rf"-done\(.*%{re.escape(name)}\)"
        (end,) = [i for i, line in enumerate(lines) if re.search(done, line)]
        filled.append(any("jax_ep_grouped_dot" in line for line in lines[begin:end]))
    # Nothing is beside the first and the last of the forward pass. The rows of the backward pass come with
    # gradients of weights, so they are not apart. Its sums are, the last of them beside the weight products.
    assert filled == [False, True, True, False, True, True]
