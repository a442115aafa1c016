"""`jax.custom_vjp`, with an error in forward mode that names the op."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def reverse_mode(op: str, *static: int) -> Callable[[Callable[..., Any]], Any]:
    """`jax.custom_vjp` for a function of `op`, whose arguments at the positions `static` are not traced."""
    error = (
        f"{op} has no forward mode (jax.jvp, jax.jacfwd, jax.hessian, or what jax.linearize returns), for "
        "only its gradient is known; take jax.grad, jax.vjp or jax.jacrev, which work to any order (a "
        "Hessian is jax.jacrev of jax.jacrev)"
    )

    def decorate(function: Callable[..., Any]) -> Any:
        inner = jax.custom_vjp(function, nondiff_argnums=static)

        @functools.wraps(function)
        def call(*arguments: Any) -> Any:
            traced = [i for i in range(len(arguments)) if i not in static]
            marked = dict(zip(traced, no_forward_mode(error, [arguments[i] for i in traced]), strict=True))
            return inner(*(marked.get(i, argument) for i, argument in enumerate(arguments)))

        call.defvjp = inner.defvjp  # pyright: ignore[reportAttributeAccessIssue]
        return call

    return decorate


def no_forward_mode(error: str, arrays: Any) -> Any:
    """The arrays of a pytree. To push a tangent of theirs forward is a TypeError; gradients pass."""

    def marked(array: Any) -> Any:
        return _mark.bind(array, message=error) if jnp.issubdtype(array.dtype, jnp.floating) else array

    return jax.tree.map(marked, arrays)


def without_gradient(error: str, sources: Any, results: Any) -> Any:
    """The results, which were made of the sources: who differentiates these through them gets a TypeError."""
    return _without_gradient(error, no_forward_mode(error, sources), results)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _without_gradient(error: str, sources: Any, results: Any) -> Any:
    return results


def _without_gradient_forward(error: str, sources: Any, results: Any) -> Any:
    return results, None


def _without_gradient_backward(error: str, saved: None, cotangents: Any) -> Any:
    raise TypeError(error)


_without_gradient.defvjp(_without_gradient_forward, _without_gradient_backward)


def _refuse(*_: Any, message: str) -> Any:
    raise TypeError(message)


def _linear(name: str) -> Primitive:
    """One array to another one of its type. (A parameter `error` would collide with one of checkify's.)"""
    primitive = Primitive(name)
    primitive.def_abstract_eval(lambda array, *, message: array)
    return primitive


# A tangent, unchanged. Reverse mode transposes it away, so who computes, compiles or batches it goes forward.
_tangent = _linear("jax_ep_tangent")
_tangent.def_impl(_refuse)
ad.deflinear2(_tangent, lambda cotangent, tangent, *, message: [cotangent])
batching.primitive_batchers[_tangent] = _refuse
mlir.register_lowering(_tangent, _refuse)

# An array, unchanged, whose tangent is one of these. (A `jax.custom_jvp` would not do: under `jax.grad` of
# `jax.vmap` its rule is batched, and with it the tangent.)
_mark = _linear("jax_ep_reverse_mode")
_mark.def_impl(lambda array, *, message: array)
ad.primitive_jvps[_mark] = lambda primals, tangents, *, message: (
    primals[0],
    _tangent.bind(*tangents, message=message),
)
batching.defvectorized(_mark)
mlir.register_lowering(_mark, lambda context, array, *, message: [array])
