"""The memory that a group has on each GPU beside JAX's arrays, but of what JAX has there."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jax_ep import _processes
from jax_ep._extension_types import Extension

# Group key -> device id -> address of the group's control block there.
_controls: dict[str, dict[int, int]] = {}
# What owns the memory that they lie in.
_clients: list[Any] = []


@functools.cache
def _reserving(size: int) -> Callable[[Any], jax.Array]:
    """A program that takes memory on its device, of what JAX has there; the halves of its address."""
    result = jax.ShapeDtypeStruct((2,), np.uint32)
    # Unlike the ops it has a side effect: two calls must not become one. It is in no program of a user.
    reserve = jax.ffi.ffi_call("jax_ep_reserve", result, has_side_effect=True)
    return jax.jit(lambda x: reserve(x, bytes=np.int64(size)))


def control_blocks(module: Extension, key: str, devices: Sequence[Any], timeout_s: float) -> dict[int, int]:
    """Device id -> address of the group's control block there.

    They are kept as long as the process, because peers and recorded programs hold their addresses. So they
    are no arrays: `jax.live_arrays()` would show them to users, and nothing keeps what `delete()` frees.
    """
    if key not in _controls:

        def reserve() -> list[np.ndarray]:
            program, halves = _reserving(module.control_bytes()), []
            for device in devices:
                with jax.default_device(device):
                    halves.append(program(np.int32(0)))
            return jax.device_get(halves)

        # In a thread, as a group may be made while a function is traced; behind whatever the devices do.
        limit_s = max(timeout_s, _processes.LEAST_S)
        halves = _processes.within(limit_s, "reserving memory", reserve)
        _clients.extend(device.client for device in devices)
        _controls[key] = {
            device.id: int(low) | int(high) << 32 for device, (low, high) in zip(devices, halves, strict=True)
        }
    return _controls[key]
