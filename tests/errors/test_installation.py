"""What a process says if it imports the package from a folder without the compiled extension."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import pytest

import jax_ep
from jax_ep import _extension, _installation

SOURCES = pathlib.Path(jax_ep.__file__).parent

USE = """
import warnings, jax, jax_ep
mesh = jax.make_mesh((1,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    group = jax_ep.Group(mesh, "ep")
    jax_ep.get_dispatch_layout([[0]], num_experts=1, num_ranks=1)
    group.info()
texts = [str(warning.message) for warning in caught]
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A clone whose sources hide an installed package."""
    clone, site = tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("site")
    for folder in (clone, site):
        shutil.copytree(SOURCES, folder / "jax_ep", ignore=shutil.ignore_patterns("_C.*", "__pycache__"))
    shutil.copy(_extension.extension().__file__, site / "jax_ep")
    (clone / "pyproject.toml").touch()
    (clone / "test_use.py").write_text(
        f"{USE}\n\ndef test_use():\n    print(*texts)\n    assert len(texts) == 1\n"
    )
    return clone, site


def run(folders, *arguments):
    """Runs Python in the clone. Without site, because an editable install would come before all folders."""
    clone, site = folders
    packages = [entry for entry in sys.path if entry.endswith("site-packages")]
    path = {"PYTHONPATH": os.pathsep.join([str(site), *packages]), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, "-S", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=clone,
        env=os.environ | path | {"JAX_PLATFORMS": "cpu"},
    )


@pytest.mark.one_jax
@pytest.mark.no_gpu
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("-c", USE + "print(*texts)\nassert len(texts) == 1"), id="command"),
        pytest.param(("-m", "jax_ep", "info"), id="info", marks=pytest.mark.slow),
        pytest.param(
            ("-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-s", "test_use.py"),
            id="pytest",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_source_folder_names_the_install_that_it_hides(folders, arguments):
    clone, site = folders
    done = run(folders, *arguments)
    printed = " ".join(done.stdout.split())
    assert (
        f"imports jax_ep from {clone / 'jax_ep'}, a source folder without the compiled extension" in printed
    )
    assert f"hides the installed package in {site / 'jax_ep'}. " in printed
    assert "Start Python in another folder, or with -P (PYTHONSAFEPATH=1)" in printed
    if "info" in arguments:
        assert max(map(len, done.stdout.splitlines())) <= 110
        done = run(folders, "-P", *arguments)  # the cure
        assert f"from {site / 'jax_ep'}" in done.stdout
        assert "implementation='ffi'" in done.stdout


@pytest.mark.no_jax
@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (
            "hidden by PYTHONPATH",
            r"hides the installed package in .*site/jax_ep\. Remove .*clone from PYTHONPATH",
        ),
        (
            "never installed",
            r"no installed package was found\. Run `pip install \.` in .*clone, and then use",
        ),
        ("other Python", r"\(it has _C\.cpython-27-x\.so, for another Python\), and no installed package"),
        ("unloadable", r"the extension .*_C\.abi3\.so cannot be imported \(undefined symbol\)\. Build"),
        ("no sources", r"clone/jax_ep, without the compiled extension\. Install the package again"),
    ],
)
def test_names_the_cause_and_the_cure(case, expected, tmp_path, monkeypatch):
    clone, site = tmp_path / "clone", tmp_path / "site"
    for folder in (clone, site):
        (folder / "jax_ep").mkdir(parents=True)
        (folder / "jax_ep" / "__init__.py").touch()
    if case != "no sources":
        (clone / "pyproject.toml").touch()
    if case.startswith("hidden"):
        (site / "jax_ep" / "_C.abi3.so").touch()
        monkeypatch.setenv("PYTHONPATH", str(clone))
    if case == "other Python":
        (clone / "jax_ep" / "_C.cpython-27-x.so").touch()
    if case == "unloadable":
        (clone / "jax_ep" / "_C.abi3.so").touch()
    monkeypatch.setattr(_installation, "folder", lambda: clone / "jax_ep")
    monkeypatch.setattr(sys, "path", [str(clone), str(site)])
    reason = _installation.why_not_importable(ImportError("undefined symbol"))
    assert re.search(expected, reason), reason


def products():
    rows, up, down = (jnp.ones(shape, jnp.bfloat16) for shape in ((4, 128), (1, 128, 256), (1, 128, 128)))
    sizes = jnp.array([4])
    return {
        "grouped_dot": lambda: jax_ep.grouped_dot(rows, down, sizes),
        "gated_mlp": lambda: jax_ep.gated_mlp(rows, up, down, sizes),
        "quantize_weights": lambda: jax_ep.quantize_weights(down),
    }


@pytest.mark.no_gpu
@pytest.mark.parametrize("op", products())
def test_ops_without_a_group_warn_on_gpus(op, monkeypatch):
    monkeypatch.setattr(_extension, "_load", lambda: (None, "nobody built it"))
    monkeypatch.setattr(_extension, "current_platform", lambda: "gpu")
    _extension.warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="'xla', which is slow, because nobody built it") as caught:
        jax.eval_shape(products()[op])
    assert len(caught) == 1
    _extension.warn_once.cache_clear()
    monkeypatch.setenv("JAX_EP_IMPLEMENTATION", "xla")  # as requested, so not worth a warning
    jax.eval_shape(products()[op])


@pytest.mark.no_gpu
def test_a_build_without_fast_products_warns(monkeypatch):
    build = {"product_engines": "any", "cuda": 13000, "cuda_architectures": "80"}
    monkeypatch.setattr(_extension, "_load", lambda: (types.SimpleNamespace(build_info=lambda: build), ""))
    for capability, warns in (("9.0", True), ("8.0", False)):  # no build has FP8 products for 8.0
        device = types.SimpleNamespace(compute_capability=capability)
        monkeypatch.setattr(jax, "local_devices", lambda backend, device=device: [device])
        _extension.warn_once.cache_clear()
        if warns:
            with pytest.warns(
                RuntimeWarning, match="lacks the fast kernels .* sm_90: .* architectures 80. Build"
            ):
                assert not _extension.has_fp8_products()
        else:
            assert not _extension.has_fp8_products()


@pytest.mark.no_gpu
@pytest.mark.parametrize(
    ("built", "driver", "jax_cuda", "expected"),
    [
        (13000, 13010, "cuda 13000", ""),
        (12090, 13000, "cuda 13000", ""),  # one wheel serves both plugins
        (12090, 12020, "cuda 12090", ""),
        (13000, 13000, "cuda 12090", ""),
        (
            13000,
            12080,
            "cuda 12090",
            r"built with CUDA 13\.0, but the NVIDIA driver supports CUDA 12\.8",
        ),
        (13000, 13000, "rocm 70000", r"JAX does not use the GPUs through CUDA"),
    ],
)
def test_the_driver_decides_whether_a_cuda_build_runs(built, driver, jax_cuda, expected, monkeypatch):
    module = types.SimpleNamespace(build_info=lambda: {"cuda": built})
    client = types.SimpleNamespace(platform_version=f"PJRT C API\n{jax_cuda}")
    monkeypatch.setattr(_extension, "_load", lambda: (module, ""))
    monkeypatch.setattr(_extension, "driver_cuda_version", lambda: driver)
    monkeypatch.setattr(jax, "local_devices", lambda backend: [types.SimpleNamespace(client=client)])
    reason = _extension.reason_against_ffi("gpu")
    assert bool(reason) == bool(expected)
    assert re.search(expected, reason), reason
