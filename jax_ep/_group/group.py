"""Groups: the ranks of a mesh, what they report, and the error for ranks that do not arrive in time."""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Hashable
from types import TracebackType
from typing import Literal, NoReturn, cast

import jax
import numpy as np

from jax_ep import _checks, _extension
from jax_ep._checks import Arguments
from jax_ep._extension import Device, Extension
from jax_ep._group import cpu_threads, domains, handshake, memory, nccl, options
from jax_ep._group.options import Options
from jax_ep._group.ranks import Ranks

# Group key -> lock of the thread that prepares the group's GPUs.
_locks: dict[str, threading.Lock] = {}


def check_axes(mesh: object, axis_name: object) -> tuple[str, ...]:
    """Checks a group's mesh and axis names, and returns the names in their order."""
    if isinstance(mesh, jax.sharding.AbstractMesh):
        raise TypeError(
            "Group: mesh must be a jax.sharding.Mesh, with devices; got an AbstractMesh, which has none. "
            "Under jit JAX provides only an AbstractMesh, so make the group outside of jit, after "
            "jax.set_mesh has set the mesh, and pass it to the model: "
            "jax_ep.Group(jax.sharding.get_mesh(), axis_name)"
        )
    if not isinstance(mesh, jax.sharding.Mesh):
        raise TypeError(f"Group: mesh must be a jax.sharding.Mesh, with devices; got {type(mesh).__name__}")
    if mesh.empty:
        raise ValueError(
            "Group: mesh must be a jax.sharding.Mesh, with devices; got an empty one, which "
            "jax.sharding.get_mesh() returns unless jax.set_mesh has set a mesh"
        )
    axes = tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
    missing = [axis for axis in axes if not isinstance(axis, Hashable) or axis not in mesh.axis_names]
    if missing or not axes or len(set(axes)) < len(axes):
        raise ValueError(
            f"Group: axis_name must name axes of the mesh, each once; got {axis_name!r}, "
            f"the mesh has {mesh.axis_names}"
        )
    return cast(tuple[str, ...], axes)


@dataclasses.dataclass(frozen=True)
class GroupInfo:
    """The implementation that a group uses, and the memory that it occupies.

    Attributes:
      implementation: "ffi" or "xla". The group's ops use it if their `implementation` is None.
      reason: the reason for a fallback, otherwise empty. With implementation "xla": why the handlers cannot
        be used. With "ffi" on GPUs of several domains: why NCCL's device API cannot be used between them.
      device_bytes: bytes of JAX's memory that the group occupies on each device.
      ranks_per_domain: number of ranks that share a domain: a host, several hosts that NVLink joins, or on
        CPUs a process. If it is smaller than the group's size, rows make two hops: one between domains, and
        one within the domain, which uses `implementation`.
      between_domains: how rows travel between domains: "nccl" is a kernel on NCCL's device API (GIN), "xla"
        is XLA's collectives. None if all ranks share one domain.
    """

    implementation: Literal["ffi", "xla"]
    reason: str
    device_bytes: int
    ranks_per_domain: int
    between_domains: Literal["nccl", "xla"] | None


class PeerTimeoutError(TimeoutError):
    """An op failed, or a Group could not be made, usually because of another rank.

    That rank was late, stalled, died, or ran another op. The message says what happened, and what to do.
    """


