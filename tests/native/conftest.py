"""A fixture of the programs with planted mistakes."""

from collections.abc import Callable
from pathlib import Path

import pytest
from stress_programs import builder_of_mistakes


@pytest.fixture(scope="session")
def build_with_mistake(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Builds a program of tests/native with changes of its sources."""
    return builder_of_mistakes(tmp_path_factory.mktemp("standard_headers"))
