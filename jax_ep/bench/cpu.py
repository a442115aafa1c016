"""Times dispatch + combine on virtual CPU devices: ffi against xla, and ffi against the tokens.

python -m jax_ep.bench.cpu            # exits with 1 if ffi is not five times faster, or not linear
python -m jax_ep.bench.cpu --order expert
"""

import argparse
import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep._cli import set_up_virtual_devices
from jax_ep.bench.shapes import SHAPES, Shape

DEVICES = 8
WANTED_RATIO = 5.0
# Time a token at the largest size over that at the smallest; 1 is linear, 16 would be quadratic.
MOST_GROWTH = 2.0


def round_trip(group: jax_ep.Group, mesh: jax.sharding.Mesh, shape: Shape, order: Any, implementation: str):
    def shard(x: jax.Array, ids: jax.Array) -> jax.Array:
        sent = jax_ep.dispatch(
            x, ids, group=group, num_experts=shape.experts, order=order, implementation=implementation
        )
        return jax_ep.combine(sent.x, sent.handle, implementation=implementation)

    return jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))


def inputs(mesh: jax.sharding.Mesh, shape: Shape) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    rows = mesh.size * shape.tokens
    ids = np.argsort(rng.random((rows, shape.experts)), axis=1)[:, : shape.top_k].astype(np.int32)
    x = jnp.asarray(rng.standard_normal((rows, shape.hidden)), jnp.bfloat16)
    sharding = NamedSharding(mesh, P("ep"))
    return jax.device_put(x, sharding), jax.device_put(ids, sharding)


def median_ms(function: Callable, *arguments: jax.Array, repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times[1:])  # the first call compiles


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--order", choices=["rank", "expert"], default="rank")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    set_up_virtual_devices(DEVICES)
    shape = SHAPES["cpu"]
    mesh = jax.make_mesh((DEVICES,), ("ep",), axis_types=(AxisType.Auto,))
    print(
        f"dispatch + combine, order {options.order}, {DEVICES} virtual devices on {os.cpu_count()} cores, "
        f"hidden {shape.hidden}, top-{shape.top_k} of {shape.experts}, bf16, median of {options.repeats}"
    )
    with jax_ep.Group(mesh, "ep") as group:
        per_token = {}
        for tokens in (shape.tokens // 4, shape.tokens, shape.tokens * 4):
            sized = dataclasses.replace(shape, tokens=tokens)
            run = round_trip(group, mesh, sized, options.order, "ffi")
            ffi = median_ms(run, *inputs(mesh, sized), repeats=options.repeats)
            per_token[tokens] = ffi / tokens
            print(f"ffi  {tokens:5d} tokens a rank  {ffi:9.2f} ms  {1e3 * ffi / tokens:6.1f} us a token")
        run = round_trip(group, mesh, shape, options.order, "xla")
        xla = median_ms(run, *inputs(mesh, shape), repeats=options.repeats)
    ratio = xla / (per_token[shape.tokens] * shape.tokens)
    print(f"xla  {shape.tokens:5d} tokens a rank  {xla:9.2f} ms  {ratio:.1f} times ffi's")
    growth = per_token[max(per_token)] / per_token[min(per_token)]
    print(
        f"ffi is {ratio:.1f} times faster (wanted: {WANTED_RATIO:.0f}); "
        f"16 times the tokens take {16 * growth:.1f} times as long"
    )
    return 0 if ratio >= WANTED_RATIO and growth <= MOST_GROWTH else 1


if __name__ == "__main__":
    sys.exit(main())
