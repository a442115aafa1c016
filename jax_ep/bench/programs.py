"""The programs that the benchmark times. Each runs one op many times, one after the other.

Each step depends on the step before it, which keeps XLA from merging or dropping steps. A round trip and a
chained pair pass on their rows. A dispatch in FP8 passes on its input rows, with one element that depends on
its result. All other ops pass on a small index array that depends on their result, which costs almost
nothing.

A chained pair is a layer's communication at inference, as in a real model: the weights travel with the rows,
and combine applies them. By rank the experts would apply them. The programs contain no experts, because an
op on the rows would measure memory, above all for padded experts, whose rows are mostly empty.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep._extension import Implementation
from jax_ep.bench import peers
from jax_ep.bench.shapes import Shape

OPS = (
    "dispatch",
    "dispatch FP8",
    "combine",
    "combine FP8",
    "layout",
    "permute",
    "unpermute",
    "round trip",
    "chained pair",
    "forward + backward",
)
IN_FP8 = ("dispatch FP8", "combine FP8")
LOCAL = ("permute", "unpermute")  # ops within one rank
ORDERLESS = ("layout", *LOCAL)
LAYERS = 8  # number of chained pairs in a program
PEERS = {"ragged_all_to_all": peers.ragged_all_to_all, "all_gather": peers.all_gather}

Step = Callable[[jax.Array], jax.Array]
Prepare = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Step]]


def repeated(mesh: jax.sharding.Mesh, prepare: Prepare, steps: int) -> Callable[..., jax.Array]:
    """Returns a function of (x, ids, weights) that runs `steps` steps on every rank.

    It returns one element of each rank's last result.
    """

    def shard(x: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
        carry, step = prepare(x, ids, weights)
        for _ in range(steps):
            carry = step(carry)
        return carry.reshape(-1)[:1]

    spec = P(*mesh.axis_names)
    return jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))


def _after(index: jax.Array, result: jax.Array) -> jax.Array:
    """Returns `index`, once all of `result` has been computed."""
    return index + _zero_after(result).astype(index.dtype)


def _zero_after(result: jax.Array) -> jax.Array:
    """Returns False, which XLA cannot infer, once all of `result` has been computed."""
    # Without the barrier XLA would compute only the one element that is read.
    result = jax.lax.optimization_barrier(result)
    return result.reshape(-1)[0].astype(jnp.float32) == 1.2345e-30


def _with_sent_rows(handle: Any, sent_rows: jax.Array) -> Any:
    """Returns the handle with other `sent_rows`, which combine reads. With two hops, changes hop 2."""
    if handle.within is not None:
        return dataclasses.replace(handle, within=_with_sent_rows(handle.within, sent_rows))
    return dataclasses.replace(handle, sent_rows=sent_rows)


def of_ours(
    op: str,
    order: Any,
    group: jax_ep.Group,
    shape: Shape,
    implementation: Implementation,
    rows: tuple[int | None, int | None] = (None, None),
) -> Prepare:
    """Returns the step of an op of this package.

    'forward + backward' is the communication of a layer whose experts do nothing. `rows` holds `capacity` and
    `domain_capacity`.
    """
    capacity, domain_capacity = rows

    def dispatch(x: jax.Array, ids: jax.Array, weights: jax.Array | None = None, quantize: Any = None) -> Any:
        return jax_ep.dispatch(
            x,
            ids,
            weights,
            group=group,
            num_experts=shape.experts,
            order=order,
            capacity=capacity,
            domain_capacity=domain_capacity,
            quantize=quantize,
            implementation=implementation,
        )

    def combine(sent: Any, handle: Any) -> jax.Array:
        row_weights = sent.row_weights if order != "rank" and op != "round trip" else None
        quantize: Any = "fp8" if op in IN_FP8 else None
        return jax_ep.combine(
            sent.x, handle, row_weights=row_weights, quantize=quantize, implementation=implementation
        )

    def prepare(x: jax.Array, ids: jax.Array, weights: jax.Array) -> tuple[jax.Array, Step]:
        def layout(ids: jax.Array) -> jax.Array:
            counts = {"num_experts": shape.experts, "num_ranks": group.size}
            result = jax_ep.get_dispatch_layout(ids, **counts, implementation=implementation)
            return _after(ids, result.num_tokens_per_expert)

        def gradients(ids: jax.Array) -> jax.Array:
            def layer(x: jax.Array, weights: jax.Array) -> jax.Array:
                sent = dispatch(x, ids, weights)
                return combine(sent, sent.handle)

            y, transposed = jax.vjp(layer, x, weights)
            d_x, d_weights = transposed(y)
            return _after(_after(ids, d_x), d_weights)

        def dispatch_fp8(x: jax.Array) -> jax.Array:
            # The rows change in every step. Otherwise XLA could quantize them once for all steps.
            return x.at[0, 0].add(_zero_after(dispatch(x, ids, quantize="fp8").x.values).astype(x.dtype))

        def round_trip(x: jax.Array) -> jax.Array:
            sent = dispatch(x, ids)
            return combine(sent, sent.handle)

        def chained_pair(x: jax.Array) -> jax.Array:
            sent = dispatch(x, ids, weights)
            return combine(sent, sent.handle)

        def permute(ids: jax.Array) -> jax.Array:
            rows = jax_ep.permute(
                x, ids, num_local_experts=shape.experts, topk_weights=weights, implementation=implementation
            )
            return _after(ids, rows.x)

        if op == "unpermute":
            count = shape.tokens * shape.top_k
            rows = jnp.tile(x, (shape.top_k, 1))
            row_map = jax.random.permutation(jax.random.key(0), count).astype(jnp.int32)

            def unpermute(row_map: jax.Array) -> jax.Array:
                y = jax_ep.unpermute(rows, row_map, topk_weights=weights, implementation=implementation)
                return _after(row_map, y)

            return row_map.reshape(shape.tokens, shape.top_k), unpermute
        if op in ("combine", "combine FP8"):
            sent = dispatch(x, ids, weights)

            def combine_again(sent_rows: jax.Array) -> jax.Array:
                return _after(sent_rows, combine(sent, _with_sent_rows(sent.handle, sent_rows)))

            return (sent.handle.within or sent.handle).sent_rows, combine_again
        row_steps: dict[str, Step] = {
            "dispatch FP8": dispatch_fp8,
            "round trip": round_trip,
            "chained pair": chained_pair,
        }
        if op in row_steps:
            return x, row_steps[op]
        index_steps: dict[str, Step] = {
            "dispatch": lambda ids: _after(ids, dispatch(x, ids).x),
            "layout": layout,
            "permute": permute,
            "forward + backward": gradients,
        }
        return ids, index_steps[op]

    return prepare


def of_peer(name: str, group: jax_ep.Group, shape: Shape) -> Prepare:
    """Returns the step of a round trip with JAX's own collectives."""
    dispatch, combine = PEERS[name](shape, group.size)

    def prepare(x: jax.Array, ids: jax.Array, _: jax.Array) -> tuple[jax.Array, Step]:
        return x, lambda x: combine(*dispatch(x, ids))

    return prepare
