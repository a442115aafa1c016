"""The devices of the tests. Import this module before jax: it says how many there are.

`JAX_EP_REQUIRE_DEVICES=n` turns a skip for want of devices into a failure when n or fewer are needed.
"""

import os
import pathlib

import jaxlib.version

os.environ.setdefault("NPROC", "32")  # docs/sharp_bits.md: XLA:CPU needs two threads a device
# The matrices are small: NumPy's threads would only wait for the next one, and take processors from XLA.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
flags = os.environ.get("XLA_FLAGS", "")
if os.environ.get("JAX_PLATFORMS") == "cpu" and "optimization_level" not in flags:
    # Most of the time goes into compiling programs. The first and the last of these halve it. The second
    # saves a fifth of the rest: XLA compiles a program in up to 32 parts, and each part repeats some work.
    os.environ["XLA_FLAGS"] = (
        flags + " --xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    )
    if jaxlib.version.__version_info__ < (0, 11):  # later versions do not have the flag
        os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
    else:  # compiling takes most of the time there, and each of its steps would be verified
        os.environ["XLA_FLAGS"] += " --xla_cpu_emitter_verification_level=0"
    # Lines of Python in lowered programs, which only a profile of a GPU shows, take a quarter of the rest.
    os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
    # Several tests compile the same programs, and so does the next run.
    os.environ.setdefault(
        "JAX_COMPILATION_CACHE_DIR", str(pathlib.Path(__file__).parents[2] / "build" / "test_programs")
    )
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh


def set_up() -> None:
    """Eight virtual CPU devices, unless XLA_FLAGS has a number.

    docs/start.md makes the same call, so its code runs in the tests' process.
    """
    if "xla_force_host_platform_device_count" not in flags:
        jax.config.update("jax_num_cpu_devices", 8)


def flags_of_processes(**more: int) -> str:
    """Returns XLA_FLAGS for other processes: those here, but with their own number of devices, and `more`."""
    kept = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag]
    return " ".join([*kept, *(f"--{name}={value}" for name, value in more.items())])


def skip_or_fail(what: str, count: int, there: int) -> None:
    if there >= count:
        return
    text = f"needs {count} {what}, there are {there}"
    if int(os.environ.get("JAX_EP_REQUIRE_DEVICES", "0")) >= count:
        pytest.fail(text)
    pytest.skip(text)


def need_devices(count: int) -> list[jax.Device]:
    devices = jax.devices()
    skip_or_fail("devices", count, len(devices))
    if all(device.process_index != jax.process_index() for device in devices[:count]):
        pytest.skip(f"none of the first {count} devices belongs to process {jax.process_index()}")
    return devices[:count]


def need_gpu() -> None:
    if jax.default_backend() != "gpu":
        if os.environ.get("JAX_PLATFORMS", "cpu") != "cpu":
            pytest.fail(f"needs GPUs, as JAX_PLATFORMS asks; JAX found only {jax.devices()[0].platform}")
        pytest.skip("needs a GPU")


def most_ranks() -> int:
    """8, or on a host of fewer GPUs the largest power of two that it has."""
    count = len(jax.devices())
    return next(size for size in (8, 4, 2, 1) if size <= count)


def make_mesh(shape: tuple[int, ...], names: tuple[str, ...], kind: AxisType = AxisType.Auto) -> Mesh:
    devices = np.array(need_devices(int(np.prod(shape)))).reshape(shape)
    return Mesh(devices, names, axis_types=(kind,) * len(names))
