"""Rails: communicators of NCCL's that join the ranks of one index on all hosts, for hops between them."""

import hashlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jax_ep import _extension, _processes
from jax_ep._extension_types import Extension

# How long the hops are given that are tried when rails are made.
TRIAL_S = 20.0
# Key of a group's hosts -> why its hops cannot go over rails, or nothing.
_settled: dict[str, str] = {}


def open_rails(key: str, devices: np.ndarray, per_host: int, reason: str, limit_s: float) -> str:
    """Makes the rails of groups of devices [groups, R], or finds them; why there are none, or nothing.

    `key` is that of the groups of each host's ranks, and `reason` why they cannot use handlers, if so. All
    processes of the groups must call it, and all find the same. Raises SetupTimeout where the others do not
    answer.
    """
    if all(device.process_index == jax.process_index() for device in devices.flat):
        return "its hosts are made up: all ranks are in this process"
    with _processes.taking_turns(limit_s):
        if key not in _settled:
            _settled[key] = _Rails(key, devices, per_host, limit_s).open(reason)
        return _settled[key]


class _Rails:
    """One process's part in joining hosts."""

    def __init__(self, key: str, devices: np.ndarray, per_host: int, limit_s: float):
        self.key = key
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
        self.ids: dict[str, str] = {}

    def open(self, reason: str) -> str:
        module = _extension.extension()
        try:
            # JAX's own exchange between all of them, which also makes it load NCCL.
            told = self._together("saying which group is made", lambda: {"key": _digest(self.key)})
            if len({message["key"] for message in told.values()}) > 1:
                return "the processes make different groups at the same time"
            told = self._together("saying which NCCL is loaded", lambda: self._introduce(module, reason))
            versions = sorted({message["version"] for message in told.values()})
            if len(versions) > 1:
                return f"the processes have loaded different versions of NCCL: {', '.join(versions)}"
            assert module is not None  # or somebody would have said so
            self.ids = {rail: id for message in told.values() for rail, id in message["ids"].items()}
            try:
                self._together("connecting hosts by NCCL", lambda: self._connect(module))
                self._together("trying hops between hosts", lambda: self._prepare(module))
            except _processes.SetupError:
                module.drop_rails(self.key)
                raise
        except _processes.SetupError as error:
            return str(error)
        return ""

    def _together(self, step: str, work: Callable[[], dict[str, Any] | None]) -> dict[int, dict[str, Any]]:
        return _processes.together(self.everywhere, step, work, self.limit_s, times=2)

    def _introduce(self, module: Extension | None, reason: str) -> dict[str, Any]:
        """What the others must know. The process of a rail's first host names the rail."""
        version, why_not = _usable_nccl(module, reason)
        _processes.raise_if(why_not)
        assert module is not None
        ids = {str(rail): module.rail_id() for _, host, rail in self.seats if host == 0}
        return {"version": version, "ids": ids}

    def _connect(self, module: Extension) -> None:
        seats = [(device.local_hardware_id, host, self.ids[str(rail)]) for device, host, rail in self.seats]
        # Nothing that XLA has launched may wait for memory while NCCL takes some.
        _processes.drain([device for device, _, _ in self.seats], self.limit_s)
        connect = lambda: module.connect_rails(self.key, seats, self.num_hosts)
        _processes.raise_if(_processes.within(self.limit_s, "connecting hosts by NCCL", connect))

    def _prepare(self, module: Extension) -> None:
        prepare = lambda: module.prepare_rails(self.key, min(TRIAL_S, self.limit_s))
        _processes.raise_if(_processes.within(self.limit_s, "trying hops between hosts", prepare))


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
