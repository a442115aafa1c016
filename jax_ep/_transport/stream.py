"""Ops on XLA's stream for communication: XLA makes a start and a done of each, with other work in between.

Each array has a call of its own, and all such calls are on one stream, so that no two of them are in flight
at the same time. A call contains only that of a handler. The gradients of these ops are such ops, too.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
from jax.core import eval_jaxpr
from jax.experimental import compute_on

from jax_ep._group.ranks import Ranks
from jax_ep._jax.vmap import vmap_by_loop
from jax_ep._rows.fp8 import QuantizedArray
from jax_ep._transport import ffi
from jax_ep._transport.attendance import ALL_RANKS, Attendance, AttendanceResult
from jax_ep._transport.backend import Leaves, Packing, Pull, Push, Routed
from jax_ep._transport.routing import Handle, Routing

# XLA's name of the stream that its own collectives run on.
_STREAM = "gpu_stream:collective"


# The function has had either name. A context manager of the second name annotates every op by itself.
_run_on: Any = getattr(compute_on, "compute_on2", compute_on.compute_on)


@dataclasses.dataclass(frozen=True)
class Stream:
    """The backend of asynchronous ops. `inner` makes the calls."""

    inner: ffi.Ffi
    keeps_bits: ClassVar[bool] = True

    def packs_fp8(self, routing: Routing, x: jax.Array) -> bool:
        """Returns whether `route` is one op, because rows that follow along a handle are sent as they are."""
        return self.inner.packs_fp8(routing, x) and ffi.goes_through_arena(routing, (x,), Packing.FP8)

    def quantize(self, rows: jax.Array, round_scale: bool, floor: float) -> QuantizedArray:
        return self.inner.quantize(rows, round_scale, floor)

    def route(
        self, routing: Routing, topk_idx: jax.Array, sent: Push, attendance: Attendance = ALL_RANKS
    ) -> Routed:
        """Computes the handle first, and sends the rows asynchronously after it.

        For few tokens one op through the arena is faster than two. If ranks may miss the op, its handle is
        for one other op only.
        """
        few = sent.packing is not Packing.NONE or ffi.goes_through_arena(routing, sent.leaves)
        if few or routing.padded_rows is not None or attendance.may_miss:
            return self.inner.route(routing, topk_idx, sent, attendance)
        routed = self.inner.route(routing, topk_idx, dataclasses.replace(sent, leaves=()), attendance)
        return routed._replace(rows=self.push(routed.handle, Push(sent.leaves))[0])

    def all_gather(self, numbers: jax.Array) -> jax.Array:
        return self.inner.all_gather(numbers)

    def place(
        self, routing: Routing, domains: jax.Array, sent_rows: jax.Array, place_rows: jax.Array
    ) -> Handle:
        return self.inner.place(routing, domains, sent_rows, place_rows)

    def push(self, handle: Handle, sent: Push) -> tuple[Leaves, jax.Array | None]:
        if sent.row_weights is not None:  # rows and dot products are two results
            return self.inner.push(handle, sent)
        weights = None if sent.weights is None else _begin(self._push_weights, handle, sent.weights)
        return tuple(_begin(self._push_row, handle, leaf) for leaf in sent.leaves), weights

    def _push_weights(self, handle: Handle, topk_weights: jax.Array) -> jax.Array:
        _, weights = self.inner.push(handle, Push((), topk_weights))
        assert weights is not None
        return weights

    def _push_row(self, handle: Handle, leaf: jax.Array) -> jax.Array:
        return self.inner.push(handle, Push((leaf,)))[0][0]

    def pull(
        self, handle: Handle, pulled: Pull, attendance: Attendance = ALL_RANKS
    ) -> tuple[Leaves, jax.Array | None, AttendanceResult]:
        # Sums cannot take the place of an operand here, because that belongs to another computation.
        pulled = dataclasses.replace(pulled, adds_in_place=False)
        if attendance.may_miss:
            return self.inner.pull(handle, pulled, attendance)
        returned = None if pulled.weights is None else _begin(self._pull_weights, handle, pulled.weights)
        # If there are biases, there is only one array.
        pull_row = functools.partial(self._pull_row, pulled.packing)
        sums = tuple(_begin(pull_row, handle, pulled.row_weights, row, pulled.biases) for row in pulled.rows)
        return sums, returned, AttendanceResult()

    def _pull_weights(self, handle: Handle, weights: jax.Array) -> jax.Array:
        _, returned, _ = self.inner.pull(handle, Pull((), weights=weights))
        assert returned is not None
        return returned

    def _pull_row(
        self,
        packing: Packing,
        handle: Handle,
        row_weights: jax.Array | None,
        row: jax.Array,
        biases: Leaves,
    ) -> jax.Array:
        return self.inner.pull(handle, Pull((row,), row_weights, biases, packing=packing))[0][0]


def has_stream(ranks: Ranks) -> bool:
    """Returns whether an op of implementation "ffi" can run asynchronously.

    With "xla" the collectives are XLA's own, which XLA starts asynchronously by itself. If a mesh axis is
    left to automatic or explicit sharding, XLA cannot partition a call that uses its rank. An op between
    domains is not a single call.
    """
    on_gpus = ranks.platform == "gpu" and ranks.within is None
    mesh = jax.sharding.get_abstract_mesh()
    left = set(mesh.axis_names) - set(mesh.manual_axes)
    others = [axis for axis in left if mesh.shape[axis] > 1 or axis in mesh.explicit_axes]
    return on_gpus and not others


def _begin(function: Callable[..., jax.Array], *operands: object) -> jax.Array:
    """Returns function(*operands), computed on the stream for communication.

    XLA waits for a call before the first use of its results, as late as that allows. Selecting one of several
    results is such a use, which XLA does at once, so the function returns one array.
    """
    leaves, tree = jax.tree.flatten(operands)
    # Traced before, so that only the call as a whole is annotated. Otherwise XLA would make a start and a
    # done of each function that is called in it.
    program = jax.make_jaxpr(lambda *leaves: function(*jax.tree.unflatten(tree, leaves)))(*leaves)

    @vmap_by_loop  # because XLA does not compile a loop in an asynchronous call
    def asynchronous(*leaves: jax.Array) -> jax.Array:
        compute = lambda *leaves: eval_jaxpr(program.jaxpr, program.consts, *leaves)[0]
        memory = jax.memory.Space.Device
        return _run_on(compute, compute_type=_STREAM, out_memory_spaces=memory)(*leaves)

    return asynchronous(*leaves)
