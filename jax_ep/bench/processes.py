"""Processes of the benchmark that share the GPUs of this host."""

import functools
import itertools
import os
import re
import subprocess

import jax
import numpy as np
from jax.experimental import multihost_utils

from jax_ep.command.options import run_all


def start(count: int) -> int:
    """Runs this program again in `count` processes, each with its own GPUs, and returns the exit status."""
    gpus = visible_gpus()
    per_process = len(gpus) // count
    if per_process < 1:
        raise SystemExit(f"bench: {count} processes need at least {count} GPUs, got {len(gpus)}")
    shares = (gpus[process * per_process : (process + 1) * per_process] for process in range(count))
    return run_all([{"CUDA_VISIBLE_DEVICES": ",".join(share)} for share in shares])


@functools.cache
def visible_gpus() -> list[str]:
    """Returns the GPUs of this host that programs may use, as CUDA_VISIBLE_DEVICES names them.

    Does not initialize JAX.
    """
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    except (FileNotFoundError, subprocess.CalledProcessError):
        return []
    # Parts of a GPU (MIG) are listed on separate lines.
    indices = [str(gpu) for gpu in range(len(re.findall("^GPU ", listed, re.M)))]
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(indices)).split(",")

    def is_known(name: str) -> bool:
        return name in indices or name.startswith(("GPU-", "MIG-"))

    # CUDA ignores all names from the first unknown one on, so -1 hides all GPUs.
    return list(itertools.takewhile(is_known, (name.strip() for name in chosen)))


def slowest(us: float | None) -> float | None:
    """Returns the time of the slowest process."""
    if us is None or jax.process_count() == 1:
        return us
    return float(np.max(multihost_utils.process_allgather(np.float32(us))))


def slowest_of_each(times: np.ndarray) -> np.ndarray:
    """Returns each of the times [N] of the process in which it took longest."""
    if jax.process_count() == 1:
        return times
    return np.max(multihost_utils.process_allgather(times.astype(np.float32)), axis=0)
