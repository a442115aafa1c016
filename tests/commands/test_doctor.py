"""`python -m jax_ep doctor`."""

import os
import subprocess
import sys
import time
import types

import jax
import pytest

from jax_ep import _extension
from jax_ep.command import doctor, info, self_test


@pytest.fixture
def without_tests(monkeypatch):
    monkeypatch.setattr(self_test.SelfTest, "tests", lambda self: {})


def test_all_right(run_command, monkeypatch):
    devices = jax.local_devices()
    if jax.default_backend() == "cpu":  # more of them find no more, and take longer
        devices = devices[:2]
        monkeypatch.setattr(jax, "local_devices", lambda *_, **options: devices)
    status, out = run_command("doctor")
    assert status == 0, out
    assert "BROKEN" not in out
    assert max(map(len, out.splitlines())) <= 110
    labels = [line[:12].strip() for line in out.splitlines()]
    for label in ("jax", "jax_ep", "extension", "devices", "TMPDIR", "sockets", "group", "moe", "replicate"):
        assert label in labels
    assert f"{len(devices)} ranks" in out


def test_without_the_extension(run_command, without_tests, monkeypatch):
    monkeypatch.setattr(_extension, "_load", lambda: (None, "nobody built it"))
    status, out = run_command("doctor")
    assert status == 1
    assert "extension   none\n            BROKEN: nobody built it" in out


def test_a_wrong_result_is_broken(run_command, monkeypatch):
    tests = {"dispatch": lambda: 0.5, "moe": lambda: float("nan"), "layout": lambda: 1 // 0}
    monkeypatch.setattr(self_test.SelfTest, "tests", lambda self: tests)
    status, out = run_command("doctor")
    assert status == 1
    assert "3 broken" in out
    assert "layout      ZeroDivisionError" in out


def test_self_tests_are_sensitive():
    """A self test whose reference belongs to other tokens fails."""
    mesh = doctor.mesh_of(jax.local_devices()[:1])
    with doctor.Group(mesh, "ep") as group:
        tests = self_test.SelfTest(group, mesh)
        assert tests.dispatch() == 0
        tests.order = tests.order[::-1]
        assert tests.dispatch() > self_test.tolerance("dispatch")
        tests.sizes = tests.sizes + 1
        assert tests.layout() > self_test.tolerance("layout")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("JAX_EP_IMPLEMENTATION", "xla", "NOTE: it makes ops slower; unset JAX_EP_IMPLEMENTATION"),
        ("JAX_EP_PLAIN_COPIES", "1", "NOTE: it makes ops slower; unset JAX_EP_PLAIN_COPIES"),
        ("TMPDIR", "/nowhere", "NOTE: TMPDIR=/nowhere is no writable folder"),
    ],
)
def test_notes_leave_the_status(name, value, expected, run_command, without_tests, monkeypatch):
    monkeypatch.setenv(name, value)
    status, out = run_command("doctor")
    assert (status, expected in out) == (0, True), out


@pytest.mark.no_gpu
def test_too_few_threads(run_command, without_tests, monkeypatch):
    monkeypatch.setenv("NPROC", "1")
    status, out = run_command("doctor")
    assert status == 1
    assert "threads     too few" in out
    _extension.warn_once.cache_clear()


def test_a_check_that_hangs_ends_the_process(monkeypatch, capsys):
    ended = []
    monkeypatch.setattr(doctor, "LIMIT_S", 0.05)
    monkeypatch.setattr(os, "_exit", ended.append)
    watch = doctor._Watch()
    watch("moe")
    for _ in range(100):
        if ended:
            break
        time.sleep(0.05)
    assert ended == [1]
    assert "moe         did not end within 0.05 s" in capsys.readouterr().out


@pytest.mark.no_gpu
@pytest.mark.parametrize(
    ("built", "plugins", "notes"),
    [
        (None, [], ["driver"]),
        (13000, [], ["CUDA"]),
        (None, ["jax-cuda13-plugin"], ["driver"]),
        (12090, ["jax-cuda12-plugin", "jax-cuda13-plugin"], ["CUDA"]),
    ],
)
def test_says_once_why_gpus_are_not_used(built, plugins, notes, monkeypatch):
    module = types.SimpleNamespace(build_info=lambda: {"cuda": built} if built else {})
    driver = types.SimpleNamespace(exists=lambda: True, read_text=lambda: "NVRM version: 580.10")
    monkeypatch.setattr(_extension, "extension", lambda: module)
    monkeypatch.setattr(_extension, "driver_cuda_version", lambda: 13000)
    monkeypatch.setattr(info, "cuda_plugins", lambda: dict.fromkeys(plugins, info.version("jaxlib")))
    monkeypatch.setattr(doctor, "Path", lambda path: driver)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    devices = [types.SimpleNamespace(platform="cpu", client=types.SimpleNamespace(platform_version="cpu"))]
    findings = [finding for finding in doctor._versions(devices) if finding.cure]
    assert [finding.label or finding.text for finding in findings] == notes


@pytest.mark.slow
@pytest.mark.no_gpu
def test_several_processes(tmp_path):
    """Inside a step of Slurm, too, where JAX by itself would let each process see a single GPU."""
    slurm = {"JOB_ID": "1", "STEP_NODELIST": "localhost", "NTASKS": "1", "PROCID": "0", "LOCALID": "0"}
    command = [sys.executable, "-m", "jax_ep", "doctor", "--processes", "2", "--devices", "2"]
    of_jax = {"JAX_PLATFORMS": "cpu", "JAX_LOGGING_LEVEL": "INFO", "JAX_LOCAL_DEVICE_IDS": "3", "NPROC": "8"}
    environment = os.environ | of_jax | {f"SLURM_{name}": value for name, value in slurm.items()}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "processes   4 ranks, 2 a domain, implementation='ffi'" in done.stdout
    assert "JAX distributed service" in done.stderr
    assert "visible devices" not in done.stderr
