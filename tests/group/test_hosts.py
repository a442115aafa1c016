"""Which ranks share a host, and which processes a group needs, with devices that are made up."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jax_ep import _extension
from jax_ep._group import handshake, hosts


def device(number, process, platform="gpu"):
    return SimpleNamespace(id=number, process_index=process, platform=platform)


def grid(processes, platform="gpu"):
    """Devices [groups, R] of these processes."""
    flat = [device(i, process, platform) for i, process in enumerate(np.ravel(processes))]
    return np.array(flat, dtype=object).reshape(np.shape(processes))


@pytest.fixture
def host_of(monkeypatch):
    """The host of each process, as they would tell each other; empty as long as nobody asks."""
    hosts = {}

    def exchange(devices, message, limit_s, step):
        assert message == {"host": handshake.host_id()}
        return {d.process_index: {"host": hosts[d.process_index]} for d in devices}

    monkeypatch.setattr(handshake, "exchange", exchange)
    monkeypatch.setattr(_extension, "reason_against_ffi", lambda platform: "")
    return hosts


@pytest.mark.parametrize(
    ("processes", "per_host"),
    [
        ([[0, 0, 0, 0, 1, 1, 1, 1]], 4),
        ([[0, 0, 1, 1, 2, 2, 3, 3]], 2),
        ([[0, 1, 2, 3]], 1),
        ([[0, 0, 1, 1], [0, 0, 1, 1]], 2),  # two groups beside each other
        ([[0, 0], [1, 1]], 2),  # none spans hosts
        ([[5, 5, 5]], 3),
    ],
)
def test_a_process_is_a_host_of_cpus(processes, per_host):
    assert hosts.find_ranks_per_host(grid(processes, "cpu"), 1) == (per_host, "")


@pytest.mark.parametrize(
    ("names", "per_host"),
    [
        (["a", "a", "a", "a"], 4),
        (["a", "a", "b", "b"], 2),
        (["b", "b", "a", "a"], 2),
        (["a", "b", "c", "d"], 1),
    ],
)
def test_gpus_of_several_processes_say_which_host_they_are_on(names, per_host, host_of):
    host_of.update(enumerate(names))
    assert hosts.find_ranks_per_host(grid([[0, 1, 2, 3]]), 1) == (per_host, "")


def test_one_process_asks_nobody(host_of):
    assert hosts.find_ranks_per_host(grid([[0, 0, 0, 0]]), 1) == (4, "")


def test_gpus_without_kernels_ask_nobody(host_of, monkeypatch):
    monkeypatch.setattr(_extension, "reason_against_ffi", lambda platform: "no CUDA part")
    assert hosts.find_ranks_per_host(grid([[0, 1]]), 1) == (2, "")


@pytest.mark.parametrize(
    "processes",
    [
        [[0, 1, 0, 1]],  # not one after the other
        [[0, 0, 0, 1]],  # not as many on each
        [[0, 0, 1, 1, 0, 0]],  # a host twice
        [[0, 0, 1, 1], [0, 1, 1, 1]],  # the second group otherwise than the first
    ],
)
def test_ranks_that_are_laid_out_otherwise(processes):
    per_host, reason = hosts.find_ranks_per_host(grid(processes, "cpu"), 1)
    assert per_host == len(processes[0])
    assert "not consecutive, or not every host has the same number" in reason
    assert str(processes) in reason


@pytest.mark.parametrize(
    ("processes", "me", "found"),
    [
        ([0, 0, 1, 1], 0, [0, 1]),  # groups of a process each
        ([0, 1, 2, 3], 1, [0, 1]),
        ([0, 1, 1, 2, 3, 3], 0, [0, 1, 2, 3]),  # by way of process 1
        ([0, 0, 1, 1], 2, []),
    ],
)
def test_only_processes_of_the_same_groups_are_asked(processes, me, found, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: me)
    devices = list(grid(processes))
    assert [d.id for d in handshake.neighbors(devices, 2)] == found
    others = any(processes[i] != me for i in found)
    assert handshake.has_peers_elsewhere(devices, 2) == others
