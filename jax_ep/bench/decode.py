"""Benchmark of a decode step: a few tokens of each rank pass through eight layers.

A layer is a projection in the place of attention, without a cache, then a router, and `moe` with
`GatedExperts` and a shared expert. The last layer's rows choose the next tokens, by sampling, which keeps the
tokens and so the routing diverse. All layers have the same routed experts, because more would not fit into
two GPUs. The alternative, with --peers, is the same step without expert parallelism: `layers.all_gathered`.

A program has one step or several. Each call begins with the tokens of the call before it, and the host waits
for them, as a server does.
"""

import argparse
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep.bench import measure, processes
from jax_ep.bench.layers import BFLOAT16, FP8, all_gathered, shared_rows
from jax_ep.bench.model import normalized
from jax_ep.bench.products import can_be_fp8
from jax_ep.bench.shapes import DECODE_TOKENS, Shape
from jax_ep.bench.timed import normal

LAYERS = 8
STEPS = 4  # of a program with several
TOKENS = (1, 16)  # of a rank, besides those of the shape, of which there are DECODE_TOKENS at most
VOCABULARY = 1024
PERCENTILES = (
    *("0", "10", "25", "50", "75", "90", "95", "98"),
    *("99", "99.5", "99.8", "99.9", "99.95", "99.99", "100"),
)
SPECS = {"embedding": P(), "experts": P("ep"), "layers": P()}

Weights = dict[str, Any]  # "embedding", "experts", "layers": a list
Moe = Callable[[Any, Any, jax.Array, jax.Array, jax.Array], jax.Array]
State = tuple[jax.Array, jax.Array]  # the last tokens [T] of a rank, and the number of steps so far


@dataclasses.dataclass(frozen=True)
class Latency:
    """Latencies of a program that was called again and again, in microseconds a step."""

    steps: int  # of the program
    calls: int
    percentiles_us: dict[str, float]  # of the slowest process in each call

    @property
    def median_us(self) -> float:
        return self.percentiles_us["50"]


@dataclasses.dataclass(frozen=True)
class DecodeStep:
    """Measurement of a decode step. All layers of a step have the same routed experts."""

    name: str
    shape: Shape  # with this row's tokens
    ranks: int
    layers: int
    by: str
    dtype: str  # of the experts' products
    several: Latency  # with STEPS steps in a program
    single: Latency  # with one step in a program
    kernels_us: float | None  # of the slowest device, a step; None on CPUs, whose profiles have none
    communication_us: float | None  # of these

    @property
    def us(self) -> float:
        return self.several.median_us

    @property
    def experts(self) -> str:
        """How the layer of experts is made."""
        return f"{self.by}, {self.dtype}"

    @property
    def label(self) -> str:
        return f"decode step, {self.shape.tokens} tokens, {self.experts}, {self.name}"


def weights_of(shape: Shape, mesh: Mesh) -> Weights:
    """Returns the weights in bfloat16. The ranks share the routed experts, and have all else in full."""
    hidden, inner = shape.hidden, shape.inner
    seeds = iter(range(4 * LAYERS + 3))

    def random(*sizes: int, spec: P = SPECS["layers"]) -> jax.Array:
        return normal(mesh, next(seeds), sizes, spec)

    experts = (shape.experts, hidden, 2 * inner), (shape.experts, inner, hidden)
    return {
        "embedding": random(VOCABULARY, hidden),
        "experts": tuple(random(*sizes, spec=SPECS["experts"]) for sizes in experts),
        "layers": [
            {
                "attention": random(hidden, hidden),
                "router": random(hidden, shape.experts),
                "shared": (random(1, hidden, 2 * inner), random(1, inner, hidden)),
            }
            for _ in range(LAYERS)
        ],
    }


def quantized(weights: Weights, mesh: Mesh) -> Weights:
    """Returns the weights with those of all experts in FP8."""

    def quantize(weights: Weights) -> Weights:
        def pair(matrices: Any) -> Any:
            return tuple(jax_ep.quantize_weights(w, gradients=False) for w in matrices)

        layers = [layer | {"shared": pair(layer["shared"])} for layer in weights["layers"]]
        return weights | {"experts": pair(weights["experts"]), "layers": layers}

    return jax.jit(jax.shard_map(quantize, mesh=mesh, in_specs=(SPECS,), out_specs=SPECS, check_vma=False))(
        weights
    )


