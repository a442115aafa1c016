"""The choice of a backend, once per op."""

import dataclasses

from jax_ep import _extension
from jax_ep._group.group import Group, ranks_of, resolve_implementation
from jax_ep._transport import stream
from jax_ep._transport.backend import Backend, LocalBackend
from jax_ep._transport.ffi import Ffi
from jax_ep._transport.ffi_local import FfiLocal
from jax_ep._transport.two_hops import TwoHops
from jax_ep._transport.xla import Xla
from jax_ep._transport.xla_local import XlaLocal


@dataclasses.dataclass(frozen=True)
class Asynchronous:
    """The implementation of an op that runs as a start and a done, where that is available.

    `dispatch_start` and `combine_start` pass it to the op in the place of `implementation`.
    """

    implementation: str | None


def requested_implementation(implementation: str | Asynchronous | None) -> str | None:
    """Returns "ffi", "xla" or None, as the user passed it."""
    return implementation.implementation if isinstance(implementation, Asynchronous) else implementation


def choose(group: Group, implementation: str | Asynchronous | None, *, is_empty: bool = False) -> Backend:
    """Returns the backend of an op of a group. `is_empty`: no rank sends anything.

    Raises ValueError if the implementation cannot be used.
    """
    ranks = ranks_of(group)
    resolved = resolve_implementation(group, requested_implementation(implementation))
    if is_empty:
        return Xla(ranks)  # makes the empty results
    make = Ffi if resolved == "ffi" else Xla
    if ranks.within is not None:
        return TwoHops(make(ranks), make(ranks.within))
    if isinstance(implementation, Asynchronous) and resolved == "ffi" and stream.has_stream(ranks):
        return stream.Stream(Ffi(ranks))
    return make(ranks)


def choose_local(implementation: str | None, *, is_empty: bool = False) -> LocalBackend:
    """Returns the backend of an op without communication. `is_empty`: it has no rows."""
    resolved = _extension.local_implementation(implementation)
    return FfiLocal() if resolved == "ffi" and not is_empty else XlaLocal()
