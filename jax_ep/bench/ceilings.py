"""Upper bounds of the hardware: rates of plain copies over the links, and in the memory of one device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep._group.group import ranks_of
from jax_ep._transport import ffi
from jax_ep.bench import measure, processes, programs

WIDTH, STEPS = 4096, 8


def _rows(mesh: jax.sharding.Mesh) -> int:
    """Returns the number of rows of each device's array."""
    # 128 MiB on GPUs and 16 MiB elsewhere, both far larger than caches.
    return 8192 if mesh.devices.flat[0].platform == "gpu" else 1024


def _rate(mesh: jax.sharding.Mesh, step: Any, size: int, kernels: tuple[str, ...], repeats: int) -> float:
    """Returns the GB/s of each device in a program whose STEPS each move `size` bytes per device."""

    def prepare(x: jax.Array, *_: jax.Array) -> tuple[jax.Array, programs.Step]:
        # Without the loop XLA would compute only the one element that the program returns.
        return x, lambda x: jax.lax.fori_loop(0, STEPS, lambda _, x: step(x), x)

    sharding = NamedSharding(mesh, P("ep"))
    rows = np.zeros((mesh.size * _rows(mesh), WIDTH), np.int32)
    x = jax.make_array_from_callback(rows.shape, sharding, lambda index: rows[index])
    run = programs.repeated(mesh, prepare, 1)
    us = measure.end_to_end_us(run, (x, x, x), STEPS, repeats)
    if mesh.devices.flat[0].platform == "gpu":
        us = measure.kernels_us(run, (x, x, x), STEPS, kernels) or us
    return size / (processes.slowest(us) or us) / 1e3


def memory(mesh: jax.sharding.Mesh, repeats: int) -> float:
    """Returns the GB/s, reads plus writes, of each device when all devices add 1 to an array at once."""
    return _rate(mesh, lambda x: x + 1, 2 * _rows(mesh) * WIDTH * 4, (), repeats)


def links(mesh: jax.sharding.Mesh, repeats: int) -> float | None:
    """Returns the GB/s into each GPU when all GPUs copy their rows to each other, or None without links.

    The copy uses as many SMs as it benefits from.
    """
    if mesh.devices.flat[0].platform != "gpu" or mesh.size == 1:
        return None
    with jax_ep.Group(mesh, "ep") as group:
        if group.info().implementation != "ffi":
            return None

        def step(x: jax.Array) -> jax.Array:
            return jnp.reshape(ffi.copy_to_all(ranks_of(group), x), (mesh.size, *x.shape))[0]

        rate = _rate(mesh, step, (mesh.size - 1) * _rows(mesh) * WIDTH * 4, ("GatherKernel",), repeats)
        group.check()
        return rate
