"""The demo's data, options and a short run; the README's example."""

import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

from jax_ep.demo import data

pytestmark = [pytest.mark.one_jax, pytest.mark.no_gpu]

ROOT = pathlib.Path(__file__).parents[2]


def run(*command, timeout=200):
    """Runs Python without the number of threads that the Makefile sets: programs must set it themselves."""
    environment = {name: value for name, value in os.environ.items() if name != "NPROC"}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=timeout, cwd=ROOT, env=environment
    )
    assert "NPROC" not in done.stderr, done.stderr  # Group would warn
    return done


@pytest.mark.slow
def test_a_short_run_learns_agrees_and_drops_no_row(tmp_path, run_command):
    """In FP8, with redundant experts, at a capacity at which the second run, without them, drops rows.

    tests/group/test_multiprocess.py runs the demo without these options.
    """
    text = tmp_path / "text.txt"
    text.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 400)
    sizes = ["--steps", "8", "--layers", "1", "--devices", "2", "--experts", "4", "--text", str(text)]
    status, output = run_command("demo", *sizes, "--fp8", "--balance", "--capacity", "1.05")
    assert status == 0, output
    out = re.sub(r"\s+", " ", output)
    assert "on 2 cpu devices, implementation 'ffi'" in out
    dropped, dropped_without = map(int, re.search(r"dropped in all steps │ (\d+) │ (\d+)", out).groups())
    assert dropped == 0 < dropped_without
    values = re.search(r"first and last step[^│]*│ ([\d.]+) → ([\d.]+) │ ([\d.]+) → ([\d.]+)", out).groups()
    first, last, first_without, last_without = map(float, values)
    assert last < first - 1
    assert last_without < first_without - 1
    assert "agree, largest difference" in out


def test_rejects_missing_text(run_command):
    status, output = run_command("demo", "--text", "/nowhere/at/all", "--devices", "1")
    assert status != 0
    assert "no text found at /nowhere/at/all" in output


def test_default_text_is_there_and_held_out_apart():
    train, held_out = data.load(None, 128)
    assert len(train) > 10 * len(held_out) > 10_000
    batch = next(data.batches(train, 6, 128, seed=0))
    assert batch.shape == (6, 129)
    assert batch.dtype == np.int32
    assert batch.max() < 256


def test_the_readme_s_example_runs():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        done = run("-c", block)
        assert done.returncode == 0, done.stderr
