"""Which groups get rails between their domains, and what is compiled where they do. No network is needed."""

import ast
import dataclasses
import importlib.util
import pathlib
import re
import subprocess
import sys
import threading
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from cases import count_calls, ranks
from devices import skip_or_fail
from layers import R, inputs, layer

import jax_ep
from jax_ep import _extension
from jax_ep._group import handshake, nccl
from jax_ep._group.group import ranks_of
from jax_ep.command import info

pytestmark = pytest.mark.one_jax

STEPS = ["connect", "allocate", "register", "join", "try", "publish"]


class Module:
    """What the extension would say, and what it is asked."""

    def __init__(self, **says):
        self.says = {"version": ("2.30.7", "")} | says
        self.asked = []

    def build_info(self):
        return {"nccl": "2.30.7"}

    def nccl_version(self):
        return self.says["version"]

    def rail_id(self):
        self.asked.append("id")
        return f"id {len(self.asked)}"

    def connect_rails(self, key, rails, num_domains):
        self.asked.append(("connect", rails, num_domains))
        return self._say("connect")

    def _say(self, step):
        """What it says of a step; `step:` names what to do instead."""
        if f"{step}:" in self.says:
            return self.says[f"{step}:"]()
        return self.says.get(step, "")

    def why_rails_failed(self, key):
        return self._say("failed")

    def __getattr__(self, name):
        step, _, noun = name.partition("_")
        if noun != "rails" or step not in (*STEPS, "drop"):
            raise AttributeError(name)
        self.asked.append(step)
        return lambda key, *_: self._say(step)


def grid(processes):
    """Devices [groups, R] of these processes."""
    flat = [
        SimpleNamespace(id=i, process_index=process, local_hardware_id=10 + i)
        for i, process in enumerate(np.ravel(processes))
    ]
    return np.array(flat, dtype=object).reshape(np.shape(processes))


@pytest.fixture
def others(monkeypatch):
    """What other processes answer in each step, by words of it; else what this one says."""
    answers = {}

    def exchange(devices, message, limit_s, step):
        processes = {device.process_index for device in devices}
        theirs = message | next((answer for words, answer in answers.items() if words in step), {})
        if "ids" in message:
            theirs = {**theirs, "ids": {"9": "theirs"}}
        return {process: message if process == 0 else theirs for process in processes}

    monkeypatch.setattr(handshake, "exchange", exchange)
    monkeypatch.setattr(handshake, "drain", lambda devices, limit_s: None)
    monkeypatch.setattr(nccl, "_settled", {})
    return answers


def open_rails(module, monkeypatch, processes=((0, 0, 1, 1),), reason="", per_domain=2, limit_s=1.0):
    monkeypatch.setattr(_extension, "_load", lambda: (module, ""))
    return nccl.open_rails(grid(processes), per_domain, reason, limit_s)


def test_each_index_has_a_rail(others, monkeypatch):
    module = Module()
    assert open_rails(module, monkeypatch) == ""
    # This process has domain 0, and so it names both rails.
    rails = [(10, 0, "id 1"), (11, 0, "id 2")]
    assert module.asked == ["id", "id", ("connect", rails, 2), *STEPS[1:]]


def test_groups_beside_each_other_have_rails_of_their_own(others, monkeypatch):
    module = Module()
    assert open_rails(module, monkeypatch, [[0, 0, 1, 1], [0, 0, 1, 1]]) == ""
    _, rails, _ = module.asked[-len(STEPS)]
    assert rails == [(10, 0, "id 1"), (11, 0, "id 2"), (14, 0, "id 3"), (15, 0, "id 4")]


def test_an_equal_group_finds_what_was_settled(others, monkeypatch):
    assert "too old" in open_rails(Module(version=("", "it is too old")), monkeypatch)
    assert "too old" in open_rails(Module(), monkeypatch)
    assert open_rails(Module(), monkeypatch, [[0, 0, 1, 1], [0, 0, 1, 1]]) == ""
    module = Module()
    assert open_rails(module, monkeypatch, [[0, 0, 1, 1], [0, 0, 1, 1]]) == ""
    assert module.asked == []


