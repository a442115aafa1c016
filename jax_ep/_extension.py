"""The compiled extension: loads it, registers its handlers, and reports what it supports."""

import contextlib
import ctypes
import functools
import importlib
import os
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import jax
import numpy as np

from jax_ep import _installation

Implementation = Literal["ffi", "xla"]

# The engine for grouped products on each compute capability that has one besides the plain engine, "any".
_PRODUCT_ENGINES = {"90": "sm90", "100": "sm100", "103": "sm100", "120": "sm120", "121": "sm120"}


class Device(Protocol):
    """A `jax.Device`, whose type JAX does not publish."""

    id: int
    process_index: int
    local_hardware_id: int  # on GPUs
    platform: str
    client: object


class Extension(Protocol):
    """The module `jax_ep._C`. It identifies groups by key, and devices by local hardware id."""

    def build_info(self) -> dict[str, Any]: ...
    def cpu_targets(self) -> dict[str, Any]: ...
    def cpu_types(self) -> dict[str, Any]: ...
    def cuda_targets(self) -> dict[str, Any]: ...
    def cuda_types(self) -> dict[str, Any]: ...
    def open_group(
        self,
        key: str,
        name: str,
        devices: Sequence[int],
        num_ranks: int,
        relays_for_other_domains: bool,
        timeout_s: float,
        num_sms: int,
    ) -> None: ...
    def close_group(self, key: str) -> None: ...
    def take_expired(self, key: str) -> str | None: ...
    def plan_sms(
        self,
        op: str,
        by_expert: bool,
        sizes: Sequence[int],
        row_bytes: float,
        num_sms: int,
        budget: int,
        compute_capability: int = 90,
    ) -> tuple[int, int]: ...

    # Only in an extension that was built with its CUDA part.
    def open_device_group(
        self, key: str, ranks: Sequence[tuple[int, int, int, int]], num_ranks: int
    ) -> str: ...
    def reset_device_group(self, key: str, epoch: int, calls: int) -> str: ...
    def has_expired(self, key: str) -> bool: ...
    def last_epoch(self, key: str) -> int: ...
    def last_call(self, key: str) -> int: ...
    def inject_stall(self, key: str, rank_index: int, phase: int, seconds: float) -> None: ...
    def check_products(self, engine: str, device: int) -> dict[str, Any]: ...
    def fits_arena(
        self, key: str, combines: bool, by_expert: bool, sizes: Sequence[int], row_bytes: int
    ) -> bool: ...
    def group_bytes(self, num_ranks: int) -> int: ...
    def watch_process(self, process: int, descriptor: int) -> None: ...
    def add_watcher(self, process: int, descriptor: int) -> None: ...
    def region_of(self, address: int, device: int) -> tuple[int, int]: ...
    def export_region(self, address: int, device: int) -> int: ...
    def import_region(self, descriptor: int, bytes: int, devices: Sequence[int]) -> int: ...
    def export_fabric_region(self, address: int, device: int) -> bytes: ...
    def import_fabric_region(self, handle: bytes, bytes: int, devices: Sequence[int]) -> int: ...
    def try_fabric_handle(self, handle: bytes, device: int) -> None: ...
    def describe_gpus(self, ordinals: Sequence[int], samples: Sequence[int]) -> dict[str, Any]: ...

    # Only in an extension that was also built with NCCL's device API.
    def nccl_version(self) -> tuple[str, str]: ...
    def rail_id(self) -> str: ...
    def connect_rails(self, key: str, rails: Sequence[tuple[int, int, str]], num_domains: int) -> str: ...
    def allocate_rails(self, key: str) -> str: ...
    def register_rails(self, key: str) -> str: ...
    def join_rails(self, key: str) -> str: ...
    def try_rails(self, key: str, trial_s: float) -> str: ...
    def publish_rails(self, key: str) -> None: ...
    def drop_rails(self, key: str) -> None: ...
    def why_rails_failed(self, key: str) -> str: ...


