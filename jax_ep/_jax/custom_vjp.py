"""Functions with custom gradients, and functions whose gradient is an error."""

import functools
from collections.abc import Callable
from typing import Any, NoReturn, ParamSpec, Protocol, TypeVar, cast

import jax
import jax.numpy as jnp

from jax_ep._jax.sharding import vary_alike

P = ParamSpec("P")
Tree = TypeVar("Tree")
R_co = TypeVar("R_co", covariant=True)


class CustomVjp(Protocol[P, R_co]):
    """The type of a `jax.custom_vjp` function, with the types of the function itself.

    If an operand may pass through to a result, `jax.vmap` needs a rule: see `with_vmap_rule`.
    """

    def __call__(self, *arguments: P.args, **options: P.kwargs) -> R_co: ...

    def defvjp(
        self, fwd: Callable[..., object], bwd: Callable[..., object], symbolic_zeros: bool = False
    ) -> None: ...


def custom_vjp(*static: int) -> Callable[[Callable[P, R_co]], CustomVjp[P, R_co]]:
    """Returns a decorator for functions whose arguments at the positions `static` are not traced."""
    return cast(Any, functools.partial(jax.custom_vjp, nondiff_argnums=static))


def inlined(function: CustomVjp[..., R_co]) -> Callable[..., R_co]:
    """Returns a function that was defined with `symbolic_zeros`, which can be called in eager mode, too.

    JAX does not support it in a `shard_map` that is not compiled. The first argument is static.
    """

    def call(static: object, *arrays: object) -> R_co:
        # A new function: a cached one would keep a group alive, and use it in the place of an equal one.
        compiled: Any = jax.jit(lambda *arrays: function(static, *arrays), inline=True)
        with jax.disable_jit(False):
            return compiled(*arrays)

    return call


def _is_primal(leaf: object) -> bool:
    return isinstance(leaf, jax.custom_derivatives.CustomVJPPrimal)


def _is_zero(leaf: object) -> bool:
    return isinstance(leaf, jax.custom_derivatives.SymbolicZero)


def primal_values(operands: Any) -> Any:
    """Returns the operands of a forward function that was defined with `symbolic_zeros`."""
    return jax.tree.map(lambda leaf: leaf.value if _is_primal(leaf) else leaf, operands, is_leaf=_is_primal)


def is_differentiated(operand: object) -> bool:
    """Returns whether a gradient of such an operand may be needed."""
    return any(_is_primal(leaf) and leaf.perturbed for leaf in jax.tree.leaves(operand, is_leaf=_is_primal))


def nonzero_cotangents(cotangents: Tree) -> Tree | None:
    """Returns the cotangents of such a function as arrays, or None if all are known to be zero."""
    leaves, tree = jax.tree.flatten(cotangents, is_leaf=_is_zero)
    if all(map(_is_zero, leaves)):
        return None
    # Integers have cotangents of dtype float0, which no operation takes.
    reals = {i: leaf for i, leaf in enumerate(leaves) if leaf.dtype != jax.dtypes.float0}
    arrays = [jnp.zeros(leaf.shape, leaf.dtype) if _is_zero(leaf) else leaf for leaf in reals.values()]
    for i, array in zip(reals, vary_alike(arrays), strict=True):
        leaves[i] = array
    return tree.unflatten(leaves)


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


def differentiated_as(
    function: Callable[..., Tree], substitute: Callable[..., Tree], *operands: object
) -> Tree:
    """Returns function(*operands) with the derivatives of substitute(*operands). Both have the same value."""
    return cast(Tree, _differentiated_as((function, substitute), *operands))


@custom_vjp(0)
def _differentiated_as(functions: tuple[Callable[..., object], ...], *operands: object) -> object:
    function, _ = functions
    return function(*operands)


def _differentiated_as_forward(functions: tuple[Callable[..., Any], ...], *operands: Any) -> tuple[Any, Any]:
    _, substitute = functions
    return jax.vjp(substitute, *operands)


def _differentiated_as_backward(functions: object, transpose: Any, cotangent: object) -> Any:
    return transpose(cotangent)


_differentiated_as.defvjp(_differentiated_as_forward, _differentiated_as_backward)


def attached(function: Callable[..., Tree], value: Tree, *operands: object) -> Tree:
    """Returns the value, which is that of function(*operands), with the derivatives of function.

    If no gradient comes, none is computed.
    """
    return cast(Tree, inlined(_attach)(function, value, operands))


@custom_vjp(0)
def _attach(function: Callable[..., object], value: object, operands: tuple[object, ...]) -> object:
    return value


def _attach_forward(function: Callable[..., object], *arguments: Any) -> tuple[object, object]:
    value, operands = primal_values(arguments)
    return attached(function, value, *operands), operands


def _attach_backward(function: Callable[..., Any], operands: Any, cotangents: object) -> Any:
    cotangents = nonzero_cotangents(cotangents)
    return None, None if cotangents is None else jax.vjp(function, *operands)[1](cotangents)


_attach.defvjp(_attach_forward, _attach_backward, symbolic_zeros=True)
