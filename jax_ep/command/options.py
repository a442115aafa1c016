"""What the commands share."""

import argparse
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax


def output_file(*suffixes: str) -> Callable[[str], Path]:
    """An argument that names a file to be written, of one of these kinds."""

    def parse(text: str) -> Path:
        path = Path(text)
        if path.suffix not in suffixes:
            raise argparse.ArgumentTypeError(f"must end in {' or '.join(suffixes)}, got {text}")
        if path.is_dir():
            raise argparse.ArgumentTypeError(f"{path} is a folder; name a file")
        if not path.parent.is_dir():
            raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
        return path

    return parse


def set_up_virtual_devices(count: int) -> None:
    """So many CPU devices, where the CPU is used; before anything asks JAX for devices."""
    # XLA:CPU hangs with many launches in flight unless it has two threads a device.
    os.environ.setdefault("NPROC", str(max(2 * count, os.cpu_count() or 1)))
    jax.config.update("jax_num_cpu_devices", count)


def free_address() -> str:
    """Where jax.distributed can have its coordinator on this host."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def run_all(environments: list[dict[str, str]]) -> int:
    """Runs this command again in a process for each of these environments; the largest exit status."""
    address, workers = free_address(), []
    for process, own in enumerate(environments):
        command = [sys.executable, "-m", "jax_ep", *sys.argv[1:], "--join", address, str(process)]
        workers.append(subprocess.Popen(command, env=os.environ | own))
    try:
        return max(worker.wait() for worker in workers)
    finally:
        for worker in workers:
            worker.kill()  # jax.distributed catches SIGTERM
