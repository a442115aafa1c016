"""Steps that all processes take together, with a time limit."""

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

T = TypeVar("T")


MESSAGE_BYTES = 8192


MOST_WORDS = 1000


# A step of the set-up may take as long as a wait of the group's ops, but no less than this: it contains what
# they do not, as NCCL's own set-up and compilations.
LEAST_S = 60.0


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


def raise_if(text: str) -> None:
    """Raises what the extension says went wrong, if it says anything."""
    if text:
        raise RuntimeError(text)


def _require_same(messages: dict[int, dict[str, Any]], name: str, otherwise: str) -> None:
    """Raises SetupError, on all processes, if they do not say the same."""
    if len({message[name] for message in messages.values()}) > 1:
        raise SetupError(otherwise)


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
