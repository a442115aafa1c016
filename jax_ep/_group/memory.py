"""GPU memory that a group's processes share.

Its parts, from top to bottom: the control blocks of this process's devices, and the set-up of a group.
"""

import concurrent.futures
import contextlib
import functools
import hashlib
import os
from collections.abc import Callable, Sequence

import jax
import numpy as np

from jax_ep._extension import Device, Extension
from jax_ep._group import connections, handshake
from jax_ep._group.handshake import Message

# Control blocks.

# Group key -> device id -> address of the group's control block there.
_controls: dict[str, dict[int, int]] = {}
# The clients that own the memory of the control blocks. They must outlive it.
_clients: list[object] = []


@functools.cache
def _reserving(size: int) -> Callable[[np.int32], jax.Array]:
    """Returns a program that reserves some of JAX's memory on its device.

    The program's result holds the lower and the upper half of the address.
    """
    result = jax.ShapeDtypeStruct((2,), np.uint32)
    # Because of the side effect XLA does not merge two calls. This call is part of no user's program.
    reserve = jax.ffi.ffi_call("jax_ep_reserve", result, has_side_effect=True)
    return jax.jit(lambda x: reserve(x, bytes=np.int64(size)))


def control_blocks(
    module: Extension, key: str, devices: Sequence[Device], num_ranks: int, timeout_s: float
) -> dict[int, int]:
    """Returns the address of the group's control block on each device, by device id.

    `num_ranks` is the number of ranks that communicate through them.

    Reserves the control blocks at the first call. They are kept until the process ends, because peers and
    recorded programs hold their addresses. They are not arrays, because users would see arrays in
    `jax.live_arrays()` and could free them with `delete()`.
    """
    if key not in _controls:

        def reserve() -> list[np.ndarray]:
            program, halves = _reserving(module.group_bytes(num_ranks)), []
            for device in devices:
                with jax.default_device(device):
                    halves.append(program(np.int32(0)))
            return jax.device_get(halves)

        # In a thread, because a group may be made while a function is traced. The programs run after all
        # programs that were launched on the devices before.
        limit_s = max(timeout_s, handshake.LEAST_S)
        halves = handshake.run_within(limit_s, "reserving memory", reserve)
        _clients.extend(device.client for device in devices)
        _controls[key] = {
            device.id: int(low) | int(high) << 32 for device, (low, high) in zip(devices, halves, strict=True)
        }
    return _controls[key]


# Set-up of a group.

# (ordinal or -1, address of the control block in this process, shift of published addresses, process)
Rank = tuple[int, int, int, int]

# (process, device id, base address there) -> base address of the same memory in this process. A mapping lasts
# until this process ends: JAX keeps its memory that long, and recorded programs of any group may use it.
_mapped: dict[tuple[int, int, int], int] = {}
# Key of a group whose set-up has ended on all processes -> its error, empty if it succeeded.
_settled: dict[str, str] = {}


