"""Benchmark of a model's training step: a decoder whose experts are on all devices, trained by AdamW.

Attention is grouped-query, causal and by cuDNN on GPUs, and is computed again in the backward pass. Each
device has its own sequences, all other parameters, and its share of the experts. With `--fsdp F` there are F
groups of ranks with all experts each, and F devices share the parameters that are theirs otherwise, and the
optimizer's state: a layer gathers its weights before it runs, and again in the backward pass. Models are cut
in depth and in their vocabulary, have no positions, and DeepSeek-V3's latent attention is replaced. What
differs is how the layer of experts is made. `on_devices` chooses the depth.
"""

import argparse
import dataclasses
import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep.bench import maxtext, measure, peers
from jax_ep.bench.layers import all_gathered, shared_rows
from jax_ep.bench.shapes import MODELS, Shape

STEPS = 10  # whose losses are compared
PEAK_TFLOPS = 989.0  # of an H100 or H200 in bfloat16, without sparsity
# Bytes of a device for the experts of all layers, with their gradients and the two moments of AdamW. The rest
# of a step fits beside them into the memory that JAX reserves of 80 GB.
EXPERTS_BYTES = 48e9

Parameters = dict[str, Any]
Moe = Callable[[Parameters, jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Decoder:
    """Sizes of a model besides those of its experts."""

    layers: int  # at most
    heads: int
    kv_heads: int
    tokens: int  # of a device
    sequence: int
    shared: int = 0  # width of the shared expert
    head: int = 128
    vocabulary: int = 32768


DECODERS = {
    "qwen3_30b_a3b": Decoder(layers=6, heads=32, kv_heads=4, tokens=8192, sequence=4096),
    "qwen3_moe_235b": Decoder(layers=3, heads=64, kv_heads=4, tokens=4096, sequence=4096),
    "deepseek_v3": Decoder(layers=1, heads=128, kv_heads=16, tokens=4096, sequence=4096, shared=2048),
    "tiny": Decoder(
        layers=1, heads=2, kv_heads=1, tokens=32, sequence=16, shared=128, head=16, vocabulary=64
    ),
}
TINY = Shape(tokens=32, hidden=128, top_k=2, experts=16, inner=128)


# The axis of each array of a layer that has the width of a token, and is divided among devices that share it.
HIDDEN_AXES = {
    "embedding": 1,
    "qkv": 0,
    "out": 1,
    "router": 0,
    "up": 1,
    "down": 2,
    "shared_up": 1,
    "shared_down": 2,
}


@dataclasses.dataclass(frozen=True)
class ModelStep:
    """Measurement of a training step."""

    name: str
    shape: Shape
    ranks: int  # all devices
    fsdp: int  # devices that share parameters
    layers: int
    by: str
    tokens: int  # of all devices
    us: float  # end to end
    flop: float  # of one device, of a model's step: three times those of the forward pass, nothing repeated
    memory: int  # bytes of one device: parameters, optimizer and temporaries
    num_dropped: int  # rows of all layers and devices, in the last step
    losses: list[float]
    kinds_us: dict[str, float]  # kernels of one device by kind; of CPUs, whose profiles have none, "all"

    @property
    def label(self) -> str:
        return f"step, {self.by}, {self.name}"

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.us * 1e6

    @property
    def mfu(self) -> float | None:
        """The share of PEAK_TFLOPS, which is that of an H100 or H200; None on CPUs."""
        return None if "all" in self.kinds_us else self.flop / self.us / 1e6 / PEAK_TFLOPS


def by_jax_ep(group: jax_ep.Group, shape: Shape, factor: float, redundant: int = 0, **options: Any) -> Moe:
    def moe(w: Parameters, x: jax.Array, ids: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        sums, stats = jax_ep.moe(
            x,
            ids,
            weights,
            jax_ep.GatedExperts(w["up"], w["down"], **options),
            group=group,
            capacity_factor=None if redundant else factor,
            num_redundant_experts=redundant,
            shared=_shared(w, **options),
            return_stats=True,
        )
        return sums, stats.num_dropped

    return moe


def by_all_gather(group: jax_ep.Group, shape: Shape, factor: float) -> Moe:
    capacity = int(factor * shape.tokens * shape.top_k)

    def moe(w: Parameters, x: jax.Array, ids: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        experts = jax_ep.GatedExperts(w["up"], w["down"])
        sums, dropped = all_gathered(experts, capacity, x, ids, weights)
        return sums + shared_rows(_shared(w), x), dropped

    return moe


def by_ragged_all_to_all(group: jax_ep.Group, shape: Shape, factor: float) -> Moe:
    """Rows are sorted by expert, and exchanged by JAX's collective."""

    def moe(w: Parameters, x: jax.Array, ids: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        # The worst case: rows past the end of the buffer would be written all the same.
        dispatch, combine = peers.ragged_all_to_all(
            shape, group.size, group.size * shape.tokens * shape.top_k
        )
        rows, state = dispatch(x, ids)
        rows = jax_ep.gated_mlp(rows, w["up"], w["down"], peers.group_sizes(ids, shape, group.size))
        return combine(rows, state, weights) + shared_rows(_shared(w), x), jnp.zeros((1,), jnp.int32)

    return moe


def by_maxtext(group: jax_ep.Group, shape: Shape, factor: float, on_gpu: bool) -> Moe:
    routed = maxtext.layer(group, shape, factor, on_gpu)

    def moe(w: Parameters, x: jax.Array, ids: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        sums, dropped = routed(w["up"], w["down"], x, ids, weights)
        return sums + shared_rows(_shared(w), x), dropped

    return moe


def _shared(w: Parameters, **options: Any) -> jax_ep.GatedExperts | None:
    return jax_ep.GatedExperts(w["shared_up"], w["shared_down"], **options) if "shared_up" in w else None


def makers(on_gpu: bool) -> dict[str, Callable[..., Moe]]:
    """Returns what makes the layer of experts, by its name."""
    made: dict[str, Callable[..., Moe]] = {
        "jax_ep": by_jax_ep,
        "jax_ep, FP8": functools.partial(by_jax_ep, quantize="fp8"),
        "jax_ep, redundant experts": functools.partial(by_jax_ep, redundant=2),
        "all_gather": by_all_gather,
        "maxtext": functools.partial(by_maxtext, on_gpu=on_gpu),
    }
    return made | ({"ragged_all_to_all": by_ragged_all_to_all} if on_gpu else {})  # XLA:CPU has none


def on_devices(model: Decoder, shape: Shape, devices: int) -> Decoder:
    """Returns a model with as many of its layers as EXPERTS_BYTES holds, and at least one."""
    values = 4 * 3 * shape.experts * shape.hidden * shape.inner  # of a layer, on all devices
    most = int(EXPERTS_BYTES * devices / (values * jnp.bfloat16.dtype.itemsize))
    return dataclasses.replace(model, layers=max(1, min(model.layers, most)))


def parameter_shapes(model: Decoder, shape: Shape) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of all parameters. All but the embedding have a first axis of layers."""
    heads, pairs, hidden = model.heads * model.head, 2 * model.kv_heads * model.head, shape.hidden
    shapes: dict[str, tuple[int, ...]] = {
        "qkv": (hidden, heads + pairs),
        "out": (heads, hidden),
        "router": (hidden, shape.experts),
        "up": (shape.experts, hidden, 2, shape.inner),
        "down": (shape.experts, shape.inner, hidden),
    }
    if model.shared:
        shapes["shared_up"] = 1, hidden, 2, model.shared
        shapes["shared_down"] = 1, model.shared, hidden
    shapes = {name: (model.layers, *shape) for name, shape in shapes.items()}
    return {"embedding": (model.vocabulary, hidden), **shapes}


def flop_of(model: Decoder, shape: Shape) -> float:
    """Returns the operations of one device's training step."""
    attention = shape.hidden * model.head * (2 * model.heads + 2 * model.kv_heads)
    scores = model.sequence * model.heads * model.head  # both products, of half of the pairs
    experts = 3 * shape.hidden * (shape.inner * shape.top_k + model.shared)
    layer = attention + scores + experts + shape.hidden * shape.experts
    return 3 * 2.0 * model.tokens * (model.layers * layer + shape.hidden * model.vocabulary)


def normalized(x: jax.Array) -> jax.Array:
    """Returns rows divided by the root of the mean of their squares."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)


def _attention(model: Decoder, on_gpu: bool, w: Parameters, x: jax.Array) -> jax.Array:
    sizes = [model.heads * model.head, (model.heads + model.kv_heads) * model.head]
    q, k, v = (
        part.reshape(-1, model.sequence, part.shape[-1] // model.head, model.head)
        for part in jnp.split(x @ w["qkv"], sizes, axis=-1)
    )
    implementation = "cudnn" if on_gpu else None
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)
    return y.reshape(len(x), -1) @ w["out"]


def _gathered(parameters: Parameters) -> Parameters:
    """Returns the whole of weights of which devices have parts."""
    if jax.lax.axis_size("fsdp") == 1:
        return parameters
    gather = lambda name, w: jax.lax.all_gather(w, "fsdp", axis=HIDDEN_AXES[name], tiled=True)
    return {name: gather(name, w) for name, w in parameters.items()}


def _saves(primitive: Any, *_: Any, **options: Any) -> bool:
    """The policy of a layer: all but gathered weights is kept for the backward pass."""
    return primitive.name != "all_gather" or "fsdp" not in options["axis_name"]


def loss_of(
    model: Decoder, shape: Shape, moe: Moe, on_gpu: bool, parameters: Parameters, tokens: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns one device's loss [1] and number of dropped rows [1]."""
    embedding = _gathered({"embedding": parameters["embedding"]})["embedding"]
    layers = {name: w for name, w in parameters.items() if name != "embedding"}

    # Two checkpoints in a sequence: inside of another one with a policy, attention's would have no effect.
    @jax.checkpoint
    def attention(x: jax.Array, w: Parameters) -> jax.Array:
        return x + _attention(model, on_gpu, _gathered(w), normalized(x))

    def experts(x: jax.Array, w: Parameters) -> tuple[jax.Array, jax.Array]:
        w = _gathered(w)
        rows = normalized(x)
        scores = jax.nn.softmax((rows @ w["router"]).astype(jnp.float32))
        weights, ids = jax.lax.top_k(scores, shape.top_k)
        y, dropped = moe(w, rows, ids, weights)
        return x + y, dropped

    if jax.lax.axis_size("fsdp") > 1:
        experts = jax.checkpoint(experts, policy=_saves)

    def layer(x: jax.Array, w: Parameters) -> tuple[jax.Array, jax.Array]:
        of_attention = {name: w[name] for name in ("qkv", "out")}
        of_experts = {name: array for name, array in w.items() if name not in of_attention}
        return experts(attention(x, of_attention), of_experts)

    x, dropped = jax.lax.scan(layer, embedding[tokens], layers)
    logits = (normalized(x) @ embedding.T).astype(jnp.float32).reshape(-1, model.sequence, model.vocabulary)
    targets = jnp.roll(tokens.reshape(-1, model.sequence), -1, axis=1)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)[:, :-1]
    return jnp.mean(losses)[None], jnp.sum(dropped, axis=0)


def specs_of(shapes: dict[str, tuple[int, ...]]) -> dict[str, P]:
    specs = {}
    for name in shapes:
        axes: list[str | None] = [None] * (HIDDEN_AXES[name] + 1)
        axes[-1] = "fsdp"
        if name in ("up", "down"):
            axes[0] = "ep"
        specs[name] = P(*axes) if name == "embedding" else P(None, *axes)
    return specs


def time_step(
    name: str, model: Decoder, shape: Shape, mesh: Mesh, by: str, options: argparse.Namespace, on_gpu: bool
) -> ModelStep:
    """Trains from the same parameters and tokens as every other call, and times a step."""
    mesh = Mesh(mesh.devices.reshape(options.fsdp, -1), ("fsdp", "ep"), axis_types=(AxisType.Auto,) * 2)
    shapes, optimizer = parameter_shapes(model, shape), optax.adamw(2e-4)
    specs = specs_of(shapes)
    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}

    def initial(key: jax.Array) -> Parameters:
        keys = jax.random.split(key, len(shapes))
        scales = {name: shape[-2 if name != "up" else -3] ** -0.5 for name, shape in shapes.items()}
        return {
            name: jax.random.normal(k, shape, jnp.bfloat16) * jnp.bfloat16(scales[name])
            for k, (name, shape) in zip(keys, shapes.items(), strict=True)
        }

    parameters = jax.jit(initial, out_shardings=shardings)(jax.random.key(0))
    rng = np.random.default_rng(0)
    tokens = rng.integers(model.vocabulary, size=mesh.size * model.tokens, dtype=np.int32)
    everywhere = P(("fsdp", "ep"))
    tokens = jax.device_put(tokens, NamedSharding(mesh, everywhere))
    with jax_ep.Group(mesh, "ep") as group:
        moe = makers(on_gpu)[by](group, shape, options.capacity or 1.25)
        mapped = jax.shard_map(
            functools.partial(loss_of, model, shape, moe, on_gpu),
            mesh=mesh,
            in_specs=(specs, everywhere),
            out_specs=everywhere,
            check_vma=False,
        )

        def loss(parameters: Parameters) -> tuple[jax.Array, jax.Array]:
            losses, dropped = mapped(parameters, tokens)
            return jnp.mean(losses), jnp.sum(dropped)

        def step(parameters: Parameters, state: Any) -> tuple[Any, Any, jax.Array, jax.Array]:
            (value, dropped), gradients = jax.value_and_grad(loss, has_aux=True)(parameters)
            updates, state = optimizer.update(gradients, state, parameters)
            return optax.apply_updates(parameters, updates), state, value, dropped

        state = optimizer.init(parameters)
        compiled = jax.jit(step, donate_argnums=(0, 1)).lower(parameters, state).compile()
        losses, dropped = [], jnp.zeros(())
        for _ in range(STEPS):
            parameters, state, value, dropped = compiled(parameters, state)
            losses.append(float(value))
        times = []
        for _ in range(options.repeats):
            begin = time.perf_counter()
            for _ in range(3):
                parameters, state, _, dropped = compiled(parameters, state)
            jax.block_until_ready(dropped)
            times.append((time.perf_counter() - begin) / 3 * 1e6)
        kinds = {"all": statistics.median(times)}
        if on_gpu:
            kinds = kinds_of(measure.kernels(lambda: compiled(parameters, state), ())[0])
        group.check()
    analysis = compiled.memory_analysis()
    assert analysis is not None
    memory = analysis.temp_size_in_bytes + analysis.argument_size_in_bytes
    return ModelStep(
        name=name,
        shape=shape,
        ranks=mesh.size,
        fsdp=options.fsdp,
        layers=model.layers,
        by=by,
        tokens=len(tokens),
        us=statistics.median(times),
        flop=flop_of(model, shape),
        memory=memory,
        num_dropped=int(dropped),
        losses=losses,
        kinds_us=kinds,
    )


def kinds_of(kernels: list[tuple[str, float, float]]) -> dict[str, float]:
    """Returns the microseconds of kernels of each kind. Kernels that overlap count twice."""
    sums: dict[str, float] = defaultdict(float)
    for name, begin, end in kernels:
        sums[measure.kind_of(name)] += (end - begin) / 1e3
    return dict(sums)


def ways_of(options: argparse.Namespace, on_gpu: bool, notes: list[str]) -> list[str]:
    """Returns the names of the ways to make the layer of experts. Appends to `notes` why one is left out."""
    ways = list(makers(on_gpu))
    unknown = [way for way in options.ways or () if way not in ways]
    if unknown:
        raise SystemExit(f"bench: --ways has {', '.join(map(repr, ways))} here, got {', '.join(unknown)}")
    chosen = options.ways or (ways if options.peers else ways[: ways.index("all_gather")])
    if "maxtext" in chosen and (reason := maxtext.missing()):
        notes.append(f"MaxText's layer was not timed: {reason}; see docs/howto/maxtext.md")
        chosen = [way for way in chosen if way != "maxtext"]
    return chosen


def results(
    name: str, mesh: Mesh, ways: list[str], options: argparse.Namespace, on_gpu: bool
) -> Iterator[ModelStep]:
    """Yields the measurements of a model, one by one."""
    shape = dataclasses.replace(MODELS.get(name, TINY), tokens=DECODERS[name].tokens)
    model = on_devices(DECODERS[name], shape, mesh.size)
    for by in ways:
        yield time_step(name, model, shape, mesh, by, options, on_gpu)
