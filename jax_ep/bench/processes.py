"""The benchmark in several processes that share the GPUs of this host."""

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
    """Runs this program again in each of `count` processes, which see their own GPUs only."""
    gpus = visible_gpus()
    each = len(gpus) // count
    if each < 1:
        raise SystemExit(f"bench: {count} processes need as many GPUs, there are {len(gpus)}")
    shares = (gpus[process * each : (process + 1) * each] for process in range(count))
    return run_all([{"CUDA_VISIBLE_DEVICES": ",".join(mine)} for mine in shares])


@functools.cache
def visible_gpus() -> list[str]:
    """The GPUs of this host that programs may use, as CUDA_VISIBLE_DEVICES names them. JAX is not started."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    except (FileNotFoundError, subprocess.CalledProcessError):
        return []
    # Parts of a GPU (MIG) have lines of their own.
    indices = [str(gpu) for gpu in range(len(re.findall("^GPU ", listed, re.M)))]
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(indices)).split(",")
    known = lambda name: name in indices or name.startswith(("GPU-", "MIG-"))
    # CUDA itself stops at the first name that it does not know; so -1 hides all.
    return list(itertools.takewhile(known, (name.strip() for name in chosen)))


def slowest(us: float | None) -> float | None:
    """The time of the slowest process."""
    if us is None or jax.process_count() == 1:
        return us
    return float(np.max(multihost_utils.process_allgather(np.float32(us))))
