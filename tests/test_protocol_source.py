"""The device protocol's own source, compiled for the host and run with faults: see protocol_stress.cc."""

import pathlib
import subprocess

import pytest

TESTS = pathlib.Path(__file__).parent


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    target = tmp_path_factory.mktemp("protocol") / "protocol_stress"
    folders = [f"-I{TESTS / 'emulation'}", f"-I{TESTS.parent / 'ffi'}"]
    source = str(TESTS / "protocol_stress.cc")
    # Fibers jump between stacks, which a fortified longjmp takes for a mistake.
    options = ["-std=c++17", "-O2", "-U_FORTIFY_SOURCE", *folders]
    subprocess.run(["g++", *options, source, "-o", str(target)], check=True)
    return target


@pytest.mark.parametrize(
    "arguments", [("faults", "120", "1"), ("held", "60", "1"), ("plain", "3000", "2")], ids=lambda a: a[0]
)
def test_protocol(program, arguments):
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
