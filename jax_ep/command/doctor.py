"""The report of `python -m jax_ep doctor`: what is wrong here, and how to cure it."""

import argparse
import contextlib
import dataclasses
import os
import re
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jax_ep
from jax_ep import _extension, _installation
from jax_ep._group import connections, cpu_threads, nccl
from jax_ep._group.group import Group
from jax_ep.command import self_test
from jax_ep.command.info import cuda_majors, cuda_report, labeled, mesh_of, version
from jax_ep.command.options import join_others, set_up_virtual_devices

# Longest time of one check, in seconds. A check may include compilations and the start of CUDA.
LIMIT_S = 180.0
COPIED_BYTES = 64 * 2**20
SWITCHES = ("NO_ARENA", "PLAIN_COPIES", "NO_RAILS", "STRESS_US")


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report. With a cure it is not right, and `is_broken` decides about the exit status."""

    label: str
    text: str
    cure: str = ""
    is_broken: bool = False

    def lines(self) -> list[str]:
        """Returns the finding as lines of the report."""
        lines = labeled(self.label, self.text)
        if self.cure:
            lines += labeled("", f"{'BROKEN' if self.is_broken else 'NOTE'}: {self.cure}")
        return lines


def add_to(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the doctor to a parser."""
    parser.add_argument(
        "--devices", type=int, help="virtual CPU devices of each process, if JAX has no GPU (default: 4)"
    )
    parser.add_argument(
        "--processes", type=int, default=1, help="processes that share the devices of this host (default: 1)"
    )
    parser.add_argument("--join", nargs=2, metavar=("ADDRESS", "PROCESS"), help=argparse.SUPPRESS)


def set_up_devices(options: argparse.Namespace) -> None:
    """Sets up the devices and processes. Must be called before JAX initializes its devices."""
    is_set = "JAX_NUM_CPU_DEVICES" in os.environ or "device_count" in os.environ.get("XLA_FLAGS", "")
    if options.devices or not is_set:
        set_up_virtual_devices(options.devices or 4)
    if options.join:
        join_others(options)


def _versions(devices: Sequence[Any]) -> Iterator[Finding]:
    yield Finding("python", f"{sys.version.split()[0]}, {sys.executable}")
    pairs = ", ".join(f"{name} {version(name)}" for name in ("jaxlib", "numpy"))
    yield Finding("jax", f"{jax.__version__}, {pairs}")
    module = _extension.extension()
    built = None if module is None else module.build_info().get("cuda")
    cuda = cuda_report(built, on_gpu=devices[0].platform == "gpu") or {"plugins": {}, "problems": []}
    if installed := cuda["plugins"]:
        alike = set(installed.values()) <= {version("jaxlib")}
        extra = f"cuda{min(cuda_majors(installed))}"
        cure = "" if alike else f"install the version of jaxlib: pip install -U 'jax[{extra}]'"
        yield Finding("", ", ".join(f"{name} {text}" for name, text in installed.items()), cure, not alike)
    for problem in cuda["problems"]:
        yield Finding("", "CUDA", problem)
    if Path("/proc/driver/nvidia/version").exists():
        yield _driver(devices, is_explained=bool(cuda["problems"]))


def _driver(devices: Sequence[Any], is_explained: bool) -> Finding:
    """Reports the driver. `is_explained`: another finding says why JAX does not use the GPUs."""
    text = Path("/proc/driver/nvidia/version").read_text()
    match = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", text)
    driver, cuda = match.group() if match else "unknown", _extension.driver_cuda_version()
    supports = _extension.cuda_text(cuda) if cuda else "no version that is known"
    text = f"{driver}, supports CUDA {supports}; JAX runs on {devices[0].client.platform_version!r}"
    is_unused = devices[0].platform == "cpu" and "cpu" not in os.environ.get("JAX_PLATFORMS", "")
    install = f"pip install 'jax[{'cuda13' if cuda >= 13000 else 'cuda12'}]'"
    cure = f"this host has NVIDIA GPUs that JAX does not use: {install}"
    cure = cure if is_unused and not is_explained else ""
    return Finding("driver", text, cure)


def _package(platform: str) -> Iterator[Finding]:
    folder, module = _installation.folder(), _extension.extension()
    yield Finding("jax_ep", f"{jax_ep.__version__}, from {folder}")
    reason = _extension.reason_against_ffi(platform)
    path = getattr(module, "__file__", None)
    text = "none" if module is None else f"{path}"
    if module is not None:
        build = module.build_info()
        parts = [
            f"{key} {build[key]}" for key in ("cuda", "cuda_architectures", "cutlass", "nccl") if key in build
        ]
        text += f" ({', '.join(parts) or 'without CUDA'})"
    could_run = platform in ("cpu", "gpu")
    yield Finding("extension", text, reason, bool(reason) and could_run)
    installed = version("jax_ep")
    if installed not in ("not installed", jax_ep.__version__):
        cure = f"version {installed} is installed, but another is imported. {_installation.how_to_unhide()}"
        yield Finding("", "two versions", cure, True)
    elif module is not None and (copies := _installation.hidden_copies()):
        yield Finding("", f"other copies, which are not used: {', '.join(map(str, copies))}")
    switches = [name for name in (f"JAX_EP_{switch}" for switch in SWITCHES) if os.environ.get(name)]
    if os.environ.get("JAX_EP_IMPLEMENTATION") == "xla":
        switches.append("JAX_EP_IMPLEMENTATION")
    for name in switches:
        yield Finding("environment", f"{name}={os.environ[name]}", f"it makes ops slower; unset {name}")


