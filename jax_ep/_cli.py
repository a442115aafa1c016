"""What the commands share."""

import argparse
import os

import jax


def positive(text: str) -> int:
    """An argument that must be a positive integer."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def set_up_virtual_devices(count: int) -> None:
    """So many CPU devices, where the CPU is used; before anything asks JAX for devices."""
    # XLA:CPU hangs with many launches in flight unless it has two threads a device.
    os.environ.setdefault("NPROC", str(max(2 * count, os.cpu_count() or 1)))
    jax.config.update("jax_num_cpu_devices", count)
