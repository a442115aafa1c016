"""Several processes: on the CPU the ops take "xla" by themselves; and how GPUs' memory is shared."""

import glob
import pathlib
import re
import sys
import tempfile

import pytest
from processes import run_all

from jax_ep.bench.processes import free_address

HERE = pathlib.Path(__file__).parent


def run_two(arguments):
    """Two processes of four virtual devices each, of these arguments for a coordinator; their outputs."""
    address = free_address()
    environment = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "NPROC": "16",
    }
    commands = [[sys.executable, *arguments(address, process)] for process in range(2)]
    return run_all(commands, [environment] * 2, timeout=200)


@pytest.mark.timeout(240)
def test_two_processes_of_four_devices():
    worker = str(HERE / "multiprocess_worker.py")
    outputs = run_two(lambda address, process: [worker, address, str(process)])
    for process, output in enumerate(outputs):
        assert f"process {process} ok" in output


@pytest.mark.timeout(240)
def test_the_example_learns():
    example = str(HERE.parent / "examples" / "multi_process.py")
    first, second = run_two(lambda address, process: [example, "--join", address, "2", str(process)])
    losses = [float(loss) for loss in re.findall(r"step \d: loss ([\d.]+)", first)]
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]
    assert "8 ranks in 2 processes: GroupStats(implementation='xla'" in first
    assert "step" not in second


def share(task):
    worker = str(HERE / "share_memory_worker.py")
    before = glob.glob(f"{tempfile.gettempdir()}/jax_ep-*")
    outputs = run_two(lambda address, process: [worker, task, address, str(process)])
    assert glob.glob(f"{tempfile.gettempdir()}/jax_ep-*") == before
    assert all("descriptors closed" in output for output in outputs)
    return outputs


@pytest.mark.timeout(240)
def test_processes_share_what_each_device_has():
    """Both see the same file for each device, its owner by itself, the other through the socket."""
    first, second = (
        dict(re.findall(r"device (\d+): inode (\d+)", output)) for output in share("all goes well")
    )
    assert len(first) == 8
    assert first == second
    assert len(set(first.values())) == 8


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("task", "text"),
    [
        ("export fails", "error: process 1: no handle to be had"),
        ("import fails", "error: process 0: out of addresses"),
    ],
)
def test_what_fails_in_one_process_is_told_by_both(task, text):
    for output in share(task):
        assert text in output


@pytest.mark.timeout(240)
def test_a_failure_that_one_process_saw_resets_both():
    for output in share("a rank has failed"):
        assert "resets 2" in output  # of the first group, and of the second
