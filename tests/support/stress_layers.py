"""Random layers whose communication runs beside products, compared bitwise with layers in sequence.

    python tests/support/stress_layers.py [--layers 30] [--steps 8] [--seed 0] [--busy]

Each has a shape, a routing and options of its own, among them 2 to all SMs for the products and for the
ops, and its values and gradients are computed in a loop, in both ways. GPUs only. JAX_EP_STRESS_US (150 if
not set) holds each rank up for a random time before it enters and leaves an op, and outputs are first
filled with a poison pattern. `--busy`: another process multiplies matrices on all GPUs meanwhile.
"""

import argparse
import os
import subprocess
import sys
import time
from typing import Any

os.environ.setdefault("JAX_EP_STRESS_US", "150")
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_ep

BUSY = """
import jax, jax.numpy as jnp
def multiply(_):
    x = jnp.ones((4096, 4096), jnp.bfloat16)
    return jax.lax.fori_loop(0, 100, lambda _, x: x @ x * jnp.bfloat16(2**-12), x)
run = jax.pmap(multiply)
while True:
    run(jnp.arange(jax.device_count())).block_until_ready()
"""


def layer(rng: np.random.Generator, group: jax_ep.Group, mesh: Mesh, steps: int) -> tuple[Any, str]:
    """Returns a program, () -> the number of different elements, and what it is."""
    ranks, num_sms = mesh.size, int(rng.choice([2, 4, 16, 64, 132]))
    tokens, k, local = int(rng.integers(1, 2500)), int(rng.integers(1, 9)), int(rng.integers(1, 9))
    width, inner = 128 * int(rng.integers(8, 33)), 128 * int(rng.integers(1, 9))
    quantize = [None, None, "fp8", "fp8_all"][rng.integers(4)]
    save = str(rng.choice(["preactivation", "inputs"]))
    is_shared, weights_first = bool(rng.random() < 0.5), bool(rng.random() < 0.5)
    redundant = int(rng.random() < 0.2)
    seed = int(rng.integers(2**31))

    def shard(seed: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed[0]), jax.lax.axis_index("ep"))
        keys = jax.random.split(key, 8)

        def normal(n: int, *shape: int) -> jax.Array:
            return jax.random.normal(keys[n], shape, jnp.bfloat16) * jnp.bfloat16(0.05)

        arrays = (
            normal(0, local, width, 2, inner),
            normal(1, local, inner, width),
            normal(2, 1, width, 2, inner),
            normal(3, 1, inner, width),
        )
        weights = jax.random.uniform(keys[4], (tokens, k))

        def run(overlap: bool, x: jax.Array, ids: jax.Array, weights: jax.Array, arrays: Any) -> jax.Array:
            options: Any = {"quantize": quantize, "save": save, "overlap": overlap, "num_sms": num_sms}
            experts = jax_ep.GatedExperts(*arrays[:2], **options)
            return jax_ep.moe(
                x,
                ids,
                weights,
                experts,
                group=group,
                shared=jax_ep.GatedExperts(*arrays[2:], **options) if is_shared else None,
                num_redundant_experts=redundant,
                experts_apply_weights=weights_first,
            )

        def step(different: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
            of_step = jax.random.fold_in(key, i)
            x = jax.random.normal(of_step, (tokens, width), jnp.bfloat16)
            ids = jax.random.randint(of_step, (tokens, k), -1, local * ranks)
            got, want = (
                jax.vjp(lambda *a, o=overlap: run(o, a[0], ids, *a[1:]), x, weights, arrays)
                for overlap in (True, False)
            )
            pairs = zip(
                *(jax.tree.leaves((y, transpose(jnp.sin(y)))) for y, transpose in (got, want)), strict=True
            )
            return different + sum(jnp.sum(one != other, dtype=jnp.int32) for one, other in pairs), None

        start = jnp.zeros((), jnp.int32) * jax.lax.axis_index("ep")
        return jax.lax.scan(step, start, jnp.arange(steps, dtype=jnp.int32))[0][None]

    compiled = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=P(), out_specs=P("ep"), check_vma=False))
    text = f"{tokens} tokens x {width}, top-{k} of {local * ranks} x {inner}, {quantize}, {save}, "
    text += f"shared {is_shared}, weights first {weights_first}, {redundant} redundant, "
    return (lambda: compiled(jnp.array([seed]))), f"{text}{num_sms} SMs"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--busy", action="store_true")
    options = parser.parse_args()
    if jax.default_backend() != "gpu":
        raise SystemExit("stress_layers: nothing runs beside products without GPUs")
    rng, begin = np.random.default_rng(options.seed), time.monotonic()
    mesh = Mesh(np.array(jax.devices()), ("ep",))
    environment = {**os.environ, "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.1"}
    other = subprocess.Popen([sys.executable, "-c", BUSY], env=environment) if options.busy else None
    try:
        for _ in range(options.layers):
            sms = int(rng.choice([0, 2, 8, 24, 100])) or None
            with jax_ep.Group(mesh, "ep", num_sms=sms) as group:
                run, text = layer(rng, group, mesh, options.steps)
                different = int(np.sum(run()))
                group.check()
            print(f"{time.monotonic() - begin:4.0f} s: {text}, ops {sms}", flush=True)
            if different:
                print(f"WRONG: {different} elements")
                return 1
    finally:
        if other is not None:
            other.kill()
    return 0


if __name__ == "__main__":
    sys.exit(main())
