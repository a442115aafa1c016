"""What the tests of all rooms share: their devices, and fixtures."""

import contextlib
import dataclasses
import gc
import pathlib
from collections.abc import Callable, Iterator

import devices
import hypothesis
import jax
import processes
import pytest
from devices import make_mesh, most_ranks, need_devices, skip_or_fail

import jax_ep
from jax_ep import _extension
from jax_ep._group.group import ranks_of
from jax_ep._transport import ffi, stream

devices.set_up()
processes.join()

# As careful users have it: whatever an op adds up without saying in which dtype or shape then raises.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile("jax_ep", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("jax_ep")


def pytest_collection_finish() -> None:
    """Makes garbage collection cheap, which otherwise takes 5 % of the time.

    It happens often while JAX traces, and would visit all modules and tests each time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)


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
    monkeypatch.setattr(group, "_ranks", dataclasses.replace(ranks_of(group), platform="gpu"))
    monkeypatch.setattr(_extension, "reason_against_ffi", lambda platform: "")
    monkeypatch.setattr(ffi, "goes_through_arena", lambda *rows, **options: False)
    return group


@pytest.fixture(params=[False, True], ids=["", "annotated"])
def annotated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether ops are annotated for the stream for communication also where there is none."""
    if request.param:
        if jax.default_backend() == "gpu":
            pytest.skip("annotated anyway")
        monkeypatch.setattr(stream, "has_stream", lambda ranks: True)
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
    from jax_ep.command import doctor
    from jax_ep.demo import arguments as demo_arguments

    monkeypatch.chdir(tmp_path)
    for module in (bench_arguments, demo_arguments, doctor):  # this process has its devices
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
