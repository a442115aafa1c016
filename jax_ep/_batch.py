"""What `jax.vmap` makes of functions that take no batch, or no sharded one."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jax_ep._manual import axes_of, vary_alike

Function = Callable[..., Any]  # of arrays


def takes_no_batch(function: Function) -> Function:
    """The function, which `jax.vmap` then calls for one element after the other."""
    function = jax.custom_batching.custom_vmap(function)

    @function.def_vmap
    def _(size: int, is_batched: list[bool], *operands: Any) -> Any:
        out = one_by_one(function, operands, is_batched)
        return out, jax.tree.map(lambda _: True, out)

    return function


def takes_no_sharded_batch(function: Function) -> Function:
    """The function, which `jax.vmap` then batches as it would, but for a device's elements alone."""
    outer = jax.custom_batching.custom_vmap(function)

    @outer.def_vmap
    def _(size: int, is_batched: list[bool], *operands: Any) -> Any:
        batched = jax.vmap(function, in_axes=[0 if b else None for b in is_batched])
        out = _of_each_shard(takes_no_sharded_batch(batched), operands, is_batched)
        return out, jax.tree.map(lambda _: True, out)

    return outer


def one_by_one(
    function: Function,
    operands: Sequence[Any],
    is_batched: Sequence[bool],
    prepare: Callable[[Sequence[Any]], Sequence[Any]] = tuple,
) -> Any:
    """The results [B, ...] of function(*operands), for each element of the operands that are batched.

    On each device `prepare` is given all operands first, which there hold that device's elements alone, and
    returns those that the function gets.
    """

    def loop(*operands: Any) -> Any:
        operands = tuple(prepare(operands))

        def one(elements: Any) -> Any:
            rest = iter(elements)
            return function(*(next(rest) if b else a for a, b in zip(operands, is_batched, strict=True)))

        return jax.lax.map(one, [a for a, b in zip(operands, is_batched, strict=True) if b])

    return _of_each_shard(loop, operands, is_batched)


def _of_each_shard(function: Function, operands: Sequence[Any], is_batched: Sequence[bool]) -> Any:
    """function(*operands) of a whole batch.

    Where Explicit mesh axes shard the batch, their devices work on the elements that they hold, at the same
    time, and the results are sharded as the batch is. Nothing is gathered.
    """
    entries = {jax.typeof(a).sharding.spec[0] for a, b in zip(operands, is_batched, strict=True) if b}
    assert len(entries) == 1, f"jax.vmap shards all operands alike, not {entries}"
    (shard,) = entries
    if shard is None:
        return function(*operands)

    num_shards = math.prod(jax.sharding.get_abstract_mesh().shape[axis] for axis in axes_of(shard))
    options = {"out_specs": P(shard), "axis_names": axes_of(shard), "check_vma": _checks_varying()}
    specs = tuple(P(shard) if b else P() for b, a in zip(is_batched, operands, strict=True) if a.size > 0)
    results: list[Any] = []  # on one device: their types, and the tree that they make up

    # XLA for GPUs (jax 0.11) ends the process where an empty array goes into a shard_map in another one, or
    # comes out of it. So they are made where they are needed.
    def of_part(*part: Any) -> list[Any]:
        rest = iter(part)
        operands_here = [
            next(rest)
            if a.size > 0
            else jnp.zeros((a.shape[0] // num_shards, *a.shape[1:]) if b else a.shape, a.dtype)
            for a, b in zip(operands, is_batched, strict=True)
        ]
        outs, tree = jax.tree.flatten(function(*vary_alike(operands_here)))
        if not results:  # later, in the shard_map of a batch around this one, types are others
            results.extend([[jax.typeof(out) for out in outs], tree])
        return [out for out in outs if out.size > 0]

    def mapped(*part: Any) -> list[Any]:
        # Made here, for a batch around this one calls it where axes of the mesh are manual.
        return jax.shard_map(of_part, in_specs=specs, **options)(*part)

    # As one equation: JAX (0.12) cannot split a shard_map in another one into what is known and what is not.
    found = iter(takes_no_sharded_batch(mapped)(*(a for a in operands if a.size > 0)))
    types, tree = results
    outs = [next(found) if like.size > 0 else _empty(like, shard, num_shards) for like in types]
    return jax.tree.unflatten(tree, outs)


def _empty(like: Any, shard: Any, num_shards: int) -> jax.Array:
    """An array without elements, sharded along its first dimension: each device's part is as `like`."""
    array = jnp.zeros((num_shards * like.shape[0], *like.shape[1:]), like.dtype)
    array = jax.sharding.reshard(array, P(shard, *[None] * (like.ndim - 1)))
    varies = like.manual_axis_type  # None: shard_map does not check it
    return vary_alike(array, () if varies is None else set(varies.varying) - axes_of(shard))


def _checks_varying() -> bool:
    """The `check_vma` of the shard_map around, if there is one: in another one types would differ."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    return not axes or bool(jax.typeof(vary_alike(jnp.zeros(()), axes)).manual_axis_type.varying)


class ShardByShard:
    """The functions of a module that take no gradients, each as `takes_no_sharded_batch` makes it."""

    def __init__(self, module: Any):
        self._module = module

    def __getattr__(self, name: str) -> Function:
        function = getattr(self._module, name)

        def call(*arguments: Any) -> Any:
            leaves, tree = jax.tree.flatten(arguments)
            places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]

            def of_arrays(*arrays: Any) -> Any:
                merged = dict(enumerate(leaves)) | dict(zip(places, arrays, strict=True))
                return function(*jax.tree.unflatten(tree, merged.values()))

            return takes_no_sharded_batch(of_arrays)(*(leaves[i] for i in places))

        return call
