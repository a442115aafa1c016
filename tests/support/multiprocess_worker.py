"""One of several processes that share eight CPU devices: `multiprocess_worker.py ADDRESS PROCESSES PROCESS`.

Dispatch, combine and gradients against the oracle. A process counts as a domain.
"""

import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_cpu_collectives_implementation", "gloo")
address, processes, process = sys.argv[1], *map(int, sys.argv[2:])
jax.distributed.initialize(address, processes, process)

import oracle  # noqa: E402
from cases import floats, routing, same_bits  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import jax_ep  # noqa: E402
from jax_ep._group.group import resolve_implementation  # noqa: E402

R, T, K, E, H = 8, 6, 3, 16, 5
mesh = Mesh(np.array(jax.devices()), ("ep",))
assert mesh.size == R
group = jax_ep.Group(mesh, "ep")
info = group.info()
assert (info.implementation, info.reason, info.ranks_per_domain) == ("ffi", "", R // processes), info
spec = NamedSharding(mesh, P("ep"))
ids, x, w = routing("sprinkled", R, T, K, E), floats((R, T, H)), floats((R, T, K))


def spread(array):
    flat = array.reshape(-1, *array.shape[2:])
    return jax.make_array_from_callback(flat.shape, spec, lambda index: flat[index])


def local(array):
    """Shards of this process: rank -> array."""
    size = array.shape[0] // R
    return {(shard.index[0].start or 0) // size: np.asarray(shard.data) for shard in array.addressable_shards}


def layer(x, ids, w, group=group):
    sent = jax_ep.dispatch(x, ids, w, group=group, num_experts=E, order="expert", expert_alignment=4)
    return sent, jax_ep.combine(sent.x, sent.handle, row_weights=sent.row_weights)


mapped = jax.shard_map(layer, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))


def loss(x, ids, w):
    d, back = mapped(x, ids, w)
    return jnp.sum(back), (d, back)


gradients, (d, back) = jax.jit(jax.grad(loss, has_aux=True))(spread(x), spread(ids), spread(w))

expected = oracle.dispatch(x, ids, w, E, "expert", alignment=4)
y = np.stack([one.x for one in expected])
weights = np.stack([one.weights for one in expected])
sums = oracle.combine(y, expected, T, weights, per_domain=R // processes)
for rank, rows in local(d.x).items():
    assert same_bits(rows, expected[rank].x)
for rank, counts in local(d.tokens_per_expert).items():
    np.testing.assert_array_equal(counts, expected[rank].tokens_per_expert)
for rank, total in local(back).items():
    np.testing.assert_allclose(total, sums[rank], rtol=1e-5, atol=1e-6)


def padded(x, ids, w, count):
    """Rows that travel as FP8 to padded experts, of batches that are not full."""
    sent = jax_ep.dispatch(
        x,
        ids,
        w,
        group=group,
        num_experts=E,
        order="expert_padded",
        quantize="fp8",
        round_scale=True,
        num_valid_tokens=count,
    )
    rows = jax_ep.dequantize_fp8(sent.x, x.dtype)
    return sent, jax_ep.combine(rows, sent.handle, row_weights=sent.row_weights)


wide, counts = floats((R, T, 256)), np.arange(R, dtype=np.int32) * 5 % (T + 1)
run = jax.jit(jax.shard_map(padded, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
sent, totals = run(spread(wide), spread(ids), spread(w), spread(counts))
packed = jax_ep.quantize_fp8(wide, round_scale=True)
valid = oracle.mask_inactive(ids, E, np.ones(R), counts)
of_values, of_scales, of_rows = (
    oracle.dispatch(np.asarray(array), valid, w, E, "expert_padded")
    for array in (packed.values, packed.scales, jax_ep.dequantize_fp8(packed, wide.dtype))
)
for got, expected in ((sent.x.values, of_values), (sent.x.scales, of_scales)):
    for rank, rows in local(got).items():
        is_row = np.array([source is not None for source in expected[rank].sources])
        assert same_bits(rows.reshape(R * T * E // R, -1)[is_row], expected[rank].x[is_row])
for rank, sizes in local(sent.group_sizes).items():
    np.testing.assert_array_equal(sizes, of_rows[rank].group_sizes)
y, weights = (np.stack([getattr(one, name) for one in of_rows]) for name in ("x", "weights"))
sums = oracle.combine(y, of_rows, T, weights, per_domain=R // processes)
for rank, total in local(totals).items():
    np.testing.assert_allclose(total, sums[rank], rtol=1e-5, atol=1e-6)


routed = np.stack([oracle.routed(one, E) for one in ids])
want = np.where(routed >= 0, w, 0).sum(axis=-1, keepdims=True) * np.ones(H)
for rank, gradient in local(gradients).items():
    np.testing.assert_allclose(gradient, want[rank], rtol=1e-5, atol=1e-5)

# Ranks in another order than their domains: one exchange among all of them, as before, and why.
mixed = Mesh(np.array(jax.devices()).reshape(2, -1).T.reshape(-1), ("ep",))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    other = jax_ep.Group(mixed, "ep")
    run = jax.jit(
        jax.shard_map(lambda *a: layer(*a, other)[1], mesh=mixed, in_specs=P("ep"), out_specs=P("ep"))
    )
    spec = NamedSharding(mixed, P("ep"))
    for _ in range(2):
        run(spread(x), spread(ids), spread(w)).block_until_ready()
assert other.info().ranks_per_domain == R
assert "are not consecutive" in other.info().reason
assert sum("spans processes" in str(warning.message) for warning in caught) == 1
with pytest.raises(ValueError, match="are not consecutive"):
    resolve_implementation(other, "ffi")
print(f"process {jax.process_index()} ok", flush=True)
