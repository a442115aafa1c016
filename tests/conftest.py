"""Devices for the tests, and what several of them share.

`JAX_EP_REQUIRE_DEVICES=n` turns a skip for want of devices into a failure when n or fewer are needed.
"""

import contextlib
import os
import pathlib
from collections.abc import Callable, Iterator

os.environ.setdefault("NPROC", "32")  # docs/sharp_bits.md: XLA:CPU needs two threads a device
flags = os.environ.get("XLA_FLAGS", "")
if os.environ.get("JAX_PLATFORMS") == "cpu" and "optimization_level" not in flags:
    # Most of the time goes into compiling programs that run once, and this halves it.
    os.environ["XLA_FLAGS"] = flags + " --xla_backend_optimization_level=0"

import hypothesis
import jax
import numpy as np
import processes
import pytest
from jax.sharding import AxisType, Mesh

import jax_ep
from jax_ep import _extension
from jax_ep._transport import ffi, stream

if "xla_force_host_platform_device_count" not in flags:
    jax.config.update(
        "jax_num_cpu_devices", 8
    )  # as docs/start.md does, so that its code runs in this process
processes.join()

# As careful users have it: whatever an op adds up without saying in which dtype or shape then raises.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile("jax_ep", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("jax_ep")


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


@pytest.fixture(params=[1, 2, 4, 8])
def num_ranks(request: pytest.FixtureRequest) -> int:
    need_devices(request.param)
    return request.param


@pytest.fixture
def two_devices() -> None:
    """For tests of several ranks; of which, and in which processes, their meshes say."""
    skip_or_fail("devices", 2, len(jax.devices()))


@pytest.fixture(params=["ffi", "xla"])
def implementation(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def open_group() -> Iterator[Callable[..., jax_ep.Group]]:
    """Makes groups that the end of the test closes."""
    with contextlib.ExitStack() as groups:
        yield lambda *args, **options: groups.enter_context(jax_ep.Group(*args, **options))


@pytest.fixture
def gpu_group(open_group: Callable[..., jax_ep.Group], monkeypatch: pytest.MonkeyPatch) -> jax_ep.Group:
    """A group as it would be on GPUs that are not here, to ops of many tokens."""
    group = open_group(make_mesh((most_ranks(),), ("ep",)), "ep")
    monkeypatch.setattr(group, "_platform", "gpu")
    monkeypatch.setattr(_extension, "reason_against_ffi", lambda platform: "")
    monkeypatch.setattr(ffi, "goes_through_arena", lambda *rows, **options: False)
    return group


@pytest.fixture(params=[False, True], ids=["", "annotated"])
def annotated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether ops are annotated for the stream for communication also where there is none."""
    if request.param:
        if jax.default_backend() == "gpu":
            pytest.skip("annotated anyway")
        by_handlers = lambda group, implementation: group._resolve(implementation) == "ffi"
        monkeypatch.setattr(stream, "has_stream", by_handlers)
    return request.param


@pytest.fixture
def run_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> Callable[..., tuple[int | str | None, str]]:
    """Runs `python -m jax_ep` in this process, in a folder of the test: exit status and output.

    A SystemExit is an exit status. Any other exception fails the test: a user would see a traceback.
    """
    from jax_ep.__main__ import main
    from jax_ep.bench import arguments as bench_arguments
    from jax_ep.demo import arguments as demo_arguments

    monkeypatch.chdir(tmp_path)
    for module in (bench_arguments, demo_arguments):  # this process has its devices
        monkeypatch.setattr(module, "set_up_virtual_devices", lambda count: None)

    def run(*arguments: str) -> tuple[int | str | None, str]:
        try:
            with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
                status = main(list(arguments))
        except SystemExit as error:
            status = error.code
        printed = capsys.readouterr()
        message = status if isinstance(status, str) else ""
        return status, printed.out + printed.err + message

    return run
