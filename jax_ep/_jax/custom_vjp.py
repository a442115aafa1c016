"""Functions with custom gradients, and functions whose gradient is an error."""

import functools
from collections.abc import Callable
from typing import Any, NoReturn, ParamSpec, Protocol, TypeVar, cast

import jax

P = ParamSpec("P")
Tree = TypeVar("Tree")
R_co = TypeVar("R_co", covariant=True)


class CustomVjp(Protocol[P, R_co]):
    """The type of a `jax.custom_vjp` function, with the types of the function itself.

    If an operand may pass through to a result, `jax.vmap` needs a rule: see `with_vmap_rule`.
    """

    def __call__(self, *arguments: P.args, **options: P.kwargs) -> R_co: ...

    def defvjp(self, fwd: Callable[..., object], bwd: Callable[..., object]) -> None: ...


def custom_vjp(*static: int) -> Callable[[Callable[P, R_co]], CustomVjp[P, R_co]]:
    """Returns a decorator for functions whose arguments at the positions `static` are not traced."""
    return cast(Any, functools.partial(jax.custom_vjp, nondiff_argnums=static))


def without_gradient(error: str, sources: object, results: Tree) -> Tree:
    """Returns the results. Their gradient with respect to the sources raises TypeError."""
    return cast(Tree, _without_gradient(error, sources, results))


@custom_vjp(0)
def _without_gradient(error: str, sources: object, results: object) -> object:
    return results


def _without_gradient_forward(error: str, sources: object, results: object) -> tuple[object, None]:
    return results, None


def _without_gradient_backward(error: str, saved: None, cotangents: object) -> NoReturn:
    raise TypeError(error)


_without_gradient.defvjp(_without_gradient_forward, _without_gradient_backward)
