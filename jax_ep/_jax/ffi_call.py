"""Calls of FFI handlers, under the names that profilers show."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jax_ep._jax.sharding import vary_alike, varying_axes, with_own_lists
from jax_ep._jax.vmap import loop_over_batch

Result = tuple[tuple[int, ...], DTypeLike]  # shape, dtype
Attribute = np.generic | str
T = TypeVar("T")
U = TypeVar("U")

# Handler -> the op that profilers show, for handlers that are not named after an op. Such a handler does the
# work of that op even when it computes the gradient of another op.
_OPS = {
    "layout": "get_dispatch_layout",
    "route": "dispatch",
    "push": "redispatch",
    "pull": "combine",
    "route_beside": "dispatch",
    "push_beside": "redispatch",
    "pull_beside": "combine",
    "quantize": "quantize_fp8",
    "quantize_gated": "gated_mlp",
}


def call(
    target: str,
    operands: Sequence[jax.Array],
    results: Sequence[Result],
    aliases: Sequence[tuple[int, int]] = (),
    **attributes: Attribute,
) -> list[jax.Array]:
    """Calls the FFI handler `jax_ep_{target}`, and returns its results.

    `aliases` has pairs of an operand and a result that takes its memory.

    Under `vmap` the handler runs once per batch element. A handler with an attribute `group` communicates.
    The first operand of such a handler is the device's position. It also has an attribute `program`, the
    name of the compiled module, by which processes find that they run different programs.
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
    parameters = {
        "results": types,
        "aliases": tuple(aliases),
        "attributes": tuple(attributes.items()),
    }
    return _primitive(target).bind(*operands, **parameters)


_STATIC = {"static": True}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Call(Generic[T]):
    """A call that is not made yet: the arguments of `call`, and a function that reads its results."""

    target: str = dataclasses.field(metadata=_STATIC)
    operands: Sequence[jax.Array]
    results: Sequence[Result] = dataclasses.field(metadata=_STATIC)
    attributes: Mapping[str, Attribute] = dataclasses.field(metadata=_STATIC)
    read: Callable[[list[jax.Array]], T] = dataclasses.field(metadata=_STATIC)
    aliases: Sequence[tuple[int, int]] = dataclasses.field(default=(), metadata=_STATIC)

    def run(self) -> T:
        return self.read(call(self.target, self.operands, self.results, self.aliases, **self.attributes))


def run_beside(first: Call[T], second: Call[U]) -> tuple[T, U]:
    """Makes two calls that run at the same time, by the handler `jax_ep_{first.target}_beside`.

    Only a handler can do so: XLA runs calls of handlers one after the other.
    """
    assert not first.aliases
    assert not second.aliases
    arrays = call(
        f"{first.target}_beside",
        [*first.operands, *second.operands],
        [*first.results, *second.results],
        (),
        **first.attributes,
        **second.attributes,
        num_operands=np.int64(len(first.operands)),
        num_results=np.int64(len(first.results)),
    )
    count = len(first.results)
    return first.read(arrays[:count]), second.read(arrays[count:])


def or_scalar(array: jax.Array | None, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Returns the array, or a scalar for an operand that is not given.

    The scalar is not an array of no elements: jaxlib 0.11.2 crashes if such an array crosses the boundary of
    a `shard_map` in a loop, and JAX moves constants out of the loop over a model's layers.
    """
    return jnp.zeros((), dtype) if array is None else array


@functools.cache
def _primitive(target: str) -> Primitive:
    """Returns the primitive of a handler.

    An instruction is named after its primitive, and CPU profiles show only that name. With `jax.ffi.ffi_call`
    all handlers would share one name.
    """
    primitive = Primitive(f"jax_ep.{_OPS.get(target, target)}")
    primitive.multiple_results = True
    compiled = jax.jit(primitive.bind, static_argnames=("results", "aliases", "attributes"))

    def run(*operands: jax.Array, **parameters: object) -> list[jax.Array]:
        with jax.disable_jit(False):  # a handler must be compiled, even if the user has disabled jit
            return compiled(*operands, **parameters)

    primitive.def_impl(run)
    primitive.def_abstract_eval(_result_types)

    def lowering(
        context: Any,
        *operands: object,
        results: Sequence[Result],
        aliases: Sequence[tuple[int, int]],
        attributes: Sequence[tuple[str, Attribute]],
    ) -> Any:
        lower: Any = jax.ffi.ffi_lowering(f"jax_ep_{target}", operand_output_aliases=dict(aliases))
        named = dict(attributes)
        if "group" in named:
            named["program"] = context.module_context.module.operation.attributes["sym_name"].value
        return lower(context, *operands, **named)

    def batch(
        operands: Sequence[jax.Array], axes: Sequence[int | None], **parameters: Any
    ) -> tuple[list[jax.Array], list[int]]:
        is_batched = [axis is not None for axis in axes]
        batch_first = [
            operand if axis is None else jnp.moveaxis(operand, axis, 0)
            for operand, axis in zip(operands, axes, strict=True)
        ]
        communicates = "group" in dict(parameters["attributes"])
        assert not (communicates and is_batched[0]), "a device's position is the same for a whole batch"
        known_axes = varying_axes(batch_first[0]) if communicates else set()
        batch_first = vary_alike(batch_first)
        if communicates:
            # The axes over which `spmd_axis_name` spreads the batch were not yet known when the position was
            # computed.
            new_axes = varying_axes(batch_first[0]) - known_axes
            batch_first[0] = with_own_lists(new_axes, batch_first[0])
        outs = loop_over_batch(functools.partial(primitive.bind, **parameters), batch_first, is_batched)
        return outs, [0] * len(outs)

    mlir.register_lowering(primitive, lowering)
    batching.primitive_batchers[primitive] = batch
    return primitive


def _result_types(operand: Any, *_: object, results: Sequence[Result], **parameters: object) -> list[object]:
    """Returns the types of a handler's results, which vary over the same manual axes as its operands.

    The results also lie in the operands' memory. They are not sharded over other axes.
    """
    return [
        operand.update(
            shape=shape,
            dtype=dtype,
            weak_type=False,
            sharding=operand.sharding.update(spec=PartitionSpec(*[None] * len(shape))),
        )
        for shape, dtype in results
    ]
