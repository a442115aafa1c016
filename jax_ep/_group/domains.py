"""Assignment of ranks to domains, within which rows travel directly between buffers.

On CPUs a domain is a process. On GPUs it is a host, or several hosts whose GPUs form one NVLink domain, such
as the 72 GPUs of a GB200 NVL72.
"""

import jax
import numpy as np

from jax_ep import _extension
from jax_ep._checks import integer
from jax_ep._extension import Device, Extension
from jax_ep._group import handshake


def forced_ranks_per_domain(value: object, num_ranks: int) -> int:
    """Checks that a Group's `ranks_per_domain` divides its number of ranks, and returns it."""
    number = integer(value)
    if number is None:
        raise TypeError(f"Group: ranks_per_domain must be an int (or None), got {value!r}")
    if number < 1 or num_ranks % number:
        raise ValueError(
            f"Group: ranks_per_domain must divide the {num_ranks} ranks of the group, got {number}; every "
            "domain has the same number of ranks"
        )
    return number


def find_ranks_per_domain(devices: np.ndarray, limit_s: float) -> tuple[int, str]:
    """Returns the ranks per domain of groups of devices [groups, R], and an error, empty on success.

    The ranks of a domain must be consecutive, and every domain must have the same number of ranks. Otherwise
    all ranks count as ranks of one domain, and the error states why.
    """
    num_ranks = devices.shape[1]
    domains = _domains_of(devices, limit_s)
    first_group = domains[0]
    per_domain = int(np.count_nonzero(first_group == first_group[0]))
    is_even = num_ranks % per_domain == 0
    if is_even:
        blocks = domains.reshape(len(domains), -1, per_domain)
        # The ranks of a domain are exactly one block of a group.
        is_even = bool((blocks == blocks[..., :1]).all()) and all(
            len(set(group)) == len(group) for group in blocks[..., 0]
        )
    if is_even:
        return per_domain, ""
    return num_ranks, (
        "the ranks live in several domains (hosts, or hosts that NVLink joins), but the ranks of a domain "
        "are not consecutive, or not every domain has the same number of ranks (the domains of the ranks are "
        f"{domains.tolist()}); order the devices of the mesh such that the axis of the group goes through "
        "one domain after the other"
    )


def _domains_of(devices: np.ndarray, limit_s: float) -> np.ndarray:
    """Returns the number of each device's domain [groups, R]."""
    processes = np.vectorize(lambda device: device.process_index, otypes=[int])(devices)
    if len(np.unique(processes)) == 1:
        return np.zeros_like(processes)
    if devices.flat[0].platform != "gpu":
        return processes  # because CPU devices reach each other only within a process
    module = _extension.extension()
    if module is None or _extension.reason_against_ffi("gpu"):
        return np.zeros_like(processes)  # because without kernels rows cannot be exchanged within a domain
    with handshake.exclusive_setup(limit_s):
        names = _domain_of_each_process(module, list(devices.flat), limit_s)
    numbers = {name: number for number, name in enumerate(sorted(set(names.values())))}
    return np.vectorize(lambda process: numbers[names[process]], otypes=[int])(processes)


def _domain_of_each_process(
    module: Extension, devices: list[Device], limit_s: float
) -> dict[int, tuple[int, ...]]:
    """Returns a value for each process that is the same for the processes of a domain.

    If there are several hosts, each process exports a fabric handle and tries to import those of the other
    hosts, which works within an NVLink domain only. Nothing is mapped. A domain is a set of processes each of
    which reaches exactly this set.
    """
    own = handshake.host_id()
    messages = handshake.exchange(devices, {"host": own}, limit_s, "reporting which host each process is on")
    hosts = {process: message["host"] for process, message in messages.items()}
    if len(set(hosts.values())) == 1:
        return dict.fromkeys(hosts, ())
    device = next(d for d in devices if d.process_index == jax.process_index())
    messages = handshake.exchange(
        devices, {"fabric": _fabric_handle(module, device)}, limit_s, "exporting memory to other hosts"
    )
    handles = {process: message["fabric"] for process, message in messages.items() if hosts[process] != own}
    errors = {process: _why_not_imported(module, handle, device) for process, handle in handles.items()}
    if messages[jax.process_index()]["fabric"] and all(errors.values()):
        _extension.warn_once(
            "jax_ep: this process can share its GPU's memory with other hosts, as in an NVLink domain, but "
            f"not import that of any of them, so they are separate domains: {min(errors.values())}"
        )
    reached = [process for process in hosts if not errors.get(process)]
    messages = handshake.exchange(
        devices, {"reached": sorted(reached)}, limit_s, "reporting which hosts NVLink joins"
    )
    sets = {process: tuple(message["reached"]) for process, message in messages.items()}
    return {
        process: peers
        if all(sets[peer] == peers for peer in peers)
        else tuple(sorted(p for p in hosts if hosts[p] == hosts[process]))
        for process, peers in sets.items()
    }


def _export(module: Extension, device: Device) -> bytes:
    """Returns a fabric handle of JAX's memory on a GPU. Raises RuntimeError if the driver gives none."""
    (address,) = _extension.sample_addresses([device])
    return module.export_fabric_region(address, device.local_hardware_id)


def _fabric_handle(module: Extension, device: Device) -> str:
    """Returns such a handle in hexadecimal digits, empty if there is none."""
    try:
        return _export(module, device).hex()
    except RuntimeError:  # NVLink joins no other host, or the process lacks an IMEX channel
        return ""


def _why_not_imported(module: Extension, handle: str, device: Device) -> str:
    """Returns why a GPU cannot import a handle, empty if it can."""
    if not handle:
        return "no process of another host has an IMEX channel"
    try:
        module.try_fabric_handle(bytes.fromhex(handle), device.local_hardware_id)
    except RuntimeError as error:
        return str(error)
    return ""


def describe_sharing(device: Device) -> str:
    """Describes whether other hosts could map JAX's memory on a GPU, as those of an NVLink domain do."""
    module = _extension.extension()
    if module is None or _extension.reason_against_ffi("gpu"):
        return "no, without handlers for GPUs"
    try:
        _export(module, device)
    except RuntimeError as error:
        return f"no: {error}"
    return "yes, by fabric handles (never executed)"
