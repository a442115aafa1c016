"""Several processes with GPUs of one host. Run it by itself: the GPUs must be free."""

import glob
import os
import pathlib
import re
import socket
import subprocess
import sys
import tempfile

import pytest
from processes import count_gpus

WORKER = pathlib.Path(__file__).with_name("gpu_worker.py")


def need_gpus(count):
    if count_gpus() < count:
        text = f"needs {count} GPUs, there are {count_gpus()}"
        if int(os.environ.get("JAX_EP_REQUIRE_DEVICES", "0")) >= count:
            pytest.fail(text)
        pytest.skip(text)


def run(task, processes, *, hide=False, may_die=(), **environment):
    """Starts the processes, all GPUs of the host shared among them; their outputs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    each = count_gpus() // processes
    command = [sys.executable, str(WORKER), task, address, str(processes)]
    workers = []
    for process in range(processes):
        arguments = [*command, str(process), str(each)]
        own = {}
        if hide:  # as job schedulers do: each process sees its GPUs only, and counts them from 0
            own["CUDA_VISIBLE_DEVICES"] = ",".join(str(process * each + i) for i in range(each))
            own["JAX_EP_TEST_HIDDEN"] = "1"
        workers.append(
            subprocess.Popen(
                arguments,
                env=os.environ | {"JAX_PLATFORMS": "cuda"} | environment | own,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        outputs = [worker.communicate(timeout=110)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()  # jax.distributed catches SIGTERM
    for process, (worker, output) in enumerate(zip(workers, outputs, strict=True)):
        assert worker.returncode == 0 or process in may_die, f"process {process}:\n{output}"
    return outputs


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
    outputs = run("growth", 2, XLA_PYTHON_CLIENT_PREALLOCATE="false")
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
