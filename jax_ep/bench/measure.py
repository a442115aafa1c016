"""Times of a program of many steps: on the clock, and of its kernels on GPUs."""

import pathlib
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import jax


def end_to_end_us(run: Callable[..., Any], arguments: Any, steps: int, repeats: int) -> float:
    """Microseconds of one of the program's steps, the median of several runs, after one to warm up."""
    jax.block_until_ready(run(*arguments))
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(run(*arguments))
        times.append(1e6 * (time.perf_counter() - begin) / steps)
    return statistics.median(times)


def kernels_us(run: Callable[..., Any], arguments: Any, steps: int, names: tuple[str, ...]) -> float | None:
    """Microseconds that one step's kernels take on the slowest device, None where the profile shows none.

    Each kernel counts with its median, so that the first one's wait for a late device does not; only kernels
    whose name has one of `names` in it count, or all if there are no names.
    """
    totals = []
    for kernels in _kernels(run, arguments):
        times: dict[str, list[float]] = defaultdict(list)
        for name, begin, end in kernels:
            if not names or any(part in name for part in names):
                times[name].append((end - begin) / 1e3)
        totals.append(sum(statistics.median(found) * len(found) for found in times.values()) / steps)
    return max(totals, default=0.0) or None


def _kernels(run: Callable[..., Any], arguments: Any) -> list[list[tuple[str, float, float]]]:
    """Of each device its kernels in a profile: name, begin and end in nanoseconds."""
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
