"""Trains a small Mixture-of-Experts language model on text, with several kinds of experts and several seeds.

    python examples/train_text.py --json losses.json --plot losses.svg    # on all devices of this machine

The model is a decoder over bytes. The default text is on every machine: the sources of Python's standard
library. Runs with the same seed have the same initial parameters and the same batches, and differ only in
their experts:

    bf16      `jax_ep.moe` with `jax_ep.GatedExperts`, tokens and products in bfloat16
    fp8       the same with `quantize="fp8"`: tokens travel in FP8, and the products have FP8 operands
    fp8_all   the same with `quantize="fp8_all"`: also the products that are the weights' gradients
    dense     the reference, without jax_ep: every expert computes every token, in float32

`--redundant 0 2` trains the first three without redundant experts, and with two on each rank. A run that the
JSON file already has is not repeated, so a call can continue another one, or only plot its results. On a
machine without GPUs, JAX_NUM_CPU_DEVICES=8 NPROC=16 in the environment give it eight virtual devices. Needs
optax, and for `--plot` matplotlib.
"""

import argparse
import dataclasses
import json
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep.demo import data

EXPERTS = ("bf16", "fp8", "fp8_all", "dense")
REFERENCE = "dense"
BALANCE = 0.01  # weight of the load-balancing loss


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes of the model and of its training. Results of other settings cannot be compared."""

    steps: int = 3000
    layers: int = 4
    width: int = 512
    expert_width: int = 512
    num_experts: int = 16
    top_k: int = 2
    heads: int = 8
    window: int = 256  # bytes of a sequence
    sequences: int = 16  # of a step, on all ranks together
    learning_rate: float = 1e-3
    chunk: int = 50  # steps of one call, in a scan
    validate_every: int = 200
    validation_batches: int = 32


class Variant(NamedTuple):
    """Kind of the experts, and the number of redundant experts on each rank."""

    experts: str
    redundant: int

    @property
    def name(self):
        return f"{self.experts}, {self.redundant} redundant" if self.redundant else self.experts


def init(settings, key):
    """Returns random parameters in float32. Those of the layers are stacked, for a scan."""
    n, d, f, e = settings.layers, settings.width, settings.expert_width, settings.num_experts
    shapes_and_fan_in = {
        "qkv": ((n, d, 3 * d), d),
        "out": ((n, d, d), 2 * n * d),
        "router": ((n, d, e), d),
        "up": ((n, e, d, 2, f), d),  # gate and up
        "down": ((n, e, f, d), 2 * n * f),
        "embed": ((256, d), d),
        "position": ((settings.window, d), d),
    }
    keys = jax.random.split(key, len(shapes_and_fan_in))
    normal = lambda key, shape, fan_in: jax.random.normal(key, shape) / fan_in**0.5
    return {name: normal(key, *of) for key, (name, of) in zip(keys, shapes_and_fan_in.items(), strict=True)}


def param_specs(variant):
    """Returns the parameters' PartitionSpecs. Each rank of the reference has all experts."""
    experts = P() if variant.experts == REFERENCE else P(None, "ep")
    names = ("qkv", "out", "router", "embed", "position")
    return dict.fromkeys(names, P()) | dict.fromkeys(("up", "down"), experts)


def normalize(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def attention(settings, layer, x):
    sequences, window, _ = x.shape
    x = x.astype(jnp.bfloat16)
    qkv = (x @ layer["qkv"].astype(x.dtype)).reshape(sequences, window, 3, settings.heads, -1)
    out = jax.nn.dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], is_causal=True)
    return out.reshape(x.shape) @ layer["out"].astype(x.dtype)


def dense_experts(layer, x, topk_idx, weights):
    """Returns the experts' weighted sums [T, H] in float32. Every expert computes every token."""
    exact = {"precision": jax.lax.Precision.HIGHEST}  # otherwise GPUs multiply float32 as tf32
    chosen = jnp.sum(jax.nn.one_hot(topk_idx, layer["up"].shape[0]) * weights[..., None], axis=1)
    gate_and_up = jnp.einsum("th,ehif->ietf", x.astype(jnp.float32), layer["up"], **exact)
    hidden = jax.nn.silu(gate_and_up[0]) * gate_and_up[1] * chosen.T[..., None]
    return jnp.einsum("etf,efh->th", hidden, layer["down"], **exact)


