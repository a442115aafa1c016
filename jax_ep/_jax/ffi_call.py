"""One call of an FFI handler, under the name that profilers show."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import PartitionSpec

from jax_ep._jax.sharding import in_lists_along, may_differ_along, vary_alike
from jax_ep._jax.vmap import one_by_one

Result = tuple[tuple[int, ...], Any]  # shape, dtype


# What profilers call the handlers whose names are not those of ops. Each does the work of that op, also where
# it is the gradient of another one.
_OPS = {
    "layout": "get_dispatch_layout",
    "route": "dispatch",
    "push": "redispatch",
    "pull": "combine",
    "grouped_dot_fp8": "grouped_dot",
}


def call(
    target: str, operands: Sequence[Any], results: Sequence[Result], **attributes: Any
) -> list[jax.Array]:
    """The results of the handler `jax_ep_{target}`, which vmap calls for one element after the other.

    The first operand of those that communicate, which have an attribute `group`, is the device's `place`.
    """
    operands = vary_alike(operands)
    shapes = [*(operand.shape for operand in operands), *(shape for shape, _ in results)]
    for shape in shapes:
        if not all(isinstance(size, int) for size in shape):
            raise ValueError(
                "jax_ep: implementation='ffi' needs shapes that are known when a program is compiled, "
                f"got {shape}; export a program for each shape"
            )
    types = tuple((tuple(shape), np.dtype(dtype)) for shape, dtype in results)
    return _primitive(target).bind(*operands, results=types, attributes=tuple(attributes.items()))


@functools.cache
def _primitive(target: str) -> Primitive:
    """Takes the place of `jax.ffi.ffi_call`, after which XLA would name the call of every handler.

    An instruction has the name of its primitive, and profiles of the CPU show nothing else.
    """
    primitive = Primitive(f"jax_ep.{_OPS.get(target, target)}")
    primitive.multiple_results = True
    compiled = jax.jit(primitive.bind, static_argnames=("results", "attributes"))

    def run(*operands: Any, **how: Any) -> Any:
        with jax.disable_jit(False):  # a handler is always compiled
            return compiled(*operands, **how)

    primitive.def_impl(run)
    primitive.def_abstract_eval(_result_types)
    lower = jax.ffi.ffi_lowering(f"jax_ep_{target}")

    def lowering(context: Any, *operands: Any, results: Any, attributes: Any) -> Any:
        return lower(context, *operands, **dict(attributes))

    def batch(operands: Any, axes: Any, **how: Any) -> Any:
        is_batched = [axis is not None for axis in axes]
        moved = [
            jnp.moveaxis(array, axis, 0) if b else array
            for array, axis, b in zip(operands, axes, is_batched, strict=True)
        ]
        communicates = "group" in dict(how["attributes"])
        assert not (communicates and is_batched[0]), "a device's place is the same for a whole batch"
        counted = may_differ_along(moved[0]) if communicates else set()
        moved = vary_alike(moved)
        if communicates:
            # Axes along which `spmd_axis_name` spreads the batch were not known where the place was computed.
            moved[0] = in_lists_along(may_differ_along(moved[0]) - counted, moved[0])
        outs = one_by_one(functools.partial(primitive.bind, **how), moved, is_batched)
        return outs, [0] * len(outs)

    mlir.register_lowering(primitive, lowering)
    batching.primitive_batchers[primitive] = batch
    return primitive


def _result_types(like: Any, *_: Any, results: Sequence[Result], attributes: Any) -> list[Any]:
    """They have the operands' manual axis type and memory. Over other axes nothing is sharded here."""
    return [
        like.update(
            shape=shape,
            dtype=dtype,
            weak_type=False,
            sharding=like.sharding.update(spec=PartitionSpec(*[None] * len(shape))),
        )
        for shape, dtype in results
    ]
