"""What the parts of the extension may know of each other, read from their sources."""

import pathlib
import re

import pytest

FFI = pathlib.Path(__file__).parents[1] / "ffi"

EVERYWHERE = ("core", "host", "handlers", "kernels", "runtime")

# (folders, what must not stand there, why)
RULES = [
    (("core", "host", "kernels", "runtime"), r"xla/ffi|nanobind|Python\.h", "they know no framework"),
    (("core",), r'#include "(?!core/)', "it stands on nothing else of the extension"),
    (("kernels",), r'#include "(host|handlers|runtime)/', "kernels stand on core alone"),
    (("core", "host"), r"cuda\w*\.h|__global__", "they build where there is no CUDA"),
    (("handlers", "runtime", "host", "core"), r"<<<|cudaLaunch", "kernels/launch/launch.h launches kernels"),
    (("kernels",), r"<<<|cudaPeekAtLastError", "kernels are launched by launch.h, which tells its own error"),
    (EVERYWHERE, r"\b(abort|assert|terminate|_?[eE]xit|quick_exit)\(", "an error is returned"),
    (EVERYWHERE, r"\btrap;", "nothing traps"),
]
# A GPU that a stuck peer may still write to is stopped, and its process ended (docs/sharp_bits.md).
EXCEPTIONS = {"runtime/gpu/peers.cc", "kernels/ptx/memory.cuh"}


def code_of(path):
    return re.sub(r"//[^\n]*", "", path.read_text())


@pytest.mark.parametrize(("folders", "pattern", "why"), RULES, ids=[rule[1] for rule in RULES])
def test_rule(folders, pattern, why):
    sources = [path for folder in folders for path in (FFI / folder).rglob("*.*")]
    assert len(sources) > len(folders)
    found = {str(path.relative_to(FFI)) for path in sources if re.search(pattern, code_of(path))}
    found -= EXCEPTIONS if folders == EVERYWHERE else set()
    assert not found, f"{pattern!r} stands in {found}: {why}"
