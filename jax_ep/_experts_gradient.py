"""The gradient of an expert function that is called for one chunk of the tokens after another.

Gradients of weights are as large as the weights, and their sum over chunks could cost more than chunks gain.
So the products that make them are told apart from the rest, and taken once, of the rows of all chunks.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params

from jax_ep._grouped_dot import is_weight_product, weight_product, weight_product_sms
from jax_ep._jaxprs import Arrays, Values, apply, constants_of, evaluate, read, run, variables
from jax_ep._joint_rows import joint_index, joint_rows
from jax_ep._order import barrier

Function = Callable[[Arrays, Arrays], Arrays]

# What a variable depends on. Of a weight product, and of what is made of one, nothing else is said.
_WEIGHTS, _CHUNK, _COTANGENT, _PRODUCT = 1, 2, 4, 8


def differentiable(arrays: Arrays) -> list[int]:
    """Which of the arrays have gradients."""
    return [i for i, array in enumerate(arrays) if jnp.issubdtype(array.dtype, jnp.inexact)]


class ExpertsGradient:
    """`function(chunk, weights)` from arrays to arrays, and its gradient, as one jaxpr in four parts.

    `shared` is for all chunks, `forward` and `backward` are for one each, and `finish` is for all again.
    """

    def __init__(self, function: Function, chunk: Arrays, weights: Arrays, wanted: Sequence[int]) -> None:
        """`chunk` and `weights` may be types of arrays; `wanted` are the weights that get gradients."""
        chunk, weights = list(chunk), list(weights)
        self._wanted = list(wanted)
        cotangents = jax.make_jaxpr(function)(chunk, weights).out_avals
        both = jax.make_jaxpr(_with_gradients(function, self._wanted))(chunk, weights, cotangents)
        flat = jax.make_jaxpr(lambda *arrays: evaluate(both, constants_of(both), arrays, _inline))
        traced = flat(*both.in_avals)
        self._equations = traced.jaxpr.eqns
        self._constants = dict(zip(traced.jaxpr.constvars, traced.consts, strict=True))
        sizes = len(chunk), len(weights), len(cotangents)
        self._chunk, self._weights, self._cotangents = _cut(traced.jaxpr.invars, sizes)
        sizes = len(cotangents), len(differentiable(chunk)), len(self._wanted)
        self._results, self._d_chunk, self._d_weights = _cut(traced.jaxpr.outvars, sizes)
        if not self._divide(apart=True):
            self._divide(apart=False)
        self._cut_up()

    def shared(self, weights: Arrays) -> Arrays:
        """What all chunks have in common: weights, and what is made of them alone."""
        return self._run(self._of_weights, self._shared, (self._weights, weights))

    def forward(self, chunk: Arrays, shared: Arrays) -> tuple[Arrays, Arrays]:
        """The function's results, and what the other parts need of the chunk."""
        given = (self._chunk, chunk), (self._shared, shared)
        found = self._run(self._forward, [*self._results, *self._saved], *given)
        return _cut(found, (len(self._results), len(self._saved)))

    def prepare(self, saved: Sequence[Arrays], shared: Arrays) -> Arrays:
        """What `finish` needs of all chunks, as far as it depends on no cotangent."""
        values = [
            {**dict(zip(self._saved, one, strict=True)), **dict(zip(self._shared, shared, strict=True))}
            for one in saved
        ]
        return _joint(self._early, values)

    def backward(self, saved: Arrays, shared: Arrays, cotangents: Arrays) -> tuple[Arrays, Arrays, Arrays]:
        """Gradients of what is differentiable of the chunk; operands of weight products; terms to add."""
        given = (self._saved, saved), (self._shared, shared), (self._cotangents, cotangents)
        found = self._run(self._backward, [*self._d_chunk, *self._operands, *self._added], *given)
        return _cut(found, (len(self._d_chunk), len(self._operands), len(self._added)))

    def finish(
        self, prepared: Arrays, late: Sequence[Arrays], terms: Sequence[Arrays], shared: Arrays
    ) -> list[jax.Array | None]:
        """Gradients of the weights, of each chunk's operands and terms; None of those not wanted."""
        chunks = [dict(zip(self._operands, one, strict=True)) for one in late]
        joint = dict(zip(self._early, prepared, strict=True))
        joint.update(zip(self._late, _joint(self._late, chunks), strict=True))
        products = {}
        for product in self._products:
            rows, others, sizes = product.invars
            total = functools.reduce(jnp.add, [chunk[sizes] for chunk in chunks])
            operands = joint[rows, sizes], joint[others, sizes], total
            products[product.outvars[0]] = weight_product(weight_product_sms(product), *operands)
        added = (self._added, [functools.reduce(jnp.add, one) for one in zip(*terms, strict=True)])
        given = (products, list(products.values())), added, (self._shared, shared)
        found = iter(self._run(self._finish, self._d_weights, *given))
        return [next(found) if i in self._wanted else None for i in range(len(self._weights))]

    def _divide(self, apart: bool) -> bool:
        """Finds out what depends on what. Says whether weight products can be kept apart, if they are to be.

        They can if after them nothing of a single chunk is needed, but for terms to be added.
        """
        self._depends: dict[Any, int] = {
            **dict.fromkeys(self._chunk, _CHUNK),
            **dict.fromkeys(self._weights, _WEIGHTS),
            **dict.fromkeys(self._cotangents, _CHUNK | _COTANGENT),
        }
        self._products: list[Any] = []
        added = []
        for equation in self._equations:
            inputs = variables(equation.invars)
            result = 0
            for var in inputs:
                result |= self._depends_on(var)
            if apart and result & _COTANGENT and is_weight_product(equation):
                if result & _PRODUCT:
                    return False
                self._products.append(equation)
                result = _PRODUCT
            elif result & _PRODUCT:
                own = [var for var in inputs if self._depends_on(var) & _CHUNK]
                if own and equation.primitive.name != "add_any":
                    return False
                added += own
                result = _PRODUCT
            self._depends.update(dict.fromkeys(equation.outvars, result))
        added += [var for var in variables(self._d_weights) if self._depends_on(var) & _CHUNK]
        self._added = list(dict.fromkeys(added))
        return not any(self._depends_on(var) & _PRODUCT for var in variables(self._d_chunk))

    def _depends_on(self, var: Any) -> int:
        return self._depends.get(var, 0)  # constants depend on nothing

    def _cut_up(self) -> None:
        """Finds the equations of each part, and what one part needs of another."""
        pairs = [(var, one.invars[2]) for one in self._products for var in one.invars[:2]]
        early = lambda var: 0 < self._depends_on(var) < _COTANGENT
        is_early = lambda pair: all(map(early, pair))
        self._early = list(dict.fromkeys(filter(is_early, pairs)))
        self._late = [pair for pair in dict.fromkeys(pairs) if pair not in self._early]
        late = [var for pair in self._late for var in pair]
        self._operands = list(dict.fromkeys([*late, *(one.invars[2] for one in self._products)]))
        made = {*self._added, *(var for one in self._products for var in one.outvars)}
        wanted = [
            *self._d_chunk,
            *self._operands,
            *self._added,
            *(var for pair in self._early for var in pair),
        ]
        self._backward, some = self._section(wanted, early)
        self._finish, more = self._section(self._d_weights, lambda var: var in made or early(var))
        needed = dict.fromkeys(var for var in (*some, *more) if var not in made)
        self._saved = [var for var in needed if self._depends_on(var) & _CHUNK]
        common = lambda var: self._depends_on(var) == _WEIGHTS
        self._forward, used = self._section([*self._results, *self._saved], common, effects=True)
        self._shared = list(dict.fromkeys((*used, *filter(common, needed))))
        self._of_weights, _ = self._section(self._shared, lambda var: False)

    def _section(
        self, wanted: Iterable[Any], given: Callable[[Any], bool], effects: bool = False
    ) -> tuple[list[Any], list[Any]]:
        """The equations that make the wanted variables, and the given ones that they begin with.

        With `effects` also what is called for its effects, if it depends on no cotangent.
        """
        needed = dict.fromkeys(variables(wanted))
        equations = []
        for equation in reversed(self._equations):
            inputs = variables(equation.invars)
            makes = any(var in needed and not given(var) for var in equation.outvars)
            early = all(self._depends_on(var) < _COTANGENT for var in inputs)
            if makes or (effects and equation.effects and early):
                equations.append(equation)
                needed.update(dict.fromkeys(inputs))
        return equations[::-1], [var for var in needed if given(var)]

    def _run(self, equations: Any, wanted: Any, *given: tuple[Iterable[Any], Arrays]) -> list[Any]:
        values = dict(self._constants)
        for names, arrays in given:
            values.update(zip(names, arrays, strict=True))
        run(equations, values, apply)
        return read(values, wanted)


