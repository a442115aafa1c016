"""`python -m jax_ep info`."""

import json
import subprocess
import sys
import types

import jax
import pytest

import jax_ep
from jax_ep import _extension
from jax_ep.command import info


def test_as_json(tmp_path):
    command = [sys.executable, "-m", "jax_ep", "info", "--json"]
    # Elsewhere than in the repository, so that the installed package is found.
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, cwd=tmp_path)
    report = json.loads(done.stdout)
    assert report["versions"]["jax"] == jax.__version__
    assert report["versions"]["jax_ep"] == jax_ep.__version__
    assert report["build"]["ffi_api_version"]
    platform = jax.default_backend()
    assert {device["platform"] for device in report["devices"]} == {platform}
    assert (report["implementation"], report["why_not_ffi"]) == ("ffi", "")
    assert report["ranks_per_domain"] == len(report["devices"])
    if platform == "gpu":
        assert all("memory" in device for device in report["devices"])
        links = report["links"]
        assert all(links[i][i] == "self" for i in range(len(links)))
        assert 0 < report["device_bytes_of_a_group"] <= 44 * 2**20


def test_as_text(capsys):
    assert info.run(as_json=False) == 0
    out = capsys.readouterr().out
    assert f"jax         {jax.__version__}" in out
    assert "ops run as  implementation='ffi'" in out
    assert f"domains     each has {len(jax.devices())} of {len(jax.devices())} ranks" in out


def test_names_the_engine_of_each_architecture(monkeypatch):
    build = {
        "ffi_api_version": (0, 1),
        "compiler": "gcc",
        "cuda": 13000,
        "cuda_architectures": "80,90,100-real,103",
        "product_engines": "sm100,sm90,any",
    }
    report = info.collect()
    module = types.SimpleNamespace(build_info=lambda: build)
    monkeypatch.setattr(_extension, "_load", lambda: (module, ""))
    engines = info._product_engines(build["cuda_architectures"])
    lines = info._lines(report | {"build": build, "product_engines": engines})
    for architecture in ("80: engine any", "100: engine sm100", "103: engine sm100"):
        assert f"            sm_{architecture}, compiled, never executed" in lines
    assert "            sm_90: engine sm90, executed" in lines


@pytest.mark.parametrize(
    ("built", "majors", "driver", "expected"),
    [
        (13000, (13,), 13000, []),
        (12090, (13,), 13000, []),
        (12090, (12,), 12020, []),
        (None, (12,), 13000, []),
        (12090, (), 13000, ["JAX has no CUDA plugin: pip install 'jax[cuda13]'"]),
        (12090, (), 0, []),
        (12090, (12,), 0, ["there is no NVIDIA driver"]),
        (12090, (12, 13), 13000, ["JAX needs one CUDA plugin, and has two"]),
        (12090, (13,), 12080, ["JAX's plugin needs a driver for CUDA 13; this one supports 12.8"]),
        (
            13000,
            (12,),
            12080,
            ["the extension was built with CUDA 13.0, but the NVIDIA driver"],
        ),
    ],
)
def test_names_cuda_versions_that_do_not_fit(built, majors, driver, expected, monkeypatch):
    plugins = {f"jax-cuda{major}-plugin": "0.10.2" for major in majors}
    monkeypatch.setattr(_extension, "driver_cuda_version", lambda: driver)
    problems = info.cuda_problems(built, plugins, driver)
    assert [problem[: len(text)] for problem, text in zip(problems, expected, strict=True)] == expected
    supported = _extension.cuda_text(driver) if driver else None
    cuda = {"plugins": plugins, "driver": supported, "problems": problems}
    lines = info._lines(info.collect() | {"cuda": cuda})
    first = next(line for line in lines if line.startswith("CUDA  "))
    assert (plugins == {}) == ("JAX's plugin: none;" in first)
    assert f"supports CUDA {supported}" in first or not driver
    assert sum(line.startswith("            NOTE: ") for line in lines) == len(expected)


def test_without_the_extension(monkeypatch, capsys):
    monkeypatch.setattr(_extension, "_load", lambda: (None, "nobody built it"))
    assert info.run(as_json=False) == 0
    out = capsys.readouterr().out
    assert "extension   none" in out
    assert "not 'ffi': nobody built it" in out


def test_links_are_a_matrix():
    report = info.collect() | {"links": [["self", "nvlink"], ["nvlink", "self"]]}
    lines = [line.rstrip() for line in info._lines(report)]
    assert "links       self   nvlink" in lines
    assert "            nvlink self" in lines
