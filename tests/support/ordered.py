"""Communication of a program that nothing puts in order.

Ops that are apart run on XLA's stream for communication, the others on the main one, so two of different
streams may be in flight at once unless one depends on the other: through data, or through a barrier of whose
results something is used.
"""

import itertools
from typing import Any

import jax

# Where the program of a call-like equation is.
_INNER = ("jaxpr", "call_jaxpr", "call", "fun_jaxpr")


def unordered(function: Any, *arguments: Any) -> list[tuple[str, str]]:
    """Pairs of ops on different streams, neither of which depends on the other. Not of those in loops."""
    program = jax.make_jaxpr(function)(*arguments).jaxpr
    numbers = itertools.count()
    nodes: list[tuple[str, list[Any], list[int]]] = []
    values = _flatten(program, [next(numbers) for _ in program.invars], nodes, numbers)
    made: dict[int, int] = {}
    before: list[int] = []  # of each node, as bits
    ops = []
    for kind, operands, results in _used(nodes, {value for value in values if value is not None}):
        sources = {made[value] for value in operands if value in made}
        before.append(0)
        for source in sources:
            before[-1] |= before[source] | 1 << source
        made.update(dict.fromkeys(results, len(before) - 1))
        if kind.startswith(("main", "apart")):
            ops.append((kind, len(before) - 1))
    return [
        (one, other)
        for (one, i), (other, j) in itertools.combinations(ops, 2)
        if one.split()[0] != other.split()[0] and not before[j] >> i & 1
    ]


def _flatten(jaxpr: Any, arguments: list[Any], nodes: list[Any], numbers: Any) -> list[Any]:
    """Adds (kind, operands, results) of each equation; what numbers the results have."""
    values = dict(zip(jaxpr.invars, arguments, strict=True))
    number_of = lambda atom: None if hasattr(atom, "val") else values.get(atom)
    for equation in jaxpr.eqns:
        operands, name = [number_of(atom) for atom in equation.invars], equation.primitive.name
        inner = next((equation.params[key] for key in _INNER if key in equation.params), None)
        if inner is None or name in ("compute_on", "scan"):
            results = [next(numbers) for _ in equation.outvars]
            nodes.append((_kind(equation), operands, results))
        else:
            if equation.params.get("prevent_cse") and equation.params.get("differentiated"):
                fresh = [next(numbers) for _ in operands]
                nodes.append(("barrier", operands, fresh))
                operands = fresh
            inner = getattr(inner, "jaxpr", inner)
            results = _flatten(inner, operands, nodes, numbers)
        values.update(zip(equation.outvars, results, strict=True))
    return [number_of(atom) for atom in jaxpr.outvars]


def _kind(equation: Any) -> str:
    name = equation.primitive.name
    if name == "compute_on":
        return f"apart {[one.primitive.name for one in equation.params['jaxpr'].eqns][-1]}"
    if "group" in dict(equation.params.get("attributes", ())):
        return f"main {name}"
    return "barrier" if "barrier" in name else "other"


def _used(nodes: list[Any], needed: set[int]) -> list[Any]:
    """What XLA keeps: barriers without the operands whose results nobody uses."""
    kept = []
    for kind, operands, results in reversed(nodes):
        if kind == "barrier":
            pairs = [pair for pair in zip(operands, results, strict=True) if pair[1] in needed]
            operands, results = [one for one, _ in pairs], [other for _, other in pairs]
        if needed.intersection(results):
            needed.update(value for value in operands if value is not None)
            kept.append((kind, operands, results))
    return kept[::-1]
