"""Benchmark of skewed routings: what redundant experts cost, and what they save.

Each routing goes through the same layer several times. Without redundant experts, its buffers either hold the
worst case or drop rows. With them, every rank gets about T * K rows. The ops:

- plan: `balance` alone. replicate: `replicate` of both matrices of the experts alone.
- round trip: dispatch by expert of the planned ids, and the weighted combine. The experts do nothing.
- layer: all of it, with SwiGLU experts. On CPUs only if they are small.

On one rank no row can move. There a layer has an eighth of the experts, as on one of eight ranks, and its
times include what the plan and the copies of the weights cost without links. `local_results` adds what one
device can measure: plans of many ranks, and the rate of `replicate` next to that of a copy.
"""

import argparse
import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_ep
from jax_ep._extension import Implementation
from jax_ep._transport.routing import worst_case_capacity
from jax_ep.bench.routings import capacity_of, route
from jax_ep.bench.shapes import Shape
from jax_ep.bench.timed import Program, normal, on_ranks, time_programs, with_gradients

DROPPING_CAPACITY = 1.25
BALANCED_CAPACITY = 1.05
PLANNED_RANKS, PLANNED_EXPERTS, PLANNED_PLACES = (8, 64), 256, 2
PLANNED_TOKENS = 32768  # of all ranks
COPIED_EXPERTS = 2
MOST_CPU_FLOP = 1e9  # of a layer's products on a rank


@dataclasses.dataclass(frozen=True)
class Time:
    """Microseconds per call, on the slowest rank."""

    device_us: float | None
    end_to_end_us: float

    @property
    def us(self) -> float:
        return self.device_us or self.end_to_end_us


@dataclasses.dataclass(frozen=True)
class SkewedLayer:
    """Measurement of a layer under one routing."""

    name: str
    shape: Shape
    ranks: int
    by: str
    routing: str
    num_redundant_experts: int
    capacity: int  # rows of a receive buffer
    capacity_ratio: float  # memory of the receive buffers, relative to the T * K rows of a balanced routing
    rows_before: list[int]  # of each rank, if all rows were computed at home
    rows_after: list[int]  # of each rank, before drops
    replicas: int  # of all ranks, as are the next two
    moved_rows: int
    dropped_rows: int
    temp_bytes: int | None  # of a rank in the last op of `times`, as XLA reports them
    times: dict[str, Time]  # by op; the last one is the layer's forward and backward pass, if it was timed

    @property
    def us(self) -> float:
        """Time of the last op."""
        return list(self.times.values())[-1].us

    @property
    def label(self) -> str:
        buffers = f"S = {self.num_redundant_experts}, buffers {self.capacity_ratio:.2f} x"
        return f"{list(self.times)[-1]}, {self.name}, {self.routing}, {buffers}"

    @property
    def before(self) -> float:
        """Rows of the fullest rank, relative to the mean."""
        return max(self.rows_before) / (sum(self.rows_before) / self.ranks)

    @property
    def after(self) -> float:
        return max(self.rows_after) / (sum(self.rows_after) / self.ranks)


@dataclasses.dataclass(frozen=True)
class LocalOp:
    """Measurement of an op on one device."""

    op: str
    by: str
    bytes: int  # that it reads and writes, 0 if they do not matter
    time: Time
    share: float | None  # of the rate of the copy

    @property
    def us(self) -> float:
        return self.time.us

    @property
    def label(self) -> str:
        return f"{self.op}, {self.by}"


def swiglu(up: jax.Array, down: jax.Array, rows: jax.Array, sizes: jax.Array) -> jax.Array:
    gate, value = jnp.split(jax_ep.grouped_dot(rows, up, sizes), 2, axis=1)
    return jax_ep.grouped_dot(jax.nn.silu(gate) * value, down, sizes)


