"""Several processes with GPUs of one host. Run it by itself: the GPUs must be free.

Where there are fewer GPUs than processes, some share a GPU (docs/multi_process.md).
"""

import glob
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from devices import skip_or_fail
from processes import GPUS, run_all, shares

from jax_ep.bench.processes import visible_gpus
from jax_ep.command.options import free_address

pytestmark = pytest.mark.gpu_processes

TESTS = pathlib.Path(__file__).parents[1]
WORKER = TESTS / "support" / "gpu_worker.py"
COUNT = len(visible_gpus())


def need_gpus(count):
    skip_or_fail("GPUs", count, COUNT)


def run(task, processes, *, hide=False, apart=False, joined=0, may_die=(), last=None, **environment):
    """Starts the processes, all GPUs of the host shared among them; their outputs.

    `last`: what else is in the environment of the last process.
    `apart`: each is to think that it is on a host of its own, and NCCL, too, which then uses sockets.
    `joined`: and that NVLink joins so many of these hosts.
    """
    need_gpus(1)
    address, commands, environments = free_address(), [], []
    for process, share in enumerate(shares(processes, visible_gpus())):
        commands.append([sys.executable, str(WORKER), task, address, str(processes), str(process)])
        environments.append({"JAX_PLATFORMS": "cuda", **share, **environment})
        if hide:  # as job schedulers do: each process sees its GPUs only, and counts them from 0
            names = [visible_gpus()[int(gpu)] for gpu in share[GPUS].split(",")]
            own = ",".join(map(str, range(len(names))))
            environments[-1] |= {"CUDA_VISIBLE_DEVICES": ",".join(names), GPUS: own}
        if apart:
            host = f"host {process}"
            environments[-1] |= {"JAX_EP_TEST_HOST": host, "NCCL_HOSTID": host, "NCCL_SOCKET_IFNAME": "lo"}
        if joined:
            environments[-1]["JAX_EP_TEST_CLUSTER"] = f"cluster-{process // joined}"
    environments[-1] |= last or {}
    try:
        return run_all(commands, environments, timeout=110, may_die=may_die)
    except AssertionError as error:
        if "Duplicate GPU detected" in str(error):  # NCCL is older than 2.30
            skip_or_fail("GPUs", processes, COUNT)
        raise


def digests(outputs, word="digest"):
    found = {tuple(re.findall(rf"^{word} (\w+) (\w+)$", output, re.M)) for output in outputs}
    (same,) = found  # on all processes, and one of all five runs
    assert [order for order, _ in same] == ["rank", "expert"]
    return same


@pytest.mark.timeout(300)
def test_results_are_the_same_in_every_process_model():
    need_gpus(2)
    together = digests(run("digests", 1))
    assert digests(run("digests", COUNT)) == together
    assert digests(run("digests", COUNT, hide=True)) == together
    if COUNT > 2:
        assert digests(run("digests", 2)) == together


def test_ranks_that_copy_in_unlike_ways_agree_on_waves():
    """300 tokens make as many waves by batches of bulk copies as by those of plain ones, but other waves."""
    shape = {"JAX_EP_NO_ARENA": "1", "JAX_EP_TEST_TOKENS": "300"}
    unlike = run("digests", 2, last={"JAX_EP_PLAIN_COPIES": "1"}, **shape)
    assert digests(unlike) == digests(run("digests", 2, **shape))


@pytest.mark.timeout(400)
def test_hosts_of_one_process_each():
    """As with hosts that are made up in one process, bit for bit; and dispatch as on one host."""
    need_gpus(2)
    one = run("digests", 1)
    each = COUNT // 2
    made_up = run("digests", 1, JAX_EP_TEST_RANKS_PER_DOMAIN=str(each))
    found = run("digests", 2, apart=True)
    for outputs in (made_up, found):
        assert all(f"ranks_per_domain={each}" in output for output in outputs)
        assert all("implementation='ffi'" in output for output in outputs)
        assert digests(outputs, "dispatched") == digests(one, "dispatched")
    assert digests(found) == digests(made_up)


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    """The environment where NCCL's proxy has a plugin that takes the place of a network between domains."""
    need_gpus(1)
    skip_or_fail("compilers (g++)", 1, int(shutil.which("g++") is not None))
    plugin = tmp_path_factory.mktemp("plugin") / "librma_test.so"
    options = ["-std=c++17", "-O2", "-fvisibility=hidden", "-shared", "-fPIC"]
    source = str(TESTS / "native" / "rma_plugin.cc")
    subprocess.run(["g++", *options, "-o", str(plugin), source, "-ldl"], check=True)
    return {"NCCL_RMA_PLUGIN": str(plugin), "NCCL_GIN_TYPE": "2"}


@pytest.fixture(scope="module")
def joined(network):
    """What a layer computes where NCCL joins the hosts, beside JAX's collectives."""
    outputs = run("digests", 2, apart=True, **network)
    if any("between_domains='xla'" in output for output in outputs):
        reason = re.search(r"reason=(.*), device_bytes", outputs[0]).group(1)
        lacks = ("at least .* is needed", "was built without", "has not loaded NCCL")
        assert any(re.search(words, reason) for words in lacks), reason
        pytest.skip(reason)
    assert digests(outputs) == digests(run("digests", 2, apart=True, JAX_EP_NO_RAILS="1"))
    return digests(outputs)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "conditions",
    [
        {"RMA_TEST_DELAY_US": "5000"},
        {"NCCL_CROSS_NIC": "0"},  # a network that joins GPUs of the same index only
        {"JAX_EP_STRESS_US": "200"},
    ],
    ids=lambda conditions: next(iter(conditions)),
)
def test_hosts_that_are_joined_by_nccl(network, joined, conditions):
    """The kernel between domains, whatever the network does."""
    outputs = run("digests", 2, apart=True, **network, **conditions)
    assert all("between_domains='nccl'" in output for output in outputs)
    assert digests(outputs) == joined


