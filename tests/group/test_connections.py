"""How processes are connected: descriptors pass whatever TMPDIR is, and hosts find each other by TCP."""

import contextlib
import os
import pathlib
import select
import socket
import tempfile
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from jax_ep._group import connections
from jax_ep._group.handshake import MAX_ERROR_LENGTH

pytestmark = pytest.mark.no_gpu

OTHER = 7  # the number of a process
WATCHERS = []  # process and descriptor
MODULE: Any = SimpleNamespace(add_watcher=lambda *watcher: WATCHERS.append(watcher))


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
    found = {}
    monkeypatch.setattr(connections, "_watched", set())
    monkeypatch.setattr(connections, "_kept", [])
    yield found
    for descriptor in [*found.values(), *connections._kept]:
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
    with connections.received(address, count, OTHER, module, 10) as (source, sink):
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
    with connections.serving(pipe, 1, MODULE) as address:
        assert address["folder"].startswith(f"{folder}/jax_ep-")
        temporary(folder_of(length + 1, tmp_path / "of the other"))
        (missing,) = {"name", "folder"} - {shared}
        before = len(os.listdir("/proc/self/fd"))
        assert receive(elsewhere(address, missing), watched) == b"memory"
        # A second time the connection is not watched again.
        assert receive(elsewhere(address, missing), watched) == b"memory"
        assert connections.is_watched(OTHER)
        assert list(watched) == [OTHER]
    assert os.listdir(folder) == []
    assert len(os.listdir("/proc/self/fd")) == before  # two ends of the watch for two sockets that listened
    assert not select.select([watched[OTHER]], [], [], 0)[0]
    os.close(connections._kept.pop())
    assert select.select([watched[OTHER]], [], [], 10)[0]


@pytest.mark.parametrize("kind", ["missing", "a file"])
def test_a_tmpdir_that_cannot_be_used_is_passed_over(kind, tmp_path, temporary, watched, pipe):
    path = tmp_path / "temporary"
    if kind == "a file":
        path.touch()
    temporary(str(path))
    with connections.serving(pipe, 1, MODULE) as address:
        assert not address["folder"].startswith(str(tmp_path))
        assert receive(elsewhere(address, "name"), watched) == b"memory"


def no_directory(**_):
    raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")


def test_the_network_namespace_suffices_if_no_directory_is_writable(monkeypatch, watched, pipe):
    monkeypatch.setattr(tempfile, "TemporaryDirectory", no_directory)
    with connections.serving(pipe, 1, MODULE) as address:
        assert receive(address, watched) == b"memory"
        with pytest.raises(OSError, match="No usable temporary directory found"):
            receive(elsewhere(address, "name"), watched)


def test_rejects_processes_that_share_neither_network_nor_directory(tmp_path, temporary, watched, pipe):
    temporary(folder_of(300, tmp_path))
    with (
        connections.serving(pipe, 1, MODULE) as address,
        pytest.raises(OSError, match="of process 7") as raised,
    ):
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
    monkeypatch.setattr(connections.secrets, "token_hex", lambda size: f"taken-{os.getpid()}")
    with taken:
        taken.bind(f"\0jax_ep-taken-{os.getpid()}")
        with pytest.raises(OSError, match=r"Address already in use.*Set TMPDIR to a directory"):
            connections.serving(pipe, 1, MODULE).__enter__()


@pytest.mark.parametrize("token", ["00" * 16, "00", ""])
def test_rejects_strangers_without_the_token(token, tmp_path, temporary, watched, pipe):
    """Everybody in the network namespace finds the socket, but gets nothing; the others still do."""
    temporary(str(tmp_path))
    with connections.serving(pipe, 2, MODULE) as address:
        if token == "":
            with socket.socket(socket.AF_UNIX) as silent:
                silent.connect(f"\0{address['name']}")  # and goes
        else:
            with pytest.raises(OSError, match=r"expected 2 file descriptors|reset by peer|Broken pipe"):
                receive(address | {"token": token}, watched)
        assert not watched
        assert receive(address, watched) == b"memory"


def watch(address, watched):
    module: Any = SimpleNamespace(watch_process=watched.__setitem__)
    connections.watch_over_network(address, OTHER, module, 10)


def test_another_host_watches_over_the_network(watched, pipe):
    with connections.serving(pipe, 1, MODULE, to_other_hosts=True) as address:
        # Addresses at which nobody answers are passed over.
        address["network"].insert(0, "256.0.0.1")
        watch(address, watched)
    assert list(watched) == [OTHER]
    assert WATCHERS[-1] == (0, connections._kept[-1])
    os.write(connections._kept[-1], b"event")
    assert select.select([watched[OTHER]], [], [], 10)[0]
    assert os.read(watched[OTHER], 10) == b"event"
    os.close(connections._kept.pop())
    assert select.select([watched[OTHER]], [], [], 10)[0]
    assert os.read(watched[OTHER], 10) == b""


@pytest.mark.parametrize("kind", ["no answer", "a stranger", "a server of something else"])
def test_rejects_hosts_that_cannot_be_reached(kind, watched, pipe):
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(connections.serving(pipe, 1, MODULE, to_other_hosts=True))
        address["network"] = ["127.0.0.1"]
        if kind == "no answer":
            address["port"] = 1
        elif kind == "a stranger":
            address["token"] = "00" * 16
        else:
            other = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            address["port"] = other.getsockname()[1]
            stack.enter_context(answering(other, b"HTTP/1.1 400"))
        with pytest.raises(OSError, match="cannot reach process 7 on another host") as raised:
            watch(address, watched)
    assert not watched
    for words in ("ports must be open", "Group(ranks_per_domain=...)", f"Tried port {address['port']} of 1"):
        assert words in str(raised.value)


@contextlib.contextmanager
def answering(server, answer):
    """Serves one connection with an answer, whatever it asks."""

    def serve():
        connection, _ = server.accept()
        with connection:
            connection.recv(100)
            connection.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    yield
    thread.join()


@pytest.mark.parametrize("to_other_hosts", [False, True])
def test_a_stranger_that_says_nothing_holds_up_nobody(to_other_hosts, watched, pipe, monkeypatch):
    """Such as a scan of ports. The others would give up before the stranger's time is up."""
    monkeypatch.setattr(connections, "_REQUEST_TIMEOUT_S", 60.0)
    with connections.serving(pipe, 3, MODULE, to_other_hosts=to_other_hosts) as address:
        silent = (
            socket.create_connection((address["network"][0], address["port"]))
            if to_other_hosts
            else socket.socket(socket.AF_UNIX)
        )
        with silent:
            if not to_other_hosts:
                silent.connect(f"\0{address['name']}")
            if to_other_hosts:
                watch(address, watched)
            else:
                assert receive(address, watched) == b"memory"
