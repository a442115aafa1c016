"""Programs of tests/native: sources of the kernels, compiled for the host together with planted mistakes."""

import dataclasses
import os
import pathlib
import subprocess
from collections.abc import Mapping, Sequence

ROOT = pathlib.Path(__file__).parents[2]
FFI, NATIVE = ROOT / "ffi", ROOT / "tests" / "native"
# Fibers jump between stacks, which a fortified longjmp takes for a mistake.
OPTIONS = ("-std=c++17", "-O1", "-U_FORTIFY_SOURCE", "-include", NATIVE / "emulation" / "planted.h")
Change = tuple[str, str, str]  # file below ffi/, right, with the mistake


@dataclasses.dataclass
class Program:
    path: pathlib.Path
    mistakes: Sequence[str]

    def run(self, *arguments: str, mistake: str | None = None) -> subprocess.CompletedProcess[str]:
        """Runs the program with one of its mistakes, by default with none, and returns how it ended."""
        number = -1 if mistake is None else self.mistakes.index(mistake)
        environment = {**os.environ, "PLANTED": str(number)}
        command = [self.path, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)


def build(name: str, folder: pathlib.Path, mistakes: Mapping[str, Sequence[Change]]) -> Program:
    """Compiles tests/native/`name`.cc with all mistakes. `PLANTED` is true in runs that make the mistake.

    `folder` gets the program, and changed copies of the kernels' files.
    """
    for number, changes in enumerate(mistakes.values()):
        for file, right, wrong in changes:
            copy = folder / file
            text = (copy if copy.exists() else FFI / file).read_text()
            assert text.count(right) == 1, f"{file} does not have {right!r} exactly once"
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(text.replace(right, wrong.replace("PLANTED", f"(planted == {number})")))
    included = [f"-I{path}" for path in (folder, NATIVE / "emulation", FFI, NATIVE)]
    subprocess.run(["g++", *OPTIONS, *included, NATIVE / f"{name}.cc", "-o", folder / name], check=True)
    return Program(folder / name, list(mistakes))
