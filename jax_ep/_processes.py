"""What the processes of a group tell each other when it is made: where the memory of their GPUs lies.

Each maps the memory that JAX has on the others' GPUs: its owner exports it as a file descriptor, which
travels through a Unix socket in a directory that only this user can enter. What is small travels as an array
over the group's own devices, so that no process that has none of them takes part.
"""

import contextlib
import functools
import json
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

MESSAGE_BYTES = 8192
TIMEOUT_S = 60.0

# (process, device id) -> where its memory begins here. Mappings last as long as this process: JAX keeps its
# memory as long, and recorded programs of any group may use them.
_mapped: dict[tuple[int, int], int] = {}


class SetupError(Exception):
    """Why the processes cannot share their memory, in the same words on each of them."""


@functools.cache
def _gather_over(devices: tuple[Any, ...]) -> tuple[NamedSharding, Callable[[jax.Array], jax.Array]]:
    """How an array of a row for each device is spread, and what brings all rows to all."""
    mesh = Mesh(np.array(devices), ("all",))
    return NamedSharding(mesh, P("all")), jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))


def exchange(devices: Sequence[Any], message: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Every process's message, by process. All processes of the devices must call it."""
    text = json.dumps(message).encode()
    if len(text) > MESSAGE_BYTES:
        raise ValueError(f"jax_ep: a message of {len(text)} bytes, at most {MESSAGE_BYTES} can be exchanged")
    devices = tuple(sorted(devices, key=lambda device: device.id))
    row = np.frombuffer(text.ljust(MESSAGE_BYTES), np.uint8)[None]
    sharding, gather = _gather_over(devices)
    with jax.ensure_compile_time_eval():  # a group may be made while a function is traced
        own = [jax.device_put(row, d) for d in devices if d.process_index == jax.process_index()]
        rows = jax.make_array_from_single_device_arrays((len(devices), MESSAGE_BYTES), sharding, own)
        everywhere = np.asarray(gather(rows))
    return {
        device.process_index: json.loads(bytes(row)) for device, row in zip(devices, everywhere, strict=True)
    }


def _agree(messages: dict[int, dict[str, Any]]) -> None:
    errors = [f"process {process}: {m['error']}" for process, m in messages.items() if m["error"]]
    if errors:
        raise SetupError("; ".join(errors))
    if len({m["host"] for m in messages.values()}) > 1:
        raise SetupError("the ranks live on several hosts, and rows can travel only within one")


def _serve(server: socket.socket, descriptors: list[int], times: int) -> None:
    # A process that does not come, or goes too soon, says why itself.
    with contextlib.suppress(OSError):
        for _ in range(times):
            connection, _ = server.accept()
            with connection:
                socket.send_fds(connection, [b"jax_ep"], descriptors)


def _fetch(path: str, count: int) -> list[int]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(TIMEOUT_S)
        connection.connect(path)
        _, descriptors, _, _ = socket.recv_fds(connection, 16, count)
    if len(descriptors) != count:
        raise OSError(f"expected {count} file descriptors from {path}, got {len(descriptors)}")
    return descriptors


def _map(module: ModuleType, process: int, message: dict[str, Any], ordinals: list[int]) -> None:
    """Maps the memory of another process that is not mapped yet."""
    descriptors = _fetch(message["path"], len(message["memory"]))
    try:
        for descriptor, (device_id, _, _, size) in zip(descriptors, message["memory"], strict=True):
            if (process, device_id) not in _mapped:
                _mapped[process, device_id] = module.import_region(descriptor, size, ordinals)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def share_memory(
    module: ModuleType, key: str, devices: Sequence[Any], controls: dict[int, int]
) -> list[tuple[int, int, int]]:
    """Lets every process of the devices reach the others' memory, and clears a group that has failed.

    `controls` are the addresses of the control blocks of this process's devices, by device id. Returns
    (ordinal or -1, address of the control block here, shift of published addresses) of each device. Raises
    SetupError on all processes or on none.
    """
    me = jax.process_index()
    local = [device for device in devices if device.process_index == me]
    others = {device.process_index for device in devices} - {me}
    ordinals = [device.local_hardware_id for device in jax.local_devices(backend=local[0].platform)]
    message: dict[str, Any] = {
        "error": "",
        "host": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "failed": module.has_expired(key),
        "memory": [],
    }
    descriptors: list[int] = []
    with tempfile.TemporaryDirectory(prefix="jax_ep-") as folder, socket.socket(socket.AF_UNIX) as server:
        try:
            for device in local:
                address = controls[device.id]
                base, size = module.region_of(address, device.local_hardware_id)
                descriptors.append(module.export_region(address, device.local_hardware_id))
                message["memory"].append((device.id, address, base, size))
            message["path"] = f"{folder}/memory"
            server.settimeout(TIMEOUT_S)
            server.bind(message["path"])
            server.listen(len(others))
        except (RuntimeError, OSError) as error:
            message["error"] = str(error)
        try:
            messages = exchange(devices, message)
            _agree(messages)
            # From here on nobody runs an op of the group: what was launched before has ended.
            answer = {"error": "", "host": message["host"]}
            server_thread = threading.Thread(
                target=_serve, args=(server, descriptors, len(others)), daemon=True
            )
            server_thread.start()
            try:
                for process in sorted(others):
                    _map(module, process, messages[process], ordinals)
                server_thread.join(TIMEOUT_S)
                if any(m["failed"] for m in messages.values()):
                    answer["error"] = module.reset_device_group(key)
            except (RuntimeError, OSError) as error:
                answer["error"] = str(error)
            _agree(exchange(devices, answer))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    found: dict[int, tuple[int, int, int]] = {}
    for process, told in messages.items():
        for device_id, control, base, _ in told["memory"]:
            shift = 0 if process == me else _mapped[process, device_id] - base
            found[device_id] = (-1, control + shift, shift)
    for device in local:
        found[device.id] = (device.local_hardware_id, controls[device.id], 0)
    return [found[device.id] for device in devices]
