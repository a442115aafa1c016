"""Results bit for bit: run after run, on GPUs as on the CPU, and whether a program is replayed as a graph."""

import dataclasses
import functools
import hashlib
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BF16, floats, more_on_gpus, routing, same_bits, tagged_rows, weights_of
from devices import most_ranks, need_gpu
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep._group.group import ranks_of
from jax_ep._transport import ffi

R, T, K, E, H = most_ranks(), 48, 4, 64, 512
# Of so many tokens, such rows go through a GPU's shared memory.
SEVERAL_WAVES, LONG = 1200, 4096


def forward_and_backward(devices, order="expert", **options):
    """(x, ids, w) -> all that a layer moves, forward and backward; and the sharding of its arguments."""
    mesh = Mesh(np.array(devices), ("ep",))
    group = jax_ep.Group(mesh, "ep", **options)

    def shard(x, ids, w):
        def layer(x, w):
            sent = jax_ep.dispatch(x, ids, w, group=group, num_experts=E, order=order)
            if order == "expert":
                return jax_ep.combine(sent.x, sent.handle, row_weights=sent.row_weights), sent
            y, weights = jax_ep.combine((sent.x, sent.topk_weights), sent.handle)
            return y * jnp.sum(weights, axis=1, keepdims=True).astype(y.dtype), sent

        y, transposed, sent = jax.vjp(layer, x, w, has_aux=True)
        return (y, sent.x, weights_of(sent), sent.handle.sent_rows), transposed(jnp.cos(y))

    mapped = jax.shard_map(shard, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    return mapped, NamedSharding(mesh, P("ep"))


def inputs(seed, tokens=T):
    ids = routing("sprinkled", R, tokens, K, E, seed).reshape(-1, K)
    width = LONG if tokens == SEVERAL_WAVES else H
    return floats((R * tokens, width), BF16, seed), ids, floats((R * tokens, K), seed=seed + 1)


def digest(results):
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(jax.device_get(results)):
        found.update(np.ascontiguousarray(leaf).tobytes())
    return found.hexdigest()


@pytest.mark.parametrize("tokens", more_on_gpus([T], [SEVERAL_WAVES]))
@pytest.mark.parametrize("order", ["rank", "expert"])
def test_repeated_forward_and_backward_hash_alike(order, tokens):
    mapped, sharding = forward_and_backward(jax.devices()[:R], order)
    run, arguments = jax.jit(mapped), jax.device_put(inputs(0, tokens), sharding)
    repeats = 20 if jax.default_backend() == "gpu" else 5
    assert len({digest(run(*arguments)) for _ in range(repeats)}) == 1


@pytest.mark.filterwarnings("ignore:Group. got num_sms:UserWarning")  # equal groups, open at once
@pytest.mark.parametrize("order", ["rank", "expert"])
def test_any_number_of_sms_gives_the_same(order):
    need_gpu()
    digests = []
    for num_sms in (None, 2, 7, 1000):
        mapped, sharding = forward_and_backward(jax.devices()[:R], order, num_sms=num_sms)
        arguments = jax.device_put(inputs(0, SEVERAL_WAVES), sharding)
        digests.append(digest(jax.jit(mapped)(*arguments)))
    assert len(set(digests)) == 1


@pytest.mark.parametrize("order", ["rank", "expert"])
def test_dispatch_equals_the_cpu_s_bit_for_bit(order):
    need_gpu()
    ids, w = routing("sprinkled", R, T, K, E).reshape(-1, K), floats((R * T, K))
    x = tagged_rows(R, T, H, BF16).reshape(-1, H)
    results = []
    for devices in (jax.devices()[:R], jax.devices("cpu")[:R]):
        mesh = Mesh(np.array(devices), ("ep",))
        with jax_ep.Group(mesh, "ep") as group:

            def shard(x, ids, w, group=group):
                options = {"group": group, "num_experts": E, "order": order, "implementation": "ffi"}
                return dataclasses.replace(jax_ep.dispatch(x, ids, w, **options), handle=None)

            mapped = jax.shard_map(shard, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
            arguments = jax.device_put((x, ids, w), NamedSharding(mesh, P("ep")))
            results.append(jax.device_get(jax.jit(mapped)(*arguments)))
    assert jax.tree.all(jax.tree.map(same_bits, *results))


@pytest.mark.parametrize("widths", [(512,), (2048,), (2880, 96)], ids=str)
@pytest.mark.parametrize(("order", "k"), [("rank", 2), ("expert", 2), ("expert", 1)])
def test_short_rows_match_xla(order, k, widths):
    """A warp sends several of them at a time. The sums are exact, so each bit is known."""
    need_gpu()
    tokens, experts = 16384, 8 * R
    ids = routing("random", R, tokens, k, experts).reshape(-1, k)
    rng = np.random.default_rng(0)
    rows = tuple(rng.integers(-8, 9, (R * tokens, width)).astype(BF16) for width in widths)
    weights = np.exp2(rng.integers(-1, 2, (R * tokens, k))).astype(np.float32)
    mesh = Mesh(np.array(jax.devices()[:R]), ("ep",))
    results = []
    for implementation in ("ffi", "xla"):
        with jax_ep.Group(mesh, "ep") as group:

            def shard(rows, ids, weights, group=group, by=implementation):
                def layer(rows, weights):
                    sent = jax_ep.dispatch(
                        rows,
                        ids,
                        weights,
                        group=group,
                        num_experts=experts,
                        order=order,
                        capacity=2 * tokens,
                        implementation=by,
                    )
                    own = sent.row_weights if order == "expert" else None
                    y = jax_ep.combine(sent.x, sent.handle, row_weights=own, implementation=by)
                    return y, (sent.x, weights_of(sent))

                y, transposed, sent = jax.vjp(layer, rows, weights, has_aux=True)
                return y, sent, transposed(rows)

            mapped = jax.shard_map(shard, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
            arguments = jax.device_put((rows, ids, weights), NamedSharding(mesh, P("ep")))
            results.append(jax.device_get(jax.jit(mapped)(*arguments)))
    assert jax.tree.all(jax.tree.map(same_bits, *results))


def test_plain_copies_bring_every_rank_s_rows():
    need_gpu()
    mesh = Mesh(np.array(jax.devices()[:R]), ("ep",))
    x = tagged_rows(R, 40, H, BF16).reshape(-1, H)
    with jax_ep.Group(mesh, "ep") as group:
        shard = functools.partial(ffi.copy_to_all, ranks_of(group))
        mapped = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
        got = np.asarray(mapped(jax.device_put(x, NamedSharding(mesh, P("ep")))))
    assert same_bits(got, np.tile(x, (R, 1)))


def launches_graphs(run, folder):
    """Whether the profile of a run shows launches of CUDA graphs."""
    with jax.profiler.trace(str(folder)):
        jax.block_until_ready(run())
    (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(path)).planes
    return any(
        "GraphLaunch" in event.name for plane in planes for line in plane.lines for event in line.events
    )


@pytest.mark.parametrize("order", ["rank", "expert"])
def test_command_buffers(order, tmp_path):
    """The same results whether a program is replayed as one graph or launched op by op, call after call."""
    need_gpu()
    mapped, sharding = forward_and_backward(jax.devices()[:R], order)
    batches = [jax.device_put(inputs(seed), sharding) for seed in range(3)]
    digests = []
    for smallest_graph in (1, 10**6):
        options = {"xla_gpu_graph_min_graph_size": smallest_graph}
        compiled = jax.jit(mapped).lower(*batches[0]).compile(compiler_options=options)
        held = []  # results that live on move the next call's buffers
        for i in range(12):
            held.append(compiled(*batches[i % 3]))
        digests.append([digest(results) for results in held])
        run = functools.partial(compiled, *batches[0])
        assert launches_graphs(run, tmp_path / str(smallest_graph)) == (smallest_graph == 1)
    assert digests[0] == digests[1]
    assert digests[0][:3] == digests[0][3:6] == digests[0][9:]
    assert len(set(digests[0])) == 3
