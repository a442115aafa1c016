"""File descriptors pass between processes whatever TMPDIR is, and through whichever place they share."""

import os
import pathlib
import select
import socket
import tempfile
from types import SimpleNamespace
from typing import Any

import pytest

from jax_ep._group import descriptors
from jax_ep._group.handshake import MAX_ERROR_LENGTH

pytestmark = pytest.mark.no_gpu

OTHER = 7  # the number of a process


def folder_of(length, root):
    """An empty directory whose path has this many characters."""
    path = str(root)
    while len(path) < length:
        path += "/" + "x" * min(length - len(path) - 1, 200)
    assert len(path) == length
    pathlib.Path(path).mkdir(parents=True)
    return path


@pytest.fixture
def watched(monkeypatch):
    """The connections that this process watches, as if it did not watch any yet."""
    connections = {}
    monkeypatch.setattr(descriptors, "_watched", set())
    monkeypatch.setattr(descriptors, "_kept", [])
    yield connections
    for descriptor in [*connections.values(), *descriptors._kept]:
        os.close(descriptor)


@pytest.fixture
def temporary(monkeypatch):
    """Sets TMPDIR, as a process reads it when it starts."""

    def set_temporary(folder):
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", None)

    return set_temporary


def elsewhere(address, *places):
    """The address as a process sees it that does not share these places."""
    unknown = {"name": "jax_ep-nobody", "folder": "/nowhere/jax_ep-1"}
    return address | {place: unknown[place] for place in places}


def receive(address, watched, count=2):
    """Receives two descriptors; what is written to one of them can be read from the other."""
    module: Any = SimpleNamespace(watch_process=watched.__setitem__)
    with descriptors.received(address, count, OTHER, module, 10) as (source, sink):
        os.write(sink, b"memory")
        return os.read(source, 10)


@pytest.fixture
def pipe():
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


@pytest.mark.parametrize("shared", ["name", "folder"])
@pytest.mark.parametrize("length", [90, 108, 300])
def test_descriptors_pass_whatever_the_length_of_tmpdir(length, shared, tmp_path, temporary, watched, pipe):
    folder = folder_of(length, tmp_path)
    temporary(folder)
    with descriptors.serving(pipe, 1) as address:
        assert address["folder"].startswith(f"{folder}/jax_ep-")
        temporary(folder_of(length + 1, tmp_path / "of the other"))
        (missing,) = {"name", "folder"} - {shared}
        before = len(os.listdir("/proc/self/fd"))
        assert receive(elsewhere(address, missing), watched) == b"memory"
        # A second time the connection is not watched again.
        assert receive(elsewhere(address, missing), watched) == b"memory"
        assert descriptors.is_watched(OTHER)
        assert list(watched) == [OTHER]
    assert os.listdir(folder) == []
    assert len(os.listdir("/proc/self/fd")) == before  # two ends of the watch for two sockets that listened
    assert not select.select([watched[OTHER]], [], [], 0)[0]
    os.close(descriptors._kept.pop())
    assert select.select([watched[OTHER]], [], [], 10)[0]


@pytest.mark.parametrize("kind", ["missing", "a file"])
def test_a_tmpdir_that_cannot_be_used_is_passed_over(kind, tmp_path, temporary, watched, pipe):
    path = tmp_path / "temporary"
    if kind == "a file":
        path.touch()
    temporary(str(path))
    with descriptors.serving(pipe, 1) as address:
        assert not address["folder"].startswith(str(tmp_path))
        assert receive(elsewhere(address, "name"), watched) == b"memory"


def no_directory(**_):
    raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")


def test_the_network_namespace_suffices_if_no_directory_is_writable(monkeypatch, watched, pipe):
    monkeypatch.setattr(tempfile, "TemporaryDirectory", no_directory)
    with descriptors.serving(pipe, 1) as address:
        assert receive(address, watched) == b"memory"
        with pytest.raises(OSError, match="No usable temporary directory found"):
            receive(elsewhere(address, "name"), watched)


def test_rejects_processes_that_share_neither_network_nor_directory(tmp_path, temporary, watched, pipe):
    temporary(folder_of(300, tmp_path))
    with descriptors.serving(pipe, 1) as address, pytest.raises(OSError, match="of process 7") as raised:
        receive(elsewhere(address, "name", "folder"), watched)
    text = str(raised.value)
    for words in (
        "hostNetwork: true",
        "mount one volume",
        "set TMPDIR",
        "Connection refused",
        "No such file",
    ):
        assert words in text
    assert len(text) + 300 < MAX_ERROR_LENGTH
    assert not watched


def test_rejects_a_host_without_any_socket(monkeypatch, pipe):
    monkeypatch.setattr(tempfile, "TemporaryDirectory", no_directory)
    taken = socket.socket(socket.AF_UNIX)
    monkeypatch.setattr(descriptors.secrets, "token_hex", lambda size: f"taken-{os.getpid()}")
    with taken:
        taken.bind(f"\0jax_ep-taken-{os.getpid()}")
        with pytest.raises(OSError, match=r"Address already in use.*Set TMPDIR to a directory"):
            descriptors.serving(pipe, 1).__enter__()


@pytest.mark.parametrize("token", ["00" * 16, "00", ""])
def test_rejects_strangers_without_the_token(token, tmp_path, temporary, watched, pipe):
    """Everybody in the network namespace finds the socket, but gets nothing; the others still do."""
    temporary(str(tmp_path))
    with descriptors.serving(pipe, 2) as address:
        if token == "":
            with socket.socket(socket.AF_UNIX) as silent:
                silent.connect(f"\0{address['name']}")  # and goes
        else:
            with pytest.raises(OSError, match=r"expected 2 file descriptors|reset by peer|Broken pipe"):
                receive(address | {"token": token}, watched)
        assert not watched
        assert receive(address, watched) == b"memory"
