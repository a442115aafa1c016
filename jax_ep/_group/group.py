"""Groups of ranks: which devices they are, and how an op waits for them."""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Hashable
from types import TracebackType
from typing import Any, Literal

import jax
import numpy as np

from jax_ep import _checks, _extension
from jax_ep._extension import Extension
from jax_ep._group import handshake, hosts, memory, nccl


def named_axes(mesh: Any, axis_name: Any) -> tuple[Any, ...]:
    """The axes that a group is to have, in their order. Raises what `Group` says."""
    if isinstance(mesh, jax.sharding.AbstractMesh):
        raise TypeError(
            "Group: mesh must be a jax.sharding.Mesh, with devices; got an AbstractMesh, which has none. "
            "Under jit JAX shows no other, so make the group outside of jit and hand it to the model: "
            "jax_ep.Group(jax.sharding.get_mesh(), axis_name), where jax.set_mesh has set the mesh"
        )
    if not isinstance(mesh, jax.sharding.Mesh):
        raise TypeError(f"Group: mesh must be a jax.sharding.Mesh, with devices; got {type(mesh).__name__}")
    if mesh.empty:
        raise ValueError(
            "Group: mesh must be a jax.sharding.Mesh, with devices; got an empty one, as "
            "jax.sharding.get_mesh() gives it where jax.set_mesh has set none"
        )
    axes = tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
    missing = [axis for axis in axes if not isinstance(axis, Hashable) or axis not in mesh.axis_names]
    if missing or not axes or len(set(axes)) < len(axes):
        raise ValueError(
            f"Group: axis_name must name axes of the mesh, each once; got {axis_name!r}, "
            f"the mesh has {mesh.axis_names}"
        )
    return axes


@dataclasses.dataclass(frozen=True)
class GroupStats:
    """What a group runs on and takes.

    Attributes:
      implementation: "ffi" or "xla", what `implementation=None` means to its ops.
      reason: why that is not "ffi", or why rows between hosts of GPUs do not go by "nccl"; empty if they do.
      device_bytes: bytes that the group takes on each device, of the memory that JAX has there.
      ranks_per_node: ranks that share a host. If there are fewer of them than the group has, rows make two
        hops: between hosts, and within one by the implementation.
      between_hosts: what brings rows from host to host: "nccl", a kernel over NCCL's device API (GIN), or
        "xla", its collectives; None if the ranks share one host.
    """

    implementation: Literal["ffi", "xla"]
    reason: str
    device_bytes: int
    ranks_per_node: int
    between_hosts: Literal["nccl", "xla"] | None


# Ten years: a longer time-out means no other thing, but its nanoseconds would overflow.
LONGEST_S = 10 * 365 * 24 * 3600.0


class PeerTimeoutError(TimeoutError):
    """A rank waited for its peers longer than the group's `timeout_s`. The text names who is missing."""


