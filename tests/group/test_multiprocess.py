"""Several processes: on the CPU each is a domain; and how GPUs' memory is shared."""

import contextlib
import glob
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import types

import multi_process
import pytest
import yaml
from devices import flags_of_processes
from processes import GPUS, run_all, shares

from jax_ep.command.options import free_address

pytestmark = pytest.mark.no_gpu

ROOT = pathlib.Path(__file__).parents[2]
SUPPORT = ROOT / "tests" / "support"


def environment_of(count):
    """The environment of each of so many processes, which share eight virtual devices."""
    return {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags_of_processes(xla_force_host_platform_device_count=8 // count),
        "NPROC": "16",
    }


def run_processes(count, arguments, may_die=(), own=None, **more):
    """Processes of these arguments for a coordinator; their outputs.

    `own`: what else is in the environment of each process.
    """
    address, environment = free_address(), environment_of(count) | more
    commands = [[sys.executable, *arguments(address, process)] for process in range(count)]
    environments = [environment | other for other in own or [{}] * count]
    return run_all(commands, environments, timeout=200, may_die=may_die)


def run_two(arguments, may_die=(), own=None, **more):
    return run_processes(2, arguments, may_die, own, **more)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_hosts_of_several_devices():
    worker, count = str(SUPPORT / "multiprocess_worker.py"), 4
    outputs = run_processes(count, lambda address, process: [worker, address, str(count), str(process)])
    for process, output in enumerate(outputs):
        assert f"process {process} ok" in output


@pytest.mark.parametrize(
    ("processes", "gpus", "visible", "ids"),
    [
        (2, ["0", "1", "2", "3"], [None, None], ["0,1", "2,3"]),
        (4, ["5", "7"], ["5", "7", "5", "7"], ["0"] * 4),
        (3, ["0"], ["0", "0", "0"], ["0"] * 3),
    ],
)
def test_what_each_process_of_the_suite_gets(processes, gpus, visible, ids):
    found = shares(processes, gpus)
    assert [share[GPUS] for share in found] == ids
    assert [share.get("CUDA_VISIBLE_DEVICES") for share in found] == visible
    if visible[0] is not None:  # they share
        assert all(share["NCCL_MULTI_RANK_GPU_ENABLE"] == "1" for share in found)
        memory = [float(share["XLA_PYTHON_CLIENT_MEM_FRACTION"]) for share in found]
        assert all(0.45 < visible.count(gpu) * part < 0.55 for gpu, part in zip(visible, memory, strict=True))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_example_learns():
    """As a reader starts it: on a machine without GPUs, and with nothing but its own words."""
    example = str(ROOT / "examples" / "multi_process.py")
    no_nvidia_smi = {"PATH": str(pathlib.Path(sys.executable).parent), "XLA_FLAGS": flags_of_processes()}
    done = subprocess.run(
        [sys.executable, example, "--start", "2"],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | no_nvidia_smi,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"step \d: loss ([\d.]+)", done.stdout)]
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]
    assert "8 ranks in 2 processes: GroupInfo(implementation='ffi', reason=''" in done.stdout
    assert "ranks_per_domain=4" in done.stdout
    # Besides, Gloo tells of its connections, of several processes at a time and in the midst of a line.
    others = [line for line in done.stdout.splitlines() if not line.startswith(("step ", "8 ranks "))]
    assert all("Gloo" in line or "peer ranks" in line or line.strip("0123456789 ") == "" for line in others)
    assert done.stderr == ""


