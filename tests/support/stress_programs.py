"""Programs of tests/native: sources of the kernels, compiled for the host, also with planted mistakes."""

import functools
import pathlib
import subprocess
from collections.abc import Callable, Iterable

ROOT = pathlib.Path(__file__).parents[2]
FFI, NATIVE = ROOT / "ffi", ROOT / "tests" / "native"
# Fibers jump between stacks, which a fortified longjmp takes for a mistake.
COMPILER = ("g++", "-std=c++17", "-U_FORTIFY_SOURCE")
# Those of the standard library take half of the time that it takes to compile a program.
STANDARD_HEADERS = """
algorithm atomic cmath cstdint cstdio cstdlib cstring deque functional memory random type_traits vector
"""


def build(name: str, target: pathlib.Path, *folders: pathlib.Path, options: tuple = ("-O2",)) -> pathlib.Path:
    """Compiles tests/native/`name`.cc. Headers in `folders` replace those of ffi/."""
    included = [f"-I{folder}" for folder in (*folders, NATIVE / "emulation", FFI, NATIVE)]
    subprocess.run([*COMPILER, *options, *included, NATIVE / f"{name}.cc", "-o", target], check=True)
    return target


def run(program: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a program and returns how it ended."""
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=200)


def builder_of_mistakes(folder: pathlib.Path) -> Callable[..., pathlib.Path]:
    """Returns build_with_mistake. Compiles the standard library's headers for it once, into `folder`."""
    header, level = folder / "standard.h", "-Og"  # GCC uses them with the same options only
    header.write_text("".join(f"#include <{name}>\n" for name in STANDARD_HEADERS.split()))
    subprocess.run([*COMPILER, level, "-x", "c++-header", header], check=True)
    options = (level, "-Winvalid-pch", "-Werror=invalid-pch", "-include", header)
    return functools.partial(build_with_mistake, options)


def build_with_mistake(
    options: tuple, name: str, changes: Iterable[tuple[str, str, str]], folder: pathlib.Path
) -> pathlib.Path:
    """Compiles a program with changes (file below ffi/, right, wrong). All of it is in `folder`."""
    for header, right, wrong in changes:
        copy = folder / header
        text = (copy if copy.exists() else FFI / header).read_text()
        assert text.count(right) == 1, f"{header} does not have {right!r} exactly once"
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(text.replace(right, wrong))
    return build(name, folder / name, folder, options=options)
