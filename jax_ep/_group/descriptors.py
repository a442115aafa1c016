"""Exchange of file descriptors between the processes of a host, over Unix sockets.

A process listens at two addresses, because containers may share only one kind of place:

- a name of the network namespace (an "abstract" socket), which the containers of a pod share. It is not a
  file: it has no permissions, and it is gone when the process ends.
- a file in the temporary directory, which containers share if they mount the same volume there.

Both are found however long the path of the temporary directory is. A socket's address has 107 characters, so
the file is bound and found through `/proc/self/fd`. Everybody in the network namespace can connect to the
name, so a request begins with a token that only the processes of the group have.
"""

import contextlib
import functools
import hmac
import os
import secrets
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypedDict

from jax_ep._extension import Extension


class Address(TypedDict):
    """The places where a process serves descriptors, and the token that it expects. It fits into JSON."""

    name: str  # in the network namespace, without the zero byte in front
    folder: str  # of the file; empty: there is none
    no_folder: str  # why there is none
    token: str


# Name of the socket's file in its folder.
_FILE = "memory"
# A process requests descriptors with a token and one of these bytes. With _WATCH it also watches the
# connection from then on: the connection closes when this process ends.
_WATCH, _ONCE = b"w", b"1"
# A process sends its request as soon as it is connected.
_REQUEST_TIMEOUT_S = 10.0

# This process's ends of the connections that other processes watch. They are bare descriptors, because Python
# closes its sockets when it ends, at a time when the driver may still have to stop kernels.
_kept: list[int] = []
# The processes that this process watches.
_watched: set[int] = set()


def _close_kept() -> None:
    for descriptor in _kept:
        os.close(descriptor)
    _kept.clear()


# Otherwise the connections would stay open as long as a child process runs.
os.register_at_fork(after_in_child=_close_kept)


@contextlib.contextmanager
def _short_path(folder: str) -> Iterator[str]:
    """Yields a path of the socket in a folder that fits into a socket's address."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{_FILE}"
    finally:
        os.close(descriptor)


def _bind_file(server: socket.socket, folder: str) -> None:
    with _short_path(folder) as path:
        server.bind(path)


def _answer(connection: socket.socket, token: bytes, descriptors: Sequence[int]) -> None:
    connection.settimeout(_REQUEST_TIMEOUT_S)
    request = connection.recv(len(token) + 1, socket.MSG_WAITALL)
    if not hmac.compare_digest(request[: len(token)], token):
        connection.close()  # a stranger
        return
    socket.send_fds(connection, [b"jax_ep"], descriptors)
    if request[len(token) :] == _WATCH:
        _kept.append(connection.detach())
    else:
        connection.close()


def _serve(server: socket.socket, token: bytes, descriptors: Sequence[int]) -> None:
    with server:  # its end refuses the connections that have not been answered
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return  # shut down, or out of descriptors; in that case the other process reports an error
            try:
                _answer(connection, token, descriptors)
            except OSError:
                connection.close()  # the other process reports an error


@contextlib.contextmanager
def _listening(bind: Callable[[socket.socket], None], most: int, serve: Callable) -> Iterator[None]:
    """Serves a socket in a thread while the context lasts."""
    server = socket.socket(socket.AF_UNIX)
    try:
        bind(server)
        server.listen(most)
    except OSError:
        server.close()
        raise
    thread = threading.Thread(target=serve, args=(server,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)  # wakes the thread
        thread.join()


@contextlib.contextmanager
def serving(descriptors: Sequence[int], most: int) -> Iterator[Address]:
    """Serves the descriptors to up to `most` processes while the context lasts. Yields where.

    Raises OSError if no socket can be bound at all.
    """
    token = secrets.token_bytes(16)
    address = Address(name=f"jax_ep-{secrets.token_hex(16)}", folder="", no_folder="", token=token.hex())

    def serve(server: socket.socket) -> None:
        _serve(server, token, descriptors)

    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="jax_ep-"))
            stack.enter_context(_listening(functools.partial(_bind_file, folder=folder), most, serve))
            address["folder"] = folder
        except OSError as error:  # no directory is writable, or it takes no sockets
            address["no_folder"] = str(error)
        try:
            stack.enter_context(_listening(lambda server: server.bind(f"\0{address['name']}"), most, serve))
        except OSError as error:
            if not address["folder"]:
                raise OSError(
                    "cannot bind a Unix socket, through which the processes of a host share GPU memory, in "
                    f"the network namespace ({error.strerror}) or in a temporary directory "
                    f"({address['no_folder']}). Set TMPDIR to a directory that this process can write to"
                ) from None
        yield address


def _connect(address: Address, process: int, limit_s: float) -> socket.socket:
    """Connects to another process, in whichever way the two can reach each other."""

    def connect(path: str) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(limit_s)
            connection.connect(path)
        except OSError:
            connection.close()
            raise
        return connection

    try:
        return connect(f"\0{address['name']}")
    except OSError as error:
        by_name = error
    by_file = address["no_folder"]
    if folder := address["folder"]:
        try:
            with _short_path(folder) as path:
                return connect(path)
        except OSError as error:
            by_file = f"{folder}: {error.strerror}"
    raise OSError(
        f"cannot reach the Unix socket of process {process}, through which the processes of a host share GPU "
        "memory. They need the same network namespace or the same TMPDIR. Containers of one pod share the "
        "network. For others use the host's (hostNetwork: true in Kubernetes, --network host in Docker), or "
        "mount one volume at the same path in all of them and set TMPDIR to it. Without either, make them "
        f"separate hosts with Group(ranks_per_node=...). Network: {by_name.strerror}. TMPDIR: {by_file}"
    )


def is_watched(process: int) -> bool:
    """Returns whether this process already watches another process."""
    return process in _watched


@contextlib.contextmanager
def received(
    address: Address, count: int, process: int, module: Extension | None, limit_s: float
) -> Iterator[Sequence[int]]:
    """Receives the descriptors that a process serves, and closes them when the context ends.

    The first time, this process also starts to watch the other one, unless `module` is None.
    """
    descriptors: list[int] = []
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(_connect(address, process, limit_s))
        watches = module is not None and not is_watched(process)
        kind = _WATCH if watches else _ONCE
        connection.sendall(bytes.fromhex(address["token"]) + kind)
        _, descriptors, _, _ = socket.recv_fds(connection, 16, count)
        stack.callback(lambda: [os.close(descriptor) for descriptor in descriptors])
        if len(descriptors) != count:
            raise OSError(
                f"expected {count} file descriptors from process {process}, got {len(descriptors)} (is the "
                "limit on open files, ulimit -n, large enough?)"
            )
        if module is not None and watches:
            connection.setblocking(False)
            module.watch_process(process, connection.fileno())
            connection.detach()  # the watch owns it now
            _watched.add(process)
        yield descriptors
