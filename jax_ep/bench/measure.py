"""Measurement of programs: end-to-end times of many steps or calls, and times of kernels on GPUs."""

import math
import pathlib
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jax_ep.bench import processes

BURST_S = 0.1

# Parts of kernels' names, and what such kernels do. The first one that is found counts.
COMMUNICATION = "communication"
_KINDS = (
    (COMMUNICATION, ("PushKernel", "PullKernel", "CountKernel", "FewTokens", "nccl")),
    ("conversions to FP8", ("Quantize",)),
    ("products of experts", ("FloatsKernel", "RowsKernel", "WeightsKernel", "SetUpKernel", "GroupedDot")),
    ("attention", ("flash", "fmha", "sdpa")),
    ("other products", ("gemm", "nvjet", "cutlass", "cublas")),
)
THE_REST = "the rest"
KINDS = (*(kind for kind, _ in _KINDS), THE_REST)


def kind_of(kernel: str) -> str:
    """Returns what a kernel does, one of KINDS."""
    return next((kind for kind, parts in _KINDS if any(part in kernel for part in parts)), THE_REST)


def end_to_end_us(run: Callable[..., Any], arguments: Any, steps: int, repeats: int) -> float:
    """Returns the microseconds per step of a program: the median of several runs after a warm-up run."""
    jax.block_until_ready(run(*arguments))
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(run(*arguments))
        times.append(1e6 * (time.perf_counter() - begin) / steps)
    return statistics.median(times)


def bursts_us(
    runs: Sequence[Callable[[], Any]], wait: Callable[[Any], object], repeats: int, pause_s: float
) -> list[float]:
    """Returns the microseconds per call of each function: the fastest of `repeats` bursts.

    The functions take turns. A burst consists of the calls of about BURST_S, and begins after a pause.
    `wait` waits until a call's result is computed.
    """

    def burst_s(run: Callable[[], Any], calls: int) -> float:
        begin = time.perf_counter()
        result = None
        for _ in range(calls):
            result = run()
        wait(result)
        return (time.perf_counter() - begin) / calls

    for run in runs:
        wait(run())  # compiles it
    # The most of all processes, because programs that communicate run in all of them equally often.
    counts = [max(3, math.ceil(BURST_S / burst_s(run, 3))) for run in runs]
    calls = [round(processes.slowest(count) or count) for count in counts]
    fastest = [math.inf] * len(runs)
    for _ in range(repeats):
        for index, run in enumerate(runs):
            time.sleep(pause_s)
            fastest[index] = min(fastest[index], 1e6 * burst_s(run, calls[index]))
    return fastest


def kernels_us(run: Callable[..., Any], arguments: Any, steps: int, names: tuple[str, ...]) -> float | None:
    """Returns the microseconds of one step's kernels on the slowest device, or None if the profile has none.

    Only kernels whose name contains one of `names` count, or all kernels if `names` is empty. Each call of a
    kernel counts with the median of all its calls, because the first call also waits for late devices.
    """
    totals = []
    for of_device in kernels(run, arguments):
        times: dict[str, list[float]] = defaultdict(list)
        for name, begin, end in of_device:
            if not names or any(part in name for part in names):
                times[name].append((end - begin) / 1e3)
        totals.append(sum(statistics.median(calls) * len(calls) for calls in times.values()) / steps)
    return max(totals, default=0.0) or None


def kinds_us(run: Callable[..., Any], arguments: Any, steps: int) -> dict[str, float] | None:
    """Returns the microseconds of one step's kernels by kind, on the device whose kernels take longest.

    Of each kernel that communicates the longest call counts with the median of all, because the first call
    also waits for late devices. Returns None if the profile has no kernels.
    """
    devices = []
    for of_device in kernels(run, arguments):
        times: dict[str, list[float]] = defaultdict(list)
        for name, begin, end in of_device:
            times[name].append((end - begin) / 1e3)
        sums: dict[str, float] = defaultdict(float)
        for name, calls in times.items():
            kind = kind_of(name)
            late = max(calls) - statistics.median(calls) if kind == COMMUNICATION else 0.0
            sums[kind] += (sum(calls) - late) / steps
        devices.append(dict(sums))
    return max(devices, key=lambda sums: sum(sums.values()), default={}) or None


def kernels(run: Callable[..., Any], arguments: Any) -> list[list[tuple[str, float, float]]]:
    """Profiles a run, and returns the kernels of each device: name, begin and end in nanoseconds."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run(*arguments))
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        devices = [
            plane
            for plane in jax.profiler.ProfileData.from_file(str(path)).planes
            if "/device:GPU" in plane.name
        ]
        return [
            [
                (event.name, event.start_ns, event.start_ns + event.duration_ns)
                for line in device.lines
                if "Stream" in line.name
                for event in line.events
            ]
            for device in devices
        ]