@pytest.mark.parametrize(
    ("says", "answers", "expected", "asked"),
    [
        ({"version": ("", "NCCL 2.27.7 is loaded")}, {}, "process 0: NCCL 2.27.7 is loaded", []),
        ({}, {"NCCL is loaded": {"error": "NCCL 2.27.7 is loaded"}}, "process 1: NCCL 2.27.7", []),
        ({}, {"NCCL is loaded": {"version": "2.32.3"}}, "different versions of NCCL: 2.30.7, 2.32.3", []),
        ({}, {"NCCL is loaded": {"protocol": 0}}, f"different versions of jax_ep: 0, {nccl.PROTOCOL}", []),
        ({}, {"group is made": {"key": "other"}}, "different groups at the same time", []),
        ({}, {"group is made": {"state": ""}}, "ended in some of the processes only", []),
        ({}, {"group is made": {"state": "it did not end"}}, "it did not end", []),
        ({}, {"earlier programs": {"error": "one fails"}}, "process 1: one fails", []),
        ({"connect": "GIN needs an RDMA network"}, {}, "process 0: GIN needs", [*STEPS[:1], "drop"]),
        ({}, {"connecting": {"error": "no GIN"}}, "process 1: no GIN", [*STEPS[:1], "drop"]),
        ({"allocate": "out of memory"}, {}, "process 0: out of memory", [*STEPS[:2], "drop"]),
        ({}, {"allocating memory": {"error": "none"}}, "process 1: none", [*STEPS[:2], "drop"]),
        ({"register": "no windows"}, {}, "process 0: no windows", [*STEPS[:3], "drop"]),
        ({"join": "4 contexts"}, {}, "process 0: 4 contexts", [*STEPS[:4], "drop"]),
        ({"try": "it brought other bytes"}, {}, "it brought", [*STEPS[:5], "drop"]),
        ({}, {"trying": {"error": "heard nothing"}}, "process 1: heard nothing", [*STEPS[:5], "drop"]),
    ],
)
def test_all_processes_have_rails_or_none(says, answers, expected, asked, others, monkeypatch):
    """What one lacks is told to all, and nothing is left behind."""
    module = Module(**says)
    others.update(answers)
    assert expected in open_rails(module, monkeypatch)
    done = [step if isinstance(step, str) else step[0] for step in module.asked]
    assert [step for step in done if step != "id"] == asked


@pytest.mark.parametrize(
    ("module", "reason", "expected"),
    [
        (None, "", "ops use implementation='xla' there"),
        (
            Module(),
            "the ranks do not reach each other",
            "ops use implementation='xla' there (the ranks do not",
        ),
        (SimpleNamespace(build_info=dict), "", "built without NCCL's device API"),
    ],
)
def test_what_is_missing_here_is_told(module, reason, expected, others, monkeypatch):
    assert expected in open_rails(module, monkeypatch, reason=reason)


@pytest.mark.parametrize("processes", [[[0, 0, 0, 0]], [[0, 0], [1, 1]]])
def test_domains_of_one_process_are_made_up(processes, others, monkeypatch):
    module = Module()
    reason = open_rails(module, monkeypatch, processes, per_domain=1)
    assert "all ranks of a group are in one process" in reason
    assert module.asked == []


def test_rails_that_have_failed_are_not_used_again(others, monkeypatch):
    assert open_rails(Module(), monkeypatch) == ""
    assert open_rails(Module(), monkeypatch) == ""
    others["group is made"] = {"state": "a hop has failed there"}
    assert open_rails(Module(), monkeypatch) == "a hop has failed there"
    del others["group is made"]
    assert open_rails(Module(), monkeypatch) == "a hop has failed there"


def test_a_failed_hop_of_this_process_is_told(others, monkeypatch):
    assert open_rails(Module(), monkeypatch) == ""
    assert "(domain 1 is silent)" in open_rails(Module(failed="domain 1 is silent"), monkeypatch)


def test_a_set_up_that_did_not_end_is_remembered(others, monkeypatch):
    """Its thread is still at work, and so nothing is given back, and the next group has no rails."""
    ends = threading.Event()
    module = Module(**{"connect:": lambda: ends.wait(60) and ""})
    with pytest.raises(
        handshake.SetupTimeout, match=r"connecting domains by NCCL did not end within 0.2 s.*NCCL"
    ):
        open_rails(module, monkeypatch, limit_s=0.2)
    assert "an earlier set-up did not end" in open_rails(Module(), monkeypatch)
    ends.set()
    assert "drop" not in module.asked


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (Module(), "NCCL 2.30.7's device API if it finds a network"),
        (Module(version=("", "JAX has not loaded NCCL")), "XLA's collectives, because JAX has not loaded"),
    ],
)
def test_info_says_what_hosts_would_use(module, expected, monkeypatch):
    report = info.collect()
    monkeypatch.setattr(_extension, "_load", lambda: (module, ""))
    monkeypatch.setattr(_extension, "reason_against_ffi", lambda platform: "")
    lines = info._lines(report | {"rails": nccl.describe()})
    assert any(re.search(f"between domains: {re.escape(expected)}", line) for line in lines)


