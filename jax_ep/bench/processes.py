"""The benchmark in several processes that share the GPUs of this host."""

import functools
import subprocess

import jax
import numpy as np
from jax.experimental import multihost_utils

from jax_ep._cli import run_all


def start(count: int) -> int:
    """Runs this program again in each of `count` processes, which see their own GPUs only."""
    each = count_gpus() // count
    if each < 1:
        raise SystemExit(f"bench: {count} processes need as many GPUs, there are {count_gpus()}")
    gpus = [",".join(str(process * each + i) for i in range(each)) for process in range(count)]
    return run_all([{"CUDA_VISIBLE_DEVICES": mine} for mine in gpus])


@functools.cache
def count_gpus() -> int:
    """GPUs of this host, without starting JAX on them."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    except (FileNotFoundError, subprocess.CalledProcessError):
        return 0
    return len(listed.splitlines())


def slowest(us: float | None) -> float | None:
    """The time of the slowest process."""
    if us is None or jax.process_count() == 1:
        return us
    return float(np.max(multihost_utils.process_allgather(np.float32(us))))
