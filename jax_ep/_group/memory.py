"""GPU memory that processes share."""

import contextlib
import functools
import hashlib
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jax_ep._extension import Extension
from jax_ep._group import handshake
from jax_ep._group.handshake import (
    LEAST_S,
    SetupError,
    _require_same,
    drain,
    host_id,
    neighbours,
    raise_if,
    taking_turns,
    together,
)

# What a process that asks for descriptors says: whether it watches this connection from then on.
_WATCH, _ONCE = b"w", b"1"


# Whoever connects asks at once.
_ASK_S = 10.0


# The ends that this process keeps for others to watch, and the processes that it watches itself.
# Bare descriptors, for Python closes sockets when it ends, while the driver may still have to stop kernels.
_kept: list[int] = []


_watched: set[int] = set()


def _let_go() -> None:
    for descriptor in _kept:
        os.close(descriptor)
    _kept.clear()


# A child that outlives this process must not look like it.
os.register_at_fork(after_in_child=_let_go)


def _answer(connection: socket.socket, descriptors: Sequence[int]) -> None:
    connection.settimeout(_ASK_S)
    is_watched = connection.recv(1) == _WATCH
    socket.send_fds(connection, [b"jax_ep"], descriptors)
    if is_watched:
        _kept.append(connection.detach())
    else:
        connection.close()


def _serve(server: socket.socket, descriptors: Sequence[int]) -> None:
    with server:  # closed, it turns away who has not been answered
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return  # shut down, or out of descriptors: then those who ask say so
            try:
                _answer(connection, descriptors)
            except OSError:
                connection.close()  # who asked says why


@contextlib.contextmanager
def serving(descriptors: Sequence[int], most: int) -> Iterator[str]:
    """Where up to so many processes get the descriptors, until this ends."""
    with tempfile.TemporaryDirectory(prefix="jax_ep-") as folder:
        path = f"{folder}/memory"
        server = socket.socket(socket.AF_UNIX)
        try:
            server.bind(path)
            server.listen(most)
        except OSError:
            server.close()
            raise
        thread = threading.Thread(target=_serve, args=(server, descriptors), daemon=True)
        thread.start()
        try:
            yield path
        finally:
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)  # which wakes the thread
            thread.join()


def is_watched(process: int) -> bool:
    """Whether this process has been told to watch that one."""
    return process in _watched


@contextlib.contextmanager
def fetched(
    path: str, count: int, process: int, module: Extension, limit_s: float
) -> Iterator[Sequence[int]]:
    """The descriptors that a process offers, closed when this ends; from the first time on it is watched."""
    descriptors: list[int] = []
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(socket.socket(socket.AF_UNIX))
        connection.settimeout(limit_s)
        connection.connect(path)
        connection.sendall(_ONCE if is_watched(process) else _WATCH)
        _, descriptors, _, _ = socket.recv_fds(connection, 16, count)
        stack.callback(lambda: [os.close(descriptor) for descriptor in descriptors])
        if len(descriptors) != count:
            raise OSError(
                f"expected {count} file descriptors from process {process}, got {len(descriptors)} (does the "
                "limit on open files, ulimit -n, leave room for them?)"
            )
        if not is_watched(process):
            connection.setblocking(False)
            module.watch_process(process, connection.fileno())
            connection.detach()  # it is the watch's now
            _watched.add(process)
        yield descriptors


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
        limit_s = max(timeout_s, handshake.LEAST_S)
        halves = handshake.within(limit_s, "reserving memory", reserve)
        _clients.extend(device.client for device in devices)
        _controls[key] = {
            device.id: int(low) | int(high) << 32 for device, (low, high) in zip(devices, halves, strict=True)
        }
    return _controls[key]


# (ordinal or -1, address of the control block here, shift of published addresses, process)
Rank = tuple[int, int, int, int]


# (process, device id, base there) -> where that memory begins here. Mappings last as long as this process:
# JAX keeps its memory as long, and recorded programs of any group may use them.
_mapped: dict[tuple[int, int, int], int] = {}


# The groups, by key, whose last step all processes have ended, and what failed in it, if anything did.
_settled: dict[str, str] = {}


