"""Benchmark of a layer, with and without communication beside its products.

The layer is `moe` with `GatedExperts`, in sequence and with `overlap=True`, and its communication alone. The
alternative, with --peers, is what one would write without expert parallelism: all tokens
are gathered on each rank, which takes those of its experts, with the same products, and all sums are added.
FP8 weights come quantized in a forward pass. A training step quantizes them. The communication of FP8 rows
also converts them back.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import jax_ep
from jax_ep.bench import measure, processes
from jax_ep.bench.products import can_be_fp8, pause_s
from jax_ep.bench.shapes import Shape
from jax_ep.bench.timed import normal, on_ranks, with_gradients

FORWARD, BOTH = "forward", "forward + backward"
BFLOAT16, FP8 = "bfloat16", "FP8"
Span = tuple[str, float, float]  # kind of a kernel, begin and end in microseconds


class Case(NamedTuple):
    """The layer of a shape in one dtype and direction."""

    dtype: str  # BFLOAT16 or FP8
    direction: str  # FORWARD or BOTH
    has_shared: bool  # it has a shared expert, as wide as one of the others

    @property
    def op(self) -> str:
        return f"{self.direction}{', shared expert' * self.has_shared}, {self.dtype}"


# Communication is timed without a shared expert, so that case comes first.
CASES = tuple(
    Case(dtype, direction, has_shared)
    for dtype in (BFLOAT16, FP8)
    for direction in (FORWARD, BOTH)
    for has_shared in (False, True)
)


@dataclasses.dataclass(frozen=True)
class Layer:
    """Measurement of a layer. Times are in microseconds, end to end, of the slowest process."""

    name: str
    shape: Shape
    ranks: int
    routing: str
    capacity: int
    dtype: str  # as in its Case, and so the two below
    direction: str
    has_shared: bool
    communication_us: float  # alone
    sequence_us: float
    us: float  # overlapped
    alternative_us: float | None
    sequence_bytes: int  # temporary memory
    bytes: int  # overlapped

    @property
    def op(self) -> str:
        return Case(self.dtype, self.direction, self.has_shared).op

    @property
    def label(self) -> str:
        return f"layer {self.op}, {self.name}"

    @property
    def hidden(self) -> float:
        """The share of the communication that overlapping hides."""
        return (self.sequence_us - self.us) / self.communication_us


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The kernels of one device in a training step of a layer."""

    label: str
    sequence: list[Span]
    overlapped: list[Span]


