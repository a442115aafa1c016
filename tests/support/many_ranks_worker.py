"""Dispatch and combine over more ranks than a domain has: `many_ranks_worker.py RANKS PER_DOMAIN EXPERTS`."""

import os
import sys

ranks, per_domain, experts = map(int, sys.argv[1:])
os.environ["NPROC"] = str(2 * ranks)

import jax  # noqa: E402

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", ranks)

import numpy as np  # noqa: E402
import oracle  # noqa: E402
from cases import floats, routing, same_bits  # noqa: E402
from jax.sharding import Mesh  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import jax_ep  # noqa: E402

T, K, H = 2, 3, 4
mesh = Mesh(np.array(jax.devices()), ("ep",))
group = jax_ep.Group(mesh, "ep", ranks_per_domain=per_domain)
assert group.info().implementation == "ffi"
ids, x = routing("sprinkled", ranks, T, K, experts), floats((ranks, T, H))
w = floats((ranks, T, K), seed=2)


def shard(x, ids, w):
    sent = jax_ep.dispatch(x, ids, w, group=group, num_experts=experts, capacity=4 * T)
    return sent, jax_ep.combine(sent.x, sent.handle, row_weights=sent.row_weights)


mapped = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
flat = [array.reshape(-1, array.shape[-1]) for array in (x, ids, w)]
sent, back = jax.tree.map(lambda a: a.reshape(ranks, -1, *a.shape[1:]), jax.device_get(mapped(*flat)))
expected = oracle.dispatch(x, ids, w, experts, "expert", capacity=4 * T)
for rank, want in enumerate(expected):
    assert same_bits(sent.x[rank], want.x)
    assert same_bits(sent.row_weights[rank], want.weights)
    np.testing.assert_array_equal(sent.num_dropped[rank], want.num_dropped)
y, weights = (np.stack([getattr(one, name) for one in expected]) for name in ("x", "weights"))
sums = oracle.combine(y, expected, T, weights, per_domain=per_domain)
np.testing.assert_allclose(back, sums, rtol=1e-5, atol=1e-6)
print(f"{ranks} ranks ok")
