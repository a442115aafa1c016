"""Kernel times of dispatch and combine on the GPUs of this host, from JAX's profiler.

    python benchmarks/gpu.py [--shape deepseek_v3] [--order rank]

Logical GB/s count every received row, wire GB/s only those from other ranks. Time is the slowest rank's
median, of dispatch with its layout.
"""

import argparse
import pathlib
import statistics
import sys
import tempfile
from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from shapes import SHAPES

import jax_ep

STEPS = 16  # ops of each kind in one program
PARTS = {"count": "CountKernel", "move": "MoveKernel", "combine": "CombineKernel"}


def kernel_us(folder: str) -> dict[str, dict[str, list[float]]]:
    """Part -> device -> durations in microseconds, from the profile in a folder."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        if "GPU" not in plane.name:
            continue
        for line in plane.lines:
            for event in line.events:
                for part, kernel in PARTS.items():
                    if kernel in event.name:
                        found[part][plane.name].append(event.duration_ns / 1e3)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="deepseek_v3")
    parser.add_argument("--order", choices=["rank", "expert"], default="rank")
    options = parser.parse_args()
    order: Any = options.order
    shape = SHAPES[options.shape]
    mesh = jax.make_mesh((len(jax.devices()),), ("ep",), axis_types=(AxisType.Auto,))
    group = jax_ep.Group(mesh, "ep")
    rng = np.random.default_rng(0)
    tokens = group.size * shape.tokens
    ids = np.argsort(rng.random((tokens, shape.experts)), axis=1)[:, : shape.top_k].astype(np.int32)
    sharding = NamedSharding(mesh, P("ep"))

    def shard(x: jax.Array, ids: jax.Array) -> jax.Array:
        def step(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            sent = jax_ep.dispatch(x, ids, group=group, num_experts=shape.experts, order=order)
            return jax_ep.combine(sent.x, sent.handle, group=group), None

        return jax.lax.scan(step, x, None, length=STEPS)[0]

    run = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
    x = jax.device_put(jnp.asarray(rng.standard_normal((tokens, shape.hidden)), jnp.bfloat16), sharding)
    ids_on_device = jax.device_put(ids, sharding)
    for _ in range(2):
        jax.block_until_ready(run(x, ids_on_device))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run(x, ids_on_device))
        found = kernel_us(folder)

    ranks = ids // (shape.experts // group.size)
    sources = np.repeat(np.arange(group.size), shape.tokens)
    sent = np.stack(
        [(ranks == r).any(axis=1) if order == "rank" else (ranks == r).sum(axis=1) for r in range(group.size)]
    )
    received = sent.sum(axis=1).max() * shape.hidden * 2
    remote = max(sent[r][sources != r].sum() for r in range(group.size)) * shape.hidden * 2
    slowest = {part: max(statistics.median(times) for times in found[part].values()) for part in PARTS}
    print(
        f"{options.shape}, order {order}, {group.size} x {jax.devices()[0].device_kind}, "
        f"jax {jax.__version__}"
    )
    for name, parts in (("dispatch", ("count", "move")), ("combine", ("combine",))):
        us = sum(slowest[part] for part in parts)
        shares = ", ".join(f"{part} {slowest[part]:.1f} us" for part in parts)
        print(
            f"{name:9s} {us:8.1f} us  logical {received / us / 1e3:6.1f} GB/s  "
            f"wire {remote / us / 1e3:6.1f} GB/s  ({shares})"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
