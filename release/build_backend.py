"""The build backend: scikit-build-core's, which gets the headers of the CUDA part only where it is built.

They are 470 MB. `AUTO` means what it does in cmake/Cuda.cmake, whose conditions these are, except that no
compiler is searched for. CUTLASS, 250 MB of them, is only for architectures that it makes products for.
"""

import os
import pathlib
import re
import tomllib
from typing import Any

from scikit_build_core import build as backend
from scikit_build_core.build import build_editable as build_editable
from scikit_build_core.build import build_sdist as build_sdist
from scikit_build_core.build import build_wheel as build_wheel
from scikit_build_core.build import get_requires_for_build_sdist as get_requires_for_build_sdist
from scikit_build_core.build import prepare_metadata_for_build_editable as prepare_metadata_for_build_editable
from scikit_build_core.build import prepare_metadata_for_build_wheel as prepare_metadata_for_build_wheel

GPU_FILES = ("/dev/nvidiactl", "/dev/dxg")

Settings = dict[str, Any] | None


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    return [*backend.get_requires_for_build_wheel(config_settings), *headers(config_settings)]


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    return [*backend.get_requires_for_build_editable(config_settings), *headers(config_settings)]


def headers(config_settings: Settings) -> list[str]:
    """Returns the requirements of the CUDA part if it may be built."""
    settings = config_settings or {}
    mode = settings.get("cmake.define.JAX_EP_CUDA", "AUTO")
    architectures = settings.get("cmake.define.CMAKE_CUDA_ARCHITECTURES") or os.environ.get("CUDAARCHS")
    is_wanted = bool(architectures) or any(pathlib.Path(path).exists() for path in GPU_FILES)
    if mode != "ON" and not (mode == "AUTO" and is_wanted):
        return []
    needed = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["dependency-groups"]["cuda"]
    if architectures and not re.search("10[03]|12[01]|all|native", architectures):
        needed = [requirement for requirement in needed if "cutlass" not in requirement]
    return needed