def say_nccl(prelude):
    """What a process finds that has done this before."""
    program = f"import ctypes, jax_ep._C as module; {prelude}; print(module.nccl_version(), end='')"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    return ast.literal_eval(done.stdout)


def test_only_the_library_that_is_loaded_is_used():
    module = _extension.extension()
    places = getattr(importlib.util.find_spec("nvidia"), "submodule_search_locations", [])
    library = next((path for at in places for path in pathlib.Path(at).glob("nccl/lib/libnccl.so.2")), None)
    if module is None or "nccl" not in module.build_info() or library is None:
        pytest.skip("needs an extension that was built with NCCL's headers, and the package nvidia-nccl")
    assert say_nccl("0") == ("", "JAX has not loaded NCCL (libnccl.so.2)")
    version, reason = say_nccl(f"ctypes.CDLL({str(library)!r})")
    assert bool(version) != bool(reason)
    if reason:
        assert re.search(r"JAX has loaded NCCL \d.*, and at least \d.* is needed", reason)


def test_a_group_whose_rails_do_not_end_leaves_no_user(two_hosts, monkeypatch):
    """Nobody has it to close it."""
    closed = []
    module = SimpleNamespace(close_group=closed.append)

    def stuck(*_):
        raise handshake.SetupTimeout("connecting domains did not end")

    with monkeypatch.context() as patched:
        patched.setattr(nccl, "open_rails", stuck)
        patched.setattr(_extension, "extension", lambda: module)
        with pytest.raises(jax_ep.PeerTimeoutError, match="did not end"):
            two_hosts.group._open_rails(grid([[0, 0, 1, 1]]), 1.0)
    assert closed == [ranks_of(two_hosts.group).within.key]


@pytest.fixture
def two_hosts(monkeypatch):
    """A group of two domains as it would be on GPUs that are not here."""
    skip_or_fail("devices", 2, R)
    on = ranks(R, R // 2)
    within = dataclasses.replace(ranks_of(on.group).within, platform="gpu")
    whole = dataclasses.replace(ranks_of(on.group), platform="gpu", within=within, rails="rails")
    monkeypatch.setattr(on.group, "_ranks", whole)
    monkeypatch.setattr(on.group, "_rails_error", "")
    monkeypatch.setattr(_extension, "reason_against_ffi", lambda platform: "")
    return on


def info_of(group, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(_extension, "extension", lambda: SimpleNamespace(group_bytes=lambda num_ranks: 1))
        return group.info()


def lowered(on, implementation):
    x, ids, w = inputs()
    mapped = on.map(lambda *a: layer(*a, on.group, implementation=implementation))
    gradient = jax.jit(jax.grad(lambda x, w: mapped(x, ids, w).sum(), argnums=(0, 1)))
    return gradient.trace(x, w).lower(lowering_platforms=("cuda",)).as_text("hlo")


def test_all_hops_go_over_rails(two_hosts, monkeypatch):
    assert info_of(two_hosts.group, monkeypatch) == jax_ep.GroupInfo("ffi", "", 1, R // 2, "nccl")
    text = lowered(two_hosts, "ffi")
    assert "all-to-all" not in text
    # A dispatch, and the gradients of a combine and of a dispatch. The sums themselves are not asked for.
    assert count_calls(text)["rail_hop"] == 3


def test_xla_means_its_collectives(two_hosts):
    text = lowered(two_hosts, "xla")
    assert "all-to-all" in text
    assert count_calls(text) == {}


def test_hops_go_by_xla_without_rails(two_hosts, monkeypatch):
    without_rails = dataclasses.replace(ranks_of(two_hosts.group), rails=None)
    monkeypatch.setattr(two_hosts.group, "_ranks", without_rails)
    monkeypatch.setattr(two_hosts.group, "_rails_error", "there is no network")
    reason = "rows between domains use XLA's collectives: there is no network"
    expected = jax_ep.GroupInfo("ffi", reason, 1, R // 2, "xla")
    assert info_of(two_hosts.group, monkeypatch) == expected
    text = lowered(two_hosts, "ffi")
    assert "all-to-all" in text
    assert "rail_hop" not in count_calls(text)


def test_groups_in_one_process_have_no_rails():
    assert ranks(R).group.info().between_domains is None
    skip_or_fail("devices", 2, R)
    assert ranks(R, R // 2).group.info().between_domains == "xla"
