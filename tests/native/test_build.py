"""When the build includes the CUDA part: cmake/Cuda.cmake, with a compiler that does not work."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.no_jax

ROOT = Path(__file__).parents[2]
NO_GPU = "CUDA part: off, this machine has no GPU"
TRIED = "CUDA part: off, no working CUDA compiler found"
HAS_GPU = any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/dxg"))
PROJECT = """cmake_minimum_required(VERSION 3.25)
project(test LANGUAGES NONE)
include({root}/cmake/Cuda.cmake)
"""


@pytest.mark.parametrize(
    ("define", "architectures", "text"),
    [
        ("JAX_EP_CUDA=AUTO", "", TRIED if HAS_GPU else NO_GPU),
        ("JAX_EP_CUDA=AUTO", "90", TRIED),
        ("CMAKE_CUDA_ARCHITECTURES=90", "", TRIED),
        ("JAX_EP_CUDA=OFF", "90", "CUDA part: off\n"),
    ],
)
def test_auto_needs_a_gpu_or_architectures(tmp_path, define, architectures, text):
    pytest.importorskip("cmake", reason="the build group installs it")
    compiler = tmp_path / "nvcc"
    compiler.write_text("#!/bin/sh\nexit 1\n")
    compiler.chmod(0o755)
    (tmp_path / "CMakeLists.txt").write_text(PROJECT.format(root=ROOT))
    options = ["-DJAX_EP_CUDA=AUTO", f"-D{define}", "-S", tmp_path, "-B", tmp_path / "build"]
    configured = subprocess.run(
        [sys.executable, "-m", "cmake", *options],
        env={**os.environ, "CUDACXX": str(compiler), "CUDAARCHS": architectures},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert text in configured.stdout, configured.stdout + configured.stderr


@pytest.mark.parametrize(
    ("define", "architectures", "packages"),
    [
        ("JAX_EP_CUDA=OFF", "90", set()),
        ("JAX_EP_CUDA=ON", "90", {"nccl"}),
        ("JAX_EP_CUDA=AUTO", "80;90a", {"nccl"}),
        ("JAX_EP_CUDA=AUTO", "80;90;100", {"nccl", "cutlass"}),
        ("CMAKE_CUDA_ARCHITECTURES=120", "", {"nccl", "cutlass"}),
        ("JAX_EP_CUDA=ON", "", {"nccl", "cutlass"}),
    ],
)
def test_a_build_gets_the_headers_that_it_needs(monkeypatch, define, architectures, packages):
    """CUTLASS's are for Blackwell, which is among the architectures if none are given."""
    pytest.importorskip("scikit_build_core", reason="the build group installs it")
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT / "release"))
    monkeypatch.setenv("CUDAARCHS", architectures)
    import build_backend

    name, value = define.split("=")
    headers = build_backend.headers({f"cmake.define.{name}": value})
    assert {name for name in ("nccl", "cutlass") if any(name in header for header in headers)} == packages
