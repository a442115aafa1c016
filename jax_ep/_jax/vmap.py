"""Functions that `jax.vmap` calls once per batch element, or by a rule of their own."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from jax_ep._checks import TreeDef

Result = TypeVar("Result")


def vmap_by_loop(function: Callable[..., Result]) -> Callable[..., Result]:
    """Returns the function such that `jax.vmap` calls it once per batch element."""
    batched = jax.custom_batching.custom_vmap(function)

    @batched.def_vmap
    def _(size: int, is_batched: list[bool], *operands: jax.Array) -> tuple[Result, object]:
        out = loop_over_batch(batched, operands, is_batched)
        return out, jax.tree.map(lambda _: True, out)

    return batched


def loop_over_batch(
    function: Callable[..., Result], operands: Sequence[jax.Array], is_batched: Sequence[bool]
) -> Result:
    """Returns the results [B, ...] of function(*operands) for each element of the batched operands."""
    batches = [operand for operand, batched in zip(operands, is_batched, strict=True) if batched]
    for batch in batches:
        _check_batch(batch, 0)

    def call(elements: Sequence[jax.Array]) -> Result:
        remaining = iter(elements)
        pairs = zip(operands, is_batched, strict=True)
        return function(*(next(remaining) if batched else operand for operand, batched in pairs))

    return jax.lax.map(call, batches)


def with_vmap_rule(
    function: Callable[..., Result], rule: Callable[..., tuple[Result, object]]
) -> Callable[..., Result]:
    """Returns the function such that `jax.vmap` calls rule(is_batched, *operands) in its place.

    In contrast to `jax.custom_batching.custom_vmap` it has the function's gradients. Batches come first.
    `is_batched` is a pytree like the operands. The rule returns the results, and a pytree of bools like them.
    """

    def call(*operands: object) -> Result:
        leaves, tree = jax.tree.flatten(operands)
        jaxpr, results = jax.make_jaxpr(function, return_shape=True)(*operands)
        outs = _with_vmap_rule.bind(*leaves, jaxpr=jaxpr, tree=tree, rule=rule)
        return jax.tree.unflatten(jax.tree.structure(results), outs)

    return call


def _call_rule(
    arrays: Sequence[jax.Array],
    dimensions: Sequence[int | None],
    *,
    jaxpr: ClosedJaxpr,
    tree: TreeDef,
    rule: Callable[..., tuple[object, object]],
) -> tuple[list[jax.Array], list[int | None]]:
    is_batched = [dimension is not None for dimension in dimensions]
    pairs = zip(arrays, dimensions, strict=True)
    batch_first = [array if d is None else jnp.moveaxis(array, d, 0) for array, d in pairs]
    results, batched = rule(tree.unflatten(is_batched), *tree.unflatten(batch_first))
    return jax.tree.leaves(results), [0 if is_one else None for is_one in jax.tree.leaves(batched)]


def _differentiate(
    primals: Sequence[jax.Array], tangents: Sequence[Any], *, jaxpr: ClosedJaxpr, **_: object
) -> tuple[Sequence[jax.Array], Sequence[jax.Array]]:
    tangents = tuple(ad.instantiate_zeros(tangent) for tangent in tangents)
    return jax.jvp(jaxpr_as_fun(jaxpr), tuple(primals), tangents)


_with_vmap_rule = Primitive("jax_ep_with_vmap_rule")
_with_vmap_rule.multiple_results = True
_with_vmap_rule.def_impl(lambda *arrays, jaxpr, **_: jaxpr_as_fun(jaxpr)(*arrays))
_with_vmap_rule.def_abstract_eval(lambda *_, jaxpr, **parameters: jaxpr.out_avals)
ad.primitive_jvps[_with_vmap_rule] = _differentiate
batching.primitive_batchers[_with_vmap_rule] = _call_rule
mlir.register_lowering(
    _with_vmap_rule,
    mlir.lower_fun(lambda *arrays, jaxpr, **_: jaxpr_as_fun(jaxpr)(*arrays), multiple_results=True),
)


def reject_sharded_batch(array: jax.Array) -> jax.Array:
    """Returns the array. If an Explicit mesh axis shards a batch of it, `jax.vmap` raises ValueError."""
    return _reject_sharded_batch.bind(array)


def _check_batch(array: jax.Array, dimension: int) -> None:
    axis = jax.typeof(array).sharding.spec[dimension]
    if axis is not None:
        raise ValueError(
            "jax_ep: no Explicit mesh axis may shard a batch that jax.vmap maps over, got "
            f"{jax.typeof(array)}, whose batch is sharded over {axis!r}; make this axis manual (name it in "
            "the axis_names and in_specs of jax.shard_map), or use an axis of type Auto"
        )


def _batch(arrays: Sequence[jax.Array], dimensions: Sequence[int]) -> tuple[jax.Array, int]:
    _check_batch(arrays[0], dimensions[0])
    return reject_sharded_batch(arrays[0]), dimensions[0]


_reject_sharded_batch = Primitive("jax_ep_rejects_sharded_batch")
_reject_sharded_batch.def_impl(lambda array: array)
_reject_sharded_batch.def_abstract_eval(lambda array: array)
ad.deflinear2(_reject_sharded_batch, lambda cotangent, _: [reject_sharded_batch(cotangent)])
batching.primitive_batchers[_reject_sharded_batch] = _batch
mlir.register_lowering(_reject_sharded_batch, lambda _, array: [array])