class Group:
    """The ranks along one or several mesh axes.

    A rank's number is `jax.lax.axis_index(axis_name)`. If the mesh has other axes, it contains several
    independent groups of ranks, one for each index along the other axes. A `Group` stands for all of them.

    Groups are static and hashable, so jitted code can close over one. Two groups are equal if they have the
    same devices in the same order, the same axis names and the same number of ranks per domain. Equal groups
    share their state, `timeout_s` and `num_sms` until the last of them is closed. A group that is given
    another value than an equal, open group was given changes it for all of them, with a UserWarning. A group
    is open until it is closed, even without references. Ops on a closed group raise RuntimeError.

    Args:
      mesh: a `jax.sharding.Mesh` with devices, not the `AbstractMesh` that JAX provides under `jit`. Outside
        of `jit`, `jax.sharding.get_mesh()` returns the mesh that `jax.set_mesh` has set.
      axis_name: the name of a mesh axis, or several names in row-major order. Arrays that are sharded over
        the ranks, such as the experts' weights, must name the axes in the same order: P(("a", "b")) for
        ("a", "b").
      ranks_per_domain: number of consecutive ranks per domain. None: detect it. On CPUs a process is a
        domain. On GPUs a host is, or several hosts that NVLink joins (docs/multi_process.md). A number
        smaller than the real one simulates several domains, or serves hosts whose GPUs cannot all reach each
        other. With several domains, a token travels to each domain only once, through XLA's collectives or
        NCCL's device API, and from there to the ranks that need it.
      timeout_s: seconds that a rank waits for its peers before it gives up. None: keep the value of an equal
        group that is open, if any, otherwise 300. A rank is also late if it compiles longer than the others,
        writes a checkpoint or is stopped in a debugger, so the default is long. `float("inf")` means ten
        years.
      num_sms: maximum number of SMs that one dispatch or combine uses on GPUs, at least 2. The remaining SMs
        are free for other kernels. None: keep the value of an equal group that is open, if any; otherwise
        choose the number from the shapes, such that more SMs would not be faster under a uniform routing
        (docs/performance.md). A new value counts for programs that run for the first time after this group
        was made.

    Raises:
      ValueError: the mesh is empty; an axis is not in the mesh or named twice; `timeout_s` is not positive;
        `num_sms` is less than 2 or too large; `ranks_per_domain` does not divide the number of ranks.
      TypeError: the mesh has no devices; `timeout_s` is not a number; `num_sms` or `ranks_per_domain` is not
        an int.
      PeerTimeoutError: the group spans processes, and another process did not make the group within
        `timeout_s` (at least a minute), or earlier programs did not end. Exit the process in this case.

    If GPUs of several processes (`jax.distributed`) form a group, all processes that own devices of the mesh
    must make the same groups in the same order, because they exchange the addresses of their memory
    (docs/multi_process.md). After a failure (`check`), all processes must make the group again. From then on,
    rows between domains travel through JAX's collectives, even if NCCL's device API was used before.
    """

    def __init__(
        self,
        mesh: jax.sharding.Mesh,
        axis_name: str | tuple[str, ...] | list[str],
        *,
        ranks_per_domain: int | None = None,
        timeout_s: float | None = None,
        num_sms: int | None = None,
    ):
        axes = check_axes(mesh, axis_name)
        requested = Options(_checks.timeout_seconds(timeout_s), Arguments("Group").most_sms(num_sms))
        others = [axis for axis in mesh.axis_names if axis not in axes]
        order = [mesh.axis_names.index(axis) for axis in (*others, *axes)]
        size = int(np.prod([mesh.shape[axis] for axis in axes]))
        devices = mesh.devices.transpose(order).reshape(-1, size)
        names = tuple(axis_name) if isinstance(axis_name, list) else axis_name
        per_domain, reason = self._find_ranks_per_domain(devices, ranks_per_domain, requested.seconds)
        self._ranks = _ranks(self, names, axes, devices, per_domain)
        self._timeout_s = options.resolve(self._opened.key, requested).seconds
        self._closed = False
        # Why the group cannot use FFI handlers. Empty if it can.
        self._setup_error = reason if self._ranks.within is None else ""
        # Why rows between domains of GPUs do not use NCCL's device API. Empty if they do.
        self._rails_error = ""
        if self._ranks.platform == "cpu":
            cpu_threads.check([d for d in devices.flat if d.process_index == jax.process_index()])
        _extension.has_handlers(
            self._ranks.platform
        )  # warns now, and not only at the first op, if they are missing
        if module := _extension.extension():
            self._open(module, list(devices.flat), requested)
        if self._ranks.within is not None and self._ranks.platform == "gpu":
            self._rails_error = self._open_rails(devices, self._timeout_s)
            if not self._rails_error:
                rails = nccl.key_of(devices, per_domain)
                self._ranks = dataclasses.replace(self._ranks, rails=rails)

    @property
    def _opened(self) -> Ranks:
        """The ranks that exchange rows by handlers, which the extension has as a group."""
        return self._ranks.within or self._ranks

    @staticmethod
    def _find_ranks_per_domain(devices: np.ndarray, forced: object, timeout_s: float) -> tuple[int, str]:
        if forced is not None:
            return domains.forced_ranks_per_domain(forced, devices.shape[1]), ""
        try:
            return domains.find_ranks_per_domain(devices, max(timeout_s, handshake.LEAST_S))
        except handshake.SetupTimeout as error:
            raise PeerTimeoutError(str(error)) from None

    def _open_rails(self, devices: np.ndarray, timeout_s: float) -> str:
        limit_s = max(timeout_s, handshake.LEAST_S)
        try:
            return nccl.open_rails(devices, self._opened.size, self._ffi_error(), limit_s)
        except BaseException as error:
            if module := _extension.extension():
                self._release(module)
            if isinstance(error, handshake.SetupTimeout):
                raise PeerTimeoutError(str(error)) from None
            raise

    def _open(self, module: Extension, devices: list[Device], requested: Options) -> None:
        """Opens the group in the extension, which must happen before a kernel waits for a peer."""
        if self._opened.platform == "gpu" and not self._ffi_error():
            self._setup_error = self._open_on_gpus(module, devices)
        # XLA identifies a handler's device by its ordinal in this process on GPUs, and by its id on CPUs.
        on_gpu = self._opened.platform == "gpu"
        ordinals = [
            (d.local_hardware_id if on_gpu else d.id) if d.process_index == jax.process_index() else -1
            for d in devices
        ]
        relays_for_other_domains = self._opened.index_groups is not None and self._opened.size > 1
        with options.lock:
            shared = options.add_user(self._opened.key, requested)
            module.open_group(
                self._opened.key,
                self._opened.name,
                ordinals,
                self._opened.size,
                relays_for_other_domains,
                shared.seconds,
                shared.num_sms or 0,
            )

    def _release(self, module: Extension) -> None:
        """Closes the group in the extension once no equal group is open."""
        with options.lock:
            options.drop_user(self._opened.key)
            module.close_group(self._opened.key)

    def _open_on_gpus(self, module: Extension, devices: list[Device]) -> str:
        """Prepares the control blocks. Returns why the group's kernels cannot run, empty if they can."""
        local = [device for device in devices if device.process_index == jax.process_index()]
        try:
            if handshake.has_peers_elsewhere(devices, self._opened.size):
                key, size, timeout_s = self._opened.key, self._opened.size, self._timeout_s
                reserve = functools.partial(memory.control_blocks, module, key, local, size, timeout_s)
                memory.open_group(module, key, devices, size, reserve, timeout_s)
                return ""
            # If several threads make equal groups at once, the first one does the work.
            with _locks.setdefault(self._opened.key, threading.Lock()):
                return self._open_in_one_process(module, devices, local)
        except handshake.SetupError as error:
            return str(error)
        except handshake.SetupTimeout as error:
            raise PeerTimeoutError(str(error)) from None

    def _open_in_one_process(self, module: Extension, devices: list[Device], local: list[Device]) -> str:
        """Opens a group on GPUs if no ranks of this process communicate with those of another one."""
        key, size = self._opened.key, self._opened.size
        controls = memory.control_blocks(module, key, local, size, self._timeout_s)
        if module.has_expired(key):
            handshake.drain(local, 3 * max(self._timeout_s, handshake.LEAST_S))
            epoch, calls = module.last_epoch(key), module.last_call(key)
            reason = module.reset_device_group(key, epoch, calls)
            if reason:
                return reason
        ranks: list[memory.Rank] = [
            (device.local_hardware_id, controls[device.id], 0, device.process_index)
            if device in local
            else (-1, 0, 0, device.process_index)
            for device in devices
        ]
        return module.open_device_group(key, ranks, size)

    @property
    def size(self) -> int:
        """Number of ranks, R."""
        return self._ranks.size

    @property
    def axis_name(self) -> str | tuple[str, ...]:
        """Mesh axis or axes, as passed."""
        return self._ranks.axis_name

    @property
    def ranks_per_domain(self) -> int:
        """Number of ranks that share a domain: all of them, or a divisor of their number."""
        return self._ranks.ranks_per_domain

    def info(self) -> GroupInfo:
        """Returns the implementation that this group uses, and the memory that it occupies."""
        self._require_open("info")
        reason = self._ffi_error()
        module = _extension.extension()
        between = None if self._ranks.within is None else "nccl" if self._ranks.rails else "xla"
        if reason or module is None:
            return GroupInfo("xla", reason, 0, self.ranks_per_domain, between)
        size = module.group_bytes(self._opened.size) if self._ranks.platform == "gpu" else 0
        if self._resolve(None) == "xla":
            return GroupInfo("xla", "JAX_EP_IMPLEMENTATION=xla", size, self.ranks_per_domain, between)
        reason = self._rails_error and f"rows between domains use XLA's collectives: {self._rails_error}"
        return GroupInfo("ffi", reason, size, self.ranks_per_domain, between)

    def check(self) -> None:
        """Raises `PeerTimeoutError` if an op of this group has failed.

        That is, a rank was late, stalled or died, ranks called different ops, or an op ran on another mesh or
        at the same time as another op of its channel.

        It does not wait for running ops, so call it when results are ready (`jax.block_until_ready`). On CPUs
        of several domains it also names ranks whose hop between domains has lasted longer than `timeout_s`;
        their results may never be ready. On the CPU the first failure since the last call is raised, once. On
        GPUs every call raises it until the `Group` is created again, except if ranks reached different ops at
        a first call. They then refuse that call alone, and it is raised once.
        """
        self._require_open("check")
        module = _extension.extension()
        text = None if module is None else module.take_expired(self._opened.key)
        if text is not None:
            raise PeerTimeoutError(text)

    def close(self) -> None:
        """Frees the group's state once no equal group is open. A group may be closed twice.

        On GPUs the control blocks and the arena (`info().device_bytes`: 39 MiB on each device with two ranks,
        0.3 MiB more for each further rank up to 16, and 2.3 MiB for each one after that) are kept until the
        process ends, because a captured graph may hold their addresses. A new group of the same devices uses
        them again.

        Waits for running programs whose results are still referenced, because they may use the group.
        """
        if self._closed:
            return
        self._closed = True
        module = _extension.extension()
        if module is None:
            return
        for array in jax.live_arrays(self._ranks.platform):
            # Errors of an array's program are raised where the array is read.
            with contextlib.suppress(Exception):
                array.block_until_ready()
        self._release(module)

    def __enter__(self) -> "Group":
        self._require_open("with")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self!r} cannot be pickled, because it refers to devices of this process. Instead make a Group "
            "from the mesh in each process"
        )

    def __copy__(self) -> "Group":
        return self

    def __deepcopy__(self, _: object) -> "Group":
        return self  # because a model that is copied refers to its group but does not own it

    def __eq__(self, other: object) -> bool:
        return self._ranks == other._ranks if isinstance(other, Group) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._ranks)

    def __repr__(self) -> str:
        return self._ranks.name

    def _require_open(self, op: str) -> None:
        if self._closed:
            raise RuntimeError(f"{op}: {self!r} is closed; make a new Group")

    def _resolve(self, implementation: str | None) -> _extension.Implementation:
        """Returns the implementation that an op of this group uses."""
        implementation = _extension.check_implementation(implementation)
        if implementation == "xla":
            return "xla"
        reason = self._ffi_error()
        if implementation == "ffi" and reason:
            raise ValueError(f"implementation='ffi' cannot run {self!r}: {reason}. Use implementation='xla'.")
        if reason and self._ranks.spans_processes and not _extension.reason_against_ffi(self._ranks.platform):
            _extension.warn_once(
                f"jax_ep: {self!r} spans processes; its ops use implementation='xla', because {reason}"
            )
        elif reason:
            _extension.warn_of_falling_back(self._ranks.platform, reason)
        return "xla" if reason else "ffi"

    def _ffi_error(self) -> str:
        """Returns why the group's ops cannot use FFI handlers, empty if they can."""
        ranks = self._opened
        reason = _extension.reason_against_ffi(ranks.platform) or self._setup_error
        if not reason and ranks.spans_processes and ranks.platform != "gpu":
            return "on CPUs the ranks of a domain must live in one process"
        return reason


