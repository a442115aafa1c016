"""Ops on XLA's stream for communication, each as a start and a done, with room for other work between them.

Those functions of `ffi.py` that move rows, with the same arguments and results: each array comes by a call
of its own, and all such calls are on one stream, so that no two of them are in flight at once. They are a
handler's call and nothing else: JAX sees no gradient in them, and the gradients of these ops are ops of this
file, too.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.core import eval_jaxpr
from jax.experimental import compute_on

from jax_ep._extension import Implementation
from jax_ep._group.group import Group
from jax_ep._jax.vmap import takes_no_batch
from jax_ep._transport import ffi
from jax_ep._transport.backend import EVERYBODY, Attendance, Attended, Leaves, Routed
from jax_ep._transport.routing import Handle, Routing

# XLA's name of the stream that its own collectives run on.
_STREAM = "gpu_stream:collective"


# The function has had either name. A context manager of the second name annotates every op by itself.
_run_on: Any = getattr(compute_on, "compute_on2", compute_on.compute_on)


@dataclasses.dataclass(frozen=True)
class Asynchronous:
    """The implementation of an op that runs as a start and a done, where that is available.

    `dispatch_start` and `combine_start` pass it to the op in the place of `implementation`.
    """

    implementation: str | None


def plain(implementation: str | Asynchronous | None) -> str | None:
    """Returns the implementation as users name it."""
    return implementation.implementation if isinstance(implementation, Asynchronous) else implementation


def route(
    routing: Routing,
    leaves: Leaves,
    topk_idx: jax.Array,
    topk_weights: jax.Array | None,
    attendance: Attendance = EVERYBODY,
    quantize: int = 0,
) -> Routed:
    """Where everything goes is found out before; the rows follow, apart.

    Not so of few tokens, whose one op by way of the arena is faster than two; nor if ranks may miss the op,
    whose handle is then for one other op only.
    """
    few = quantize != 0 or ffi.goes_through_arena(routing, leaves)
    if few or routing.slots is not None or attendance.active_ranks is not None:
        return ffi.route(routing, leaves, topk_idx, topk_weights, attendance, quantize)
    routed = ffi.route(routing, (), topk_idx, topk_weights, attendance)
    return routed._replace(rows=push(routed.handle, leaves, None)[0])


def push(handle: Handle, leaves: Leaves, topk_weights: jax.Array | None) -> tuple[Leaves, jax.Array | None]:
    weights = None if topk_weights is None else _begin(_push_weights, handle, topk_weights)
    return tuple(_begin(_push_row, handle, leaf) for leaf in leaves), weights


def _push_weights(handle: Handle, topk_weights: jax.Array) -> Any:
    return ffi.push(handle, (), topk_weights)[1]


def _push_row(handle: Handle, leaf: jax.Array) -> jax.Array:
    return ffi.push(handle, (leaf,), None)[0][0]


push_scaled = ffi.push_scaled  # rows and dot products are two results


def pull(
    handle: Handle,
    rows: Leaves,
    row_weights: jax.Array | None,
    biases: Leaves,
    weights: jax.Array | None,
    attendance: Attendance = EVERYBODY,
) -> tuple[Leaves, jax.Array | None, Attended]:
    if attendance.active_ranks is not None:
        return ffi.pull(handle, rows, row_weights, biases, weights, attendance)
    returned = None if weights is None else _begin(_pull_weights, handle, weights)
    # There are biases of a single array only.
    sums = tuple(_begin(_pull_row, handle, row_weights, row, biases) for row in rows)
    return sums, returned, Attended(None, None)


def _pull_weights(handle: Handle, weights: jax.Array) -> Any:
    return ffi.pull(handle, (), None, (), weights)[1]


def _pull_row(handle: Handle, row_weights: jax.Array | None, row: jax.Array, biases: Leaves) -> jax.Array:
    return ffi.pull(handle, (row,), row_weights, biases, None)[0][0]


def if_asynchronous(
    implementation: Implementation, group: Group, requested: str | Asynchronous | None
) -> Implementation:
    """Returns the asynchronous backend if it was requested and is available."""
    requests = isinstance(requested, Asynchronous)
    return "ffi apart" if requests and has_stream(group, implementation) else implementation


def has_stream(group: Any, implementation: str | None) -> bool:
    """With "xla" the collectives are XLA's own, which it starts apart by itself.

    Where a mesh axis is left to automatic or explicit sharding, XLA cannot partition a call that asks for its
    rank: the op then runs as it is. So does one between hosts, which is no single call.
    """
    on_gpus = isinstance(group, Group) and group._platform == "gpu" and group._within is None
    mesh = jax.sharding.get_abstract_mesh()
    left = set(mesh.axis_names) - set(mesh.manual_axes)
    others = [axis for axis in left if mesh.shape[axis] > 1 or axis in mesh.explicit_axes]
    return on_gpus and not others and group._resolve(implementation) == "ffi"


def _begin(function: Callable[..., Any], *operands: Any) -> jax.Array:
    """Returns function(*operands), computed on the stream for communication.

    XLA waits for a call before the first use of its results, as late as that allows. Selecting one of several
    results is such a use, which XLA does at once, so the function returns one array.
    """
    leaves, tree = jax.tree.flatten(operands)
    # Traced before, so that only the call as a whole is annotated. Otherwise XLA would make a start and a
    # done of each function that is called in it.
    program = jax.make_jaxpr(lambda *leaves: function(*jax.tree.unflatten(tree, leaves)))(*leaves)

    @takes_no_batch  # because XLA does not compile a loop in an asynchronous call
    def asynchronous(*leaves: jax.Array) -> jax.Array:
        compute = lambda *leaves: eval_jaxpr(program.jaxpr, program.consts, *leaves)[0]
        memory = jax.memory.Space.Device
        return _run_on(compute, compute_type=_STREAM, out_memory_spaces=memory)(*leaves)

    return asynchronous(*leaves)