def by_jax_ep(group: jax_ep.Group, quantize: Any) -> Moe:
    def moe(experts: Any, shared: Any, x: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
        return jax_ep.moe(
            x,
            ids,
            weights,
            jax_ep.GatedExperts(*experts, quantize=quantize),
            shared=jax_ep.GatedExperts(*shared, quantize=quantize),
            group=group,
        )

    return moe


def by_all_gather(group: jax_ep.Group, quantize: Any) -> Moe:
    def moe(experts: Any, shared: Any, x: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
        local = jax_ep.GatedExperts(*experts, quantize=quantize)
        tokens, top_k = ids.shape
        capacity = group.size * tokens * min(top_k, local.num_experts)  # drops nothing
        sums, _ = all_gathered(local, capacity, x, ids, weights)
        return sums + shared_rows(jax_ep.GatedExperts(*shared, quantize=quantize), x)

    return moe


MAKERS = {"jax_ep": by_jax_ep, "all_gather": by_all_gather}


def hidden_rows(weights: Weights, moe: Moe, top_k: int, tokens: jax.Array) -> jax.Array:
    """Returns the last layer's rows [T, H] of a rank's tokens [T]."""
    x = weights["embedding"][tokens]
    for layer in weights["layers"]:
        x = x + normalized(x) @ layer["attention"]
        rows = normalized(x)
        scores = jax.nn.sigmoid((rows @ layer["router"]).astype(jnp.float32))
        chosen, ids = jax.lax.top_k(scores, top_k)
        x = x + moe(
            weights["experts"], layer["shared"], rows, ids, chosen / jnp.sum(chosen, -1, keepdims=True)
        )
    return x


def program(steps: int, moe: Moe, top_k: int, weights: Weights, state: State) -> State:
    """Runs decode steps on one rank."""

    def step(state: State, _: None = None) -> tuple[State, None]:
        tokens, number = state
        rows = normalized(hidden_rows(weights, moe, top_k, tokens))
        # Nearly uniform. Other tokens would soon repeat themselves, and with them their experts.
        logits = (rows @ weights["embedding"].T).astype(jnp.float32) / rows.shape[1]
        key = jax.random.fold_in(jax.random.key(0), number)
        key = jax.random.fold_in(key, jax.lax.axis_index("ep"))
        return (jax.random.categorical(key, logits).astype(jnp.int32), number + 1), None

    return step(state)[0] if steps == 1 else jax.lax.scan(step, state, length=steps)[0]


def latency(run: Callable[[State], State], state: State, steps: int, repeats: int, on_gpu: bool) -> Latency:
    """Calls a program of some steps with its last result, and times each call.

    Calls it for `repeats` * 2000 steps on GPUs and `repeats` * 4 on CPUs, but for at most `repeats` * 2 s.
    """

    def call(state: State) -> tuple[State, float]:
        begin = time.perf_counter()
        state = jax.block_until_ready(run(state))
        return state, time.perf_counter() - begin

    state, _ = call(state)  # compiles it
    seconds = []
    for _ in range(3):
        state, each = call(state)
        seconds.append(each)
    # Programs that communicate run in all processes equally often.
    median = statistics.median(seconds)
    limit = 2.0 * repeats / (processes.slowest(median) or median)
    calls = max(3, round(min(repeats * (2000 if on_gpu else 4) / steps, limit)))
    times = np.empty(calls)
    for index in range(calls):
        state, times[index] = call(state)
    times = 1e6 / steps * processes.slowest_of_each(times)
    # A time that was measured. The last percentiles of few calls are that of the slowest.
    values = np.percentile(times, [float(percentile) for percentile in PERCENTILES], method="higher")
    return Latency(steps, calls, dict(zip(PERCENTILES, map(float, values), strict=True)))


def time_step(
    name: str, shape: Shape, mesh: Mesh, by: str, weights: Weights, dtype: str, options: argparse.Namespace
) -> DecodeStep:
    """Times programs of one step and of several. `shape` has the tokens of a rank."""
    on_gpu = mesh.devices.flat[0].platform == "gpu"
    rng = np.random.default_rng(0)
    tokens = rng.integers(VOCABULARY, size=mesh.size * shape.tokens, dtype=np.int32)
    spec = P("ep"), P()
    state = (
        jax.device_put(tokens, NamedSharding(mesh, spec[0])),
        jax.device_put(np.int32(0), NamedSharding(mesh, spec[1])),
    )
    with jax_ep.Group(mesh, "ep", num_sms=options.num_sms) as group:
        moe = MAKERS[by](group, "fp8" if dtype == FP8 else None)
        latencies, kinds = {}, None
        for steps in (STEPS, 1):
            mapped = jax.shard_map(
                functools.partial(program, steps, moe, shape.top_k),
                mesh=mesh,
                in_specs=(SPECS, spec),
                out_specs=spec,
                check_vma=False,
            )
            run = functools.partial(jax.jit(mapped), weights)
            latencies[steps] = latency(run, state, steps, options.repeats, on_gpu)
            if on_gpu and steps == STEPS:
                kinds = measure.kinds_us(run, (state,), steps)
        group.check()
    return DecodeStep(
        name=name,
        shape=shape,
        ranks=mesh.size,
        layers=LAYERS,
        by=by,
        dtype=dtype,
        several=latencies[STEPS],
        single=latencies[1],
        kernels_us=None if kinds is None else processes.slowest(sum(kinds.values())),
        communication_us=None if kinds is None else processes.slowest(kinds.get(measure.COMMUNICATION, 0.0)),
    )


def results(name: str, shape: Shape, mesh: Mesh, options: argparse.Namespace) -> Iterator[DecodeStep]:
    """Yields the measurements of a shape, one by one."""
    counts = [tokens for tokens in TOKENS if tokens < shape.tokens]
    counts.append(min(shape.tokens, DECODE_TOKENS))
    weights = weights_of(shape, mesh)
    for dtype in (BFLOAT16, FP8):
        if dtype == FP8:
            if not can_be_fp8(shape.hidden, shape.inner):
                return
            weights = quantized(weights, mesh)
        for tokens in counts:
            for by in MAKERS if options.peers else ["jax_ep"]:
                row_shape = dataclasses.replace(shape, tokens=tokens)
                yield time_step(name, row_shape, mesh, by, weights, dtype, options)