def shape_on(ranks: int, shape: Shape) -> Shape:
    """Returns the shape of the layers. On one rank it has the experts of one of eight ranks."""
    return shape if ranks > 1 else dataclasses.replace(shape, experts=max(shape.top_k, shape.experts // 8))


def can_time_layers(shape: Shape) -> bool:
    """Returns False for products that take minutes."""
    flop = 6.0 * shape.tokens * shape.top_k * shape.hidden * shape.inner * shape.experts
    return flop <= MOST_CPU_FLOP or jax.devices()[0].platform == "gpu"


def variants(shape: Shape, ranks: int, options: argparse.Namespace) -> Iterator[tuple[int, int]]:
    """Yields the layers to compare: redundant experts of a rank, and capacity."""
    local, choices = shape.experts // ranks, shape.tokens * shape.top_k
    worst = worst_case_capacity("expert", ranks * shape.tokens, shape.top_k, local, 1)
    yield 0, worst
    dropping = capacity_of(options.capacity or DROPPING_CAPACITY, shape, ranks, "expert")
    if dropping is not None and dropping < worst:
        yield 0, dropping
    for places in options.redundant_experts:
        if 0 < places <= local:
            yield places, math.ceil(BALANCED_CAPACITY * choices)


@dataclasses.dataclass(frozen=True)
class Ops:
    """The functions to time, for one variant. Each runs on one rank."""

    shape: Shape
    num_places: int
    capacity: int
    shared: dict[str, Any]  # arguments of all ops: group and implementation

    def plan(self, ids: jax.Array) -> jax_ep.Placement:
        numbers = {"num_experts": self.shape.experts, "num_redundant_experts": self.num_places}
        return jax_ep.balance(ids, **numbers, **self.shared)

    def replicate(self, up: jax.Array, down: jax.Array, placement: jax_ep.Placement) -> Any:
        weights = jax_ep.replicate((up, down), placement, **self.shared)
        return [w.redundant for w in weights]  # a program that returned the others would copy them

    def round_trip(self, x: jax.Array, placement: jax_ep.Placement, weights: jax.Array) -> jax.Array:
        numbers = {"num_experts": placement.num_experts, "capacity": self.capacity}
        return jax_ep.moe(x, placement.topk_idx, weights, lambda sent: sent.x, **numbers, **self.shared)

    def layer(
        self, x: jax.Array, ids: jax.Array, weights: jax.Array, up: jax.Array, down: jax.Array
    ) -> jax.Array:
        return jax_ep.moe(
            x,
            ids,
            weights,
            lambda sent, params: swiglu(params[0], params[1], sent.x, sent.group_sizes),
            num_experts=self.shape.experts,
            capacity=self.capacity,
            num_redundant_experts=self.num_places,
            expert_params=(up, down),
            **self.shared,
        )

    def count(self, x: jax.Array, placement: jax_ep.Placement) -> dict[str, jax.Array]:
        """Returns the numbers of rows and replicas, the same on every rank."""
        numbers = {"num_experts": placement.num_experts, "capacity": self.capacity}
        sent = jax_ep.dispatch(x, placement.topk_idx, **numbers, **self.shared)
        return {
            "rows_before": placement.loads_before,
            "rows_after": placement.loads_after,
            "replicas": placement.num_replicas,
            "moved_rows": placement.num_moved,
            "dropped_rows": jax.lax.psum(sent.num_dropped, "ep"),
        }


def results(
    name: str,
    shape: Shape,
    mesh: jax.sharding.Mesh,
    x: jax.Array,
    weights: jax.Array,
    ids_of: dict[str, jax.Array],
    options: argparse.Namespace,
    implementation: Implementation = "ffi",
) -> Iterator[SkewedLayer]:
    """Yields the measurements of a shape. `ids_of` holds the choices of each routing."""
    experts, width, inner = shape.experts, shape.hidden, shape.inner
    arrays: dict[str, Any] = {
        "x": x,
        "weights": weights,
        "up": normal(mesh, 1, (experts, width, 2 * inner)),
        "down": normal(mesh, 2, (experts, inner, width)),
    }
    with jax_ep.Group(mesh, "ep", num_sms=options.num_sms) as group:
        for num_places, capacity in variants(shape, mesh.size, options):
            ops = Ops(shape, num_places, capacity, {"group": group, "implementation": implementation})
            count = on_ranks(mesh, ops.count)
            plan = on_ranks(mesh, ops.plan).lower(next(iter(ids_of.values()))).compile()
            compiled: dict[str, Any] = {"plan": plan}  # by op, for all routings
            for routing, ids in ids_of.items():
                arrays |= {"ids": ids, "plan": plan(ids)}
                programs = list(programs_of(ops, mesh, arrays, compiled))
                memory = compiled[programs[-1].op].memory_analysis()
                counts = {
                    key: np.asarray(value.addressable_shards[0].data)
                    for key, value in count(x, arrays["plan"]).items()
                }
                yield SkewedLayer(
                    name=name,
                    shape=shape,
                    ranks=mesh.size,
                    by=implementation,
                    routing=routing,
                    num_redundant_experts=num_places,
                    capacity=capacity,
                    capacity_ratio=capacity / (shape.tokens * shape.top_k),
                    rows_before=counts["rows_before"].tolist(),
                    rows_after=counts["rows_after"].tolist(),
                    **{key: counts[key].item() for key in ("replicas", "moved_rows", "dropped_rows")},
                    temp_bytes=getattr(memory, "temp_size_in_bytes", None),
                    times=times_of(programs, options),
                )
        group.check()


def programs_of(
    ops: Ops, mesh: jax.sharding.Mesh, arrays: dict[str, Any], compiled: dict[str, Any]
) -> Iterator[Program]:
    """Yields the programs of a variant. Those in `compiled`, by op, are not compiled again."""
    layer = ("x", "ids", "weights", "up", "down")
    functions: dict[str, tuple[Any, tuple[str, ...]]] = {
        "plan": (ops.plan, ("ids",)),
        "replicate": (ops.replicate, ("up", "down", "plan")),
        "round trip": (ops.round_trip, ("x", "plan", "weights")),
        "layer forward": (ops.layer, layer),
        "layer forward + backward": (with_gradients(ops.layer), layer),
    }
    for op, (function, names) in functions.items():
        if ops.num_places == 0 and op in ("plan", "replicate"):
            continue
        if op.startswith("layer") and not can_time_layers(ops.shape):
            continue
        arguments = tuple(arrays[name] for name in names)
        if op not in compiled:
            compiled[op] = on_ranks(mesh, function).lower(*arguments).compile()
        yield Program(op, ops.shared["implementation"], compiled[op], arguments)


def times_of(programs: list[Program], options: argparse.Namespace) -> dict[str, Time]:
    on_gpu = jax.devices()[0].platform == "gpu"
    timed = time_programs(iter(programs), options, on_gpu)
    return {program.op: Time(device, end_to_end) for program, device, end_to_end in timed}


def plan_programs(implementation: Implementation) -> Iterator[Program]:
    """Yields plans from the counts of more ranks than there are devices, without communication."""
    plan = functools.partial(
        jax_ep.plan_redundant_experts, num_redundant_experts=PLANNED_PLACES, implementation=implementation
    )
    for ranks in PLANNED_RANKS:
        shape = Shape(PLANNED_TOKENS // ranks, hidden=0, top_k=8, experts=PLANNED_EXPERTS, inner=0)
        for routing in ("lognormal 1.5", "equal counts"):
            counts = np.full((ranks, PLANNED_EXPERTS), shape.tokens * shape.top_k // PLANNED_EXPERTS)
            if routing != "equal counts":
                ids = route(routing, shape, ranks).reshape(ranks, -1)
                counts = np.stack([np.bincount(row, minlength=PLANNED_EXPERTS) for row in ids])
            op = f"plan, {ranks} ranks, {PLANNED_EXPERTS} experts, S = {PLANNED_PLACES}, {routing}"
            yield Program(op, implementation, jax.jit(plan), (jnp.asarray(counts, jnp.int32),))


def copy_programs(
    mesh: jax.sharding.Mesh, group: jax_ep.Group, shape: Shape, by: Implementation
) -> Iterator[Program]:
    """Yields a copy of experts' weights, and their `replicate` to where they are, with its gradient."""
    up = normal(mesh, 1, (COPIED_EXPERTS, shape.hidden, 2 * shape.inner))
    down = normal(mesh, 2, (COPIED_EXPERTS, shape.inner, shape.hidden))
    home = jax_ep.Placement.from_map(
        np.arange(COPIED_EXPERTS), num_logical_experts=COPIED_EXPERTS, num_ranks=group.size
    )

    def replicate(weights: Any) -> Any:
        return jax_ep.replicate(weights, home, group=group, implementation=by)

    def gradient(weights: Any) -> Any:
        # The gradient does not depend on the weights, so they also serve as its cotangents.
        return jax.vjp(replicate, weights)[1](weights)

    def copy(weights: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf + 1, weights)  # XLA could drop a mere copy

    yield Program("copy", "XLA", on_ranks(mesh, copy), ((up, down),))
    for op, function in (("replicate", replicate), ("gradient of replicate", gradient)):
        yield Program(op, by, on_ranks(mesh, function), ((up, down),), (("copy", "XLA"),))


def local_results(
    mesh: jax.sharding.Mesh, shape: Shape, options: argparse.Namespace, implementation: Implementation = "ffi"
) -> Iterator[LocalOp]:
    """Yields the measurements of one device: plans, and on a GPU also copies of a shape's weights."""
    on_gpu = mesh.devices.flat[0].platform == "gpu"
    for program, device, end_to_end in time_programs(plan_programs(implementation), options, on_gpu):
        yield LocalOp(program.op, program.by, 0, Time(device, end_to_end), None)
    if not on_gpu:
        return
    with jax_ep.Group(mesh, "ep", num_sms=options.num_sms) as group:
        times: dict[tuple[str, str], float] = {}
        programs = copy_programs(mesh, group, shape, implementation)
        for program, device, end_to_end in time_programs(programs, options, on_gpu):
            time = Time(device, end_to_end)
            times[program.op, program.by] = time.us
            share = times[program.compared_with[0]] / time.us if program.compared_with else None
            size = 2 * sum(leaf.nbytes for leaf in program.arguments[0])
            yield LocalOp(program.op, program.by, size, time, share)
        group.check()