def _devices(devices: Sequence[Any]) -> Iterator[Finding]:
    kinds = ", ".join(sorted({device.device_kind for device in devices}))
    yield Finding("devices", f"{len(devices)} of {devices[0].platform}: {kinds}")
    if devices[0].platform == "cpu":
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _extension.warn_once.cache_clear()
            cpu_threads.check(devices)
        if caught:
            yield Finding("threads", "too few", str(caught[0].message), True)
    capability = getattr(devices[0], "compute_capability", "").replace(".", "")
    if devices[0].platform == "gpu" and not _extension.reason_against_ffi("gpu"):
        reason = _extension.missing_product_engine(capability)
        yield Finding(
            "products", f"engine {_extension.product_engine(capability)} on sm_{capability}", reason
        )
        if os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "").lower() in ("0", "false"):
            cure = "several processes need preallocation: unset XLA_PYTHON_CLIENT_PREALLOCATE"
            yield Finding("memory", "JAX does not preallocate", cure)


def _links(devices: Sequence[Any]) -> Iterator[Finding]:
    """Yields the links between GPUs, and the speed of copies over them."""
    module = _extension.extension()
    if devices[0].platform != "gpu" or len(devices) < 2 or _extension.reason_against_ffi("gpu"):
        return
    assert module is not None
    samples = _extension.sample_addresses(devices)
    links = module.describe_gpus([d.local_hardware_id for d in devices], samples)["links"]
    rates: dict[tuple[int, int], float] = {}
    for i, source in enumerate(devices):
        x = jax.device_put(np.zeros(COPIED_BYTES, np.uint8), source)
        for j, target in enumerate(devices):
            if i != j:
                rates[i, j] = _copy_rate(x, target)
    for i, row in enumerate(links):
        cells = (f"{link} {rates[i, j]:.0f}" if i != j else "-" for j, link in enumerate(row))
        yield Finding("GB/s" if i == 0 else "", " ".join(f"{cell:10s}" for cell in cells))
    unreachable = [(i, j) for i, row in enumerate(links) for j, link in enumerate(row) if link == "none"]
    if unreachable:
        cure = (
            "these GPUs have no peer access, so ops use implementation='xla'. Check `nvidia-smi topo -p2p "
            "r`, the IOMMU, and the container; or set Group(ranks_per_domain=...) to GPUs that reach each "
            "other"
        )
        yield Finding("", f"not reachable: {unreachable[:8]}", cure, True)
    for kind in ("nvlink", "pcie"):
        same = {pair: rate for pair, rate in rates.items() if links[pair[0]][pair[1]] == kind}
        slow = [pair for pair, rate in same.items() if rate < max(same.values()) / 2]
        if slow:
            cure = "check these links (`nvidia-smi nvlink -s`), and whether another program uses these GPUs"
            yield Finding("", f"{kind}, less than half as fast as others: {slow[:8]}", cure)


def _copy_rate(x: jax.Array, target: Any) -> float:
    """Returns the speed of copies to a device, in GB/s."""
    jax.block_until_ready(jax.device_put(x, target))
    start = time.perf_counter()
    jax.block_until_ready([jax.device_put(x, target) for _ in range(4)])
    return 4 * x.nbytes / (time.perf_counter() - start) / 1e9


def _nccl(platform: str) -> Iterator[Finding]:
    """Yields the NCCL that this process has loaded. JAX loads it at its first collective."""
    if platform != "gpu":
        return
    paths = sorted(set(re.findall(r"/\S*libnccl\.so\S*", Path("/proc/self/maps").read_text())))
    packages = ", ".join(
        f"{name} {version(name)}"
        for name in ("nvidia-nccl-cu12", "nvidia-nccl-cu13")
        if version(name) != "not installed"
    )
    text = f"{', '.join(paths) or 'not loaded yet'} (packages: {packages or 'none'})"
    cure = "two of them are loaded; remove one from LD_LIBRARY_PATH" if len(paths) > 1 else ""
    yield Finding("NCCL", text, cure, len(paths) > 1)
    yield Finding("", f"between domains: {nccl.describe()}")


