"""Random shapes and routings, many ops in a program, every result checked on the device.

    python tests/stress.py [--programs 40] [--steps 150] [--seed 0] [--small] [--epochs 64]

Each step dispatches rows that say where they come from and combines them; the sum must be the row times
its number of copies, exactly, and the weights that travelled along must come back as they were. A step
also sends another payload through the handle. On GPUs JAX_EP_STRESS_US (150 if not set) holds each rank up
for a random time on the device, before it enters and before it leaves an op, and outputs are first filled
with a poison pattern. `--epochs N` lets the ops of each program pass from N before 2**31, or 2**32 by
turns, to beyond. Many ops in a row, in two minutes on two GPUs:

    JAX_EP_STRESS_US=2 python tests/stress.py --programs 20 --steps 1250 --small --epochs 500
"""

import argparse
import os
import sys
import time

os.environ.setdefault("NPROC", "32")
os.environ.setdefault("JAX_EP_STRESS_US", "150")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep import _extension


def program(rng: np.random.Generator, group: jax_ep.Group, mesh: Mesh, steps: int, small: bool):
    """One compiled program and what it is: () -> wrong elements over all steps."""
    ranks = group.size
    # Many tokens are moved in several waves.
    tokens, k = (
        int(rng.integers(1, rng.choice([100] if small else [100, 200, 3000]))),
        int(rng.integers(1, 9)),
    )
    experts = ranks * int(rng.integers(1, 17))
    width = int(rng.choice([1, 3, 8, 64] if small else [1, 3, 8, 64, 520, 1024, 4096]))
    order = str(rng.choice(["rank", "expert", "expert_padded"]))
    dtype = jnp.dtype(str(rng.choice(["float32", "bfloat16"])))
    alignment = int(rng.choice([1, 8])) if order == "expert" else 1
    seed = int(rng.integers(2**31))

    def shard(seed: jax.Array) -> jax.Array:
        rank = jax.lax.axis_index("ep")
        own = jax.random.fold_in(jax.random.key(seed[0]), rank)
        # Small integers: sums of copies are exact in every dtype.
        tag = (rank * 7 + jnp.arange(tokens)[:, None] + jnp.arange(width)) % 16

        def step(wrong: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
            keys = jax.random.split(jax.random.fold_in(own, i))
            ids = jax.random.randint(keys[0], (tokens, k), -1, experts)
            weights = jax.random.uniform(keys[1], (tokens, k))
            x = ((tag + i) % 16).astype(dtype)
            sent = jax_ep.dispatch(
                x, ids, weights, group=group, num_experts=experts, order=order, expert_alignment=alignment
            )
            again = jax_ep.redispatch(-x, sent.handle)
            back = jax_ep.combine(sent.x, sent.handle)
            copies = jnp.sum(sent.handle.sent_rows >= 0, axis=1, keepdims=True)
            wrong += jnp.sum(back != (x * copies).astype(dtype))
            used = sent.handle.topk_idx >= 0
            # Slots of padded experts that no row fills hold anything.
            padded = isinstance(sent, jax_ep.DispatchedByExpert) and order == "expert_padded"
            there = sent.is_row() if padded else jnp.ones(sent.x.shape[:-1], bool)
            wrong += jnp.sum((again != -sent.x) & there[..., None])
            if isinstance(sent, jax_ep.DispatchedByExpert) and sent.row_weights is not None:

                def weighted(y: jax.Array, row_weights: jax.Array) -> jax.Array:
                    return jax_ep.combine(y, sent.handle, row_weights=row_weights)

                _, transposed = jax.vjp(weighted, sent.x, sent.row_weights)
                d_y, d_weights = transposed(x)
                rows = sent.x.astype(jnp.float32)
                scaled = (sent.row_weights[..., None] * rows).astype(dtype)
                wrong += jnp.sum((d_y != scaled) & there[..., None])
                wrong += jnp.sum((d_weights != jnp.sum(rows * rows, axis=-1)) & there)
            if isinstance(sent, jax_ep.DispatchedByRank):
                returned = jax_ep.combine(sent.topk_weights, sent.handle)
                wrong += jnp.sum(returned != jnp.where(used, weights, 0))
            return wrong, None

        start = jnp.zeros((), jnp.int32) * rank
        return jax.lax.scan(step, start, jnp.arange(steps, dtype=jnp.int32))[0][None]

    mapped = jax.shard_map(shard, mesh=mesh, in_specs=P(), out_specs=P("ep"), check_vma=False)
    compiled = jax.jit(mapped)
    ops = steps * (4 if order == "rank" else 5)
    hosts = "" if group.ranks_per_node == ranks else f", {group.ranks_per_node} a host"
    name = (
        f"{ranks} ranks{hosts}, {tokens} tokens x {width} {dtype.name}, top-{k} of {experts}, order {order}"
    )
    return (lambda: compiled(jnp.array([seed]))), name, ops


def begin_epochs(group: jax_ep.Group, before: int, number: int) -> str:
    """Lets the group's next ops have epochs that soon pass 2**31, or 2**32 by turns; where they begin."""
    module, first = _extension.extension(), 2 ** (31 + number % 2) - before
    assert module is not None
    reason = module.reset_device_group(group._key, first - 1, module.last_call(group._key))
    if reason:
        raise RuntimeError(reason)
    return f", epochs from {first}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--programs", type=int, default=40)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small", action="store_true", help="few and short rows, and all devices: more ops")
    parser.add_argument("--epochs", type=int, default=0, help="on GPUs, begin so far below 2**31 or 2**32")
    parser.add_argument(
        "--hosts", action="store_true", help="make up hosts, of as many ranks as come by chance"
    )
    options = parser.parse_args()
    rng = np.random.default_rng(options.seed)
    total, begin = 0, time.perf_counter()
    on_gpus = jax.default_backend() == "gpu"
    for number in range(options.programs):
        size = len(jax.devices()) if options.small else int(rng.integers(1, len(jax.devices()) + 1))
        mesh = Mesh(rng.permutation(np.array(jax.devices()))[:size], ("ep",))
        divisors = [n for n in range(1, size + 1) if size % n == 0]
        per_host = int(rng.choice(divisors)) if options.hosts else size
        with jax_ep.Group(mesh, "ep", ranks_per_node=per_host) as group:
            run, name, ops = program(rng, group, mesh, options.steps, options.small)
            if options.epochs and on_gpus:
                name += begin_epochs(group, options.epochs, number)
            wrong = int(np.sum(jax.device_get(run())))
            group.check()
        total += ops
        print(f"{total:6d} ops, {time.perf_counter() - begin:4.0f} s: {name}", flush=True)
        if wrong:
            print(f"WRONG: {wrong} elements")
            return 1
    print(
        f"{options.programs} programs, {total} ops on up to {len(jax.devices())} "
        f"{jax.devices()[0].device_kind} devices in {time.perf_counter() - begin:.0f} s: all right"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
