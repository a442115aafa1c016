"""One of two processes of four CPU devices that share pretended GPU memory: files, told by their inodes."""

import os
import sys
import tempfile
from types import SimpleNamespace
from typing import Any

import jax

task, address, process = sys.argv[1], sys.argv[2], int(sys.argv[3])
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(address, num_processes=2, process_id=process)

from jax_ep import _processes  # noqa: E402

BASE, BYTES = 0x10000, 0x1000
inodes: dict[int, int] = {}  # of what was imported, by the base it was given
resets: list[str] = []
files = {}


def export_region(address: int, device: int) -> int:
    if task == "export fails" and process == 1:
        raise RuntimeError("no handle to be had")
    files[address] = tempfile.TemporaryFile()  # noqa: SIM115, the test's memory
    return os.dup(files[address].fileno())


def import_region(descriptor: int, size: int, devices: list[int]) -> int:
    if task == "import fails" and process == 0:
        raise RuntimeError("out of addresses")
    assert size == BYTES
    base = BASE * (len(inodes) + 100)
    inodes[base] = os.fstat(descriptor).st_ino
    return base


def reset_device_group(key: str) -> str:
    resets.append(key)
    return ""


module: Any = SimpleNamespace(
    has_expired=lambda key: task == "a rank has failed" and process == 1,
    region_of=lambda address, device: (address // BASE * BASE, BYTES),
    export_region=export_region,
    import_region=import_region,
    reset_device_group=reset_device_group,
)

devices = jax.devices()
controls = {device.id: BASE * (device.id + 1) + 0x40 for device in jax.local_devices()}
_processes.exchange(devices, {})  # which opens connections that stay
before = len(os.listdir("/proc/self/fd"))
try:
    ranks = _processes.share_memory(module, "key", devices, controls)
except _processes.SetupError as error:
    print(f"error: {error}", flush=True)
else:
    for device, (ordinal, control, shift) in zip(devices, ranks, strict=True):
        own = device.process_index == process
        assert (ordinal >= 0) == own
        # The control block lies where its region was mapped, as far into it as at its owner's.
        assert control == BASE * (device.id + 1) + 0x40 + shift
        assert (shift == 0) == own
        inode = os.fstat(files[control].fileno()).st_ino if own else inodes[control - 0x40]
        print(f"device {device.id}: inode {inode}", flush=True)
    # A second group maps nothing again.
    mapped = dict(inodes)
    assert _processes.share_memory(module, "key", devices, controls) == ranks
    assert inodes == mapped
    print(f"resets {len(resets)}", flush=True)
assert len(os.listdir("/proc/self/fd")) == before + len(files)  # but for the memory itself
print("descriptors closed", flush=True)