def mixture(settings, variant, group, layer, x):
    """Returns the experts' sums [T, H] of tokens x [T, H], the load-balancing loss, and the dropped rows."""
    scores = jax.nn.softmax(jnp.matmul(x, layer["router"], precision=jax.lax.Precision.HIGHEST))
    weights, topk_idx = jax.lax.top_k(scores, settings.top_k)
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    x = x.astype(jnp.bfloat16)
    if variant.experts == REFERENCE:
        y, dropped = dense_experts(layer, x, topk_idx, weights), jnp.int32(0)
    else:
        experts = jax_ep.GatedExperts(
            layer["up"].astype(x.dtype),
            layer["down"].astype(x.dtype),
            quantize=None if variant.experts == "bf16" else variant.experts,
        )
        y, stats = jax_ep.moe(
            x,
            topk_idx,
            weights,
            experts,
            group=group,
            num_redundant_experts=variant.redundant,
            return_stats=True,
        )
        dropped = jax.lax.psum(stats.num_dropped[0], "ep")
    # As in Switch Transformer (arXiv:2101.03961): the share of tokens times the mean score.
    share = jnp.mean(jax.nn.one_hot(topk_idx, settings.num_experts), axis=(0, 1))
    share, mean_score = jax.lax.pmean((share, jnp.mean(scores, axis=0)), "ep")
    return y, settings.num_experts * jnp.sum(share * mean_score), dropped


def loss(settings, variant, group, params, batch):
    """Returns the loss of a batch int32 [B, W + 1], and the nats per byte and dropped rows.

    The loss includes the load-balancing loss. Must be called inside `jax.shard_map`.
    """
    inputs, targets = batch[:, :-1], batch[:, 1:]
    layers = {name: params[name] for name in ("qkv", "out", "router", "up", "down")}

    def one_layer(x, layer):
        x = x + attention(settings, layer, normalize(x))
        tokens = normalize(x).reshape(-1, settings.width)
        y, balance, dropped = mixture(settings, variant, group, layer, tokens)
        return x + y.reshape(x.shape), (balance, dropped)

    x = params["embed"][inputs] + params["position"][None]
    x, (balance, dropped) = jax.lax.scan(one_layer, x, layers)
    x, embed = normalize(x).astype(jnp.bfloat16), params["embed"].astype(jnp.bfloat16)
    logits = jnp.matmul(x, embed.T, preferred_element_type=jnp.float32)
    nats = jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, targets))
    nats = jax.lax.pmean(nats, "ep")
    return nats + BALANCE * jnp.sum(balance), (nats, jnp.sum(dropped))


