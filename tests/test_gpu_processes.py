"""Several processes with GPUs of one host. Run it by itself: the GPUs must be free."""

import glob
import pathlib
import re
import sys
import tempfile

import pytest
from conftest import skip_or_fail
from processes import run_all

from jax_ep._cli import free_address
from jax_ep.bench.processes import count_gpus

WORKER = pathlib.Path(__file__).with_name("gpu_worker.py")


def need_gpus(count):
    skip_or_fail("GPUs", count, count_gpus())


def run(task, processes, *, hide=False, may_die=(), **environment):
    """Starts the processes, all GPUs of the host shared among them; their outputs."""
    address, each = free_address(), count_gpus() // processes
    commands, environments = [], []
    for process in range(processes):
        arguments = [task, address, str(processes), str(process), str(each)]
        commands.append([sys.executable, str(WORKER), *arguments])
        environments.append({"JAX_PLATFORMS": "cuda", **environment})
        if hide:  # as job schedulers do: each process sees its GPUs only, and counts them from 0
            mine = ",".join(str(process * each + i) for i in range(each))
            environments[-1] |= {"CUDA_VISIBLE_DEVICES": mine, "JAX_EP_TEST_HIDDEN": "1"}
    return run_all(commands, environments, timeout=110, may_die=may_die)


def digests(outputs):
    found = {tuple(re.findall(r"^digest (\w+) (\w+)$", output, re.M)) for output in outputs}
    (same,) = found  # on all processes, and one of all five runs
    assert [order for order, _ in same] == ["rank", "expert"]
    return same


@pytest.mark.timeout(300)
def test_results_are_the_same_in_every_process_model():
    need_gpus(2)
    together = digests(run("digests", 1))
    assert digests(run("digests", count_gpus())) == together
    assert digests(run("digests", count_gpus(), hide=True)) == together
    if count_gpus() > 2:
        assert digests(run("digests", 2)) == together


def test_death_of_a_process():
    need_gpus(2)
    count = count_gpus()
    outputs = run("death", count, may_die={count - 1})
    for output in outputs[:-1]:
        seconds, text = re.search(r"after ([\d.]+) s: (.*)", output).groups()
        assert re.search(rf"rank\(s\) {count - 1} did not arrive in time", text)
        assert float(seconds) < 10


def test_a_hundred_groups_leak_no_descriptor():
    need_gpus(2)
    for output in run("descriptors", 2):
        early, late = re.search(r"descriptors (\d+) (\d+)", output).groups()
        assert early == late


def test_memory_that_grows_is_refused_with_the_remedy():
    need_gpus(2)
    # What goes through the arena touches no array of a peer, wherever that lies.
    outputs = run("growth", 2, XLA_PYTHON_CLIENT_PREALLOCATE="false", JAX_EP_NO_ARENA="1")
    assert all("error: " in output for output in outputs)
    assert any("XLA_PYTHON_CLIENT_PREALLOCATE=true" in output for output in outputs)


def test_processes_end_in_any_order_and_leave_nothing_behind():
    need_gpus(2)
    places = ["/dev/shm/*", f"{tempfile.gettempdir()}/jax_ep-*"]
    before = [set(glob.glob(place)) for place in places]
    outputs = run("exit", count_gpus())
    assert [set(glob.glob(place)) for place in places] == before
    # jax.distributed may say that its coordinator has gone; of this package and of CUDA there is no word.
    for output in outputs:
        assert "jax_ep" not in output, output
        assert "CUDA" not in output, output