def _sharing(platform: str) -> Iterator[Finding]:
    """Yields whether processes could exchange memory, as a group of several processes does."""
    wanted, folder = os.environ.get("TMPDIR"), tempfile.gettempdir()
    cure = ""
    if wanted and Path(wanted).absolute() != Path(folder).absolute():
        cure = f"TMPDIR={wanted} is no writable folder, so {folder} is used; create it, or unset TMPDIR"
    yield Finding("TMPDIR", folder, cure)
    with contextlib.suppress(OSError):
        free = shutil.disk_usage("/dev/shm").free
        cure = "" if free > 2**26 else "NCCL needs more between processes: docker run --shm-size=1g"
        yield Finding("/dev/shm", f"{free / 2**20:.0f} MiB free", cure)
    try:
        _pass_descriptor()
    except Exception as error:
        cure = "processes of a host cannot share memory: set TMPDIR to a directory that all can write to"
        yield Finding("sockets", f"{type(error).__name__}: {error}", cure, platform == "gpu")
    else:
        yield Finding("sockets", "pass descriptors of shared memory")


def _pass_descriptor() -> None:
    """Passes a file through a socket, as the processes of a group do."""
    with contextlib.ExitStack() as stack:
        shared = os.memfd_create("jax_ep", os.MFD_CLOEXEC)
        stack.callback(os.close, shared)
        os.write(shared, b"jax_ep")
        address = stack.enter_context(connections.serving([shared], 1, None))
        (received,) = stack.enter_context(connections.received(address, 1, 0, None, 10.0))
        if os.pread(received, 6, 0) != b"jax_ep":
            raise OSError("the memory that was received is not the memory that was sent")


def _group(label: str, devices: Sequence[Any]) -> Finding:
    """Returns which implementation a group of the devices uses."""
    with warnings.catch_warnings(action="ignore"), Group(mesh_of(devices), "ep") as group:
        info = group.info()
    text = f"{len(devices)} ranks, {info.ranks_per_domain} a domain, implementation={info.implementation!r}"
    if info.implementation == "ffi" or _extension.reason_against_ffi(devices[0].platform):
        return Finding(label, text)  # the line of the extension has the reason
    chosen = os.environ.get("JAX_EP_IMPLEMENTATION") == "xla"
    one_domain_each = devices[0].platform == "cpu" and info.ranks_per_domain == 1
    return Finding(label, text, info.reason, not (chosen or one_domain_each))


def _self_tests(devices: Sequence[Any], watch: Callable[[str], None]) -> Iterator[Finding]:
    """Yields the result of each op on the devices of this process."""
    mesh = mesh_of(devices)
    with warnings.catch_warnings(action="ignore"), Group(mesh, "ep", timeout_s=30.0) as group:
        for name, test in self_test.SelfTest(group, mesh).tests().items():
            watch(name)
            start = time.perf_counter()
            try:
                error = test()
                group.check()
            except Exception as failure:
                text = " ".join(f"{type(failure).__name__}: {failure}".split())[:600]
                yield Finding(name, text, "this op fails here; report it with this output", True)
                continue
            text = f"relative error {error:.1e}, {time.perf_counter() - start:.1f} s with compilation"
            is_wrong = not error <= self_test.tolerance(name)
            cure = f"at most {self_test.tolerance(name):.0e} is right; report it with this output"
            yield Finding(name, text, cure if is_wrong else "", is_wrong)


class _Watch:
    """Ends the process if a check does not end in time, because waits of XLA and of drivers have no limit."""

    def __init__(self) -> None:
        self.timer: threading.Timer | None = None

    def __call__(self, label: str) -> None:
        self.stop()
        self.timer = threading.Timer(LIMIT_S, self._end, (label,))
        self.timer.daemon = True
        self.timer.start()

    def stop(self) -> None:
        if self.timer is not None:
            self.timer.cancel()

    @staticmethod
    def _end(label: str) -> None:
        cure = "another program may hold the devices, or another process may be missing; see `nvidia-smi`"
        finding = Finding(label, f"did not end within {LIMIT_S:g} s", cure, True)
        print("\n".join(finding.lines()), flush=True)
        os._exit(1)


def _checks(watch: Callable[[str], None]) -> Iterator[Finding]:
    watch("devices")
    devices = jax.local_devices()
    platform = devices[0].platform
    yield from _versions(devices)
    yield from _package(platform)
    yield from _devices(devices)
    watch("GB/s")
    yield from _links(devices)
    yield from _sharing(platform)
    watch("group")
    yield _group("group", devices)
    if jax.process_count() > 1:
        watch("processes")
        yield _group("processes", jax.devices())
    yield from _self_tests(devices, watch)
    watch("NCCL")
    yield from _nccl(platform)


def run() -> int:
    """Prints the report, and returns the exit status: 0, or 1 if something is broken.

    Of several processes the first prints all lines, and the others only those that are not right.
    """
    watch, broken, notes = _Watch(), 0, 0
    process = jax.process_index()
    try:
        for finding in _checks(watch):
            broken += finding.is_broken
            notes += bool(finding.cure) and not finding.is_broken
            if process == 0 or finding.cure:
                prefix = f"process {process}\n" if process else ""
                print(prefix + "\n".join(finding.lines()), flush=True)
    finally:
        watch.stop()
    if process == 0:
        print(
            "\n".join(labeled("result", f"{broken} broken, {notes} notes" if broken + notes else "all right"))
        )
    return 1 if broken else 0
