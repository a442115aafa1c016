"""NCCL communicators between domains, which groups use as their rails."""

import contextlib
import functools
import hashlib
from collections.abc import Callable

import jax
import numpy as np

from jax_ep import _extension
from jax_ep._extension import Extension
from jax_ep._group import handshake
from jax_ep._group.handshake import Message

# Longest wait of each trial hop, in seconds.
TRIAL_S = 20.0
# Version of the data that the ranks of a rail write into each other's windows. A change of that data needs a
# new number.
PROTOCOL = 2
STUCK = (
    "NCCL waits for other domains there: a process may have ended or failed, or cannot be reached "
    "(NCCL_DEBUG=INFO shows more). This process should end, because NCCL cannot be stopped. "
    "JAX_EP_NO_RAILS=1 in the environment keeps hops with JAX's collectives."
)

# Key of rails -> why hops cannot use them, empty if they can.
_settled: dict[str, str] = {}


def key_of(devices: np.ndarray, per_domain: int) -> str:
    """Returns the key of the rails of groups of devices [groups, R]. Groups with the same key share rails."""
    ids = [[device.id for device in group] for group in devices]
    return f"rails:{ids}:{per_domain} ranks a domain"


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def _usable_nccl(module: Extension | None, reason: str) -> tuple[str, str]:
    """Returns the version of NCCL that JAX has loaded, or an empty version and why hops cannot use NCCL."""
    if module is None or reason:
        return "", f"ops use implementation='xla' there ({reason})"
    if "nccl" not in module.build_info():
        return "", "the extension was built without NCCL's device API; build it with JAX_EP_NCCL"
    return module.nccl_version()


class _Rails:
    """One process's part of the set-up of rails."""

    def __init__(self, devices: np.ndarray, per_domain: int, limit_s: float):
        self.key = key_of(devices, per_domain)
        self.limit_s = limit_s
        self.num_domains = devices.shape[1] // per_domain
        self.all_devices = list(devices.flat)
        # (device, number of its domain, number of its rail) for each device of this process
        self.endpoints = [
            (device, rank // per_domain, group * per_domain + rank % per_domain)
            for group, row in enumerate(devices)
            for rank, device in enumerate(row)
            if device.process_index == jax.process_index()
        ]

    def settle(self, reason: str) -> str:
        """Makes the rails if they are new. Returns why hops cannot use them, empty if they can."""
        module = _extension.extension()

        def report_state() -> Message:
            return {"key": _digest(self.key), "state": self._state(module)}

        # This exchange uses JAX's own collectives between all processes, so it also makes JAX load NCCL.
        messages = self._run_step("reporting which group is made", report_state)
        if len({message["key"] for message in messages.values()}) > 1:
            return "the processes make different groups at the same time"
        states = {message["state"] for message in messages.values()}
        if states == {None}:
            self._make(module, reason)
            return ""
        reasons = sorted(state for state in states if state)
        if reasons or states == {""}:
            return reasons[0] if reasons else ""
        return "an earlier set-up of this group ended in some of the processes only"

    def _state(self, module: Extension | None) -> str | None:
        """Returns the rails' entry in `_settled`, if any. After a failed hop, returns the failure instead."""
        state = _settled.get(self.key)
        if state == "" and module is not None and (failure := module.why_rails_failed(self.key)):
            return f"an earlier hop over NCCL has failed, so NCCL is not used again ({failure})"
        return None if state is None else state[: handshake.MAX_ERROR_LENGTH]

    def _make(self, module: Extension | None, reason: str) -> None:
        messages = self._run_step("reporting which NCCL is loaded", lambda: self._introduce(module, reason))
        for library, name in (("NCCL", "version"), ("jax_ep", "protocol")):
            versions = sorted({str(message[name]) for message in messages.values()})
            if len(versions) > 1:
                raise handshake.SetupError(
                    f"the processes have loaded different versions of {library}: {', '.join(versions)}"
                )
        assert module is not None  # otherwise _introduce has failed
        key = self.key
        ids = {rail: id for message in messages.values() for rail, id in message["ids"].items()}
        endpoints = [
            (device.local_hardware_id, domain, ids[str(rail)]) for device, domain, rail in self.endpoints
        ]

        # While NCCL allocates memory, no program that XLA has launched may wait for memory.
        local_devices = [device for device, _, _ in self.endpoints]
        self._run_step("ending earlier programs", lambda: handshake.drain(local_devices, self.limit_s))
        steps: list[tuple[str, Callable[[], str]]] = [
            ("connecting domains by NCCL", lambda: module.connect_rails(key, endpoints, self.num_domains)),
            ("allocating memory for hops between domains", lambda: module.allocate_rails(key)),
            ("registering the memory with NCCL", lambda: module.register_rails(key)),
            ("joining kernels of domains by NCCL", lambda: module.join_rails(key)),
            ("trying hops between domains", lambda: module.try_rails(key, min(TRIAL_S, self.limit_s))),
        ]
        try:
            for step, work in steps:
                self._run_step(step, functools.partial(self._advance, step, work))
        except handshake.SetupError:
            with contextlib.suppress(handshake.SetupTimeout):
                handshake.run_within(self.limit_s, "disconnecting domains", lambda: module.drop_rails(key))
            raise
        module.publish_rails(key)

    def _advance(self, step: str, work: Callable[[], str]) -> None:
        try:
            handshake.raise_if_error(handshake.run_within(self.limit_s, step, work))
        except handshake.SetupTimeout:
            place = f"within {self.limit_s:g} s in process {jax.process_index()}"
            raise handshake.SetupTimeout(f"Group: {step} did not end {place}. {STUCK}") from None

    def _run_step(self, step: str, work: Callable[[], Message | None]) -> dict[int, Message]:
        return handshake.run_step(self.all_devices, step, work, self.limit_s, limit_factor=2)

    def _introduce(self, module: Extension | None, reason: str) -> Message:
        """Returns this process's versions, and the ids of the rails whose first domain this process has."""
        version, error = _usable_nccl(module, reason)
        handshake.raise_if_error(error)
        assert module is not None
        ids = {str(rail): module.rail_id() for _, domain, rail in self.endpoints if domain == 0}
        return {"version": version, "protocol": PROTOCOL, "ids": ids}


def open_rails(devices: np.ndarray, per_domain: int, reason: str, limit_s: float) -> str:
    """Makes the rails of groups of devices [groups, R], unless an earlier call made them.

    `reason` is the reason why the groups cannot use FFI handlers, or empty. All processes of the groups must
    call this function. It returns the same text on all of them: why rails are not available, or an empty text
    if they are. Raises SetupTimeout if the other processes do not answer.
    """
    if all(device.process_index == row[0].process_index for row in devices for device in row):
        return "its domains are simulated: all ranks of a group are in one process"
    with handshake.exclusive_setup(limit_s):
        rails = _Rails(devices, per_domain, limit_s)
        try:
            _settled[rails.key] = rails.settle(reason)
        except handshake.SetupError as error:
            _settled[rails.key] = str(error)
        except handshake.SetupTimeout as error:
            # The other processes may have succeeded. They receive this error when the group is made again.
            _settled[rails.key] = f"an earlier set-up did not end: {error}"
            raise
        return _settled[rails.key]


def describe() -> str:
    """Describes what a group would use between domains, as far as a single process can find out."""
    module = _extension.extension()
    version, error = _usable_nccl(module, _extension.reason_against_ffi("gpu"))
    if error:
        return f"XLA's collectives, because {error}"
    return (
        f"NCCL {version}'s device API if it finds a network that it supports (never executed on a real one), "
        "otherwise XLA's collectives"
    )