def runtime_ffi_version() -> tuple[int, int]:
    """Returns the XLA FFI version of the installed jaxlib, read from the headers that it ships."""
    text = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()

    def number(name: str) -> int:
        match = re.search(rf"#define XLA_FFI_API_{name} (\d+)", text)
        if match is None:
            raise RuntimeError(f"jax_ep: cannot read XLA_FFI_API_{name} from jaxlib's c_api.h")
        return int(match.group(1))

    return number("MAJOR"), number("MINOR")


@functools.cache
def _load() -> tuple[Extension | None, str]:
    """Returns the extension with its handlers registered, or None and the reason why it cannot be used."""
    try:
        module = cast(Extension, importlib.import_module("jax_ep._C"))
    except ImportError as error:
        return None, _installation.why_not_importable(error)
    built, runtime = module.build_info()["ffi_api_version"], runtime_ffi_version()
    if built[0] != runtime[0] or built[1] > runtime[1]:
        return None, (
            f"the extension was built for XLA FFI {built[0]}.{built[1]}, but the installed jaxlib has "
            f"{runtime[0]}.{runtime[1]}; build it against this jaxlib or an older one"
        )
    # Types must be registered before the handlers that use them. JAX does not keep the order of registrations
    # that are made before it has set up its devices.
    jax.devices()
    for platform, types, targets in (
        ("cpu", module.cpu_types(), module.cpu_targets()),
        ("CUDA", module.cuda_types(), module.cuda_targets()),
    ):
        for name, type_info in types.items():
            jax.ffi.register_ffi_type(name, type_info, platform=platform)
        for name, target in targets.items():
            jax.ffi.register_ffi_target(name, target, platform=platform)
    return module, ""


def extension() -> Extension | None:
    """Returns the extension with its handlers registered, or None if it cannot be used."""
    return _load()[0]


def reason_against_ffi(platform: str) -> str:
    """Returns why the handlers cannot run on a platform, or an empty text if they can."""
    module, reason = _load()
    if module is None:
        return reason
    if platform in ("gpu", "cuda"):
        built = module.build_info().get("cuda")
        if built is None:
            return "the extension was built without its CUDA part; build it with JAX_EP_CUDA=ON"
        version = jax.local_devices(backend="gpu")[0].client.platform_version
        if not re.search(r"cuda \d", version):
            return f"JAX does not use the GPUs through CUDA ({version!r})"
        return reason_against_driver(built)
    if platform != "cpu":
        return f"there are no handlers for platform {platform!r}, only for 'cpu' and 'gpu'"
    return ""


@functools.cache
def driver_cuda_version() -> int:
    """Returns the newest CUDA version that the NVIDIA driver supports, 13000 for 13.0; 0 without a driver."""
    version = ctypes.c_int(0)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value


def cuda_text(version: int) -> str:
    """Returns a CUDA version as text, "12.9" for 12090."""
    return f"{version // 1000}.{version % 1000 // 10}"


def reason_against_driver(built: int) -> str:
    """Returns why the NVIDIA driver cannot run an extension built with this CUDA version. Empty if it can.

    The version of JAX's CUDA plugin does not matter, because the extension contains CUDA's runtime and shares
    only the driver's memory and streams with JAX.
    """
    driver = driver_cuda_version()
    if driver // 1000 >= built // 1000:
        return ""
    return (
        f"the extension was built with CUDA {cuda_text(built)}, but the NVIDIA driver supports CUDA "
        f"{cuda_text(driver)}. Install a driver for CUDA {built // 1000}, or an extension built with "
        "an older CUDA (docs/building.md)"
    )


def has_handlers(platform: str) -> bool:
    """Returns whether the handlers can run on a platform.

    Warns once if they could run there but for a problem of the installation, unless JAX_EP_IMPLEMENTATION=xla
    says that they are not wanted.
    """
    reason = reason_against_ffi(platform)
    if reason and check_implementation(None) != "xla":
        warn_of_falling_back(platform, reason)
    return not reason


def product_engine(capability: str) -> str:
    """Returns this build's fastest engine for grouped products on a compute capability, "90" for 9.0."""
    module, _ = _load()
    built = module.build_info().get("product_engines", "") if module is not None else ""
    engine = _PRODUCT_ENGINES.get(capability, "any")
    return engine if engine in built.split(",") else "any"


