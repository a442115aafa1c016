"""Fixtures of the commands' tests."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

FAKES = Path(__file__).parents[1] / "support" / "fake_deep_gemm"


@pytest.fixture
def deep_gemm_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[dict]]:
    """Installs stand-ins for DeepGEMM and torch, and returns a function that returns their calls so far."""
    calls = tmp_path / "calls.txt"
    monkeypatch.syspath_prepend(FAKES)
    monkeypatch.setenv("PYTHONPATH", str(FAKES), prepend=os.pathsep)
    monkeypatch.setenv("FAKE_CALLS", str(calls))
    return lambda: [json.loads(line) for line in calls.read_text().splitlines()]
