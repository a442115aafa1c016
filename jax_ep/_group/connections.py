"""Connections between the processes of a group, and the file descriptors that pass over them on one host.

Processes of one host use Unix sockets. A process listens at two addresses, because containers may share only
one kind of place:

- a name of the network namespace (an "abstract" socket), which the containers of a pod share. It is not a
  file: it has no permissions, and it is gone when the process ends.
- a file in the temporary directory, which containers share if they mount the same volume there.

Both are found however long the path of the temporary directory is. A socket's address has 107 characters, so
the file is bound and found through `/proc/self/fd`.

Processes of several hosts, whose GPUs form one NVLink domain, use TCP. A process listens at all its network
addresses, because it cannot know by which of them another host reaches it.

Everybody can connect to the name and to the network addresses, so a request begins with a token that only the
processes of the group have.
"""

import contextlib
import fcntl
import functools
import hmac
import os
import secrets
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypedDict

import jax

from jax_ep._extension import Extension


class Address(TypedDict):
    """The places where a process answers others, and the token that it expects. It fits into JSON."""

    name: str  # in the network namespace, without the zero byte in front
    folder: str  # of the file; empty: there is none
    no_folder: str  # why there is none
    network: list[str]  # this host's addresses in the network; empty: no other host is to connect
    port: int
    token: str


# Name of the socket's file in its folder.
_FILE = "memory"
# A request is the token, one of these bytes, and the number of the process that requests. With _WATCH that
# process watches the connection from then on: it receives what this process sends of its calls
# (ffi/runtime/processes.h), until the connection closes when this process ends.
_WATCH, _ONCE = b"w", b"1"
_NUMBER_BYTES = 4
_ANSWER = b"jax_ep"
# A process sends its request as soon as it is connected.
_REQUEST_TIMEOUT_S = 5.0
# Another host may drop what is sent to an address of a network that the hosts do not share.
_CONNECT_TIMEOUT_S = 5.0
# Enough for the networks of a host; a message to other processes has little room.
_MOST_ADDRESSES = 32
# The system's messages on a silent connection, so that no firewall forgets it: after 15 s, then every 5 s.
# The connection is lost after ten minutes without an answer.
_KEEP_ALIVE = {socket.TCP_KEEPIDLE: 15, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 120}
_SIOCGIFADDR = 0x8915

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


def _receive(connection: socket.socket, size: int) -> bytes:
    """Returns so many bytes, or fewer if the other end closes."""
    received = b""
    while len(received) < size and (part := connection.recv(size - len(received))):
        received += part
    return received


def _answer(
    connection: socket.socket, token: bytes, descriptors: Sequence[int], module: Extension | None
) -> None:
    connection.settimeout(_REQUEST_TIMEOUT_S)
    request = _receive(connection, len(token) + len(_WATCH) + _NUMBER_BYTES)
    kind, number = request[len(token) : -_NUMBER_BYTES], request[-_NUMBER_BYTES:]
    if kind not in (_WATCH, _ONCE) or not hmac.compare_digest(request[: len(token)], token):
        return  # a stranger
    if kind == _WATCH and module is not None:
        # Before the answer, because after it the other process relies on what this one sends.
        _kept.append(os.dup(connection.fileno()))
        module.add_watcher(int.from_bytes(number, "big"), _kept[-1])
    if connection.family == socket.AF_UNIX:
        socket.send_fds(connection, [_ANSWER], descriptors)
    else:
        _keep_alive(connection)
        connection.sendall(_ANSWER)


