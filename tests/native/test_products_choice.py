"""What happens if an engine for grouped products that nobody has executed fails its check. Needs no GPU."""

import pathlib
import subprocess

import pytest

pytestmark = pytest.mark.no_jax

HERE = pathlib.Path(__file__).parent
FFI = HERE.parents[1] / "ffi"

# What products.cc needs of CUDA.
CUDA = """
#pragma once
#include <cstddef>
enum cudaError_t { cudaSuccess };
enum cudaDeviceAttr { cudaDevAttrComputeCapabilityMajor, cudaDevAttrComputeCapabilityMinor };
typedef struct Stream* cudaStream_t;
typedef struct Event* cudaEvent_t;
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) { return *value = 9, cudaSuccess; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    folder = tmp_path_factory.mktemp("products")
    (folder / "cuda_runtime_api.h").write_text(CUDA)
    sources = [HERE / "products_choice.cc", FFI / "kernels" / "products" / "products.cc"]
    command = [
        "g++",
        "-std=c++17",
        "-DJAX_EP_PRODUCTS_SM90",
        f"-I{folder}",
        f"-I{FFI}",
        "-o",
        folder / "choice",
    ]
    subprocess.run([*command, *sources], check=True)
    return folder / "choice"


def run(program, found):
    """Returns the errors and warnings of two calls, and the engine of each kind of product."""
    output = subprocess.run([program, found], check=True, capture_output=True, text=True).stdout
    lines = output.split("\n")
    return lines[:4], dict(line.split(": ") for line in lines[4:-1])


@pytest.mark.parametrize(
    ("found", "plain"),
    [("nothing", set()), ("differences", {"bfloat16 rows", "FP8 rows"}), ("no kernels", None)],
)
def test_plain_engine_takes_over_what_fails(program, found, plain):
    (error, warning, again, silent), engines = run(program, found)
    assert error == again == silent == ""
    plain = set(engines) if plain is None else plain
    assert {kind for kind, engine in engines.items() if engine == "any"} == plain
    assert len(engines) == 8
    if found != "differences":
        assert warning == ""
        return
    assert "engine sm90 failed its check on GPU 0 (sm_99)" in warning
    assert "bfloat16 rows: differs by 0.5 of the largest value, at most 0.1 expected" in warning
    assert "FP8 rows: the launch failed: out of resources" in warning
    assert "The plain engine computes these products instead" in warning


def test_gpu_that_a_check_breaks_is_an_error(program):
    (error, warning, again, silent), _ = run(program, "a hang")
    assert error == again
    assert "float16 gradient of rows: did not end within 60 s" in error
    assert "JAX_EP_PRODUCTS=any" in error
    assert warning == silent == ""