def _joint(pairs: Iterable[tuple[Any, Any]], chunks: Sequence[Values]) -> Arrays:
    """The rows of all chunks together, of each variable of rows that is paired with one of group sizes."""
    indices: Values = {}
    found = []
    for var, sizes in pairs:
        rows = [chunk[var] for chunk in chunks]
        if sizes not in indices:
            indices[sizes] = joint_index([chunk[sizes] for chunk in chunks], sum(map(len, rows)))
        found.append(joint_rows(rows, indices[sizes]))
    return found


def _with_gradients(function: Function, wanted: Sequence[int]) -> Callable[..., Any]:
    """Results, and gradients of what has them, of a chunk, weights and cotangents of the results."""

    def both(chunk: Arrays, weights: Arrays, cotangents: Arrays) -> Any:
        rows = differentiable(chunk)
        of_some = lambda *some: function(_put(chunk, rows, some[0]), _put(weights, wanted, some[1]))
        operands = [chunk[i] for i in rows], [weights[i] for i in wanted]
        results, transposed = jax.vjp(of_some, *operands)
        return results, *transposed(list(cotangents))

    return both


def _put(arrays: Arrays, places: Sequence[int], some: Arrays) -> Arrays:
    """The arrays, with those at some places replaced."""
    found = dict(zip(places, some, strict=True))
    return [found.get(i, array) for i, array in enumerate(arrays)]


def _cut(items: Iterable[Any], sizes: Iterable[int]) -> Any:
    items = iter(items)
    return tuple([next(items) for _ in range(size)] for size in sizes)


# Calls that do nothing but call.
_CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", "checkpoint", "remat2")


def _inline(equation: Any, arrays: Arrays) -> Arrays:
    """The results of an equation, without the calls in which weight products lie."""
    if equation.primitive.name not in _CALLS or not _holds_product(equation):
        return apply(equation, arrays)
    again = equation.params.get("prevent_cse", False)
    if again if isinstance(again, bool) else any(again):
        arrays = barrier(list(arrays))  # or what is computed again would be merged with what was before
    inner = equation.params.get("jaxpr") or equation.params["call_jaxpr"]
    return evaluate(inner, constants_of(inner), arrays, _inline)


def _holds_product(equation: Any) -> bool:
    """Whether a weight product lies in an equation, at any depth, but is not the equation."""
    if is_weight_product(equation):
        return False
    inner = [one for jaxpr in jaxprs_in_params(equation.params) for one in jaxpr.eqns]
    return any(is_weight_product(one) or _holds_product(one) for one in inner)
