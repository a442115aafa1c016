"""Benchmarks of a layer's expert products and of the whole layer.

Each product is compared with a dense product of equal work, and the layer with its parts. The experts are
those of most models: `w_down(silu(gate) * up)`, where one product computes both gate and up. They are
composed of JAX's ops and `grouped_dot`, or one `gated_mlp`, also in FP8.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep.bench import measure, processes
from jax_ep.bench.shapes import Shape

CALLS = 8


@dataclasses.dataclass(frozen=True)
class Work:
    """Measurement of a product or a layer. Times are in microseconds per call, on the slowest rank."""

    name: str
    shape: Shape
    ranks: int
    op: str
    by: str
    routing: str
    capacity: int | None  # None: the worst case
    device_us: float | None
    end_to_end_us: float
    flop: float  # of one rank, if all ranks receive the same number of rows
    # Of the dense product's or the composed experts' rate; for a layer, its slower part's share of the time.
    share: float | None

    @property
    def us(self) -> float:
        return self.device_us or self.end_to_end_us

    @property
    def label(self) -> str:
        return f"{self.op}, {self.by}, {self.name}"


@dataclasses.dataclass(frozen=True)
class Program:
    """A program to time."""

    op: str
    by: str
    flop: float
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    compared_with: tuple[tuple[str, str], ...] = ()  # (op, by) of the programs that set the reference time


def swiglu(up: jax.Array, down: jax.Array, rows: jax.Array, sizes: jax.Array) -> jax.Array:
    gate, value = jnp.split(jax_ep.grouped_dot(rows, up, sizes), 2, axis=1)
    return jax_ep.grouped_dot(jax.nn.silu(gate) * value, down, sizes)


def normal(mesh: jax.sharding.Mesh, seed: int, shape: tuple[int, ...]) -> jax.Array:
    """Returns random bfloat16 values, sharded along the first dimension."""

    def make(key: jax.Array) -> jax.Array:
        return jax.random.normal(key, shape, jnp.bfloat16) * jnp.bfloat16(0.02)

    return jax.jit(make, out_shardings=NamedSharding(mesh, P("ep")))(jax.random.key(seed))


def on_ranks(mesh: jax.sharding.Mesh, function: Any) -> Any:
    """Returns a program that runs a function on every rank. All arrays are sharded along their first axis."""
    spec = P(*mesh.axis_names)
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))


def _fits_fp8(weights: jax.Array) -> bool:
    """Returns whether FP8, with its scales of 128 x 128 elements, divides the matrices."""
    return weights.shape[1] % 128 == 0 and weights.shape[2] % 128 == 0


def _transposed(array: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.swapaxes(1, 2), array)


def _gradient(function: Callable[..., jax.Array], *arguments: jax.Array) -> Callable[[jax.Array], Any]:
    return jax.vjp(function, *arguments)[1]


def with_gradients(function: Any) -> Any:
    """Returns a function that computes the value and its gradients, except for the second argument."""

    # The second argument holds integers, which have no gradient.
    def run(first: jax.Array, integers: jax.Array, *rest: jax.Array) -> Any:
        def call(first: jax.Array, *rest: jax.Array) -> Any:
            return function(first, integers, *rest)

        value, transposed = jax.vjp(call, first, *rest)
        return value, transposed(value)

    return run


def product_programs(
    local: Any,
    name: str,
    rows: jax.Array,
    weights: jax.Array,
    cotangent: jax.Array,
    sizes: jax.Array,
    count: int,
) -> Iterator[Program]:
    """Yields the products of rows [C, M] and matrices [L, M, N] on each rank, forward and backward.

    The dense products use the first `count` rows and the first matrix.
    """
    flop = 2.0 * count * weights.shape[1] * weights.shape[2]
    dot = jax_ep.grouped_dot
    grouped = {
        "forward": lambda r, w, d, s: dot(r, w, s),
        "dgrad": lambda r, w, d, s: _gradient(lambda r: dot(r, w, s), r)(d),
        "wgrad": lambda r, w, d, s: _gradient(lambda w: dot(r, w, s), w)(d),
    }
    dense = {
        "forward": lambda r, w, d, s: r[:count] @ w[0],
        "dgrad": lambda r, w, d, s: d[:count] @ w[0].T,
        "wgrad": lambda r, w, d, s: r[:count].T @ d[:count],
    }
    arguments = rows, weights, cotangent, sizes
    for direction, function in dense.items():
        yield Program(f"{name} {direction}", "dense", flop, local(function), arguments)
    for direction, function in grouped.items():
        op = f"{name} {direction}"
        yield Program(op, "grouped_dot", flop, local(function), arguments, ((op, "dense"),))
    if not _fits_fp8(weights):
        return
    fp8_rows = local(jax_ep.quantize_fp8)(rows)
    # Tensor cores read FP8 matrices transposed, so the weights are stored that way.
    fp8_weights = local(lambda w: _transposed(jax_ep.quantize_fp8(w, block=(128, 128))))(weights)
    fp8 = local(lambda r, w, s: dot(r, _transposed(w), s))
    op = f"{name} forward"
    yield Program(op, "grouped_dot, FP8", flop, fp8, (fp8_rows, fp8_weights, sizes), ((op, "dense"),))


def layer_programs(local: Any, moe: Any, arrays: dict[str, Any], flop: float) -> Iterator[Program]:
    """Yields the layer, its communication alone and its experts alone, composed and as one op.

    Each comes twice: the forward pass, and both passes. In FP8 the weights come quantized.
    """

    def communication(x: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
        return moe(x, ids, weights, lambda sent: sent.x)

    def layer(x: jax.Array, ids: jax.Array, weights: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return moe(x, ids, weights, lambda sent: swiglu(up, down, sent.x, sent.group_sizes))

    def layer_in_fp8(x: jax.Array, fixed: Any, weights: jax.Array, *matrices: Any) -> jax.Array:
        ids, quantized = fixed
        up, down = _with_weights(quantized, matrices)

        def experts(sent: Any) -> jax.Array:
            return jax_ep.gated_mlp(sent.x, up, down, sent.group_sizes, quantize="fp8")

        return moe(x, ids, weights, experts, quantize="fp8")

    def composed(rows: jax.Array, sizes: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return swiglu(up, down, rows, sizes)

    def gated(rows: jax.Array, sizes: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return jax_ep.gated_mlp(rows, up, down, sizes)

    def gated_in_fp8(rows: jax.Array, fixed: Any, *matrices: jax.Array) -> jax.Array:
        sizes, quantized = fixed
        up, down = _with_weights(quantized, matrices)
        return jax_ep.gated_mlp(rows, up, down, sizes, quantize="fp8")

    rows, x, matrices = arrays["rows"], (arrays["x"], arrays["ids"], arrays["weights"]), arrays["matrices"]
    sizes = arrays["sizes"]
    for direction, factor in (("forward", 1), ("forward + backward", 3)):
        experts, work = f"experts {direction}", factor * flop

        def timed(function: Any, factor: int = factor) -> Any:
            return local(function if factor == 1 else with_gradients(function))

        yield Program(f"communication {direction}", "ffi", 0.0, timed(communication), x)
        yield Program(experts, "composed", work, timed(composed), (rows, sizes, *matrices))
        of_composed = ((experts, "composed"),)
        yield Program(experts, "gated_mlp", work, timed(gated), (rows, sizes, *matrices), of_composed)
        parts = (f"communication {direction}", "ffi"), (experts, "composed")
        yield Program(f"layer {direction}", "composed", work, timed(layer), (*x, *matrices), parts)
        if "quantized" not in arrays:
            continue
        by, quantized = "gated_mlp, FP8", arrays["quantized"]
        fixed = sizes, quantized
        yield Program(experts, by, work, timed(gated_in_fp8), (rows, fixed, *matrices), of_composed)
        operands = x[0], (x[1], quantized), x[2], *matrices
        parts = (f"communication {direction}", "ffi"), (experts, by)
        yield Program(f"layer {direction}", by, work, timed(layer_in_fp8), operands, parts)


def _with_weights(quantized: Any, matrices: tuple[jax.Array, ...]) -> list[Any]:
    """Returns quantized weights whose gradient goes to the matrices."""
    return [dataclasses.replace(q, w=w) for q, w in zip(quantized, matrices, strict=True)]


def programs(
    group: jax_ep.Group,
    mesh: jax.sharding.Mesh,
    shape: Shape,
    arguments: tuple[jax.Array, jax.Array, jax.Array],
    capacity: int | None,
) -> Iterator[Program]:
    """Yields all programs for a shape: the products of both matrices, and the layer with its parts."""
    shared: dict[str, Any] = {"group": group, "num_experts": shape.experts, "implementation": "ffi"}
    local = functools.partial(on_ranks, mesh)

    def moe(*arguments: Any, **options: Any) -> jax.Array:
        return jax_ep.moe(*arguments, capacity=capacity, **shared, **options)

    def route(*arguments: jax.Array) -> tuple[jax.Array, jax.Array]:
        sent: Any = jax_ep.dispatch(*arguments, capacity=capacity, **shared)
        return sent.x, sent.group_sizes

    rows, sizes = local(route)(*arguments)
    experts, width, inner = shape.experts, shape.hidden, shape.inner
    up = normal(mesh, 1, (experts, width, 2 * inner))
    down = normal(mesh, 2, (experts, inner, width))
    count = min(shape.tokens * shape.top_k, rows.shape[0] // mesh.size)
    wide, narrow = (normal(mesh, seed, (rows.shape[0], n)) for seed, n in ((3, 2 * inner), (4, inner)))
    yield from product_programs(local, "up", rows, up, wide, sizes, count)
    yield from product_programs(local, "down", narrow, down, rows, sizes, count)
    x, ids, weights = arguments
    arrays: dict[str, Any] = {"x": x, "ids": ids, "weights": weights, "rows": rows, "sizes": sizes}
    arrays["matrices"] = up, down
    if _fits_fp8(up) and _fits_fp8(down):
        # Without the weights themselves, of which a program would return a copy.
        quantize = local(lambda w: dataclasses.replace(jax_ep.quantize_weights(w), w=None))
        arrays["quantized"] = quantize(up), quantize(down)
    yield from layer_programs(local, moe, arrays, 2.0 * count * 3 * width * inner)


def time_programs(
    untimed: Iterator[Program], options: argparse.Namespace, on_gpu: bool
) -> Iterator[tuple[Program, float | None, float]]:
    """Yields each program with its time on the devices, if available, and its end-to-end time."""
    for program in untimed:

        def run(*arguments: Any, program: Program = program) -> Any:
            for _ in range(CALLS - 1):
                program.function(*arguments)
            return program.function(*arguments)

        end_to_end = measure.end_to_end_us(run, program.arguments, CALLS, options.repeats)
        device = measure.kernels_us(run, program.arguments, CALLS, ()) if on_gpu else None
        yield program, processes.slowest(device), processes.slowest(end_to_end) or end_to_end


def results(
    name: str,
    shape: Shape,
    mesh: jax.sharding.Mesh,
    arguments: Any,
    capacity: int | None,
    options: argparse.Namespace,
) -> Iterator[Work]:
    """Yields the measurements of all programs for a shape."""
    on_gpu = mesh.devices.flat[0].platform == "gpu"
    times: dict[tuple[str, str], float] = {}
    with jax_ep.Group(mesh, "ep", num_sms=options.num_sms) as group:
        untimed = programs(group, mesh, shape, arguments, capacity)
        for program, device, end_to_end in time_programs(untimed, options, on_gpu):
            us = times[program.op, program.by] = device or end_to_end
            yield Work(
                name=name,
                shape=shape,
                ranks=mesh.size,
                op=program.op,
                by=program.by,
                routing=options.routing,
                capacity=capacity,
                device_us=device,
                end_to_end_us=end_to_end,
                flop=program.flop,
                share=max(times[key] for key in program.compared_with) / us
                if program.compared_with
                else None,
            )
        group.check()
