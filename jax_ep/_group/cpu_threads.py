"""The threads of XLA's CPU client, of which programs need two per device."""

import contextlib
import os
from collections.abc import Sequence

import jax

from jax_ep import _extension
from jax_ep._extension import Device


def _count() -> int:
    """Returns the number of threads on which XLA runs programs, computed as XLA does."""
    num_devices = len(jax.local_devices(backend="cpu"))
    for name in ("PJRT_NPROC", "NPROC"):
        with contextlib.suppress(KeyError, ValueError):
            return max(int(os.environ[name]), num_devices)
    return max(len(os.sched_getaffinity(0)), num_devices)


def check(devices: Sequence[Device]) -> None:
    """Warns once if XLA has fewer than two threads for each of these CPU devices of this process.

    Their programs can then hang, even those that only call JAX's own collectives (docs/sharp_bits.md). A
    single device has no peers in its process, so one thread is enough.
    """
    needed, threads = 2 * len(devices), _count()
    if len(devices) > 1 and threads < needed:
        _extension.warn_once(
            f"Group: XLA needs two threads for each CPU device, so {needed} for the {len(devices)} devices "
            f"of this group, but it has {threads}; otherwise programs can hang. Set the environment variable "
            f'NPROC before JAX initializes its devices: os.environ["NPROC"] = "{needed}" (docs/sharp_bits.md)'
        )