def test_pods_of_the_manifest_run_what_the_example_starts(monkeypatch):
    """With what Kubernetes would put into the command of each; test_the_example_learns runs such commands."""
    manifest = yaml.safe_load((ROOT / "examples" / "jobset.yaml").read_text())
    (job,) = manifest["spec"]["replicatedJobs"]
    pods = job["template"]["spec"]
    (container,) = pods["template"]["spec"]["containers"]
    env = {entry["name"]: entry for entry in container["env"]}
    host, port = env["COORDINATOR"]["value"].split(":")
    # JobSet names a pod after the set, the job and both indices, in a domain that has the name of the set.
    assert host == "{0}-{1}-0-0.{0}".format(manifest["metadata"]["name"], job["name"])
    assert 1024 <= int(port) < 65536
    field = env["HOST"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert field == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert pods["completionMode"] == "Indexed"
    assert pods["completions"] == pods["parallelism"] == 2
    started = []

    def start(command, **options):
        started.append(command)
        return types.SimpleNamespace(stdout=[], wait=lambda: 0)

    monkeypatch.setattr(multi_process.subprocess, "Popen", start)
    assert multi_process.start(pods["completions"]) == 0
    for process, (python, file, *arguments) in enumerate(started):
        assert (python, pathlib.Path(file)) == (sys.executable, ROOT / container["command"][1])
        values = {"$(COORDINATOR)": arguments[1], "$(HOST)": str(process)}
        assert [values.get(word, word) for word in container["command"][2:]] == arguments
    assert container["command"][0] == "python"
    assert len(started) == pods["completions"]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_demo_in_two_processes(tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 400)
    options = ["--processes", "2", "--devices", "2", "--experts", "4", "--layers", "1", "--steps", "5"]
    done = subprocess.run(
        [sys.executable, "-m", "jax_ep", "demo", *options, "--text", str(text)],
        capture_output=True,
        text=True,
        timeout=230,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    out = re.sub(r"\s+", " ", done.stdout)
    first, last = map(float, re.search(r"first and last step.*?([\d.]+) → ([\d.]+)", out).groups())
    assert last < first - 0.5
    assert "agree, largest difference" in out
    assert "implementation 'ffi'" in out


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("task", "count"), [("killed", 4), ("stopped", 2)])
def test_the_others_hear_of_a_host_that_dies(task, count):
    """By an error of the program, and by name within twice the time-out of 4 s. No op hangs, or is wrong."""
    worker = str(SUPPORT / "host_fault_worker.py")
    arguments = lambda address, process: [worker, task, address, str(count), str(process)]
    # What stands still says nothing: how long XLA waits for it is an option of XLA's.
    flags = flags_of_processes(
        xla_force_host_platform_device_count=8 // count, xla_cpu_collective_timeout_seconds=4
    )
    outputs = run_processes(count, arguments, {count - 1}, XLA_FLAGS=flags)
    for output in outputs[:-1]:
        seconds, done, _ = re.search(r"after ([\d.]+) s and (\d+) ops: (.*)", output).groups()
        assert int(done) > 0
        assert float(seconds) < 8
        seconds, text = re.search(r"check after ([\d.]+) s: (.*)", output).groups()
        assert float(seconds) < 8
        assert re.search("of group .* did not (hear from the other domains|arrive) within 4 s", text)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_ranks_that_are_swapped_fail_at_once():
    """And so do those of their process that are in the right places, and would wait for 4 s."""
    worker = str(SUPPORT / "host_fault_worker.py")
    outputs = run_two(lambda address, process: [worker, "swapped", address, "2", str(process)], {1})
    seconds, text = re.search(r"after ([\d.]+) s: (.*)", outputs[0]).groups()
    assert "made for another mesh" in text
    assert float(seconds) < 3


def share(task):
    """Runs the worker in two processes, each with its own TMPDIR, too long for a socket's path."""
    worker = str(SUPPORT / "share_memory_worker.py")
    may_die = (1,) if task == "one dies" or "never comes" in task else ()
    with tempfile.TemporaryDirectory() as folder:
        own = [f"{folder}/{'x' * (length - len(folder) - 1)}" for length in (108, 300)]
        own[1] = f"{own[1][:200]}/{own[1][201:]}"  # a name has 255 characters at most
        for path in own:
            os.makedirs(path)
        outputs = run_two(
            lambda address, process: [worker, task, address, str(process)],
            may_die,
            [{"TMPDIR": path} for path in own],
        )
        if not may_die:  # who is killed meanwhile cannot tidy up
            assert [glob.glob(f"{path}/*") for path in own] == [[], []]
    return outputs


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("hosts", ["", " on two hosts"])
def test_processes_share_what_each_device_has(hosts):
    """Both see the same file for each device, its owner by itself, the other through a socket or a handle."""
    outputs = share(f"all goes well{hosts}")
    first, second = (dict(re.findall(r"^(.*): inode (\d+)", output, re.M)) for output in outputs)
    assert first == second
    assert len(first) == 6 * 8  # of each group
    assert len(set(first.values())) == 8  # the same for all groups
    assert all(output.count("descriptors closed") == 2 for output in outputs)
    # Each sees that the other ends, even if a child of it does not.
    assert "saw the end of the other" in outputs[0]
    assert "the other lives" in outputs[1]


@pytest.fixture
def two_networks():
    """What runs a command in one of two network namespaces that a cable joins, at 10.9.0.1 and 10.9.0.2."""
    with contextlib.ExitStack() as stack:

        def hold(*prefix):
            holder = subprocess.Popen([*prefix, "sleep", "120"], stderr=subprocess.DEVNULL)
            stack.callback(holder.wait)
            stack.callback(holder.kill)
            for _ in range(200):  # until it has its namespaces
                if holder.poll() is not None:
                    pytest.skip("needs network namespaces, which this machine does not let it make")
                if os.path.basename(os.readlink(f"/proc/{holder.pid}/exe")) == "sleep":
                    break
                time.sleep(0.05)
            enter = ["nsenter", "-t", str(holder.pid), "--user", "--preserve-credentials", "--net", "--uts"]
            return holder.pid, enter

        _, enter_first = hold("unshare", "--user", "--map-root-user", "--net", "--uts")
        second, enter_second = hold(*enter_first, "unshare", "--net", "--uts")
        cable = ["ip", "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", str(second)]
        if subprocess.run([*enter_first, *cable], capture_output=True).returncode != 0:
            pytest.skip("needs virtual network devices, which this machine does not let it make")
        for number, enter in ((1, enter_first), (2, enter_second)):
            for command in (
                f"ip addr add 10.9.0.{number}/24 dev cable",
                "ip link set cable up",
                "ip link set lo up",
                f"hostname 10.9.0.{number}",  # from which gloo takes its address
            ):
                subprocess.run([*enter, *command.split()], check=True)
        yield enter_first, enter_second


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_hosts_find_each_other_in_the_network(two_networks):
    """Each process sees only the network of its own host."""
    worker = str(SUPPORT / "share_memory_worker.py")
    arguments = [sys.executable, worker, "all goes well on two hosts", "10.9.0.1:7001"]
    commands = [[*enter, *arguments, str(process)] for process, enter in enumerate(two_networks)]
    outputs = run_all(commands, [environment_of(2)] * 2, timeout=120)
    assert "saw the end of the other" in outputs[0]
    assert "the other lives" in outputs[1]


# Where the set-up of a group fails in one process, and the error in both.
FAILURES = {
    "1: hold": "process 1: KeyError: 'not of a kind that is expected'",
    "1: export": "process 1: no export to be had",
    "1: fabric export on two hosts": "process 1: no fabric export to be had",
    "0: fabric import on two hosts": "process 0: no fabric import to be had",
    "0: watch on two hosts": "process 0: no watch to be had",
    "0: import": "process 0: no import to be had",
    "1: watch": "process 1: no watch to be had",
    "1: open": "process 1: process 1 says no",
    "1: reset": "process 1: no reset to be had",
    "other groups": "different groups at the same time: process 0: key 0 .*; process 1: key 1 ",
}


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_failure_in_one_process_is_reported_by_both():
    tasks = [*FAILURES, "a rank has failed"]  # one after the other in the same processes
    for output in share(", ".join(tasks)):
        names, outputs = zip(*re.findall(r"^task (.*)\n((?:(?!task ).*\n)*)", output, re.M), strict=True)
        assert list(names) == tasks
        for text, printed in zip(FAILURES.values(), outputs[:-1], strict=True):
            seconds, found = re.search(r"SetupError after ([\d.]+) s: (.*)", printed).groups()
            assert re.search(text, found)
            assert float(seconds) < 30
            assert "descriptors closed" in printed
        assert "Setup" not in outputs[-1]
        assert "drained and reset" in outputs[-1]


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("step", "words"),
    [
        ("introduce", "reporting which group is made"),
        ("offer", "exporting JAX's memory"),
        ("fetch", "mapping the memory of other processes"),
    ],
)
def test_nobody_waits_for_ever(step, words):
    """A process that does not come to a step: the other says so, and where, in time."""
    first, _ = share(f"{step}: never comes")
    seconds, text = re.search(r"SetupTimeout after ([\d.]+) s: (.*)", first).groups()
    assert 3 <= float(seconds) < 9
    assert f"Group: {words}, as all processes must, did not end within 3 s in process 0" in text
    assert "This process should end" in text


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_process_that_dies_before_it_has_said_anything():
    first, _ = share("one dies")
    assert re.search(
        r"(SetupTimeout|RuntimeError) after [\d.]+ s: Group: reporting which group is made", first
    )