class _Setup:
    """One process's part in the set-up of a group."""

    def __init__(self, module: Extension, key: str, devices: Sequence[Any], num_ranks: int, limit_s: float):
        self.module = module
        self.key = key
        self.num_ranks = num_ranks
        self.everywhere = devices
        self.devices = devices = neighbours(devices, num_ranks)
        self.limit_s = limit_s
        self.me = jax.process_index()
        self.local = [device for device in devices if device.process_index == self.me]
        self.others = sorted({device.process_index for device in devices} - {self.me})
        self.leader = min(device.process_index for device in devices)
        self.cleanup = contextlib.ExitStack()
        self.controls: dict[int, int] = {}
        self.messages: dict[int, dict[str, Any]] = {}
        self.board = -1

    def together(
        self, step: str, work: Callable[[], dict[str, Any] | None], times: int = 1
    ) -> dict[int, dict[str, Any]]:
        return together(self.devices, step, work, self.limit_s, times)

    def introduce(self) -> dict[str, Any]:
        """What the others must know of this process before anything else."""
        return {
            "host": host_id(),
            "group": f"{self.key[:200]} ({hashlib.sha256(self.key.encode()).hexdigest()[:16]})",
            "settled": self.key in _settled,
            "failed": self.module.has_expired(self.key),
            "epoch": self.module.last_epoch(self.key),
            "calls": self.module.last_call(self.key),
        }

    def offer(self, hold: Callable[[], dict[int, int]]) -> dict[str, Any]:
        """Exports this process's memory, and answers the others that ask for it."""
        self.controls = hold()
        descriptors: list[int] = []
        self.cleanup.callback(lambda: [os.close(descriptor) for descriptor in descriptors])
        memory = []
        for device in self.local:
            address, ordinal = self.controls[device.id], device.local_hardware_id
            base, size = self.module.region_of(address, ordinal)
            descriptors.append(self.module.export_region(address, ordinal))
            memory.append((device.id, address, base, size))
        if self.me == self.leader:
            self.board = os.memfd_create("jax_ep", os.MFD_CLOEXEC)
            descriptors.append(self.board)
            os.ftruncate(self.board, self.module.board_bytes(len(self.everywhere)))
        path = self.cleanup.enter_context(serving(descriptors, len(self.others)))
        return {"memory": memory, "path": path}

    def fetch(self) -> None:
        """Maps what others have and this process has not mapped yet, and takes the board."""
        ordinals = [device.local_hardware_id for device in jax.local_devices(backend=self.local[0].platform)]
        for process in self.others:
            memory, has_board = self.messages[process]["memory"], process == self.leader
            known = all((process, device_id, base) in _mapped for device_id, _, base, _ in memory)
            if known and not has_board and is_watched(process):
                continue
            count = len(memory) + has_board
            with fetched(
                self.messages[process]["path"], count, process, self.module, self.limit_s
            ) as descriptors:
                for descriptor, (device_id, _, base, size) in zip(descriptors, memory, strict=False):
                    if (process, device_id, base) not in _mapped:
                        mapped = self.module.import_region(descriptor, size, ordinals)
                        _mapped[process, device_id, base] = mapped
                if has_board:
                    self.board = os.dup(descriptors[-1])
                    self.cleanup.callback(os.close, self.board)

    def ranks(self) -> list[Rank]:
        """Where the control block of each device lies; of those that are no neighbours nothing is known."""
        found: dict[int, Rank] = {d.id: (-1, 0, 0, d.process_index) for d in self.everywhere}
        for process in self.others:
            for device_id, control, base, _ in self.messages[process]["memory"]:
                shift = _mapped[process, device_id, base] - base
                found[device_id] = (-1, control + shift, shift, process)
        for device in self.local:
            found[device.id] = (device.local_hardware_id, self.controls[device.id], 0, self.me)
        return [found[device.id] for device in self.everywhere]


def _prepare(setup: _Setup, hold: Callable[[], dict[int, int]]) -> None:
    module, key = setup.module, setup.key
    told = setup.together("saying which group is made", setup.introduce)
    groups = "; ".join(f"process {process}: {message['group']}" for process, message in told.items())
    _require_same(told, "group", f"the processes make different groups at the same time: {groups}")
    _require_same(told, "host", "the ranks live on several hosts, and rows can travel only within one")
    _require_same(told, "settled", "an earlier set-up of this group ended in some of the processes only")
    is_new = key not in _settled
    failed = any(message["failed"] for message in told.values())
    if is_new:
        setup.messages = setup.together("exporting JAX's memory", lambda: setup.offer(hold))
        setup.together("mapping the memory of other processes", setup.fetch)
    if failed:
        # From the first step on nobody launches an op of the group; what was launched before ends everywhere.
        setup.together("ending earlier ops", lambda: drain(setup.local, 3 * setup.limit_s), times=4)
    if is_new or failed:
        epoch, calls = (max(message[name] for message in told.values()) for name in ("epoch", "calls"))

        def make() -> None:
            if failed:
                raise_if(module.reset_device_group(key, epoch, calls))
            if is_new:
                raise_if(module.open_device_group(key, setup.ranks(), setup.num_ranks, setup.board))

        try:
            setup.together("preparing the GPUs", make)
        except SetupError as error:
            _settled[key] = str(error)  # what some have opened cannot be opened anew
            raise
        _settled[key] = ""


def open_group(
    module: Extension,
    key: str,
    devices: Sequence[Any],
    num_ranks: int,
    hold: Callable[[], dict[int, int]],
    timeout_s: float,
) -> None:
    """Opens a group whose devices belong to several processes, or resets one that has failed.

    The devices are those of one or several groups of `num_ranks`. All processes of a group must call it; of
    other groups they need not know. `hold` gives the addresses of the control blocks of this process's
    devices, by device id. Raises SetupError on all processes or on none; SetupTimeout where the others do not
    answer.
    """
    limit_s = max(timeout_s, LEAST_S)
    with taking_turns(limit_s):
        if _settled.get(key):
            raise SetupError(_settled[key])
        setup = _Setup(module, key, devices, num_ranks, limit_s)
        with setup.cleanup:
            _prepare(setup, hold)
