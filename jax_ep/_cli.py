"""What the commands share."""

import argparse
import math
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax


def at_least(least: int, most: float = math.inf) -> Callable[[str], int]:
    """An argument that must be an integer, not below `least` nor above `most`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
        if value > most:
            raise argparse.ArgumentTypeError(f"must be at most {most}, got {value}")
        return value

    return parse


positive = at_least(1)
# More than a host has GPUs. Each virtual one has threads of its own, and JAX makes millions without end.
device_count = at_least(1, most=256)

# A buffer of as many times what a uniform routing brings as there are ranks holds any routing.
MOST_CAPACITY = 1000.0


def capacity_factor(*, zero_too: bool) -> Callable[[str], float]:
    """An argument that says how large a receive buffer is, relative to what a uniform routing brings."""
    least = "0 for the worst case, or" if zero_too else "more than 0 and"

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None
        if not 0 <= value <= MOST_CAPACITY or (value == 0 and not zero_too):
            raise argparse.ArgumentTypeError(f"must be {least} at most {MOST_CAPACITY:g}, got {text}")
        return value

    return parse


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


def require_devices(command: str) -> None:
    """Ends the command, with the reason, where JAX finds no device on the platforms that it may use."""
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # which of them depends on what JAX lacks
        reason = str(error) or type(error).__name__
        wanted = os.environ.get("JAX_PLATFORMS") or "any platform"
        raise SystemExit(
            f"{command}: JAX finds no devices of {wanted} (JAX_PLATFORMS) here: {reason}. "
            "NVIDIA GPUs need pip install 'jax[cuda13]' and a driver; JAX_PLATFORMS=cpu uses the CPU"
        ) from None
