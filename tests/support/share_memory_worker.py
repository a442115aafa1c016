"""One of two processes of four CPU devices that share pretended GPU memory: files, told by their inodes.

`share_memory_worker.py TASKS ADDRESS PROCESS`, with a comma between tasks. In a task "... on two hosts" each
process thinks that it has a host of its own, in one NVLink domain with the other's.
"""

import os
import select
import signal
import socket
import sys
import tempfile
import time
from types import SimpleNamespace
from typing import Any

import jax

tasks, address, process = sys.argv[1].split(", "), sys.argv[2], int(sys.argv[3])
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(address, num_processes=2, process_id=process)

import numpy as np  # noqa: E402

from jax_ep._group import connections, handshake, memory  # noqa: E402

BASE, BYTES = 0x10000, 0x1000
SIZE = 4
ON_TWO_HOSTS = " on two hosts"
inodes: dict[int, int] = {}  # of what was imported, by the base it was given
watched: dict[int, int] = {}
watchers: dict[int, int] = {}
opened: list[str] = []
log: list[Any] = []
files = {}
has_failed = False
has_own_host = False
task = ""  # the present one


def fails(here: str) -> None:
    """What a task asks for: "0: import" fails of an import in process 0."""
    if task == f"{process}: {here}":
        raise RuntimeError(f"no {here} to be had")


def hold() -> dict[int, int]:
    if task == f"{process}: hold":
        raise KeyError("not of a kind that is expected")
    return {device.id: BASE * (device.id + 1) + 0x40 for device in jax.local_devices()}


def export_region(address: int, device: int) -> int:
    if address not in files:
        fails("export")
        files[address] = tempfile.TemporaryFile()  # noqa: SIM115, the test's memory
    return os.dup(files[address].fileno())


def import_region(descriptor: int, size: int, devices: list[int]) -> int:
    fails("import")
    assert size == BYTES
    base = BASE * (len(inodes) + 100)
    inodes[base] = os.fstat(descriptor).st_ino
    return base


def watch_process(other: int, descriptor: int) -> None:
    fails("watch")
    assert other not in watched
    watched[other] = descriptor


def add_watcher(other: int, descriptor: int) -> None:
    watchers[other] = descriptor


def export_fabric_region(address: int, device: int) -> bytes:
    """The handle says where other processes find the file."""
    fails("fabric export")
    os.close(export_region(address, device))
    return f"/proc/{os.getpid()}/fd/{files[address].fileno()}".encode().ljust(64)


def import_fabric_region(handle: bytes, size: int, devices: list[int]) -> int:
    fails("fabric import")
    with open(handle.decode().strip(), "rb") as file:
        return import_region(file.fileno(), size, devices)


def open_device_group(key: str, ranks: list[memory.Rank], num_ranks: int) -> str:
    assert num_ranks == SIZE
    opened.append(key)
    for device, (ordinal, control, shift, owner) in zip(devices, ranks, strict=True):
        assert owner == device.process_index
        own = owner == process
        assert (ordinal >= 0) == own
        # The control block lies where its region was mapped, as far into it as at its owner's.
        assert control == BASE * (device.id + 1) + 0x40 + shift
        assert (shift == 0) == own
        inode = os.fstat(files[control].fileno()).st_ino if own else inodes[control - 0x40]
        print(f"{key}: device {device.id}: inode {inode}", flush=True)
    return f"process {process} says no" if task == f"{process}: open" else ""


def reset_device_group(key: str, epoch: int, calls: int) -> str:
    log.append((key, epoch, calls))
    return "no reset to be had" if task == f"{process}: reset" else ""