def _serve(server: socket.socket, token: bytes, descriptors: Sequence[int], module: Extension | None) -> None:
    """Answers until the socket is shut down. A stranger that says nothing holds up nobody but itself."""

    def answer(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:  # the other process reports an error
            _answer(connection, token, descriptors, module)

    threads = []
    # In the end `accept` fails, as if out of descriptors. In that case the other process reports an error.
    # The end of the socket refuses the connections that have not been answered.
    with contextlib.suppress(OSError), server:
        while True:
            connection, _ = server.accept()
            threads.append(threading.Thread(target=answer, args=(connection,), daemon=True))
            threads[-1].start()
    for thread in threads:
        thread.join()  # because the descriptors are about to be closed


def _keep_alive(connection: socket.socket) -> None:
    """Keeps a connection between hosts open, and lets it send at once what is to be sent."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (_KEEP_ALIVE | {socket.TCP_NODELAY: 1}).items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _network_addresses() -> list[str]:
    """Returns the addresses of this host, first the one of the default route.

    A host without a network has only 127.0.0.1.
    """
    found: list[str] = []
    for family, anywhere in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((anywhere, 9))  # sends nothing, but chooses the address to send from
            found.append(probe.getsockname()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                request = struct.pack("256s", name.encode()[:15])
                found.append(socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24]))
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            address, _, _, scope, *_ = line.split()
            if scope == "00":  # global
                found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address)))
    outside = [address for address in dict.fromkeys(found) if not address.startswith("127.")]
    return outside[:_MOST_ADDRESSES] or ["127.0.0.1"]


def _bind_network(server: socket.socket) -> None:
    if server.family == socket.AF_INET6:
        server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    server.bind(("", 0))


@contextlib.contextmanager
def _listening(
    bind: Callable[[socket.socket], None],
    most: int,
    serve: Callable[[socket.socket], None],
    family: socket.AddressFamily = socket.AF_UNIX,
) -> Iterator[socket.socket]:
    """Serves a socket in a thread while the context lasts."""
    server = socket.socket(family)
    try:
        bind(server)
        server.listen(most)
    except OSError:
        server.close()
        raise
    thread = threading.Thread(target=serve, args=(server,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)  # wakes the thread
        thread.join()


@contextlib.contextmanager
def serving(
    descriptors: Sequence[int], most: int, module: Extension | None, *, to_other_hosts: bool = False
) -> Iterator[Address]:
    """Answers up to `most` processes while the context lasts: those of this host receive the descriptors.

    Yields where. Processes that ask for it watch this one from then on, unless `module` is None. Raises
    OSError if no socket can be bound.
    """
    token = secrets.token_bytes(16)
    address = Address(
        name=f"jax_ep-{secrets.token_hex(16)}",
        folder="",
        no_folder="",
        network=[],
        port=0,
        token=token.hex(),
    )

    def serve(server: socket.socket) -> None:
        _serve(server, token, descriptors, module)

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
        if to_other_hosts:
            family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
            server = stack.enter_context(_listening(_bind_network, most, serve, family))
            address["network"], address["port"] = _network_addresses(), server.getsockname()[1]
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
        f"separate domains with Group(ranks_per_domain=...). Network: {by_name.strerror}. TMPDIR: {by_file}"
    )


def is_watched(process: int) -> bool:
    """Returns whether this process already watches another process."""
    return process in _watched


def _request(connection: socket.socket, address: Address, kind: bytes) -> None:
    number = jax.process_index().to_bytes(_NUMBER_BYTES, "big")
    connection.sendall(bytes.fromhex(address["token"]) + kind + number)


def _watch(connection: socket.socket, process: int, module: Extension) -> None:
    """Hands over the connection to the extension."""
    connection.setblocking(False)
    module.watch_process(process, connection.fileno())
    connection.detach()
    _watched.add(process)


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
        _request(connection, address, _WATCH if watches else _ONCE)
        _, descriptors, _, _ = socket.recv_fds(connection, len(_ANSWER), count)
        stack.callback(lambda: [os.close(descriptor) for descriptor in descriptors])
        if len(descriptors) != count:
            raise OSError(
                f"expected {count} file descriptors from process {process}, got {len(descriptors)} (is the "
                "limit on open files, ulimit -n, large enough?)"
            )
        if module is not None and watches:
            _watch(connection, process, module)
        yield descriptors


def watch_over_network(address: Address, process: int, module: Extension, limit_s: float) -> None:
    """Starts to watch a process of another host, at the first of its addresses that it answers from."""
    errors = []
    for host in address["network"]:
        try:
            with socket.create_connection((host, address["port"]), _CONNECT_TIMEOUT_S) as connection:
                connection.settimeout(limit_s)
                _keep_alive(connection)
                _request(connection, address, _WATCH)
                if _receive(connection, len(_ANSWER)) != _ANSWER:
                    raise OSError("answers as no process of this group does")
                _watch(connection, process, module)
                return
        except OSError as error:
            errors.append(f"{host}: {error.strerror or error}")
    raise OSError(
        f"cannot reach process {process} on another host of the same NVLink domain, over TCP. Its ports must "
        "be open to the other hosts. Without that, make the hosts separate domains with "
        f"Group(ranks_per_domain=...). Tried port {address['port']} of {'; '.join(errors)}"
    )