class Group:
    """The ranks along one or several mesh axes.

    A rank's number is `jax.lax.axis_index(axis_name)`. The other axes of the mesh give independent
    groups, which all ops of this `Group` serve at once.

    Groups are static and hashable, so jitted code can close over one. Two groups are equal if they
    have the same devices in the same order, the same axis names and as many ranks on a host (whatever
    their `timeout_s` and `num_sms`). Equal groups share their state, until the last of them is closed.
    Ops on a closed group raise RuntimeError.

    Args:
      mesh: a `jax.sharding.Mesh` (with devices, not the `AbstractMesh` that JAX shows under `jit`). Where
        `jax.set_mesh` has set one, `jax.sharding.get_mesh()` gives it, outside of `jit`.
      axis_name: a name of one of its axes, or several names, row-major. Arrays that are sharded over the
        ranks, such as the experts' weights, must name them in the same order: P(("a", "b")) for ("a", "b").
      ranks_per_node: how many ranks share a host, the first so many the first one, and so on. None: as it
        is found (on CPUs a process counts as a host). Fewer of them may be named than there are, to try on
        one host what runs on several, or where not all GPUs of a host reach each other. Rows then travel
        to each host once, by XLA's collectives or NCCL's device API, and from there to the ranks that need
        them (docs/multi_process.md).
      timeout_s: seconds that a rank waits for its peers before it gives up. A rank is also late when it
        compiles longer than the others, writes a checkpoint or stands in a debugger, so the default is long.
        `float("inf")` means ten years. Among equal groups, the newest one's value counts.
      num_sms: on GPUs, the most SMs that one dispatch or combine takes, at least 2; the others are left to
        kernels that run beside it. None: chosen from the shapes for a uniform routing, such that more would
        not be faster (docs/performance.md). Among equal groups, the newest one's value counts, for programs
        that run for the first time after it was made.

    Raises:
      ValueError: the mesh is empty; an axis is not in it or named twice; the time-out is not positive,
        num_sms below 2 or too large; ranks_per_node does not divide the number of ranks.
      TypeError: the mesh has no devices, the time-out is no number, num_sms or ranks_per_node no int.
      PeerTimeoutError: the group spans processes, and another one did not make it within `timeout_s` (or a
        minute, if that is longer), or earlier programs do not end. The process should end then.

    On GPUs of several processes of one host (`jax.distributed`), all processes that own devices of the mesh
    must make it, and several groups in the same order: they tell each other where their memory lies
    (docs/multi_process.md). A group that has failed (`check`) works again once all have made it anew; between
    hosts rows then go by JAX's collectives.
    """

    def __init__(
        self,
        mesh: jax.sharding.Mesh,
        axis_name: str | tuple[str, ...] | list[str],
        *,
        ranks_per_node: int | None = None,
        timeout_s: float = 300.0,
        num_sms: int | None = None,
    ):
        axes = named_axes(mesh, axis_name)
        timeout_s = _checks.timeout_seconds(timeout_s)
        num_sms = _checks.most_sms("Group", num_sms)
        others = [axis for axis in mesh.axis_names if axis not in axes]
        order = [mesh.axis_names.index(axis) for axis in (*others, *axes)]
        size = int(np.prod([mesh.shape[axis] for axis in axes]))
        devices = mesh.devices.transpose(order).reshape(-1, size)
        self._axis_name = tuple(axis_name) if isinstance(axis_name, list) else axis_name
        self._axes = axes
        per_host, reason = self._find_ranks_per_host(devices, ranks_per_node, timeout_s)
        self._index_groups: _IndexGroups | None = None
        self._within: Group | None = None
        if per_host < size:
            self._within = self._make_within(devices.reshape(-1, per_host), size, timeout_s, num_sms)
        self._set_up(devices, timeout_s, num_sms, reason)
        if self._within is not None and self._platform == "gpu":
            self._without_rails = self._open_rails(self._within, devices, timeout_s)

    @staticmethod
    def _find_ranks_per_host(devices: np.ndarray, forced: Any, timeout_s: float) -> tuple[int, str]:
        if forced is not None:
            return hosts.forced_ranks_per_host(forced, devices.shape[1]), ""
        try:
            return hosts.find_ranks_per_host(devices, max(timeout_s, handshake.LEAST_S))
        except handshake.SetupTimeout as error:
            raise PeerTimeoutError(str(error)) from None

    def _open_rails(self, within: "Group", devices: np.ndarray, timeout_s: float) -> str:
        limit_s = max(timeout_s, handshake.LEAST_S)
        try:
            return nccl.open_rails(devices, within._size, within._reason_against_ffi(), limit_s)
        except BaseException as error:
            if module := _extension.extension():
                module.close_group(within._key)
            if isinstance(error, handshake.SetupTimeout):
                raise PeerTimeoutError(str(error)) from None
            raise

    def _make_within(self, devices: np.ndarray, size: int, timeout_s: float, num_sms: int | None) -> "Group":
        """The groups of the ranks of each host [hosts, ranks], along the same axis: what hop 2 goes among."""
        group = Group.__new__(Group)
        group._axis_name, group._axes = self._axis_name, self._axes
        per_host = devices.shape[1]
        group._index_groups = tuple(
            tuple(range(first, first + per_host)) for first in range(0, size, per_host)
        )
        group._within = None
        group._set_up(devices, timeout_s, num_sms, "")
        return group

    def _set_up(self, devices: np.ndarray, timeout_s: float, num_sms: int | None, reason: str) -> None:
        """What all groups have. `reason` says why the handlers cannot be used, if so."""
        self._size = devices.shape[1]
        self._platform: str = devices.flat[0].platform
        self._device_ids: tuple[tuple[int, ...], ...] = tuple(
            tuple(device.id for device in group) for group in devices
        )
        self._spans_processes = any(
            device.process_index != group[0].process_index for group in devices for device in group
        )
        self._timeout_s = min(timeout_s, LONGEST_S)
        self._key = f"{self._platform}:{','.join(self._axes)}:{self._device_ids}"
        if self._within is not None:
            self._key += f":{self._within._size} ranks a host"
        elif self._index_groups is not None:
            self._key += f":within each of {len(self._index_groups)} hosts"
        self._rails_key = nccl.key_of(devices, self.ranks_per_node)
        self._closed = False
        self._unreachable = reason
        self._without_rails = ""  # why rows between hosts of GPUs do not go by NCCL's device API, if so
        module = _extension.extension()
        if module is not None and self._within is None:
            self._open(module, devices, num_sms)

    def _open(self, module: Extension, devices: np.ndarray, num_sms: int | None) -> None:
        """Makes what must exist before a kernel waits on a peer."""
        if self._platform == "gpu" and not self._reason_against_ffi():
            self._unreachable = self._open_on_gpus(module, list(devices.flat))
        # What a handler is told of its device: on GPUs the ordinal in this process, else the id.
        on_gpu = self._platform == "gpu"
        here = [
            (d.local_hardware_id if on_gpu else d.id) if d.process_index == jax.process_index() else -1
            for d in devices.flat
        ]
        hands_on = self._index_groups is not None and self._size > 1
        module.open_group(self._key, repr(self), here, self._size, hands_on, self._timeout_s, num_sms or 0)

    def _open_on_gpus(self, module: Extension, devices: list[Any]) -> str:
        """Prepares the control blocks; why the group's kernels cannot run, or nothing."""
        local = [device for device in devices if device.process_index == jax.process_index()]
        try:
            if handshake.has_peers_elsewhere(devices, self._size):
                limits = (module, self._key, local, self._timeout_s)
                hold = functools.partial(memory.control_blocks, *limits)
                memory.open_group(module, self._key, devices, self._size, hold, self._timeout_s)
                return ""
            # Of threads that make equal groups at once, one prepares it, and the others find it prepared.
            with _locks.setdefault(self._key, threading.Lock()):
                return self._open_here(module, devices, local)
        except handshake.SetupError as error:
            return str(error)
        except handshake.SetupTimeout as error:
            raise PeerTimeoutError(str(error)) from None

    def _open_here(self, module: Extension, devices: list[Any], local: list[Any]) -> str:
        """The same where this process has all ranks of every group that it has ranks of."""
        controls = memory.control_blocks(module, self._key, local, self._timeout_s)
        if module.has_expired(self._key):
            handshake.drain(local, 3 * max(self._timeout_s, handshake.LEAST_S))
            epoch, calls = module.last_epoch(self._key), module.last_call(self._key)
            reason = module.reset_device_group(self._key, epoch, calls)
            if reason:
                return reason
        ranks: list[memory.Rank] = [
            (device.local_hardware_id, controls[device.id], 0, device.process_index)
            if device in local
            else (-1, 0, 0, device.process_index)
            for device in devices
        ]
        return module.open_device_group(self._key, ranks, self._size, -1)

    @property
    def size(self) -> int:
        """The number of ranks, R."""
        return self._size

    @property
    def axis_name(self) -> str | tuple[str, ...]:
        """The mesh axis, or axes, as given."""
        return self._axis_name

    @property
    def ranks_per_node(self) -> int:
        """The number of ranks that share a host: all of them, or a divisor."""
        return self._size if self._within is None else self._within._size

    @property
    def _has_rails(self) -> bool:
        """Whether rows go between hosts by NCCL's device API."""
        return self._within is not None and self._platform == "gpu" and not self._without_rails

    def stats(self) -> GroupStats:
        """What this group runs on, and the memory that it takes."""
        self._require_open("stats")
        reason = self._reason_against_ffi()
        module = _extension.extension()
        between = None if self._within is None else "nccl" if self._has_rails else "xla"
        if reason or module is None:
            return GroupStats("xla", reason, 0, self.ranks_per_node, between)
        size = module.control_bytes() if self._platform == "gpu" else 0
        reason = self._without_rails and f"between hosts by XLA's collectives: {self._without_rails}"
        return GroupStats("ffi", reason, size, self.ranks_per_node, between)

    def check(self) -> None:
        """Raises `PeerTimeoutError` if a wait of this group expired since the last check."""
        self._require_open("check")
        module = _extension.extension()
        text = None if module is None else module.take_expired((self._within or self)._key)
        if text is not None:
            raise PeerTimeoutError(text)

    def close(self) -> None:
        """Frees the group's state once no equal group is open. Closing twice is fine.

        On GPUs the control blocks and the arena, 37 MiB on each device, are kept as long as the process, for
        a captured graph may hold their addresses. A group of the same devices finds them again.

        Waits for the programs in flight whose results are still referred to: they may use the group.
        """
        if self._closed:
            return
        self._closed = True
        module = _extension.extension()
        if module is None:
            return
        for array in jax.live_arrays(self._platform):
            # What an array's own program failed of is told to those who read the array.
            with contextlib.suppress(Exception):
                array.block_until_ready()
        module.close_group((self._within or self)._key)

    def __enter__(self) -> "Group":
        self._require_open("with")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{self!r} cannot be pickled: it stands for devices of this process. Make a Group from the mesh "
            "where it is needed"
        )

    def __copy__(self) -> "Group":
        return self

    def __deepcopy__(self, _: Any) -> "Group":
        return self  # as with whatever else a model refers to but does not own

    def __eq__(self, other: Any) -> bool:
        return self._key == other._key if isinstance(other, Group) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        groups = [list(group) for group in self._device_ids]
        shown = groups if len(groups) > 1 else groups[0]
        hosts = "" if self._within is None else f", ranks_per_node={self.ranks_per_node}"
        hosts = hosts if self._index_groups is None else ", those of a host each"
        return f"Group({self._axis_name!r}, {self._platform} devices {shown}{hosts})"

    def _require_open(self, op: str) -> None:
        if self._closed:
            raise RuntimeError(f"{op}: {self!r} is closed; make a new Group")

    def _resolve(self, implementation: str | None) -> _extension.Implementation:
        """The implementation that an op of this group uses."""
        _extension.check_implementation(implementation)
        if implementation == "xla":
            return "xla"
        reason = self._reason_against_ffi()
        if implementation == "ffi" and reason:
            raise ValueError(f"implementation='ffi' cannot run {self!r}: {reason}. Use implementation='xla'.")
        if reason and self._spans_processes:
            _extension.warn_once(
                f"jax_ep: {self!r} spans processes; its ops use implementation='xla', because {reason}"
            )
        elif reason:
            _extension.warn_of_falling_back(self._platform, reason)
        return "xla" if reason else "ffi"

    def _reason_against_ffi(self) -> str:
        if self._within is not None:
            return self._within._reason_against_ffi()
        reason = _extension.reason_against_ffi(self._platform) or self._unreachable
        if not reason and self._spans_processes and self._platform != "gpu":
            return "the ranks of a host must live in one process, where they are CPUs"
        return reason


# The ranks of each host, as numbers along a group's axis.
_IndexGroups = tuple[tuple[int, ...], ...]


# Group key -> what only one thread at a time does.
_locks: dict[str, threading.Lock] = {}
