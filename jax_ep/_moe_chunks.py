"""The whole layer in chunks of its tokens: communication of some beside the products of others."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep import _apart
from jax_ep._combine import combine
from jax_ep._dispatch import DispatchedByExpert
from jax_ep._experts_gradient import ExpertsGradient
from jax_ep._group import Group
from jax_ep._handle import Handle
from jax_ep._jaxprs import Arrays, constants_of, evaluate, without_constants
from jax_ep._manual import vary_alike, whole
from jax_ep._order import barrier
from jax_ep._push_pull import open_handle, pull, push_scaled
from jax_ep._remat import CHECKPOINT_HANDLE, CHECKPOINT_ROWS, CHECKPOINT_WEIGHTS, name_all
from jax_ep._reverse_mode import reverse_mode

Send = Callable[[jax.Array, jax.Array, jax.Array], DispatchedByExpert]
Experts = Callable[[DispatchedByExpert], Any]
Counts = tuple[jax.Array, jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True, eq=False)
class _Layer:
    """What is static of a layer in chunks."""

    count: int
    size: int  # tokens of a chunk
    send: Send
    experts: Callable[[Arrays, Arrays], Arrays]  # leaves of `sent`, weights -> leaves of (rows, row weights)
    arrived: Arrays  # types of the leaves of `sent`
    made: Any  # the tree of (rows, row weights)
    has_rows: bool  # whether rows that arrive have gradients
    group: Group
    implementation: str | None

    def settled(self, sent: Any) -> Any:
        """What of it is there before anything is in flight."""
        return dataclasses.replace(sent, x=()) if self._flies(sent) else sent

    def unsettled(self, sent: Any, settled: Any) -> Any:
        """All of it again, with what is settled in its place."""
        return dataclasses.replace(settled, x=sent.x) if self._flies(sent) else settled

    def _flies(self, sent: Any) -> bool:
        return isinstance(sent, DispatchedByExpert) and _apart.has_stream(self.group, self.implementation)

    def chunk(self, arrays: Any, number: int) -> Any:
        """The tokens of a chunk."""
        cut = lambda array: jax.lax.slice_in_dim(array, number * self.size, (number + 1) * self.size)
        return jax.tree.map(cut, arrays)


def in_chunks(
    tokens: tuple[jax.Array, jax.Array, jax.Array],
    send: Send,
    experts: Experts,
    *,
    size: int,
    has_rows: bool,
    group: Group,
    implementation: str | None,
) -> tuple[Any, Counts]:
    """The layer of x [T, ...], ids and weights [T, K], `size` tokens in each chunk: sums, and counts of rows.

    `send` dispatches a chunk by expert. Tokens without experts fill the last chunk, if it has fewer.
    """
    num_tokens = tokens[0].shape[0]
    count = -(-num_tokens // size)
    x, ids, weights = whole(tokens)

    def fill(array: jax.Array, value: int = 0) -> jax.Array:
        missing = [(0, count * size - num_tokens), *[(0, 0)] * (array.ndim - 1)]
        return jnp.pad(array, missing, constant_values=value)

    tokens = vary_alike((fill(x), fill(ids, -1), fill(weights)), group._axes)
    sends, arrived = jax.make_jaxpr(send, return_shape=True)(*(array[:size] for array in tokens))
    tree = jax.tree.structure(arrived)

    def rows_and_weights(*leaves: jax.Array) -> Any:
        sent = jax.tree.unflatten(tree, leaves)
        if not has_rows:
            sent = dataclasses.replace(sent, x=jax.lax.stop_gradient(sent.x))
        return vary_alike(whole((experts(sent), sent.row_weights)))

    # What the experts close over becomes an argument, of which there can be a gradient.
    traced, made = jax.make_jaxpr(rows_and_weights, return_shape=True)(*sends.out_avals)
    constants, program = constants_of(traced), without_constants(traced)
    if any(isinstance(array, jax.Ref) for array in constants):
        raise TypeError(
            "moe: with num_chunks > 1, expert_fn is traced once for all chunks, so it must not read or write "
            "a jax.Ref from outside; read it before moe, and return_stats=True for counts of rows"
        )
    function = lambda leaves, closed: evaluate(program, closed, leaves)
    shapes = sends.out_avals, jax.tree.structure(made)
    layer = _Layer(count, size, send, function, *shapes, has_rows, group, implementation)
    sums, counts = _run(layer, *tokens, list(constants))
    return jax.tree.map(lambda leaf: leaf[:num_tokens], sums), counts


@reverse_mode("moe", 0)
def _run(
    layer: _Layer, x: jax.Array, ids: jax.Array, weights: jax.Array, closed: Arrays
) -> tuple[Any, Counts]:
    compute = lambda leaves: (layer.experts(leaves, closed), [])
    return _forward(layer, (x, ids, weights), compute)[:2]


def _run_forward(layer: _Layer, *marked: Any) -> Any:
    x, ids, weights, closed = jax.tree.map(lambda primal: primal.value, marked)
    # Nothing else need have a gradient: weights that are not trained may be FP8, or go through a callback.
    wanted = [i for i, primal in enumerate(marked[3]) if primal.perturbed]
    types = [jax.typeof(array) for array in closed]
    gradient = ExpertsGradient(layer.experts, layer.arrived, types, wanted)
    shared = gradient.shared(closed)
    compute = lambda leaves: gradient.forward(leaves, shared)
    sums, counts, saved = _forward(layer, (x, ids, weights), compute)
    return (sums, counts), _Saved(saved, shared, gradient)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Saved:
    """What the backward pass needs."""

    chunks: list[tuple[Handle, Any, Arrays]]  # of each the handle, (rows, row weights) and the experts' own
    shared: Arrays
    gradient: ExpertsGradient = dataclasses.field(metadata={"static": True})


def _forward(
    layer: _Layer, tokens: Any, compute: Callable[[Arrays], tuple[Arrays, Arrays]]
) -> tuple[Any, Counts, list[Any]]:
    """Sums, counts, and what is saved of each chunk."""
    saved: list[Any] = [None] * layer.count
    counts: list[Any] = [None] * layer.count

    def send(_: int, operands: Any) -> DispatchedByExpert:
        with _apart.started():
            return layer.send(*operands)

    def experts(number: int, arrived: DispatchedByExpert) -> Any:
        sent = _named(arrived)
        counts[number] = sent.tokens_per_expert, sent.num_tokens, sent.num_dropped
        made, own = compute(jax.tree.leaves(sent))
        made = jax.tree.unflatten(layer.made, made)
        saved[number] = sent.handle, made, own
        return made, sent.handle

    def fetch(_: int, computed: Any) -> Any:
        (rows, weights), handle = computed
        with _apart.started():
            return combine(rows, handle, row_weights=weights, implementation=layer.implementation)

    operands = [layer.chunk(tokens, number) for number in range(layer.count)]
    sums, ready, _ = _pipeline(layer, range(layer.count), operands, send, experts, fetch)
    # All of it or nothing: what uses one array alone would not wait for the others.
    sums[-1] = barrier(fetch(layer.count - 1, ready))
    totals = jax.tree.map(lambda *parts: sum(parts[1:], start=parts[0]), *counts)
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *sums), totals, saved


def _run_backward(layer: _Layer, saved: _Saved, cotangents: Any) -> Any:
    d_sums = vary_alike(jax.tree.map(_instantiated, cotangents[0]), layer.group._axes)
    gradient, shared = saved.gradient, saved.shared
    handles, made, own = zip(*saved.chunks, strict=True)
    late: list[Any] = [None] * layer.count
    terms: list[Any] = [None] * layer.count
    weights_of: list[Any] = [None] * layer.count

    def send(_: int, operands: Any) -> Any:
        return _combine_gradient(layer, *operands)

    def experts(number: int, arrived: Any) -> Any:
        d_chunk, late[number], terms[number] = gradient.backward(
            own[number], shared, jax.tree.leaves(arrived)
        )
        *rows, weights_of[number] = d_chunk
        return tuple(rows) if layer.has_rows else ()

    def fetch(number: int, rows: Arrays) -> Arrays:
        with _apart.started():
            return along(number, rows, None)[0] if rows else ()

    def along(number: int, rows: Arrays, weights: jax.Array | None) -> Any:
        handle, chosen = open_handle("combine", handles[number], layer.implementation)
        return pull(chosen, handle, rows, weights)

    first, *_, last = order = range(layer.count)[::-1]
    operands = [(handles[i], layer.chunk(d_sums, i), made[i]) for i in range(layer.count)]
    # Beside the first communication: so not before all is there with which that one begins.
    _, rows = barrier((operands[first], own))
    prepared = gradient.prepare(rows, shared)
    d_x, rows, prepared = _pipeline(layer, order, operands, send, experts, fetch, prepared)
    d_weights: list[Any] = [None] * layer.count
    for number in order:
        rows, weights = barrier((rows, weights_of[number]))
        d_weights[number] = along(number, (), weights)[1]
        rows, d_weights[number] = barrier((rows, d_weights[number]))
    d_x[last] = fetch(last, rows)
    _, late = barrier((rows, late))  # beside it
    found, d_x[last] = barrier((gradient.finish(prepared, late, terms, shared), d_x[last]))
    d_rows = [jnp.concatenate(chunks) for chunks in zip(*d_x, strict=True)]
    return d_rows[0] if d_rows else None, None, jnp.concatenate(d_weights), found


_run.defvjp(_run_forward, _run_backward, symbolic_zeros=True)


def _instantiated(cotangent: Any) -> jax.Array:
    is_zero = isinstance(cotangent, jax.custom_derivatives.SymbolicZero)
    return jnp.zeros(cotangent.shape, jnp.result_type(cotangent.dtype)) if is_zero else cotangent


def _combine_gradient(layer: _Layer, handle: Handle, d_sums: Any, made: tuple[Any, jax.Array]) -> Any:
    """Gradients of the rows and row weights that were combined."""
    rows, weights = made
    leaves, tree = jax.tree.flatten(rows)
    wide = [tuple(jax.tree.leaves(one)) for one in (whole(d_sums), rows)]
    handle, chosen = open_handle("combine", handle, layer.implementation)
    operands = vary_alike((handle, *wide, weights))
    d_rows, d_weights = push_scaled(chosen, *operands)
    narrow = [row.astype(leaf.dtype) for row, leaf in zip(d_rows, leaves, strict=True)]
    return jax.tree.unflatten(tree, narrow), d_weights


def _named(sent: DispatchedByExpert) -> DispatchedByExpert:
    """With names for `jax.checkpoint`: else what is kept of a dispatch would lie before a barrier."""
    indices = ("group_sizes", "tokens_per_expert", "num_tokens", "num_dropped", "handle")
    named: dict[str, Any] = {name: name_all(getattr(sent, name), CHECKPOINT_HANDLE) for name in indices}
    named["x"] = name_all(sent.x, CHECKPOINT_ROWS)
    named["row_weights"] = name_all(sent.row_weights, CHECKPOINT_WEIGHTS)
    return dataclasses.replace(sent, **named)


def _pipeline(
    layer: _Layer,
    order: Sequence[int],
    operands: Sequence[Any],
    send: Callable[[int, Any], Any],
    compute: Callable[[int, Any], Any],
    fetch: Callable[[int, Any], Any],
    computed: Any = (),
) -> tuple[list[Any], Any, Any]:
    """What `fetch` gives for each chunk but the last, of what `compute` makes of what `send` brings.

    While a chunk is computed, the one after is sent and the one before is fetched. All communication is in
    one order, and so are the computations, the first of them after what is `computed` already. Also returned
    is what the last fetch begins with, and what is computed.

    Barriers say so, of which each result is used: XLA drops what is not, and with it the order. A computation
    begins when what flies beside it can start, which XLA then starts first.
    """
    found: dict[int | None, Any] = {}
    made: Any = ()
    fetched: Any = ()
    sent = send(order[0], operands[order[0]])
    chunks = [None, None, *order], [None, *order], order, [*order[1:], None]
    for before, previous, chunk, following in zip(*chunks, strict=False):
        coming = () if following is None else operands[following]
        fetched, arrived, made, coming, computed = barrier((fetched, sent, made, coming, computed))
        found[before] = fetched
        sent = () if following is None else send(following, coming)
        # What both wait for must not be in flight: of two ops that are, each needs SMs until its peers come.
        there, made, arrived = barrier((layer.settled(sent), made, arrived))
        sent = layer.unsettled(sent, there)
        fetched = () if previous is None else fetch(previous, made)
        made = compute(chunk, arrived)
    found[order[-2]], made, computed = barrier((fetched, made, computed))
    return [found.get(chunk) for chunk in range(layer.count)], made, computed
