"""What the processes of a group tell each other when it is made: where the memory of their GPUs lies.

Each maps the memory that JAX has on the others' GPUs: its owner exports it as a file descriptor, which
travels through a Unix socket (_sockets.py). What is small travels as an array over the group's own devices,
so that no process that has none of them takes part.

It is done in steps. What one process fails of in a step is told to all at its end, and fails all of them. No
process waits for ever: a step that the others do not end in time raises SetupTimeout.
"""

import contextlib
import functools
import hashlib
import json
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ep import _sockets
from jax_ep._extension_types import Extension

T = TypeVar("T")
# (ordinal or -1, address of the control block here, shift of published addresses, process)
Rank = tuple[int, int, int, int]

MESSAGE_BYTES = 8192
MOST_WORDS = 1000
# A step of the set-up may take as long as a wait of the group's ops, but no less than this: it contains what
# they do not, as NCCL's own set-up and compilations.
LEAST_S = 60.0

# (process, device id, base there) -> where that memory begins here. Mappings last as long as this process:
# JAX keeps its memory as long, and recorded programs of any group may use them.
_mapped: dict[tuple[int, int, int], int] = {}
# The groups, by key, whose last step all processes have ended, and what failed in it, if anything did.
_settled: dict[str, str] = {}
# Set-ups exchange over the same devices, so that one must end before the next begins.
_turn = threading.Lock()


class SetupError(Exception):
    """Why the processes cannot share their memory, in the same words on each of them."""


class SetupTimeout(Exception):
    """A step of the set-up did not end in time."""


def host_id() -> str:
    """What the processes of a host have in common, and those of other hosts do not."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def neighbours(devices: Sequence[Any], num_ranks: int) -> list[Any]:
    """Those of the groups of devices that this process takes part in, itself or by way of a peer.

    The processes of other groups may live on other hosts, and need not be asked.
    """
    groups = [devices[first : first + num_ranks] for first in range(0, len(devices), num_ranks)]
    processes = {jax.process_index()}
    while True:
        mine = [group for group in groups if any(d.process_index in processes for d in group)]
        reached = processes.union(d.process_index for group in mine for d in group)
        if reached == processes:
            return [device for group in mine for device in group]
        processes = reached


def has_peers_elsewhere(devices: Sequence[Any], num_ranks: int) -> bool:
    """Whether this process must be told of others when it makes these groups."""
    return any(d.process_index != jax.process_index() for d in neighbours(devices, num_ranks))


def within(limit_s: float, step: str, work: Callable[[], T]) -> T:
    """What the work gives. It is done in a thread, for what XLA waits for has no time-out."""
    outcome: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcome.put((work(), None))
        except BaseException as error:
            outcome.put((None, error))

    threading.Thread(target=run, daemon=True, name=f"jax_ep: {step}").start()
    try:
        value, error = outcome.get(timeout=limit_s)
    except queue.Empty:
        raise SetupTimeout(
            f"Group: {step} did not end within {limit_s:g} s in process {jax.process_index()}. Every process "
            "that owns devices of the mesh must make the same groups in the same order, and none may be "
            "stuck in an earlier program. This process should end: JAX still waits on its devices, and "
            "nothing that is launched there from now on would run."
        ) from None
    if error is not None:
        raise error
    return value


@functools.cache
def _gather_over(devices: tuple[Any, ...]) -> tuple[NamedSharding, Callable[[jax.Array], jax.Array]]:
    """How an array of a row for each device is spread, and what brings all rows to all."""
    mesh = Mesh(np.array(devices), ("all",))
    return NamedSharding(mesh, P("all")), jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))


def exchange(
    devices: Sequence[Any], message: dict[str, Any], limit_s: float, step: str
) -> dict[int, dict[str, Any]]:
    """Every process's message, by process. All processes of the devices must call it."""
    text = json.dumps(message).encode()
    if len(text) > MESSAGE_BYTES:
        error = f"a message of {len(text)} bytes, at most {MESSAGE_BYTES} can be exchanged"
        text = json.dumps({"error": error}).encode()
    devices = tuple(sorted(devices, key=lambda device: device.id))
    row = np.frombuffer(text.ljust(MESSAGE_BYTES), np.uint8)[None]

    def gather_rows() -> np.ndarray:
        sharding, gather = _gather_over(devices)
        own = [jax.device_put(row, d) for d in devices if d.process_index == jax.process_index()]
        rows = jax.make_array_from_single_device_arrays((len(devices), MESSAGE_BYTES), sharding, own)
        return np.asarray(gather(rows))

    try:
        everywhere = within(limit_s, step, gather_rows)
    except (RuntimeError, ValueError) as error:  # XLA's
        raise RuntimeError(
            f"Group: {step} failed, for JAX could not bring what the processes say to all of them (has one "
            f"ended?): {error}"
        ) from error
    return {
        device.process_index: json.loads(bytes(row)) for device, row in zip(devices, everywhere, strict=True)
    }


