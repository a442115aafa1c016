"""Which ranks share a domain, and which processes a group needs, with devices that are made up."""

import contextlib
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jax_ep import _extension
from jax_ep._group import domains, handshake


def device(number, process, platform="gpu"):
    return SimpleNamespace(id=number, local_hardware_id=0, process_index=process, platform=platform)


def grid(processes, platform="gpu"):
    """Devices [groups, R] of these processes."""
    flat = [device(i, process, platform) for i, process in enumerate(np.ravel(processes))]
    return np.array(flat, dtype=object).reshape(np.shape(processes))


class World:
    """What other processes would say. Nobody says anything before the hosts are set."""

    def __init__(self):
        self.hosts = {}  # of each process
        self.clusters = {}  # that NVLink joins, of each process that has handles

    def handle(self, process):
        return f"{self.clusters[process]:02x}" if process in self.clusters else ""

    def reached(self, process):
        return [
            other
            for other in self.hosts
            if self.hosts[other] == self.hosts[process]
            or (other in self.clusters and self.clusters[other] == self.clusters.get(process))
        ]

    def export(self, address, device):
        if not self.handle(0):
            raise RuntimeError("no channel")
        return bytes.fromhex(self.handle(0))

    def attempt(self, handle, device):
        if handle.hex() != self.handle(0):
            raise RuntimeError("the driver says no")

    def exchange(self, devices, message, limit_s, step):
        (kind,) = message
        if kind == "host":
            assert message == {"host": handshake.host_id()}
            said = self.hosts
        else:
            say = {"fabric": self.handle, "reached": self.reached}[kind]
            said = {process: say(process) for process in self.hosts}
            assert message[kind] == said[0]
        return {d.process_index: {kind: said[d.process_index]} for d in devices}


@pytest.fixture
def world(monkeypatch):
    world = World()
    module = SimpleNamespace(export_fabric_region=world.export, try_fabric_handle=world.attempt)
    monkeypatch.setattr(handshake, "exchange", world.exchange)
    monkeypatch.setattr(handshake, "host_id", lambda: world.hosts[0])
    monkeypatch.setattr(_extension, "reason_against_ffi", lambda platform: "")
    monkeypatch.setattr(_extension, "extension", lambda: module)
    monkeypatch.setattr(_extension, "sample_addresses", lambda devices: [0x1000 for _ in devices])
    return world


@pytest.mark.parametrize(
    ("processes", "per_domain"),
    [
        ([[0, 0, 0, 0, 1, 1, 1, 1]], 4),
        ([[0, 0, 1, 1, 2, 2, 3, 3]], 2),
        ([[0, 1, 2, 3]], 1),
        ([[0, 0, 1, 1], [0, 0, 1, 1]], 2),  # two groups beside each other
        ([[0, 0], [1, 1]], 2),  # none spans hosts
        ([[5, 5, 5]], 3),
    ],
)
def test_a_process_is_a_domain_of_cpus(processes, per_domain):
    assert domains.find_ranks_per_domain(grid(processes, "cpu"), 1) == (per_domain, "")


@pytest.mark.parametrize(
    ("names", "per_domain"),
    [
        (["a", "a", "a", "a"], 4),
        (["a", "a", "b", "b"], 2),
        (["b", "b", "a", "a"], 2),
        (["a", "b", "c", "d"], 1),
    ],
)
def test_gpus_of_several_processes_say_which_host_they_are_on(names, per_domain, world):
    world.hosts = dict(enumerate(names))
    assert domains.find_ranks_per_domain(grid([[0, 1, 2, 3]]), 1) == (per_domain, "")


@pytest.mark.parametrize(
    ("clusters", "per_domain", "warning"),
    [
        ([1, 1, 1, 1], 4, None),  # NVLink joins both hosts
        ([1, 1, 2, 2], 2, "separate domains: the driver says no"),
        ([1, 1, None, None], 2, "separate domains: no process of another host has an IMEX channel"),
        ([None, None, 1, 1], 2, None),  # of this host: most have none
        ([1, None, 1, 1], 2, None),  # one process lacks its channel: no set that all reach each other
    ],
)
def test_hosts_that_nvlink_joins_are_one_domain(clusters, per_domain, warning, world):
    world.hosts = dict(enumerate("aabb"))
    world.clusters = {p: cluster for p, cluster in enumerate(clusters) if cluster}
    _extension.warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match=warning) if warning else contextlib.nullcontext():
        assert domains.find_ranks_per_domain(grid([[0, 1, 2, 3]]), 1) == (per_domain, "")


def test_several_domains_of_several_hosts(world):
    world.hosts = dict(enumerate("aabbccdd"))
    world.clusters = dict(enumerate([1] * 4 + [2] * 4))
    assert domains.find_ranks_per_domain(grid([list(range(8))]), 1) == (4, "")


def test_one_process_asks_nobody(world):
    assert domains.find_ranks_per_domain(grid([[0, 0, 0, 0]]), 1) == (4, "")


def test_gpus_without_kernels_ask_nobody(world, monkeypatch):
    monkeypatch.setattr(_extension, "reason_against_ffi", lambda platform: "no CUDA part")
    assert domains.find_ranks_per_domain(grid([[0, 1]]), 1) == (2, "")


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
    per_domain, reason = domains.find_ranks_per_domain(grid(processes, "cpu"), 1)
    assert per_domain == len(processes[0])
    assert "not consecutive, or not every domain has the same number" in reason
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
