"""The compiled extension: whether it is there, and its handlers registered with JAX.

Nothing happens at import; the handlers are registered before the first call that needs them. A
registration whose version does not fit would take the whole backend down, so the versions are
compared first.
"""

import functools
import importlib
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast

import jax
import numpy as np

from jax_ep._extension_types import Extension

Implementation = Literal["ffi", "ffi apart", "xla"]


def runtime_ffi_version() -> tuple[int, int]:
    """The XLA FFI version of the installed jaxlib, read from the headers it ships."""
    text = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()

    def number(name: str) -> int:
        found = re.search(rf"#define XLA_FFI_API_{name} (\d+)", text)
        if found is None:
            raise RuntimeError(f"jax_ep: cannot read XLA_FFI_API_{name} from jaxlib's c_api.h")
        return int(found.group(1))

    return number("MAJOR"), number("MINOR")


@functools.cache
def _load() -> tuple[Extension | None, str]:
    """The extension with its handlers registered, or None and the reason why not."""
    try:
        module = cast(Extension, importlib.import_module("jax_ep._C"))
    except ImportError as error:
        return None, f"the extension jax_ep._C cannot be imported ({error}); install with `pip install .`"
    built, runtime = module.build_info()["ffi_api_version"], runtime_ffi_version()
    if built[0] != runtime[0] or built[1] > runtime[1]:
        return None, (
            f"the extension was built for XLA FFI {built[0]}.{built[1]}, the installed jaxlib has "
            f"{runtime[0]}.{runtime[1]}; build it against this jaxlib or an older one"
        )
    # JAX has its devices before handlers are registered: their types must come before them, and of what is
    # registered earlier JAX does not keep the order.
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
    """The extension with its handlers registered, or None where it cannot be used."""
    return _load()[0]


def reason_against_ffi(platform: str) -> str:
    """Why the handlers cannot run on a platform; empty where they can."""
    module, reason = _load()
    if module is None:
        return reason
    if platform in ("gpu", "cuda"):
        built = module.build_info().get("cuda")
        if built is None:
            return "the extension was built without its CUDA part; build it with JAX_EP_CUDA=ON"
        version = jax.local_devices(backend="gpu")[0].client.platform_version
        runtime = re.search(r"cuda (\d+)", version)
        if runtime is None:
            return f"the GPUs are not run by CUDA ({version!r})"
        major = int(runtime.group(1)) // 1000
        if built // 1000 != major:
            return f"the extension was built with CUDA {built // 1000}, but JAX uses CUDA {major}"
        return ""
    if platform != "cpu":
        return f"there are no handlers for platform {platform!r} (but for 'cpu' and 'gpu')"
    return ""


def has_fp8_products() -> bool:
    """Whether the kernels of FP8 products run on the local GPUs, which are of one kind."""
    module, _ = _load()
    capability = getattr(jax.local_devices(backend="gpu")[0], "compute_capability", "")
    return module is not None and "cutlass" in module.build_info() and capability == "9.0"


def sample_addresses(devices: Sequence[Any]) -> list[int]:
    """The address of a small array on each device: it shows whose memory JAX uses there."""
    with jax.ensure_compile_time_eval():  # a group may be made while a function is traced
        arrays = [jax.device_put(np.zeros(1, np.uint8), device) for device in devices]
    return [array.unsafe_buffer_pointer() for array in jax.block_until_ready(arrays)]


def check_implementation(implementation: str | None) -> None:
    known = implementation is None or (isinstance(implementation, str) and implementation in ("ffi", "xla"))
    if not known:
        raise ValueError(f"implementation must be None, 'ffi' or 'xla', got {implementation!r}")


def current_platform() -> str:
    """The platform of the mesh around, else the default backend's."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return getattr(device, "platform", None) or jax.default_backend()


def local_implementation(implementation: str | None) -> Implementation:
    """Resolves `implementation` for an op that needs no group.

    Inside `jax.shard_map` the mesh's platform counts, elsewhere the default backend.
    """
    check_implementation(implementation)
    if implementation == "xla":
        return "xla"
    platform = current_platform()
    reason = reason_against_ffi(platform)
    if implementation == "ffi" and reason:
        raise ValueError(f"implementation='ffi' cannot run here: {reason}. Use implementation='xla'.")
    if reason:
        warn_of_falling_back(platform, reason)
    return "xla" if reason else "ffi"


def warn_of_falling_back(platform: str, reason: str) -> None:
    """Once for each reason, where the handlers could run if something were mended."""
    if platform in ("cpu", "gpu", "cuda"):
        warn_once(f"jax_ep: ops use implementation='xla', which is slow, because {reason}")


@functools.cache
def warn_once(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=2)
