"""Helpers for the options and processes of commands."""

import argparse
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax


def output_file(*suffixes: str) -> Callable[[str], Path]:
    """Returns a parser for an argument that names an output file with one of these suffixes."""

    def parse(text: str) -> Path:
        path = Path(text)
        if path.suffix not in suffixes:
            raise argparse.ArgumentTypeError(f"must end in {' or '.join(suffixes)}, got {text}")
        if path.is_dir():
            raise argparse.ArgumentTypeError(f"must be a file, but {path} is a folder")
        if not path.parent.is_dir():
            raise argparse.ArgumentTypeError(
                f"must be in an existing folder, but {path.parent} does not exist"
            )
        return path

    return parse


def set_up_virtual_devices(count: int) -> None:
    """Sets the number of virtual CPU devices. Must be called before JAX initializes its devices."""
    # XLA:CPU hangs with many launches in flight unless it has two threads per device.
    os.environ.setdefault("NPROC", str(max(2 * count, os.cpu_count() or 1)))
    jax.config.update("jax_num_cpu_devices", count)


def free_address() -> str:
    """Returns an address on this host for the coordinator of jax.distributed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def join_others(options: argparse.Namespace) -> None:
    """Joins the other processes of `run_all`, with all devices that this one sees."""
    address, process = options.join
    # In a job of Slurm or Open MPI, JAX would otherwise take only one.
    jax.distributed.initialize(
        address, options.processes, int(process), cluster_detection_method="deactivate"
    )


def run_all(environments: list[dict[str, str]]) -> int:
    """Runs this command again in one process per environment, and returns the largest exit status.

    Each process has the variables of its environment in addition to those of this process.
    """
    address, workers = free_address(), []
    # Otherwise a process that started with -P in a clone would run workers that import the sources there.
    python = [sys.executable, *(["-P"] if sys.flags.safe_path else [])]
    for process, variables in enumerate(environments):
        command = [*python, "-m", "jax_ep", *sys.argv[1:], "--join", address, str(process)]
        environment = os.environ | variables | {"JAX_LOCAL_DEVICE_IDS": ""}  # all that it sees
        workers.append(subprocess.Popen(command, env=environment))
    try:
        return max(worker.wait() for worker in workers)
    finally:
        for worker in workers:
            worker.kill()  # because jax.distributed catches SIGTERM
