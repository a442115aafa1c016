"""Steps that all processes of a group take together, with a time limit."""

import contextlib
import functools
import json
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ep._extension import Device

T = TypeVar("T")
# A JSON object: what a process reports to the others in a step.
Message = dict[str, Any]

# Size of the message that each process sends in a step.
MESSAGE_BYTES = 8192
# Longest error text in a message, in characters.
MAX_ERROR_LENGTH = 1000
# The time limit of a step is the group's `timeout_s`, but at least this, because a step can include
# compilations and NCCL's own set-up.
LEAST_S = 60.0

# Held during a set-up. All set-ups exchange messages over the same devices, so they must not overlap.
_setup_lock = threading.Lock()


class SetupError(Exception):
    """A reason why the processes cannot share their memory. Every process raises it with the same text."""


class SetupTimeout(Exception):
    """A step of the set-up that did not end in time."""


def host_id() -> str:
    """Returns an id that is the same in all processes of a host, and different on every host."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def neighbors(devices: Sequence[Device], num_ranks: int) -> list[Device]:
    """Returns the devices of the groups that this process belongs to, itself or through its peers.

    The processes of other groups take no part in the set-up. They may live on other hosts.
    """
    groups = [devices[first : first + num_ranks] for first in range(0, len(devices), num_ranks)]
    processes = {jax.process_index()}
    while True:
        connected = [group for group in groups if any(d.process_index in processes for d in group)]
        reached = processes.union(d.process_index for group in connected for d in group)
        if reached == processes:
            return [device for group in connected for device in group]
        processes = reached


def has_peers_elsewhere(devices: Sequence[Device], num_ranks: int) -> bool:
    """Returns whether a neighbor of this process in these groups belongs to another process."""
    return any(d.process_index != jax.process_index() for d in neighbors(devices, num_ranks))


@contextlib.contextmanager
def exclusive_setup(limit_s: float) -> Iterator[None]:
    """Lets this process run one set-up at a time."""
    if not _setup_lock.acquire(timeout=limit_s):
        raise SetupTimeout(
            f"Group: another thread of process {jax.process_index()} has been making a group for more than "
            f"{limit_s:g} s. Make groups that span processes one after the other."
        )
    try:
        yield
    finally:
        _setup_lock.release()


def run_within(limit_s: float, step: str, work: Callable[[], T]) -> T:
    """Returns the result of `work()`. Raises SetupTimeout if the call takes longer than the limit.

    The work runs in a thread of its own, because XLA's waits have no time-out.
    """
    outcome: queue.SimpleQueue[T | BaseException] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcome.put(work())
        except BaseException as error:
            outcome.put(error)

    threading.Thread(target=run, daemon=True, name=f"jax_ep: {step}").start()
    try:
        result = outcome.get(timeout=limit_s)
    except queue.Empty:
        raise SetupTimeout(
            f"Group: {step} did not end within {limit_s:g} s in process {jax.process_index()}. Every process "
            "that owns devices of the mesh must make the same groups in the same order, and none may be "
            "stuck in an earlier program. This process should end: JAX still waits on its devices, and "
            "programs that are launched on them from now on would not run."
        ) from None
    if isinstance(result, BaseException):
        raise result
    return result


def drain(devices: Sequence[Device], limit_s: float) -> None:
    """Waits until all programs that were launched on the devices have ended.

    This includes programs whose results nobody holds, because XLA runs a device's programs in launch order.
    """

    def run() -> None:
        last_program, results = jax.jit(lambda x: x + 1), []
        for device in devices:
            with jax.default_device(device):
                results.append(last_program(np.int32(0)))
        jax.block_until_ready(results)

    run_within(limit_s, "waiting for earlier programs", run)


def exchange(devices: Sequence[Device], message: Message, limit_s: float, step: str) -> dict[int, Message]:
    """Sends a message to all processes of the devices, and returns the message of each process.

    All these processes must call it.
    """
    text = json.dumps(message).encode()
    if len(text) > MESSAGE_BYTES:
        error = f"a message of {len(text)} bytes, but at most {MESSAGE_BYTES} can be exchanged"
        text = json.dumps({"error": error}).encode()
    devices = tuple(sorted(devices, key=lambda device: device.id))
    row = np.frombuffer(text.ljust(MESSAGE_BYTES), np.uint8)[None]

    def exchange_rows() -> np.ndarray:
        sharding, all_gather = _all_gather_over(devices)
        local = [jax.device_put(row, d) for d in devices if d.process_index == jax.process_index()]
        rows = jax.make_array_from_single_device_arrays((len(devices), MESSAGE_BYTES), sharding, local)
        return np.asarray(all_gather(rows))

    try:
        all_rows = run_within(limit_s, step, exchange_rows)
    except (RuntimeError, ValueError) as error:  # from XLA
        raise RuntimeError(
            f"Group: {step} failed, because JAX could not exchange the processes' messages (has a process "
            f"ended?): {error}"
        ) from error
    return {
        device.process_index: json.loads(bytes(row)) for device, row in zip(devices, all_rows, strict=True)
    }


@functools.cache
def _all_gather_over(devices: tuple[Device, ...]) -> tuple[NamedSharding, Callable[[jax.Array], jax.Array]]:
    """Returns the sharding of an array with one row per device, and a function that gathers all rows."""
    mesh = Mesh(np.array(devices), ("all",))
    return NamedSharding(mesh, P("all")), jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))


def run_step(
    devices: Sequence[Device],
    step: str,
    work: Callable[[], Message | None],
    limit_s: float,
    limit_factor: int = 1,
) -> dict[int, Message]:
    """Does this process's work of a step, and waits for the work of all other processes.

    The wait may last `limit_factor * limit_s`, because the other processes' work has time limits of its own.
    Returns the result of each process's work, by process. If the work of one process fails, all processes
    raise SetupError.
    """
    message: Message = {"error": ""}
    try:
        message |= work() or {}
    except SetupTimeout:
        raise
    except Exception as error:
        is_expected = isinstance(error, (RuntimeError, OSError))
        text = str(error) if is_expected and str(error) else f"{type(error).__name__}: {error}"
        message["error"] = text[:MAX_ERROR_LENGTH]
    messages = exchange(devices, message, limit_factor * limit_s, f"{step}, as all processes must,")
    errors = [f"process {process}: {m['error']}" for process, m in messages.items() if m["error"]]
    if errors:
        raise SetupError("; ".join(errors))
    return messages


def raise_if_error(text: str) -> None:
    """Raises the error that a function of the extension returned as text. An empty text means success."""
    if text:
        raise RuntimeError(text)


def require_same(messages: dict[int, Message], name: str, error: str) -> None:
    """Raises SetupError, on all processes, if their messages have different values for `name`."""
    if len({message[name] for message in messages.values()}) > 1:
        raise SetupError(error)