def drain(devices: Sequence[Any], limit_s: float) -> None:
    """Waits until whatever was launched on the devices has ended, also where nobody holds its results.

    XLA runs the programs of a device in the order of their launch.
    """

    def run() -> None:
        last, ends = jax.jit(lambda x: x + 1), []
        for device in devices:
            with jax.default_device(device):
                ends.append(last(np.int32(0)))
        jax.block_until_ready(ends)

    within(limit_s, "waiting for earlier programs", run)


def together(
    devices: Sequence[Any],
    step: str,
    work: Callable[[], dict[str, Any] | None],
    limit_s: float,
    times: int = 1,
) -> dict[int, dict[str, Any]]:
    """Does this process's share of a step and waits, so many times the limit, for the others'.

    What each process's work gives, by process. Raises SetupError on all or on none.
    """
    message: dict[str, Any] = {"error": ""}
    try:
        message |= work() or {}
    except SetupTimeout:
        raise
    except Exception as error:
        expected = isinstance(error, (RuntimeError, OSError))
        words = str(error) if expected and str(error) else f"{type(error).__name__}: {error}"
        message["error"] = words[:MOST_WORDS]
    messages = exchange(devices, message, times * limit_s, f"{step}, as all processes must,")
    errors = [f"process {process}: {m['error']}" for process, m in messages.items() if m["error"]]
    if errors:
        raise SetupError("; ".join(errors))
    return messages


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
        path = self.cleanup.enter_context(_sockets.serving(descriptors, len(self.others)))
        return {"memory": memory, "path": path}

    def fetch(self) -> None:
        """Maps what others have and this process has not mapped yet, and takes the board."""
        ordinals = [device.local_hardware_id for device in jax.local_devices(backend=self.local[0].platform)]
        for process in self.others:
            memory, has_board = self.messages[process]["memory"], process == self.leader
            known = all((process, device_id, base) in _mapped for device_id, _, base, _ in memory)
            if known and not has_board and _sockets.is_watched(process):
                continue
            count = len(memory) + has_board
            with _sockets.fetched(
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


def raise_if(text: str) -> None:
    """Raises what the extension says went wrong, if it says anything."""
    if text:
        raise RuntimeError(text)


def _require_same(messages: dict[int, dict[str, Any]], name: str, otherwise: str) -> None:
    """Raises SetupError, on all processes, if they do not say the same."""
    if len({message[name] for message in messages.values()}) > 1:
        raise SetupError(otherwise)


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


@contextlib.contextmanager
def taking_turns(limit_s: float) -> Iterator[None]:
    """One set-up at a time in this process."""
    if not _turn.acquire(timeout=limit_s):
        raise SetupTimeout(
            f"Group: another thread of process {jax.process_index()} has been making a group for more than "
            f"{limit_s:g} s. Make groups that span processes one after the other."
        )
    try:
        yield
    finally:
        _turn.release()
