"""Which ranks share a host."""

from typing import Any

import numpy as np

from jax_ep import _extension
from jax_ep._checks import integer
from jax_ep._group import handshake


def forced_ranks_per_host(value: Any, num_ranks: int) -> int:
    """A Group's ranks_per_node: a divisor of its ranks."""
    number = integer(value)
    if number is None:
        raise TypeError(f"Group: ranks_per_node must be an int (or None), got {value!r}")
    if number < 1 or num_ranks % number:
        raise ValueError(
            f"Group: ranks_per_node must divide the {num_ranks} ranks of the group, got {number}; every host "
            "has as many of them"
        )
    return number


def find_ranks_per_host(devices: np.ndarray, limit_s: float) -> tuple[int, str]:
    """How many ranks each host has, of groups of devices [groups, R]; and why they are not used so, if so.

    The ranks of a host must be consecutive, and as many on each. Where they are not, the ranks count as those
    of one host.
    """
    num_ranks = devices.shape[1]
    hosts = _hosts_of(devices, limit_s)
    first = hosts[0]
    per_host = int(np.count_nonzero(first == first[0]))
    even = num_ranks % per_host == 0
    if even:
        blocks = hosts.reshape(len(hosts), -1, per_host)
        # A host's ranks are one block of a group: none is in two, and none is of two hosts.
        even = bool((blocks == blocks[..., :1]).all()) and all(
            len(set(group)) == len(group) for group in blocks[..., 0]
        )
    if even:
        return per_host, ""
    return num_ranks, (
        "the ranks live on several hosts, but those of a host are not consecutive, or not as many on each "
        f"(the hosts of the ranks are {hosts.tolist()}); order the devices of the mesh such that the axis of "
        "the group goes through one host after the other"
    )


def _hosts_of(devices: np.ndarray, limit_s: float) -> np.ndarray:
    """The number of each device's host [groups, R]."""
    processes = np.vectorize(lambda device: device.process_index, otypes=[int])(devices)
    if len(np.unique(processes)) == 1:
        return np.zeros_like(processes)
    if devices.flat[0].platform != "gpu":
        return processes  # only the devices of one process reach each other there
    if _extension.reason_against_ffi("gpu"):
        return np.zeros_like(processes)  # there are no kernels to be used within a host
    told = handshake.exchange(
        list(devices.flat), {"host": handshake.host_id()}, limit_s, "saying which host each process is on"
    )
    names = sorted({message["host"] for message in told.values()})
    return np.vectorize(lambda process: names.index(told[process]["host"]), otypes=[int])(processes)
