"""NCCL communicators between hosts."""

import contextlib
import functools
import hashlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jax_ep import _extension
from jax_ep._extension import Extension
from jax_ep._group import handshake

# How long each hop may wait that is tried when rails are made.
TRIAL_S = 20.0


# Of what ranks of a rail put into each other's windows. Who changes that gives it another number.
PROTOCOL = 2


STUCK = (
    "NCCL waits for other hosts there: a process may have ended or failed, or cannot be reached "
    "(NCCL_DEBUG=INFO says more). This process should end, for NCCL cannot be told to stop. "
    "JAX_EP_NO_RAILS=1 in the environment keeps hops with JAX's collectives."
)


# Key of rails -> why hops cannot go over them, or nothing.
_settled: dict[str, str] = {}


def key_of(devices: np.ndarray, per_host: int) -> str:
    """What groups of devices [groups, R] have in common that hop over the same rails."""
    ids = [[device.id for device in group] for group in devices]
    return f"rails:{ids}:{per_host} ranks a host"


def open_rails(devices: np.ndarray, per_host: int, reason: str, limit_s: float) -> str:
    """Makes the rails of groups of devices [groups, R], or finds them; why there are none, or nothing.

    `reason` is why the groups cannot use handlers, if so. All processes of the groups must call it, and all
    find the same. Raises SetupTimeout where the others do not answer.
    """
    if all(device.process_index == row[0].process_index for row in devices for device in row):
        return "its hosts are made up: all ranks of a group are in one process"
    with handshake.taking_turns(limit_s):
        rails = _Rails(devices, per_host, limit_s)
        try:
            _settled[rails.key] = rails.settle(reason)
        except handshake.SetupError as error:
            _settled[rails.key] = str(error)
        except handshake.SetupTimeout as error:
            # Others may have gone on: they are told when the group is made anew.
            _settled[rails.key] = f"an earlier set-up did not end: {error}"
            raise
        return _settled[rails.key]


class _Rails:
    """One process's part in joining hosts."""

    def __init__(self, devices: np.ndarray, per_host: int, limit_s: float):
        self.key = key_of(devices, per_host)
        self.limit_s = limit_s
        self.num_hosts = devices.shape[1] // per_host
        self.everywhere = list(devices.flat)
        # (device, number of its host, number of its rail) of this process's devices
        self.seats = [
            (device, rank // per_host, group * per_host + rank % per_host)
            for group, row in enumerate(devices)
            for rank, device in enumerate(row)
            if device.process_index == jax.process_index()
        ]

    def settle(self, reason: str) -> str:
        """Why hops cannot go over these rails; or nothing, and they are there."""
        module = _extension.extension()
        # JAX's own exchange between all of them, which also makes it load NCCL.
        state = lambda: {"key": _digest(self.key), "state": self._state(module)}
        told = self._together("saying which group is made", state)
        if len({message["key"] for message in told.values()}) > 1:
            return "the processes make different groups at the same time"
        states = {message["state"] for message in told.values()}
        if states == {None}:
            self._make(module, reason)
            return ""
        reasons = sorted(state for state in states if state)
        if reasons or states == {""}:
            return reasons[0] if reasons else ""
        return "an earlier set-up of this group ended in some of the processes only"

    def _state(self, module: Extension | None) -> str | None:
        """As _settled has it, None if nothing is. Where a hop has failed, its rails are not used again."""
        state = _settled.get(self.key)
        if state == "" and module is not None and (why := module.why_rails_failed(self.key)):
            return f"a hop over NCCL has failed before, and it is not used again ({why})"
        return None if state is None else state[: handshake.MOST_WORDS]

    def _make(self, module: Extension | None, reason: str) -> None:
        told = self._together("saying which NCCL is loaded", lambda: self._introduce(module, reason))
        for what, name in (("NCCL", "version"), ("jax_ep", "protocol")):
            found = sorted({str(message[name]) for message in told.values()})
            if len(found) > 1:
                raise handshake.SetupError(
                    f"the processes have loaded different versions of {what}: {', '.join(found)}"
                )
        assert module is not None  # or somebody would have said so
        key = self.key
        ids = {rail: id for message in told.values() for rail, id in message["ids"].items()}
        seats = [(device.local_hardware_id, host, ids[str(rail)]) for device, host, rail in self.seats]

        # Nothing that XLA has launched may wait for memory while NCCL takes some.
        mine = [device for device, _, _ in self.seats]
        self._together("ending earlier programs", lambda: handshake.drain(mine, self.limit_s))
        steps: list[tuple[str, Callable[[], str]]] = [
            ("connecting hosts by NCCL", lambda: module.connect_rails(key, seats, self.num_hosts)),
            ("taking memory for hops between hosts", lambda: module.allocate_rails(key)),
            ("registering it with NCCL", lambda: module.register_rails(key)),
            ("joining kernels of hosts by NCCL", lambda: module.join_rails(key)),
            ("trying hops between hosts", lambda: module.try_rails(key, min(TRIAL_S, self.limit_s))),
        ]
        try:
            for step, work in steps:
                self._together(step, functools.partial(self._advance, step, work))
        except handshake.SetupError:
            with contextlib.suppress(handshake.SetupTimeout):
                handshake.within(self.limit_s, "disconnecting hosts", lambda: module.drop_rails(key))
            raise
        module.publish_rails(key)

    def _advance(self, step: str, work: Callable[[], str]) -> None:
        try:
            handshake.raise_if(handshake.within(self.limit_s, step, work))
        except handshake.SetupTimeout:
            where = f"within {self.limit_s:g} s in process {jax.process_index()}"
            raise handshake.SetupTimeout(f"Group: {step} did not end {where}. {STUCK}") from None

    def _together(self, step: str, work: Callable[[], dict[str, Any] | None]) -> dict[int, dict[str, Any]]:
        return handshake.together(self.everywhere, step, work, self.limit_s, times=2)

    def _introduce(self, module: Extension | None, reason: str) -> dict[str, Any]:
        """What the others must know. The process of a rail's first host names the rail."""
        version, why_not = _usable_nccl(module, reason)
        handshake.raise_if(why_not)
        assert module is not None
        ids = {str(rail): module.rail_id() for _, host, rail in self.seats if host == 0}
        return {"version": version, "protocol": PROTOCOL, "ids": ids}


def _usable_nccl(module: Extension | None, reason: str) -> tuple[str, str]:
    """The version that JAX has loaded; or why hops cannot go over it."""
    if module is None or reason:
        return "", f"ops use implementation='xla' there ({reason})"
    if "nccl" not in module.build_info():
        return "", "the extension was built without NCCL's device API; build it with JAX_EP_NCCL"
    return module.nccl_version()


def describe() -> str:
    """What a group that spans hosts would use between them, as far as one process can say."""
    module = _extension.extension()
    version, why_not = _usable_nccl(module, _extension.reason_against_ffi("gpu"))
    if why_not:
        return f"XLA's collectives, because {why_not}"
    return f"NCCL {version}'s device API where it finds a network for it, else XLA's collectives"


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:16]
