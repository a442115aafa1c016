"""Assignment of ranks to hosts."""

import numpy as np

from jax_ep import _extension
from jax_ep._checks import integer
from jax_ep._group import handshake


def forced_ranks_per_host(value: object, num_ranks: int) -> int:
    """Checks that a Group's `ranks_per_node` divides its number of ranks, and returns it."""
    number = integer(value)
    if number is None:
        raise TypeError(f"Group: ranks_per_node must be an int (or None), got {value!r}")
    if number < 1 or num_ranks % number:
        raise ValueError(
            f"Group: ranks_per_node must divide the {num_ranks} ranks of the group, got {number}; every host "
            "has the same number of ranks"
        )
    return number


def find_ranks_per_host(devices: np.ndarray, limit_s: float) -> tuple[int, str]:
    """Returns the number of ranks per host of groups of devices [groups, R], and an error, empty on success.

    The ranks of a host must be consecutive, and every host must have the same number of ranks. Otherwise all
    ranks count as ranks of one host, and the error states why.
    """
    num_ranks = devices.shape[1]
    hosts = _hosts_of(devices, limit_s)
    first_group = hosts[0]
    per_host = int(np.count_nonzero(first_group == first_group[0]))
    is_even = num_ranks % per_host == 0
    if is_even:
        blocks = hosts.reshape(len(hosts), -1, per_host)
        # The ranks of a host are exactly one block of a group.
        is_even = bool((blocks == blocks[..., :1]).all()) and all(
            len(set(group)) == len(group) for group in blocks[..., 0]
        )
    if is_even:
        return per_host, ""
    return num_ranks, (
        "the ranks live on several hosts, but the ranks of a host are not consecutive, or not every host has "
        f"the same number of ranks (the hosts of the ranks are {hosts.tolist()}); order the devices of the "
        "mesh such that the axis of the group goes through one host after the other"
    )


def _hosts_of(devices: np.ndarray, limit_s: float) -> np.ndarray:
    """Returns the number of each device's host [groups, R]."""
    processes = np.vectorize(lambda device: device.process_index, otypes=[int])(devices)
    if len(np.unique(processes)) == 1:
        return np.zeros_like(processes)
    if devices.flat[0].platform != "gpu":
        return processes  # because CPU devices reach each other only within a process
    if _extension.reason_against_ffi("gpu"):
        return np.zeros_like(processes)  # because without kernels rows cannot be exchanged within a host
    messages = handshake.exchange(
        list(devices.flat), {"host": handshake.host_id()}, limit_s, "reporting which host each process is on"
    )
    names = sorted({message["host"] for message in messages.values()})
    return np.vectorize(lambda process: names.index(messages[process]["host"]), otypes=[int])(processes)