def all_gathered(
    experts: jax_ep.GatedExperts, capacity: int, x: jax.Array, ids: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns a layer's sums [T, H], and how many rows were dropped, without expert parallelism."""
    x, ids, weights = (jax.lax.all_gather(array, "ep", tiled=True) for array in (x, ids, weights))
    local = experts.num_experts
    ids = ids - jax.lax.axis_index("ep") * local
    ids = jnp.where((ids >= 0) & (ids < local), ids, -1)
    moved = jax_ep.permute(x, ids, num_local_experts=local, capacity=capacity)
    rows = rows_of(experts, moved.x, moved.group_sizes)
    sums = jax_ep.unpermute(rows, moved.row_map, topk_weights=weights)
    return jax.lax.psum_scatter(sums, "ep", tiled=True), moved.num_dropped


def rows_of(experts: jax_ep.GatedExperts, rows: jax.Array, sizes: jax.Array) -> jax.Array:
    """Returns the experts' rows of rows that lie group by group."""
    return jax_ep.gated_mlp(rows, experts.w_up, experts.w_down, sizes, quantize=experts.quantize)


def shared_rows(shared: jax_ep.GatedExperts | None, x: jax.Array) -> jax.Array | float:
    """Returns the rows of a shared expert, in sequence."""
    return 0.0 if shared is None else rows_of(shared, x, jnp.full((1,), x.shape[0], jnp.int32))


def functions(
    group: jax_ep.Group, num_experts: int, capacity: int, quantize: Any, has_shared: bool
) -> dict[str, Callable[..., Any]]:
    """Returns what a rank runs, by its name: functions of x, ids, weights, and the experts' matrices."""
    options: Any = {"group": group, "capacity": capacity}

    def made(matrices: Any, overlap: bool = False) -> tuple[jax_ep.GatedExperts, jax_ep.GatedExperts | None]:
        up, down, shared_up, shared_down = matrices
        experts = jax_ep.GatedExperts(up, down, quantize=quantize, overlap=overlap)
        shared = dataclasses.replace(experts, w_up=shared_up, w_down=shared_down)
        return experts, shared if has_shared else None

    def layer(overlap: bool, x: jax.Array, ids: jax.Array, weights: jax.Array, *matrices: Any) -> jax.Array:
        experts, shared = made(matrices, overlap)
        return jax_ep.moe(x, ids, weights, experts, shared=shared, **options)

    def alternative(x: jax.Array, ids: jax.Array, weights: jax.Array, *matrices: Any) -> jax.Array:
        experts, shared = made(matrices)
        return all_gathered(experts, capacity, x, ids, weights)[0] + shared_rows(shared, x)

    def communication(x: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
        way: Any = None if quantize is None else "fp8_dequantize"
        return jax_ep.moe(
            x, ids, weights, lambda sent: sent.x, num_experts=num_experts, quantize=way, **options
        )

    return {
        "sequence": functools.partial(layer, False),
        "overlapped": functools.partial(layer, True),
        "alternative": alternative,
        "communication": communication,
    }


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled program with its arguments."""

    program: Any
    arguments: tuple[Any, ...]

    def __call__(self) -> Any:
        return self.program(*self.arguments)

    @property
    def temporary_bytes(self) -> int:
        return self.program.memory_analysis().temp_size_in_bytes


def programs(
    group: jax_ep.Group, mesh: Mesh, arguments: tuple[Any, ...], capacity: int, case: Case, peers: bool
) -> dict[str, Compiled]:
    """Returns the programs of a case, compiled."""
    dtype, direction, has_shared = case
    num_experts = jax.tree.leaves(arguments[3])[0].shape[0]
    quantize = "fp8" if dtype == FP8 else None
    if dtype == FP8 and direction == FORWARD:
        quantized = on_ranks(mesh, functools.partial(jax_ep.quantize_weights, gradients=False))
        arguments = *arguments[:3], *map(quantized, arguments[3:])
    made = {}
    for name, function in functions(group, num_experts, capacity, quantize, has_shared).items():
        if (name == "communication" and has_shared) or (name == "alternative" and not peers):
            continue
        run = function if direction == FORWARD else with_gradients(function)
        given = arguments[:3] if name == "communication" else arguments
        made[name] = Compiled(on_ranks(mesh, run).lower(*given).compile(), given)
    return made


def results(
    name: str, shape: Shape, mesh: Mesh, inputs: tuple[Any, ...], capacity: int, options: argparse.Namespace
) -> Iterator[Layer]:
    """Yields the measurements of a shape. `inputs`: x, ids and weights."""
    arguments = *inputs, *matrices_of(shape, mesh)
    dtypes = (BFLOAT16, FP8) if can_be_fp8(shape.hidden, shape.inner) else (BFLOAT16,)
    with jax_ep.Group(mesh, "ep", num_sms=options.num_sms) as group:
        communication_us = 0.0
        for case in CASES:
            if case.dtype not in dtypes:
                continue
            made = programs(group, mesh, arguments, capacity, case, options.peers)
            runs, wait = list(made.values()), jax.block_until_ready
            bursts = measure.bursts_us(runs, wait, options.repeats, pause_s=pause_s())
            us = {key: processes.slowest(t) or t for key, t in zip(made, bursts, strict=True)}
            communication_us = us.get("communication", communication_us)
            yield Layer(
                name=name,
                shape=shape,
                ranks=mesh.size,
                routing=options.routing,
                capacity=capacity,
                **case._asdict(),
                communication_us=communication_us,
                sequence_us=us["sequence"],
                us=us["overlapped"],
                alternative_us=us.get("alternative"),
                sequence_bytes=made["sequence"].temporary_bytes,
                bytes=made["overlapped"].temporary_bytes,
            )
        group.check()


def matrices_of(shape: Shape, mesh: Mesh) -> tuple[jax.Array, ...]:
    """Returns w_up and w_down of the experts, and of a shared one on each rank."""
    experts, width, inner = shape.experts, shape.hidden, shape.inner
    return (
        normal(mesh, 1, (experts, width, 2 * inner)),
        normal(mesh, 2, (experts, inner, width)),
        normal(mesh, 3, (mesh.size, width, 2 * inner)),
        normal(mesh, 4, (mesh.size, inner, width)),
    )


def timelines(
    name: str, shape: Shape, mesh: Mesh, inputs: tuple[Any, ...], capacity: int, options: argparse.Namespace
) -> list[Timeline]:
    """Profiles a training step of the layer, with and without a shared expert."""
    arguments, found = (*inputs, *matrices_of(shape, mesh)), []
    with jax_ep.Group(mesh, "ep", num_sms=options.num_sms) as group:
        for has_shared in (False, True):
            case = Case(BFLOAT16, BOTH, has_shared)
            made = programs(group, mesh, arguments, capacity, case, peers=False)
            spans = [spans_of(made[key]) for key in ("sequence", "overlapped")]
            if not all(spans):
                raise SystemExit("bench: --plot of the part layer needs GPUs, whose profiles have kernels")
            found.append(Timeline(f"{name}, {case.op}", *spans))
    return found


def spans_of(run: Compiled) -> list[Span]:
    """Returns the kernels of a call on the first device, from the first one on."""
    jax.block_until_ready(run())
    devices = measure.kernels(run, ())
    kernels = sorted(devices[0], key=lambda kernel: kernel[1]) if devices else []
    return [
        (measure.kind_of(name), (begin - kernels[0][1]) / 1e3, (end - kernels[0][1]) / 1e3)
        for name, begin, end in kernels
    ]
