"""The choice of a backend, once per op."""

import dataclasses

from jax_ep import _extension
from jax_ep._group.group import resolve_implementation
from jax_ep._transport import stream
from jax_ep._transport.backend import Backend, LocalBackend
from jax_ep._transport.ffi import Ffi
from jax_ep._transport.routing import Routing
from jax_ep._transport.two_hops import TwoHops
from jax_ep._transport.xla import Xla


@dataclasses.dataclass(frozen=True)
class Asynchronous:
    """The implementation of an op that runs as a start and a done, where that is available.

    `dispatch_start` and `combine_start` pass it to the op in the place of `implementation`.
    """

    implementation: str | None


def requested_implementation(implementation: str | Asynchronous | None) -> str | None:
    """Returns "ffi", "xla" or None, as the user passed it."""
    return implementation.implementation if isinstance(implementation, Asynchronous) else implementation


def choose(routing: Routing, implementation: str | Asynchronous | None) -> Backend:
    """Returns the backend of an op along a routing. Raises ValueError if it cannot be used."""
    resolved = resolve_implementation(routing.group, requested_implementation(implementation))
    if not (routing.num_tokens and routing.capacity):
        return Xla()  # makes the empty results; no rank sends anything
    inner = Ffi() if resolved == "ffi" else Xla()
    if routing.makes_two_hops:
        return TwoHops(inner)
    if isinstance(implementation, Asynchronous) and resolved == "ffi" and stream.has_stream(routing.ranks):
        return stream.Stream(Ffi())
    return inner


def choose_local(implementation: str | None, *, is_empty: bool = False) -> LocalBackend:
    """Returns the backend of an op without communication. `is_empty`: it has no rows."""
    resolved = _extension.local_implementation(implementation)
    return Ffi() if resolved == "ffi" and not is_empty else Xla()
