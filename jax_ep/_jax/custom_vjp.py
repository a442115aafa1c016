"""Functions with custom gradients, and functions whose gradient is an error."""

import functools
from collections.abc import Callable
from typing import Any

import jax


def custom_vjp(*static: int) -> Callable[[Callable[..., Any]], Any]:
    """Returns `jax.custom_vjp` for functions whose arguments at the positions `static` are not traced.

    pyright cannot infer the results of `functools.partial(jax.custom_vjp, ...)`.
    """
    return functools.partial(jax.custom_vjp, nondiff_argnums=static)


@custom_vjp(0)
def without_gradient(error: str, sources: Any, results: Any) -> Any:
    """Returns the results. Their gradient with respect to the sources raises TypeError."""
    return results


def _without_gradient_forward(error: str, sources: Any, results: Any) -> Any:
    return results, None


def _without_gradient_backward(error: str, saved: None, cotangents: Any) -> Any:
    raise TypeError(error)


without_gradient.defvjp(_without_gradient_forward, _without_gradient_backward)
