"""One thing after another where no data says so."""

from typing import Any, TypeVar

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxlib.mlir.dialects import stablehlo

Tree = TypeVar("Tree")


def barrier(values: Tree) -> Tree:
    """The same, but what uses any of the results runs after what has made all of the values.

    As `jax.lax.optimization_barrier`, which asks that all values vary over the same axes of a shard_map.
    XLA's scheduler may go through them in their order: so what is to run first is named first.
    """
    leaves, tree = jax.tree.flatten(values)
    return jax.tree.unflatten(tree, _barrier.bind(*leaves)) if leaves else values


_barrier = Primitive("jax_ep_barrier")
_barrier.multiple_results = True
_barrier.def_impl(lambda *arrays: list(arrays))
_barrier.def_abstract_eval(lambda *avals: list(avals))


def _lower(_: Any, *arrays: Any) -> Any:
    return stablehlo.OptimizationBarrierOp(arrays).results


mlir.register_lowering(_barrier, _lower)
batching.primitive_batchers[_barrier] = lambda arrays, dims: (_barrier.bind(*arrays), dims)
ad.primitive_jvps[_barrier] = lambda arrays, tangents: (_barrier.bind(*arrays), list(tangents))
