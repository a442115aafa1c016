"""Text to train on. The default is available on every machine: the sources of Python's standard library."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

MOST_BYTES = 16_000_000
HELD_OUT_EVERY = 20  # one of this many files is held out


def find_files(path: Path | None) -> list[Path]:
    """Returns the files to read, in a fixed order."""
    if path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        skipped = {"site-packages", "test", "tests", "idlelib", "__pycache__"}
        files = [f for f in sorted(root.rglob("*.py")) if not skipped & set(f.relative_to(root).parts)]
    else:
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        files = [f for f in files if f.is_file()]
    if not files:
        raise SystemExit(f"demo: no text found at {path}")
    return files


def load(path: Path | None, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the training bytes and the held-out bytes, uint8 [N]. Both are longer than one window."""
    train, held_out, size = [], [], 0
    files = find_files(path)
    for i, file in enumerate(files):
        content = file.read_bytes()
        size += len(content)
        (held_out if i % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 else train).append(content)
        if size > MOST_BYTES:
            break
    train_text = np.frombuffer(b"".join(train), np.uint8)
    if held_out:
        held_out_text = np.frombuffer(b"".join(held_out), np.uint8)
    else:  # with few files, hold out the end of the text
        train_text, held_out_text = np.split(
            train_text, [-max(len(train_text) // HELD_OUT_EVERY, window + 1)]
        )
    if min(len(train_text), len(held_out_text)) <= window:
        raise SystemExit(f"demo: the text needs more than {2 * window} bytes, got {size}")
    return train_text, held_out_text


def batches(text: np.ndarray, sequences: int, window: int, seed: int) -> Iterator[np.ndarray]:
    """Yields batches int32 [sequences, window + 1] from random positions of the text, without end."""
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(text) - window, sequences)
        yield np.stack([text[start : start + window + 1] for start in starts]).astype(np.int32)
