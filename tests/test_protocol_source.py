"""The device protocol's own source, compiled for the host and run with faults.

See protocol_stress.cc, and mail_stress.cc for ops that go through the arena.
"""

import pathlib
import subprocess

import pytest

TESTS = pathlib.Path(__file__).parent
FFI = TESTS.parent / "ffi"
MAIL, ARGS, WAIT = "kernels/protocol/mail_session.cuh", "kernels/small/args.cuh", "kernels/protocol/wait.cuh"

# Mistakes in the arena's protocol: the fault that shows each, and (file, right, wrong) for each change.
MISTAKES = {
    "does not look again when time is up": (
        "held",
        [(WAIT, "IsTimeUp(peers)) return ready();", "IsTimeUp(peers)) return false;")],
    ),
    "does not look again whether a peer has begun": (
        "held",
        [(MAIL, "writable = writable || has_begun();", "")],
    ),
    "uses one half": ("short", [(ARGS, "heads[epoch % 2]", "heads[0]")]),
    "takes the verdict of any op": (
        "late",
        [
            (
                MAIL,
                "!IsOf(seen = LoadStampedAcquire(&head.verdict), visit.epoch)",
                "(seen = LoadStampedAcquire(&head.verdict)) == 0",
            ),
            (
                MAIL,
                "IsOf(seen, visit.epoch) ? static_cast<uint32_t>(seen) : 0",
                "static_cast<uint32_t>(seen)",
            ),
        ],
    ),
    "writes to a rank that it has not heard of": (
        "short",
        [(MAIL, "doubtful = visit.ranks & ~heard;", "doubtful = 0;")],
    ),
    "counts blocks over several ops": ("late", [(MAIL, "if (last) own.ended = 0;", "")]),
}


def build(name, target, *first, level="-O2"):
    """Compiles a program of the tests. Headers in the folders `first` replace the real ones."""
    folders = [f"-I{folder}" for folder in (*first, TESTS / "emulation", FFI, TESTS)]
    # Fibers jump between stacks, which a fortified longjmp takes for a mistake.
    options = ["-std=c++17", level, "-U_FORTIFY_SOURCE", *folders]
    subprocess.run(["g++", *options, str(TESTS / f"{name}.cc"), "-o", str(target)], check=True)
    return target


def run(program, *arguments):
    """Runs a program and returns how it ended."""
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=200)


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return build("protocol_stress", tmp_path_factory.mktemp("protocol") / "protocol_stress")


@pytest.fixture(scope="module")
def mail_program(tmp_path_factory):
    return build("mail_stress", tmp_path_factory.mktemp("mail") / "mail_stress")


@pytest.mark.parametrize(
    "arguments", [("faults", "120", "1"), ("held", "60", "1"), ("plain", "3000", "2")], ids=lambda a: a[0]
)
def test_protocol(program, arguments):
    done = run(program, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("arguments", [("faults", "400", "1"), ("plain", "800", "2")], ids=lambda a: a[0])
def test_arena_protocol(mail_program, arguments):
    done = run(mail_program, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("mistake", MISTAKES)
def test_arena_finds_planted_mistake(mistake, tmp_path):
    fault, changes = MISTAKES[mistake]
    for name, right, wrong in changes:
        copy = tmp_path / name
        text = (copy if copy.exists() else FFI / name).read_text()
        assert text.count(right) == 1, f"{name} has {right!r} not once"
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(text.replace(right, wrong))
    program = build("mail_stress", tmp_path / "mail_stress", tmp_path, level="-O1")
    done = run(program, "faults", "1000", "1", fault)
    assert done.returncode == 1, done.stdout
    assert "mail_stress: seed" in done.stderr