def missing_product_engine(capability: str) -> str:
    """Returns why this build lacks the fast engine that exists for a compute capability. Empty otherwise."""
    engine = _PRODUCT_ENGINES.get(capability, "any")
    if engine == product_engine(capability):
        return ""
    module, _ = _load()
    build = {} if module is None else module.build_info()
    architectures = build.get("cuda_architectures", "none")
    return (
        f"the extension lacks the fast kernels for products on sm_{capability}: it was built for the "
        f"architectures {architectures}. Build it for architecture {capability} (docs/building.md)"
    )


def has_fp8_products() -> bool:
    """Returns whether the local GPUs can run the kernels for FP8 products. All of them are the same model.

    Warns once if this build lacks kernels that exist for these GPUs.
    """
    device = jax.local_devices(backend="gpu")[0]
    capability = getattr(device, "compute_capability", "").replace(".", "")
    if reason := missing_product_engine(capability):
        warn_once(f"jax_ep: FP8 products convert their operands to float32, which is slow, because {reason}")
    return product_engine(capability) != "any"


def sample_addresses(devices: Sequence[Device]) -> list[int]:
    """Returns the address of a small array on each device. It shows which allocator JAX uses there."""
    with jax.ensure_compile_time_eval():  # because a group may be made while a function is traced
        arrays = [jax.device_put(np.zeros(1, np.uint8), device) for device in devices]
    return [array.unsafe_buffer_pointer() for array in jax.block_until_ready(arrays)]


def check_implementation(implementation: str | None) -> Implementation | None:
    """Returns the implementation that an op must use, or None if it may choose.

    If the op's `implementation` is None, this is the value of the environment variable JAX_EP_IMPLEMENTATION.
    Raises ValueError if the argument is not None, "ffi" or "xla", or the variable not "ffi", "xla" or empty.
    """
    is_text = isinstance(implementation, str)  # an array would be compared with the names element by element
    if implementation is not None and not (is_text and implementation in ("ffi", "xla")):
        raise ValueError(f"implementation must be None, 'ffi' or 'xla', got {implementation!r}")
    default = os.environ.get("JAX_EP_IMPLEMENTATION") or None
    if default not in (None, "ffi", "xla"):
        raise ValueError(
            f"the environment variable JAX_EP_IMPLEMENTATION must be 'ffi', 'xla' or unset, got {default!r}. "
            "It chooses the implementation of all ops whose `implementation` is None."
        )
    return cast("Implementation | None", implementation or default)


def current_platform() -> str:
    """Returns the platform of the current mesh if one is set, and otherwise that of the default backend."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return getattr(device, "platform", None) or jax.default_backend()


def local_implementation(implementation: str | None) -> Implementation:
    """Resolves `implementation` for an op that needs no group.

    Uses the platform of the mesh inside `jax.shard_map`, and of the default backend elsewhere. Raises
    ValueError if "ffi" was requested, here or by JAX_EP_IMPLEMENTATION, and cannot run.
    """
    implementation = check_implementation(implementation)
    if implementation == "xla":
        return "xla"
    platform = current_platform()
    reason = reason_against_ffi(platform)
    if implementation == "ffi" and reason:
        raise ValueError(
            f"implementation='ffi' cannot run here: {reason}. Use implementation='xla', or for the whole "
            "program JAX_EP_IMPLEMENTATION=xla."
        )
    if reason:
        warn_of_falling_back(platform, reason)
    return "xla" if reason else "ffi"


def runs_kernels(implementation: str | None) -> bool:
    """Returns whether an op uses kernels that exist for GPUs only.

    On CPUs such an op uses XLA's ops with any implementation. Elsewhere it resolves the argument as other ops
    do.
    """
    implementation = check_implementation(implementation)
    return current_platform() != "cpu" and local_implementation(implementation) == "ffi"


def warn_of_falling_back(platform: str, reason: str) -> None:
    """Warns once per reason, on platforms whose handlers would run if the problem were fixed."""
    if platform in ("cpu", "gpu", "cuda"):
        warn_once(f"jax_ep: ops use implementation='xla', which is slow, because {reason}")


@functools.cache
def warn_once(text: str) -> None:
    """Warns once per text."""
    warnings.warn(text, RuntimeWarning, stacklevel=2)
