"""What late, stalled, dead and mistaken ranks do to the others, on the devices of this host.

    python tests/support/faults.py [--cases late,mismatch] [--ops dispatch] [--repeats 50] [--seed 0]
                           [--timeout 0.1] [--graph] [--concurrent] [--nccl] [--devices 2]
                           [--processes 4] [--jobs 8]

After each fault: no byte of an array that was allocated since is changed; results are right, or NaN and -1,
or an error, and never those of an earlier step; the error comes in time and names op, rank and missing ranks;
and a new group works, or the process has ended with the named error where docs/sharp_bits.md says so.

late      a rank enters after the others have given up
inside    a rank stalls inside an op, longer than the time-out, less than twice
stuck     longer than twice: the process ends (processes of their own)
mismatch  ranks call different ops, shapes or dtypes
masked    a rank comes late to ops with on_timeout="mask", without which the others go on
second    other groups are made in a thread while ops run
delete    all live arrays are deleted
killed    a process is killed before an op or inside one (processes of their own, several at a time)
left      a process is killed, and the others go on by ops with on_timeout="mask" (likewise)
order     two processes launch two programs in different orders (likewise)
stalled   a process stalls before an op or inside it, and all go on with a new group (likewise)

On the CPU `late`, `mismatch`, `second` and `delete` run, without what only GPUs do.
"""

import argparse
import concurrent.futures
import faulthandler
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

from processes import shares

IN_PROCESS = ("late", "inside", "mismatch", "masked", "second", "delete")
IN_OTHERS = ("stuck", "killed", "left", "order", "stalled")
IN_ONE_SET = ("order", "stalled")  # of processes, which repeat it
WORKER = pathlib.Path(__file__).with_name("fault_worker.py")
LIMIT_S = 90  # of one set of processes


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cases", default=",".join((*IN_PROCESS, *IN_OTHERS)))
    parser.add_argument("--ops", default="", help="only kinds of ops with this in their names, as 'expert'")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=0.1)
    parser.add_argument("--graph", action="store_true", help="in a scan, replayed as a CUDA graph")
    parser.add_argument("--concurrent", action="store_true", help="two ops at a time, graphs that branch")
    parser.add_argument("--nccl", action="store_true", help="beside a sum by NCCL in the same program")
    parser.add_argument("--devices", type=int, default=0, help="0: all")
    parser.add_argument(
        "--processes",
        type=int,
        default=0,
        help="how many processes a case has that needs several; 0: one for each GPU. More share the GPUs",
    )
    parser.add_argument("--jobs", type=int, default=8, help="sets of processes at a time")
    options = parser.parse_args(arguments)
    options.cases = options.cases.split(",")
    unknown = set(options.cases) - {*IN_PROCESS, *IN_OTHERS}
    if unknown:
        parser.error(f"unknown cases {sorted(unknown)}; there are {', '.join((*IN_PROCESS, *IN_OTHERS))}")
    return options


def prepare_environment(options: argparse.Namespace) -> None:
    """Before JAX is imported."""
    os.environ.setdefault("NPROC", "32")
    os.environ.setdefault("JAX_EP_STRESS_US", "20")
    # The processes of the other cases need room beside this one.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.3")
    flags = [os.environ.get("XLA_FLAGS", "")]
    if "xla_force_host_platform_device_count" not in flags[0]:
        flags.append("--xla_force_host_platform_device_count=4")
    if options.concurrent:
        flags.append("--xla_gpu_command_buffer_scheduling_mode=CONCURRENT")
    os.environ["XLA_FLAGS"] = " ".join(flags).strip()


class Report:
    """A line for each case, and what failed."""

    def __init__(self) -> None:
        self.failures = 0

    def line(self, name: str, repeats: int, seen: str, seconds: float, failed: bool = False) -> None:
        self.failures += failed
        print(f"{'FAILED ' if failed else ''}{name}: {repeats} repeats, {seen}, {seconds:.1f} s", flush=True)


def run_in_process(options: argparse.Namespace, report: Report) -> None:
    import fault_cases
    import fault_rig
    import jax

    style = fault_rig.Style(options.graph, options.concurrent, options.nccl)
    devices = jax.devices()[: options.devices or None]
    rig = fault_rig.Rig(devices, options.timeout, style, options.seed)
    kinds = [kind for kind in fault_rig.KINDS if options.ops in kind]
    print(f"{rig.size} x {devices[0].device_kind}, time-out {options.timeout} s, {style}", flush=True)
    if options.graph and rig.on_gpus:
        from test_gpu import launches_graphs

        program = rig.program(kinds[0], fault_rig.FEW)
        with tempfile.TemporaryDirectory() as folder:
            if not launches_graphs(lambda: program.run(0), folder):
                report.line("graph", 1, "the program is not replayed as a graph", 0, failed=True)
    available = fault_cases.cases(rig, options.repeats, kinds)
    for case in options.cases:
        if case not in IN_PROCESS:
            continue
        for part, repeats, once in available[case]():
            run_part(rig, f"{case} ({part})", repeats, once, report)


def run_part(rig: Any, name: str, repeats: int, once: Callable[[], str], report: Report) -> None:
    begin, done, seen = time.perf_counter(), 0, ""
    faulthandler.dump_traceback_later(120 + 4 * repeats, exit=True)  # a hang is a failure, too
    try:
        for done in range(repeats):  # noqa: B007
            seen = once()
        report.line(name, repeats, seen, time.perf_counter() - begin)
    except Exception as error:
        traceback.print_exc()
        report.line(name, done + 1, f"{error}", time.perf_counter() - begin, failed=True)
        rig.end_stalls()
        rig.regroup()
    finally:
        faulthandler.cancel_dump_traceback_later()


