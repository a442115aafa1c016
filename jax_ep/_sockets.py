"""File descriptors between the processes of a host, and how each finds out that another has ended.

A process offers its descriptors at a Unix socket in a directory that only this user can enter, while a group
is made. Of a process's first connection to another both keep their ends as long as they live, so that the
first sees when the other has ended.
"""

import contextlib
import os
import socket
import tempfile
import threading
from collections.abc import Iterator, Sequence

from jax_ep._extension_types import Extension

# What a process that asks for descriptors says: whether it watches this connection from then on.
_WATCH, _ONCE = b"w", b"1"
# Whoever connects asks at once.
_ASK_S = 10.0

# The ends that this process keeps for others to watch, and the processes that it watches itself.
# Bare descriptors, for Python closes sockets when it ends, while the driver may still have to stop kernels.
_kept: list[int] = []
_watched: set[int] = set()


def _let_go() -> None:
    for descriptor in _kept:
        os.close(descriptor)
    _kept.clear()


# A child that outlives this process must not look like it.
os.register_at_fork(after_in_child=_let_go)


def _answer(connection: socket.socket, descriptors: Sequence[int]) -> None:
    connection.settimeout(_ASK_S)
    is_watched = connection.recv(1) == _WATCH
    socket.send_fds(connection, [b"jax_ep"], descriptors)
    if is_watched:
        _kept.append(connection.detach())
    else:
        connection.close()


def _serve(server: socket.socket, descriptors: Sequence[int]) -> None:
    with server:  # closed, it turns away who has not been answered
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return  # shut down, or out of descriptors: then those who ask say so
            try:
                _answer(connection, descriptors)
            except OSError:
                connection.close()  # who asked says why


@contextlib.contextmanager
def serving(descriptors: Sequence[int], most: int) -> Iterator[str]:
    """Where up to so many processes get the descriptors, until this ends."""
    with tempfile.TemporaryDirectory(prefix="jax_ep-") as folder:
        path = f"{folder}/memory"
        server = socket.socket(socket.AF_UNIX)
        try:
            server.bind(path)
            server.listen(most)
        except OSError:
            server.close()
            raise
        thread = threading.Thread(target=_serve, args=(server, descriptors), daemon=True)
        thread.start()
        try:
            yield path
        finally:
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)  # which wakes the thread
            thread.join()


def is_watched(process: int) -> bool:
    """Whether this process has been told to watch that one."""
    return process in _watched


@contextlib.contextmanager
def fetched(
    path: str, count: int, process: int, module: Extension, limit_s: float
) -> Iterator[Sequence[int]]:
    """The descriptors that a process offers, closed when this ends; from the first time on it is watched."""
    descriptors: list[int] = []
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(socket.socket(socket.AF_UNIX))
        connection.settimeout(limit_s)
        connection.connect(path)
        connection.sendall(_ONCE if is_watched(process) else _WATCH)
        _, descriptors, _, _ = socket.recv_fds(connection, 16, count)
        stack.callback(lambda: [os.close(descriptor) for descriptor in descriptors])
        if len(descriptors) != count:
            raise OSError(
                f"expected {count} file descriptors from process {process}, got {len(descriptors)} (does the "
                "limit on open files, ulimit -n, leave room for them?)"
            )
        if not is_watched(process):
            connection.setblocking(False)
            module.watch_process(process, connection.fileno())
            connection.detach()  # it is the watch's now
            _watched.add(process)
        yield descriptors