module: Any = SimpleNamespace(
    has_expired=lambda key: has_failed,
    last_epoch=lambda key: 10 + process,
    last_call=lambda key: 21 - process,
    region_of=lambda address, device: (address // BASE * BASE, BYTES),
    export_region=export_region,
    import_region=import_region,
    export_fabric_region=export_fabric_region,
    import_fabric_region=import_fabric_region,
    watch_process=watch_process,
    add_watcher=add_watcher,
    open_device_group=open_device_group,
    reset_device_group=reset_device_group,
)

drain = handshake.drain


def drain_and_log(local: Any, limit_s: float) -> None:
    drain(local, limit_s)
    log.append([device.id for device in local])


handshake.drain = drain_and_log
handshake.host_id = lambda: f"host {process}" if has_own_host else "host"
devices = list(np.array(jax.devices()).reshape(2, -1).T.flat)  # two groups, each of both processes' devices
handshake.exchange(devices, {}, 60, "a first word")  # which opens connections that stay
before = len(os.listdir("/proc/self/fd"))


def make(key: str) -> None:
    """Makes a group; an error is printed."""
    began = time.monotonic()
    try:
        memory.open_group(module, key, devices, SIZE, hold, 0.5)
    except (handshake.SetupError, handshake.SetupTimeout, RuntimeError) as error:
        kind = type(error).__name__
        print(f"{kind} after {time.monotonic() - began:.1f} s: {error}", flush=True)
        if isinstance(error, handshake.SetupTimeout):
            end()  # the other process has gone, or is late on purpose


def count_descriptors() -> None:
    """None is open but the memory itself, and one for each end of a watch."""
    expected = before + len(files) + len(watched) + len(connections._kept)
    assert len(os.listdir("/proc/self/fd")) == expected
    print("descriptors closed", flush=True)


def end() -> None:
    """Ends at once: the other process may have gone, of which JAX would complain."""
    sys.stdout.flush()
    os._exit(0)


def forget() -> None:
    """Makes the process as it was before any task, but for the connections of `handshake`."""
    for descriptor in (*watched.values(), *connections._kept):
        os.close(descriptor)
    for file in files.values():
        file.close()
    for state in (inodes, watched, watchers, opened, log, files, memory._mapped, memory._settled):
        state.clear()
    connections._kept.clear()
    connections._watched.clear()
    count_descriptors()


def never_comes() -> None:
    handshake.LEAST_S = 3.0
    name = task.split(":")[0]
    if process == 1:
        original = getattr(memory._Setup, name)

        def late(*arguments: Any) -> Any:
            time.sleep(10)
            return original(*arguments)

        setattr(memory._Setup, name, late)
    make("key")
    end()


def one_dies() -> None:
    if process == 1:
        time.sleep(1)  # the other may not have read the first word yet
        os.kill(os.getpid(), signal.SIGKILL)
    handshake.LEAST_S = 5.0  # gloo of the newest jax says nothing of its end
    make("key")
    end()


def all_goes_well() -> None:
    # A second group maps nothing again, and an equal one asks nobody for anything.
    mapped = dict(inodes)
    for i in range(5):
        make(f"another {i}")
        make("key")
    assert inodes == mapped
    assert opened == ["key", *(f"another {i}" for i in range(5))]
    assert log == []
    count_descriptors()
    (descriptor,) = watched.values()
    with socket.socket(fileno=os.dup(descriptor)) as connected:
        assert (connected.family == socket.AF_UNIX) == (not has_own_host)
    os.write(watchers[1 - process], b"event")
    assert select.select([descriptor], [], [], 15)[0]
    assert os.read(descriptor, 10) == b"event"
    if process == 1:
        if os.fork() == 0:  # a child that outlives its parent
            for standard in range(3):
                os.close(standard)
            time.sleep(20)
            os._exit(0)
        assert not select.select([descriptor], [], [], 1)[0]
        print("the other lives", flush=True)
    else:
        assert select.select([descriptor], [], [], 15)[0]
        assert socket.socket(fileno=descriptor).recv(1) == b""
        print("saw the end of the other", flush=True)
    end()


handshake.LEAST_S = 20.0
for task in tasks:
    print(f"task {task}", flush=True)
    has_own_host = task.endswith(ON_TWO_HOSTS)
    task = task.removesuffix(ON_TWO_HOSTS)
    if task.endswith("never comes"):
        never_comes()
    if task == "one dies":
        one_dies()
    make(f"key {process}" if task == "other groups" else "key")
    count_descriptors()
    if task == "all goes well":
        all_goes_well()
    if task in ("a rank has failed", "1: reset"):
        has_failed = process == 1
        make("key")
        assert log == [[device.id for device in jax.local_devices()], ("key", 11, 21)]
        has_failed = False
        make("key")
        assert len(log) == 2
        print("drained and reset", flush=True)
    if task.endswith(": open"):
        make("key")  # which is refused without asking anybody
        assert opened == ["key"]
    forget()