def _ranks(
    group: Group,
    axis_name: str | tuple[str, ...],
    axes: tuple[str, ...],
    devices: np.ndarray,
    per_domain: int,
) -> Ranks:
    """Returns the ranks of a group of devices [lists of ranks, R], of which `per_domain` share a domain."""

    def describe(devices: np.ndarray, key: str, name: str) -> Ranks:
        platform = devices.flat[0].platform
        ids = tuple(tuple(device.id for device in ranks) for ranks in devices)
        shown = [list(ranks) for ranks in ids]
        return Ranks(
            key=f"{platform}:{','.join(axes)}:{ids}{key}",
            group=group,
            name=f"Group({axis_name!r}, {platform} devices {shown if len(shown) > 1 else shown[0]}{name})",
            axis_name=axis_name,
            axes=axes,
            size=devices.shape[1],
            platform=platform,
            spans_processes=any(
                device.process_index != ranks[0].process_index for ranks in devices for device in ranks
            ),
        )

    size = devices.shape[1]
    if per_domain == size:
        return describe(devices, "", "")
    index_groups = tuple(tuple(range(first, first + per_domain)) for first in range(0, size, per_domain))
    key = f":within each of {len(index_groups)} domains"
    within = describe(devices.reshape(-1, per_domain), key, ", one group per domain")
    within = dataclasses.replace(within, index_groups=index_groups)
    whole = describe(devices, f":{per_domain} ranks a domain", f", ranks_per_domain={per_domain}")
    return dataclasses.replace(whole, within=within)


def ranks_of(group: Group) -> Ranks:
    """Returns the ranks of a group, which is what traced programs depend on."""
    return group._ranks


def resolve_implementation(group: Group, implementation: str | None) -> _extension.Implementation:
    """Returns the implementation that an op of a group uses. Raises ValueError if it cannot be used."""
    return group._resolve(implementation)


def require_open(op: str, group: Group) -> None:
    """Raises RuntimeError if a group is closed."""
    group._require_open(op)
