"""Functions with custom gradients, and functions whose gradient is an error."""

import functools
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

P = ParamSpec("P")
R = TypeVar("R")


class CustomVjp(Generic[P, R]):
    """A `jax.custom_vjp` function whose results are all batched under `vmap` if any operand is.

    `jax.custom_vjp` sums the gradient of an operand that is not batched over the batch, also the part that
    comes from a result that is not batched either. JAX counts this part once per batch element before 0.12,
    and raises ValueError since.
    """

    def __init__(self, function: Callable[P, R], static: tuple[int, ...]):
        functools.update_wrapper(self, function)
        self._static = static

        @functools.wraps(function)
        def batched_alike(*arguments: P.args, **options: P.kwargs) -> R:
            return _batched_alike(function(*arguments, **options), self._operands(arguments))

        self._function = jax.custom_vjp(batched_alike, nondiff_argnums=static)

    def __call__(self, *arguments: P.args, **options: P.kwargs) -> R:
        return self._function(*arguments, **options)

    def defvjp(self, forward: Callable[..., tuple[R, Any]], backward: Callable[..., Any]) -> None:
        """Defines the gradients, as `jax.custom_vjp.defvjp` does."""

        @functools.wraps(forward)
        def batched_alike(*arguments: Any) -> tuple[R, Any]:
            results, residuals = forward(*arguments)
            return _batched_alike(results, self._operands(arguments)), residuals

        self._function.defvjp(batched_alike, backward)

    def _operands(self, arguments: tuple[Any, ...]) -> list[Any]:
        return [argument for i, argument in enumerate(arguments) if i not in self._static]


def custom_vjp(*static: int) -> Callable[[Callable[P, R]], CustomVjp[P, R]]:
    """Returns a decorator for functions whose arguments at the positions `static` are not traced."""
    return lambda function: CustomVjp(function, static)


def _batched_alike(results: R, operands: Any) -> R:
    """Returns the results. Under `vmap` all of them are batched if a result or an operand is."""
    leaves, tree = jax.tree.flatten(results)
    if len(leaves) == 0:
        return results
    return tree.unflatten(_alike.bind(*leaves, *jax.tree.leaves(operands), num_results=len(leaves)))


def _batch(arrays: Any, dimensions: Any, *, num_results: int) -> Any:
    pairs = list(zip(arrays, dimensions, strict=True))
    size = next(array.shape[dimension] for array, dimension in pairs if dimension is not None)
    results = [
        jnp.broadcast_to(array, (size, *jnp.shape(array))) if dimension is None else array
        for array, dimension in pairs[:num_results]
    ]
    return results, [dimension or 0 for dimension in dimensions[:num_results]]


def _jvp(primals: Any, tangents: Any, *, num_results: int) -> Any:
    return _alike.bind(*primals, num_results=num_results), tangents[:num_results]


_alike = Primitive("jax_ep_batched_alike")
_alike.multiple_results = True
_alike.def_impl(lambda *arrays, num_results: arrays[:num_results])
_alike.def_abstract_eval(lambda *arrays, num_results: list(arrays[:num_results]))
ad.primitive_jvps[_alike] = _jvp
batching.primitive_batchers[_alike] = _batch
mlir.register_lowering(_alike, lambda _, *arrays, num_results: arrays[:num_results])


@custom_vjp(0)
def without_gradient(error: str, sources: Any, results: Any) -> Any:
    """Returns the results. Their gradient with respect to the sources raises TypeError."""
    return results


def _without_gradient_forward(error: str, sources: Any, results: Any) -> Any:
    return results, None


def _without_gradient_backward(error: str, saved: None, cotangents: Any) -> Any:
    raise TypeError(error)


without_gradient.defvjp(_without_gradient_forward, _without_gradient_backward)
