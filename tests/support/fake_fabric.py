"""Fabric handles for processes of one host that think they are on several.

A handle names a socket that hands out the file descriptor of the memory. All else that a domain over several
hosts needs is as it would be there.
"""

import os
import secrets
import socket
import threading
from typing import Any

from jax_ep import _extension

# What this process has exported, and where: address -> handle.
_handles: dict[int, bytes] = {}


def install(cluster: str) -> None:
    """Joins the hosts of this cluster, in this process."""
    module: Any = _extension.extension()

    def export(address: int, device: int) -> bytes:
        base, _ = module.region_of(address, device)
        if base not in _handles:
            _handles[base] = f"{cluster} {secrets.token_hex(8)}".encode()
            _serve(_handles[base], module.export_region(address, device))
        return _handles[base].ljust(64)

    def attempt(handle: bytes, device: int) -> None:
        if handle.decode().split()[0] != cluster:
            raise RuntimeError("not of this cluster")
        os.close(_fetch(handle))

    def import_(handle: bytes, size: int, devices: list[int]) -> int:
        descriptor = _fetch(handle)
        try:
            return module.import_region(descriptor, size, devices)
        finally:
            os.close(descriptor)

    module.export_fabric_region = export
    module.try_fabric_handle = attempt
    module.import_fabric_region = import_


def _serve(name: bytes, descriptor: int) -> None:
    """Hands out a descriptor until the process ends."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(b"\0" + name)
    server.listen(16)

    def answer() -> None:
        while True:
            connection, _ = server.accept()
            with connection:
                socket.send_fds(connection, [b"x"], [descriptor])

    threading.Thread(target=answer, daemon=True).start()


def _fetch(handle: bytes) -> int:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(b"\0" + handle.strip())
        _, (descriptor,), _, _ = socket.recv_fds(connection, 1, 1)
        return descriptor