class Trainer:
    """Compiled programs of a variant, for all its seeds."""

    def __init__(self, settings, variant, group, mesh):
        self.settings = settings
        specs = param_specs(variant)
        self.shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
        self.replicated = NamedSharding(mesh, P())
        schedule = optax.warmup_cosine_decay_schedule(
            0.0, settings.learning_rate, settings.steps // 20, settings.steps, settings.learning_rate / 10
        )
        self.optimizer = optax.chain(
            optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1)
        )
        loss_of_batch = jax.shard_map(
            lambda params, batch: loss(settings, variant, group, params, batch),
            mesh=mesh,
            in_specs=(specs, P("ep")),
            out_specs=P(),
        )

        def windows(text, starts):
            return text[starts[:, None] + jnp.arange(settings.window + 1)[None]].astype(jnp.int32)

        def one_step(params, state, batch):
            gradients, metrics = jax.grad(loss_of_batch, has_aux=True)(params, batch)
            updates, state = self.optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state, metrics

        def train(params, state, text, starts):
            def step(carry, starts):
                *carry, metrics = one_step(*carry, windows(text, starts))
                return tuple(carry), metrics

            return jax.lax.scan(step, (params, state), starts)

        def validate(params, text, starts):
            return jnp.mean(jax.lax.map(lambda s: loss_of_batch(params, windows(text, s))[1][0], starts))

        self.train = jax.jit(train, donate_argnums=(0, 1))
        self.validate = jax.jit(validate)

    def initial(self, seed):
        """Returns parameters, and the optimizer's state, which is sharded like them."""
        params = jax.device_put(init(self.settings, jax.random.key(seed)), self.shardings)
        place = lambda leaf: leaf if leaf.ndim else jax.device_put(leaf, self.replicated)
        return params, jax.tree.map(place, self.optimizer.init(params))

    def run(self, seed, text, held_out):
        """Trains once, and returns the losses, the milliseconds per step and the number of dropped rows."""
        settings = self.settings
        per_batch, window = settings.sequences, settings.window
        starts = np.random.default_rng(seed).integers(0, len(text) - window, (settings.steps, per_batch))
        count = settings.validation_batches * per_batch
        validated = np.linspace(0, len(held_out) - window - 1, count).reshape(-1, per_batch).astype(np.int32)
        text, held_out, validated = jax.device_put((text, held_out, validated), self.replicated)
        (params, state), losses, validation, seconds, dropped = self.initial(seed), [], [], [], 0
        for begin in range(0, settings.steps, settings.chunk):
            chunk = jax.device_put(starts[begin : begin + settings.chunk].astype(np.int32), self.replicated)
            started = time.perf_counter()
            (params, state), metrics = self.train(params, state, text, chunk)
            chunk_losses, chunk_dropped = jax.device_get(metrics)
            seconds.append(time.perf_counter() - started)
            losses += chunk_losses.tolist()
            dropped += int(chunk_dropped.sum())
            if len(losses) % settings.validate_every == 0 or len(losses) == settings.steps:
                validation.append([len(losses), float(self.validate(params, held_out, validated))])
        return {
            "train": [[step + 1, losses[step]] for step in range(9, settings.steps, 10)],
            "validation": validation,
            "ms_per_step": 1e3 * statistics.median(seconds[1:] or seconds) / settings.chunk,
            "dropped": dropped,
        }


def load_results(path, settings, text):
    """Returns the results in a file, or empty ones. Exits if they are of other settings or another text."""
    results = {
        "settings": dataclasses.asdict(settings) | {"text": str(text or "standard library")},
        "runs": [],
    }
    if path and path.exists():
        existing = json.loads(path.read_text())
        if existing["settings"] != results["settings"]:
            raise SystemExit(f"train_text: {path} has results of other settings; choose another --json")
        return existing
    return results


def find_run(results, variant, seed):
    """Returns the run of a variant and a seed, or None."""
    key = [*variant, seed]
    return next((r for r in results["runs"] if [r["experts"], r["redundant"], r["seed"]] == key), None)


def train_missing(results, settings, variants, seeds, options):
    """Trains the runs that results lack, and adds each to them, and to the JSON file."""
    text, held_out = data.load(options.text, settings.window)
    devices = jax.devices()[: options.devices]
    if settings.sequences % len(devices):
        raise SystemExit(
            f"train_text: --sequences must be a multiple of the {len(devices)} ranks, "
            f"got {settings.sequences}"
        )
    mesh = jax.make_mesh((len(devices),), ("ep",), (AxisType.Auto,), devices=devices)
    with jax_ep.Group(mesh, "ep") as group:
        for variant in variants:
            trainer = Trainer(settings, variant, group, mesh)
            for seed in seeds:
                if find_run(results, variant, seed):
                    continue
                started = time.perf_counter()
                found = trainer.run(seed, text, held_out)
                group.check()
                where = {"ranks": group.size, "device": devices[0].device_kind, "text_bytes": len(text)}
                results["runs"].append({**variant._asdict(), "seed": seed, **where, **found})
                if options.json:
                    options.json.write_text(json.dumps(results))
                nats, seconds = found["validation"][-1][1], time.perf_counter() - started
                print(
                    f"{variant.name}, seed {seed}: validation {nats:.4f} nats per byte, "
                    f"{found['ms_per_step']:.2f} ms per step, {seconds:.0f} s in all",
                    flush=True,
                )


