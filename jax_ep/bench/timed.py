"""Programs of the benchmark that run on all ranks, and their times."""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ep.bench import measure, processes

CALLS = 8
SHARDED = P("ep")


@dataclasses.dataclass(frozen=True)
class Program:
    """A program to time."""

    op: str
    by: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    compared_with: tuple[tuple[str, str], ...] = ()  # (op, by) of the programs that set the reference time


def normal(mesh: jax.sharding.Mesh, seed: int, shape: tuple[int, ...], spec: P = SHARDED) -> jax.Array:
    """Returns random bfloat16 values, by default sharded along the first dimension."""
    return _normal(shape, NamedSharding(mesh, spec))(jax.random.key(seed))


@functools.cache  # because layers of a model have the same shapes
def _normal(shape: tuple[int, ...], sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    def make(key: jax.Array) -> jax.Array:
        return jax.random.normal(key, shape, jnp.bfloat16) * jnp.bfloat16(0.02)

    return jax.jit(make, out_shardings=sharding)


def on_ranks(mesh: jax.sharding.Mesh, function: Any) -> Any:
    """Returns a program that runs a function on every rank. All arrays are sharded along their first axis."""
    spec = P(*mesh.axis_names)
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))


def with_gradients(function: Any) -> Any:
    """Returns a function that computes the value and its gradients, except for the second argument."""

    # The second argument holds integers, which have no gradient.
    def run(first: jax.Array, integers: jax.Array, *rest: jax.Array) -> Any:
        def call(first: jax.Array, *rest: jax.Array) -> Any:
            return function(first, integers, *rest)

        value, transposed = jax.vjp(call, first, *rest)
        return value, transposed(value)

    return run


def time_programs(
    untimed: Iterator[Program], options: argparse.Namespace, on_gpu: bool
) -> Iterator[tuple[Program, float | None, float]]:
    """Yields each program with its time on the devices, if available, and its end-to-end time."""
    for program in untimed:

        def run(*arguments: Any, program: Program = program) -> Any:
            for _ in range(CALLS - 1):
                program.function(*arguments)
            return program.function(*arguments)

        end_to_end = measure.end_to_end_us(run, program.arguments, CALLS, options.repeats)
        device = measure.kernels_us(run, program.arguments, CALLS, ()) if on_gpu else None
        yield program, processes.slowest(device), processes.slowest(end_to_end) or end_to_end
