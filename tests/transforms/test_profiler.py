"""What a profile shows: the ops by their names."""

import gzip
import json
import re

import jax
import jax.numpy as jnp
import pytest
from cases import ranks
from layers import E, R, inputs, layer

import jax_ep


def recorded(folder, run):
    """How many events of a profile of run() have each name, without XLA's numbers; of jax_ep's names."""
    jax.block_until_ready(run())  # compiled before it is recorded
    with jax.profiler.trace(folder):
        jax.block_until_ready(run())
    (trace,) = folder.rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    names = [match[1] for event in events if (match := re.match(r"(jax_ep\w+)", event.get("name", "")))]
    return {name: names.count(name) for name in names}


@pytest.fixture(autouse=True)
def on_the_cpu():
    if jax.default_backend() != "cpu":
        pytest.skip("on GPUs a profile shows kernels")


def test_a_layer_and_its_gradient(tmp_path):
    on = ranks(R)
    x, ids, w = inputs()
    mapped = on.map(lambda *a: layer(*a, on.group))
    gradient = jax.jit(jax.grad(lambda x, w: jnp.sum(mapped(x, ids, w) ** 2), argnums=(0, 1)))
    # The gradient of combine is a redispatch, that of dispatch a combine.
    assert recorded(tmp_path, lambda: gradient(x, w)) == {
        "jax_ep_dispatch": R,
        "jax_ep_combine": 2 * R,
        "jax_ep_redispatch": R,
    }


def test_ops_on_one_device(tmp_path):
    x, ids, w = inputs()

    @jax.jit
    def run(x):
        moved = jax_ep.permute(x, ids, num_local_experts=E)
        back = jax_ep.unpermute(moved.x, moved.row_map, topk_weights=w)
        return back, jax_ep.get_dispatch_layout(ids, num_experts=E, num_ranks=1)

    names = ("jax_ep_permute", "jax_ep_unpermute", "jax_ep_get_dispatch_layout")
    assert recorded(tmp_path, lambda: run(x)) == dict.fromkeys(names, 1)