def test_death_of_a_domain_that_is_joined_by_nccl(network, joined):
    outputs = run("death of a domain", 2, apart=True, may_die={1}, **network)
    seconds, text = re.search(r"after ([\d.]+) s: (.*)", outputs[0]).groups()
    assert "heard nothing from domain 1 within 5 s" in text
    assert float(seconds) < 10


def test_a_host_that_calls_another_op(network, joined):
    outputs = run("another order", 2, apart=True, **network)
    for output in outputs:
        assert re.search(r"error: .*hop between domains: .* was sent rows of another op", output)
        assert not re.search(r"^wrong [1-9]", output, re.M)


def test_hosts_of_several_processes_each():
    """Each of two hosts has two processes, which share their memory with each other only."""
    per_domain = 2 * max(COUNT // 4, 1)
    found = run("digests", 4, JAX_EP_TEST_RANKS_PER_DOMAIN=str(per_domain))
    assert all(f"ranks_per_domain={per_domain}" in output for output in found)
    assert digests(found, "dispatched") == digests(run("digests", 4), "dispatched")
    assert len(digests(found)) == 2
    if 2 * per_domain == COUNT:
        assert digests(found) == digests(run("digests", 1, JAX_EP_TEST_RANKS_PER_DOMAIN=str(per_domain)))


def test_death_of_a_domain():
    """JAX's collectives say so, at once: whatever waits for them fails, and nothing wrong comes out."""
    outputs = run("death of a domain", 2, apart=True, may_die={1})
    seconds, _ = re.search(r"after ([\d.]+) s: (.*)", outputs[0]).groups()
    assert float(seconds) < 10


def test_hosts_that_nvlink_joins_are_as_one():
    """Their processes meet over TCP, and find one another's memory by handles: rows make one hop."""
    outputs = run("digests", 2, apart=True, joined=2)
    assert all(f"ranks_per_domain={max(COUNT // 2, 1) * 2}," in output for output in outputs)
    assert digests(outputs) == digests(run("digests", 2))


def test_two_domains_of_two_hosts_each():
    """Rows make two hops, one between domains and one within, as with ranks that are told their domains."""
    per_domain = 2 * max(COUNT // 4, 1)
    outputs = run("digests", 4, apart=True, joined=2)
    assert all(f"ranks_per_domain={per_domain}" in output for output in outputs)
    assert digests(outputs) == digests(run("digests", 4, JAX_EP_TEST_RANKS_PER_DOMAIN=str(per_domain)))


@pytest.mark.parametrize("hosts", [{}, {"apart": True, "joined": 8}], ids=["one host", "hosts"])
def test_death_of_a_process(hosts):
    count = max(COUNT, 2)
    outputs = run("death", count, may_die={count - 1}, **hosts)
    for output in outputs[:-1]:
        seconds, text = re.search(r"after ([\d.]+) s: (.*)", output).groups()
        assert re.search(rf"rank\(s\) {count - 1} did not arrive in time", text)
        assert f"\njax_ep: {text}\n" in output
        assert float(seconds) < 10


@pytest.mark.parametrize("hosts", [{}, {"apart": True, "joined": 2}], ids=["one host", "hosts"])
def test_threads_that_run_programs_in_other_orders_are_refused(hosts):
    """First calls: the programs have equal ops, but not the same names. Then the group works as before."""
    for output in run("two threads", 2, **hosts):
        errors = re.findall(r"^error: (.*)$", output, re.M)
        assert len(errors) == 2
        for error in errors:
            assert "If several threads run programs of this group, let them take turns" in error
            assert "No rank has launched this call" in error
        assert "in program jit_" in "".join(errors)
        assert "doubled True" in output


@pytest.mark.parametrize("hosts", [{}, {"apart": True, "joined": 2}], ids=["one host", "hosts"])
def test_a_hundred_groups_leak_no_descriptor(hosts):
    for output in run("descriptors", 2, **hosts):
        early, late = re.search(r"descriptors (\d+) (\d+)", output).groups()
        assert early == late


def test_memory_that_grows_is_refused_with_the_remedy():
    # What goes through the arena touches no array of a peer, wherever that lies.
    outputs = run("growth", 2, XLA_PYTHON_CLIENT_PREALLOCATE="false", JAX_EP_NO_ARENA="1")
    assert all("error: " in output for output in outputs)
    assert any("XLA_PYTHON_CLIENT_PREALLOCATE=true" in output for output in outputs)


def test_processes_end_in_any_order_and_leave_nothing_behind(tmp_path):
    """Each but the last has a TMPDIR that is too long for a socket's path, and the last one another."""
    folders = [tmp_path / ("x" * 200) / ("y" * length) for length in (50, 100)]
    for folder in folders:
        folder.mkdir(parents=True)
    places = ["/dev/shm/*", *(f"{folder}/jax_ep-*" for folder in folders)]
    before = [set(glob.glob(place)) for place in places]
    first, last = map(str, folders)
    outputs = run("exit", max(COUNT, 2), TMPDIR=first, last={"TMPDIR": last})
    assert [set(glob.glob(place)) for place in places] == before
    # jax.distributed may say that its coordinator has gone; of this package and of CUDA there is no word.
    for output in outputs:
        assert "jax_ep" not in output, output
        assert "CUDA" not in output, output