class _Setup:
    """One process's part of the set-up of a group."""

    def __init__(
        self, module: Extension, key: str, devices: Sequence[Device], num_ranks: int, limit_s: float
    ):
        self.module = module
        self.key = key
        self.num_ranks = num_ranks
        self.limit_s = limit_s
        self.all_devices = devices
        self.devices = devices = handshake.neighbors(devices, num_ranks)
        self.process = jax.process_index()
        self.local_devices = [device for device in devices if device.process_index == self.process]
        self.other_processes = sorted({device.process_index for device in devices} - {self.process})
        self.cleanup = contextlib.ExitStack()
        self.controls: dict[int, int] = {}
        # Processes of other hosts. Known after the first step.
        self.far: set[int] = set()
        self.messages: dict[int, Message] = {}

    def run_step(
        self, step: str, work: Callable[[], Message | None], limit_factor: int = 1
    ) -> dict[int, Message]:
        return handshake.run_step(self.devices, step, work, self.limit_s, limit_factor)

    def introduce(self) -> Message:
        """Returns what the other processes need first: this process's host, and its state of the group."""
        return {
            "host": handshake.host_id(),
            "group": f"{self.key[:200]} ({hashlib.sha256(self.key.encode()).hexdigest()[:16]})",
            "settled": self.key in _settled,
            "failed": self.module.has_expired(self.key),
            "epoch": self.module.last_epoch(self.key),
            "calls": self.module.last_call(self.key),
        }

    def offer(self, reserve_control_blocks: Callable[[], dict[int, int]]) -> Message:
        """Exports this process's memory, and serves it to the other processes of this host.

        Returns where it lies, and how processes of other hosts reach it.
        """
        self.controls = reserve_control_blocks()
        served: list[int] = []
        self.cleanup.callback(lambda: [os.close(descriptor) for descriptor in served])
        memory = []
        for device in self.local_devices:
            address, ordinal = self.controls[device.id], device.local_hardware_id
            base, size = self.module.region_of(address, ordinal)
            served.append(self.module.export_region(address, ordinal))
            fabric = self.module.export_fabric_region(address, ordinal).hex() if self.far else ""
            memory.append((device.id, address, base, size, fabric))
        socket = connections.serving(
            served, len(self.other_processes), self.module, to_other_hosts=bool(self.far)
        )
        return {"memory": memory, "socket": self.cleanup.enter_context(socket)}

    def fetch(self) -> None:
        """Maps the memory of other processes that is not mapped yet, and begins to watch them."""
        platform = self.local_devices[0].platform
        ordinals = [device.local_hardware_id for device in jax.local_devices(backend=platform)]
        for process in self.other_processes:
            memory, socket = self.messages[process]["memory"], self.messages[process]["socket"]
            missing = [entry for entry in memory if (process, entry[0], entry[2]) not in _mapped]
            if process in self.far:
                for device_id, _, base, size, fabric in missing:
                    handle = bytes.fromhex(fabric)
                    mapped = self.module.import_fabric_region(handle, size, ordinals)
                    _mapped[process, device_id, base] = mapped
            elif missing or not connections.is_watched(process):
                with connections.received(
                    socket, len(memory), process, self.module, self.limit_s
                ) as received:
                    for descriptor, entry in zip(received, memory, strict=True):
                        if entry in missing:
                            device_id, _, base, size, _ = entry
                            mapped = self.module.import_region(descriptor, size, ordinals)
                            _mapped[process, device_id, base] = mapped
        self.watch_other_hosts()

    def watch_other_hosts(self) -> None:
        """Begins to watch the processes of other hosts, all at once, because a host may be slow to reach."""
        unwatched = [process for process in sorted(self.far) if not connections.is_watched(process)]

        def watch(process: int) -> None:
            socket = self.messages[process]["socket"]
            connections.watch_over_network(socket, process, self.module, self.limit_s)

        if unwatched:
            with concurrent.futures.ThreadPoolExecutor(len(unwatched)) as pool:
                list(pool.map(watch, unwatched))

    def ranks(self) -> list[Rank]:
        """Returns each device's rank entry. Devices that are not neighbors have no addresses."""
        ranks: dict[int, Rank] = {d.id: (-1, 0, 0, d.process_index) for d in self.all_devices}
        for process in self.other_processes:
            for device_id, control, base, _, _ in self.messages[process]["memory"]:
                shift = _mapped[process, device_id, base] - base
                ranks[device_id] = (-1, control + shift, shift, process)
        for device in self.local_devices:
            ranks[device.id] = (device.local_hardware_id, self.controls[device.id], 0, self.process)
        return [ranks[device.id] for device in self.all_devices]


def _prepare(setup: _Setup, reserve_control_blocks: Callable[[], dict[int, int]]) -> None:
    module, key = setup.module, setup.key
    messages = setup.run_step("reporting which group is made", setup.introduce)
    groups = "; ".join(f"process {process}: {message['group']}" for process, message in messages.items())
    require_same = functools.partial(handshake.require_same, messages)
    require_same("group", f"the processes make different groups at the same time: {groups}")
    require_same("settled", "an earlier set-up of this group ended in some of the processes only")
    setup.far = {p for p, message in messages.items() if message["host"] != handshake.host_id()}
    is_new = key not in _settled
    failed = any(message["failed"] for message in messages.values())
    if is_new:
        setup.messages = setup.run_step("exporting JAX's memory", lambda: setup.offer(reserve_control_blocks))
        setup.run_step("mapping the memory of other processes", setup.fetch)
    if failed:
        # No process launches ops of the group from the first step on, and all earlier ops end.
        drain = functools.partial(handshake.drain, setup.local_devices, 3 * setup.limit_s)
        setup.run_step("ending earlier ops", drain, limit_factor=4)
    if is_new or failed:
        epoch, calls = (max(message[name] for message in messages.values()) for name in ("epoch", "calls"))

        def prepare_gpus() -> None:
            if failed:
                handshake.raise_if_error(module.reset_device_group(key, epoch, calls))
            if is_new:
                error = module.open_device_group(key, setup.ranks(), setup.num_ranks)
                handshake.raise_if_error(error)

        try:
            setup.run_step("preparing the GPUs", prepare_gpus)
        except handshake.SetupError as error:
            # Kept, because the processes that have opened the group cannot open it again.
            _settled[key] = str(error)
            raise
        _settled[key] = ""


def open_group(
    module: Extension,
    key: str,
    devices: Sequence[Device],
    num_ranks: int,
    reserve_control_blocks: Callable[[], dict[int, int]],
    timeout_s: float,
) -> None:
    """Opens a group whose devices belong to several processes, or resets it if it has failed.

    The devices are those of one or several groups of `num_ranks`. All processes of a group must call it, but
    the processes of other groups need not. `reserve_control_blocks` returns the addresses of the control
    blocks of this process's devices, by device id.

    Raises SetupError on all processes or on none, and SetupTimeout if the other processes do not answer.
    """
    limit_s = max(timeout_s, handshake.LEAST_S)
    with handshake.exclusive_setup(limit_s):
        if _settled.get(key):
            raise handshake.SetupError(_settled[key])
        setup = _Setup(module, key, devices, num_ranks, limit_s)
        with setup.cleanup:
            _prepare(setup, reserve_control_blocks)
