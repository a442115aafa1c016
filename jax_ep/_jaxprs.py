"""Jaxprs, evaluated equation by equation."""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal

Arrays = Sequence[jax.Array]
Values = dict[Any, Any]


class Program(NamedTuple):
    """A jaxpr without its constants. Where they are tracers, what keeps it for longer must not hold them."""

    constvars: Sequence[Any]
    invars: Sequence[Any]
    eqns: Sequence[Any]
    outvars: Sequence[Any]


def without_constants(closed: Any) -> Program:
    jaxpr = getattr(closed, "jaxpr", closed)
    return Program(jaxpr.constvars, jaxpr.invars, jaxpr.eqns, jaxpr.outvars)


def evaluate(
    closed: Any, constants: Arrays, arrays: Arrays, bind: Callable[[Any, Arrays], Arrays] | None = None
) -> list[Any]:
    """The results of a jaxpr or program, with these constants; `bind` in place of `apply`."""
    jaxpr = getattr(closed, "jaxpr", closed)  # of an open one there is nothing around
    values: Values = {}
    values.update(zip(jaxpr.constvars, constants, strict=True))
    values.update(zip(jaxpr.invars, arrays, strict=True))
    run(jaxpr.eqns, values, bind or apply)
    return read(values, jaxpr.outvars)


def constants_of(closed: Any) -> Arrays:
    return getattr(closed, "consts", ())


def run(equations: Iterable[Any], values: Values, bind: Callable[[Any, Arrays], Arrays]) -> None:
    """Adds what the equations make to the values of variables."""
    for equation in equations:
        results = bind(equation, read(values, equation.invars))
        values.update(zip(equation.outvars, results, strict=True))


def read(values: Values, atoms: Iterable[Any]) -> list[Any]:
    return [atom.val if isinstance(atom, Literal) else values[atom] for atom in atoms]


def apply(equation: Any, arrays: Arrays) -> Arrays:
    """The results of an equation, in the scope and the settings that it was traced in."""
    scope = str(equation.source_info.name_stack)
    with equation.ctx.manager, jax.named_scope(scope) if scope else contextlib.nullcontext():
        results = equation.primitive.bind(*arrays, **equation.primitive.get_bind_params(equation.params))
    return results if equation.primitive.multiple_results else [results]


def variables(atoms: Iterable[Any]) -> list[Any]:
    """Without literals."""
    return [atom for atom in atoms if not isinstance(atom, Literal)]
