"""after: one thing after another where no data says so."""

from typing import Any, TypeVar

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxlib.mlir.dialects import stablehlo

Tree = TypeVar("Tree")


def after(values: Tree, others: Any) -> Tree:
    """`values`, but what uses them runs after what has made `others`.

    As `jax.lax.optimization_barrier` of both, which asks that all of them vary over the same axes of a
    shard_map, and would make each vary over those of the others.
    """
    leaves, tree = jax.tree.flatten(values)
    before = jax.tree.leaves(others)
    if not leaves or not before:
        return values
    return jax.tree.unflatten(tree, _after.bind(*before, *leaves, count=len(leaves)))


_after = Primitive("jax_ep_after")
_after.multiple_results = True
_after.def_impl(lambda *arrays, count: list(arrays[-count:]))
_after.def_abstract_eval(lambda *avals, count: list(avals[-count:]))


def _lower(_: Any, *arrays: Any, count: int) -> Any:
    # XLA's scheduler likes to go through operands in their order: so the others are the first of them.
    return stablehlo.OptimizationBarrierOp(arrays).results[-count:]


def _batch(arrays: Any, dims: Any, *, count: int) -> Any:
    return _after.bind(*arrays, count=count), dims[-count:]


def _differentiate(arrays: Any, tangents: Any, *, count: int) -> Any:
    return _after.bind(*arrays, count=count), list(tangents[-count:])


mlir.register_lowering(_after, _lower)
batching.primitive_batchers[_after] = _batch
ad.primitive_jvps[_after] = _differentiate
