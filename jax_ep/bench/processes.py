"""The benchmark in several processes that share the GPUs of this host."""

import functools
import os
import socket
import subprocess
import sys

import jax
import numpy as np
from jax.experimental import multihost_utils


def start(count: int) -> int:
    """Runs this program again in each of `count` processes, which see their own GPUs only."""
    address, each = free_address(), count_gpus() // count
    if each < 1:
        raise SystemExit(f"bench: {count} processes need as many GPUs, there are {count_gpus()}")
    workers = []
    for process in range(count):
        mine = ",".join(str(process * each + i) for i in range(each))
        command = [sys.executable, "-m", "jax_ep", *sys.argv[1:], "--join", address, str(process)]
        workers.append(subprocess.Popen(command, env=os.environ | {"CUDA_VISIBLE_DEVICES": mine}))
    try:
        return max(worker.wait() for worker in workers)
    finally:
        for worker in workers:
            worker.kill()  # jax.distributed catches SIGTERM


def free_address() -> str:
    """Where jax.distributed can have its coordinator on this host."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


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