def run_set(
    task: str, processes: int, gpus: list[str], memory: float, settings: dict[str, Any]
) -> list[tuple[int | None, str]]:
    """The exit statuses and outputs of a set of processes, each with this part of a GPU's memory.

    None: it had to be killed.
    """
    from jax_ep.command.options import free_address

    address = free_address()
    limits = {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{memory:.3f}", "JAX_PLATFORMS": "cuda"}
    workers, files = [], []
    for process, share in enumerate(shares(processes, gpus)):
        command = [sys.executable, str(WORKER), task, address, str(processes), str(process)]
        # A file, for nobody reads a pipe while another process is waited for.
        files.append(tempfile.TemporaryFile("w+"))  # noqa: SIM115, closed below
        workers.append(
            subprocess.Popen(
                [*command, json.dumps(settings)],
                env=os.environ | share | limits,
                stdout=files[-1],
                stderr=subprocess.STDOUT,
            )
        )
    deadline = time.monotonic() + LIMIT_S + settings["repeats"] * settings["limit_of_each_s"]
    statuses: list[int | None] = []
    for worker in workers:
        try:
            statuses.append(worker.wait(max(0.1, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            statuses.append(None)
    outputs = []
    for worker, file in zip(workers, files, strict=True):
        worker.kill()
        worker.wait()
        file.seek(0)
        outputs.append(file.read())
        file.close()
    return list(zip(statuses, outputs, strict=True))


def judge_set(task: str, settings: dict[str, Any], results: list[tuple[int | None, str]]) -> list[str]:
    """What the processes of a set have seen; raises if one of them broke a promise."""
    seen = []
    # One that fails lets others fail, too.
    ends = "\n".join(
        f"process {i} ended with {end}:\n{text[-1500:]}" for i, (end, text) in enumerate(results)
    )
    for process, (status, output) in enumerate(results):
        if task in ("killed", "left") and process == settings["victim"]:
            assert status == -9, f"the victim was not killed:\n{ends}"
            continue
        assert status is not None, f"process {process} hangs:\n{ends}"
        if task == "stuck":
            told = re.search(r"[^\n]*(?:stuck|inside)[^\n]*stopped[^\n]*", output)
            assert told, f"ended with {status}, but no error says why:\n{output[-3000:]}"
            ended = status == 1 and "ends this process" in output
            assert ended or settings["seed"] % 2 == 0, f"ended with {status}:\n{output[-3000:]}"
            seen.append(told.group()[-200:])
            continue
        assert status == 0, ends
        seen += re.findall(r"^seen (.*)$", output, re.M)
    return seen


def run_in_others(task: str, options: argparse.Namespace, report: Report) -> None:
    from jax_ep.bench.processes import visible_gpus

    gpus = visible_gpus()[: options.devices or None]
    ranks = len(gpus) if task == "stuck" else options.processes or len(gpus)
    if ranks < 2 or not gpus:
        more = "" if task == "stuck" else " or --processes 2"
        print(f"{task}: skipped, it needs two GPUs{more}, there are {len(gpus)}", flush=True)
        return
    begin, processes = time.perf_counter(), 1 if task == "stuck" else ranks
    # Sets share the GPUs by turns, so that they need a longer time-out.
    timeout_s = max(options.timeout, 0.5 if task in IN_ONE_SET else 2.0)
    style = {"graph": options.graph, "concurrent": options.concurrent, "nccl": False}
    sets, repeats = (1, options.repeats) if task in IN_ONE_SET else (options.repeats, 0)
    # A rank that stalls is held up in each op for less than two time-outs: up to 4 ops, in the 3 steps of a
    # graph, and two at a time.
    ops = 4 * (3 if options.graph else 1) * (2 if options.concurrent else 1)
    limit_of_each_s = 2 + (2 * timeout_s * ops if task == "stalled" else 0)
    # The rest is for NCCL and contexts.
    memory = min(0.05, 0.4 * len(gpus) / (ranks * min(options.jobs, sets)))

    def run_one(number: int) -> list[str]:
        victim = 1 + number % (ranks - 1)  # process 0 has the coordinator, without which all end
        settings = {"seed": options.seed + number, "timeout": timeout_s, "style": style, "ranks": ranks}
        settings |= {"victim": victim, "inside": number % 2 == 1, "repeats": repeats}
        settings["limit_of_each_s"] = limit_of_each_s
        return judge_set(task, settings, run_set(task, processes, gpus, memory, settings))

    seen: list[str] = []
    failures = []
    with concurrent.futures.ThreadPoolExecutor(min(options.jobs, sets)) as pool:
        for future in concurrent.futures.as_completed(pool.submit(run_one, number) for number in range(sets)):
            try:
                seen += future.result()
            except Exception as error:
                failures.append(str(error))
    for failure in failures[:3]:
        print(failure, flush=True)
    seconds = time.perf_counter() - begin
    summary = f"{len(seen)} survivors' reports, as: {seen[0]}" if seen else "nothing"
    if failures:
        summary = f"{len(failures)} of {sets} sets of processes failed; {summary}"
    report.line(task, sets * max(1, repeats), summary, seconds, failed=bool(failures))


def main() -> int:
    options = parse()
    prepare_environment(options)
    faulthandler.enable()
    report = Report()
    for task in IN_OTHERS:  # while this process has not taken its memory
        if task in options.cases:
            run_in_others(task, options, report)
    if set(options.cases) & set(IN_PROCESS):
        run_in_process(options, report)
    print("all promises kept" if report.failures == 0 else f"{report.failures} cases FAILED", flush=True)
    sys.stdout.flush()
    os._exit(1 if report.failures else 0)  # a group that hangs must not hold the process


if __name__ == "__main__":
    main()
