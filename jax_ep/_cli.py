"""What the commands share."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

import jax


def positive(text: str) -> int:
    """An argument that must be a positive integer."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def factor(zero: str = "") -> Callable[[str], float]:
    """An argument that must be a finite, positive number, or 0 where that means something: `zero`."""

    def parse(text: str) -> float:
        value = float(text)
        if not 0 <= value < float("inf") or (value == 0 and not zero):
            meaning = f"positive, or 0 for {zero}" if zero else "a positive number"
            raise argparse.ArgumentTypeError(f"must be {meaning}, got {text}")
        return value

    return parse


def output_file(*suffixes: str) -> Callable[[str], Path]:
    """An argument that names a file to be written, of one of these kinds."""

    def parse(text: str) -> Path:
        path = Path(text)
        if path.suffix not in suffixes:
            raise argparse.ArgumentTypeError(f"must end in {' or '.join(suffixes)}, got {text}")
        if not path.parent.is_dir():
            raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
        return path

    return parse


def set_up_virtual_devices(count: int) -> None:
    """So many CPU devices, where the CPU is used; before anything asks JAX for devices."""
    # XLA:CPU hangs with many launches in flight unless it has two threads a device.
    os.environ.setdefault("NPROC", str(max(2 * count, os.cpu_count() or 1)))
    jax.config.update("jax_num_cpu_devices", count)