def mean_and_spread(values):
    """Returns the mean and the sample standard deviation as a text."""
    spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4f}{spread}"


def table(results, variants, seeds):
    """Returns the final validation losses as a Markdown table, also compared with the reference."""
    lines = [
        f"| experts | validation loss, mean and standard deviation of {len(seeds)} seeds "
        "| minus the reference's with the same seed | ms per step | dropped rows |",
        "|---|---|---|---|---|",
    ]
    for variant in variants:
        runs = [find_run(results, variant, seed) for seed in seeds]
        references = [find_run(results, Variant(REFERENCE, 0), seed) for seed in seeds]
        final = [run["validation"][-1][1] for run in runs]
        difference = ""
        if all(references) and variant.experts != REFERENCE:
            pairs = zip(final, references, strict=True)
            difference = mean_and_spread([value - run["validation"][-1][1] for value, run in pairs])
        time_of_step = statistics.median(run["ms_per_step"] for run in runs)
        dropped = sum(run["dropped"] for run in runs)
        lines.append(
            f"| {variant.name} | {mean_and_spread(final)} | {difference} | {time_of_step:.2f} | {dropped} |"
        )
    return "\n".join(lines)


def draw(results, variants, seeds, path):
    """Draws the validation losses, and beside them their differences from the reference, a line a seed."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for number, variant in enumerate(variants):
        for seed in seeds:
            color = "black" if variant.experts == REFERENCE else f"C{number}"
            label = variant.name if seed == seeds[0] else "_"  # a legend skips such labels
            steps, losses = np.array(find_run(results, variant, seed)["validation"]).T
            left.plot(steps, losses, color=color, alpha=0.7, label=label)
            reference = find_run(results, Variant(REFERENCE, 0), seed)
            if reference and variant.experts != REFERENCE:
                difference = losses - np.array(reference["validation"])[:, 1]
                right.plot(steps, difference, color=color, alpha=0.7)
    left.set_ylabel("validation loss, nats per byte")
    right.set_ylabel("minus the reference's with the same seed")
    right.axhline(0, color="black", linestyle=":")
    for axes in (left, right):
        axes.set_xlabel("steps")
        axes.grid(True, alpha=0.3)
    figure.legend(loc="outside lower center", ncols=len(variants))
    with rc_context({"svg.fonttype": "none"}):  # text stays text
        figure.savefig(path)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--experts", nargs="+", choices=EXPERTS, default=["bf16", "fp8", "dense"])
    parser.add_argument("--redundant", nargs="+", type=int, default=[0], help="experts per rank (default: 0)")
    parser.add_argument("--seeds", type=int, default=3, help="number of runs of each kind (default: 3)")
    parser.add_argument("--devices", type=int, help="number of ranks (default: all devices)")
    parser.add_argument("--text", type=Path, help="file or folder (default: Python's standard library)")
    parser.add_argument("--json", type=Path, help="file of results, which the runs are added to")
    parser.add_argument("--plot", type=Path, help="figure of the results, such as losses.svg")
    for field in dataclasses.fields(Settings):
        option = f"--{field.name.replace('_', '-')}"
        parser.add_argument(option, type=type(field.default), default=field.default)
    options = parser.parse_args(arguments)
    settings = Settings(
        **{field.name: getattr(options, field.name) for field in dataclasses.fields(Settings)}
    )
    if settings.steps % settings.chunk:
        raise SystemExit(f"train_text: --chunk must divide the {settings.steps} steps, got {settings.chunk}")

    seeds = range(options.seeds)
    variants = [Variant(e, 0 if e == REFERENCE else r) for e in options.experts for r in options.redundant]
    variants = list(dict.fromkeys(variants))
    results = load_results(options.json, settings, options.text)
    if not all(find_run(results, variant, seed) for variant in variants for seed in seeds):
        train_missing(results, settings, variants, seeds, options)
    print(table(results, variants, seeds))
    if options.plot:
        draw(results, variants, seeds, options.plot)


if __name__ == "__main__":
    main()
