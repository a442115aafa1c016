"""Training of the demo's model, with a comparison of the two implementations."""

import argparse
import dataclasses
import itertools
import math
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import jax_ep
from jax_ep._extension import Implementation
from jax_ep._group.group import ranks_of
from jax_ep.demo import data, model

SEQUENCES = 4  # per device and step
COMPARED_STEPS = 4
HELD_OUT_BATCHES = 8
REDUNDANT_EXPERTS = 2  # per device, with --balance
# Largest accepted difference of losses, in nats. It is larger on GPUs, because they multiply float32 values
# as tf32, which has 10 bits, and in FP8, which has 3, so small rounding differences soon affect the loss.
AGREEMENT = {"cpu": 1e-3, "gpu": 1e-2}
AGREEMENT_IN_FP8 = 1e-2


class Trainer:
    """One training run: its parameters, optimizer and compiled step."""

    def __init__(self, config: model.Config, mesh: jax.sharding.Mesh, steps: int, seed: int):
        self.config, self.mesh = config, mesh
        axis = config.group.axis_name
        specs = model.param_specs(config)
        self.batch_sharding = NamedSharding(mesh, P(axis))
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
        self.params = jax.device_put(model.init(config, jax.random.key(seed)), shardings)
        schedule = optax.warmup_cosine_decay_schedule(0.0, 4e-3, min(10, steps), max(steps, 11), 4e-4)
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01))
        replicated = NamedSharding(mesh, P())
        # A step returns the optimizer's counters on all devices, so they start there too. Otherwise the
        # second step would recompile.
        self.state = jax.tree.map(
            lambda leaf: leaf if leaf.ndim else jax.device_put(leaf, replicated), optimizer.init(self.params)
        )
        loss = jax.shard_map(
            lambda params, batch: model.loss(config, params, batch),
            mesh=mesh,
            in_specs=(specs, P(axis)),
            out_specs=P(),
        )

        def step(params: Any, state: Any, batch: jax.Array) -> Any:
            (_, metrics), gradients = jax.value_and_grad(loss, has_aux=True)(params, batch)
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state, metrics

        self._step = jax.jit(step, donate_argnums=(0, 1))
        self._evaluate = jax.jit(lambda params, batch: loss(params, batch)[1]["loss"])

    def step(self, batch: np.ndarray) -> dict[str, Any]:
        """Trains on one batch, and returns the step's metrics."""
        sharded = jax.device_put(batch, self.batch_sharding)
        self.params, self.state, metrics = self._step(self.params, self.state, sharded)
        return jax.device_get(metrics)

    def bits_per_byte(self, batches: list[np.ndarray]) -> float:
        """Returns the mean loss of the batches in bits per byte."""
        losses = [self._evaluate(self.params, jax.device_put(b, self.batch_sharding)) for b in batches]
        return float(np.mean(jax.device_get(losses))) / math.log(2)


def make_config(
    options: argparse.Namespace, group: jax_ep.Group, implementation: Implementation | None
) -> model.Config:
    mean_rows = SEQUENCES * model.Config.window * options.top_k  # per device
    capacity = math.ceil(mean_rows * options.capacity) if options.capacity else None
    quantize = "fp8" if options.fp8 else "fp8_dequantize" if options.quantize else None
    places = min(REDUNDANT_EXPERTS, options.experts // group.size) if options.balance else 0
    products = "fp8" if options.fp8 else None
    return model.Config(
        group,
        options.experts,
        options.top_k,
        capacity,
        implementation,
        quantize=quantize,
        quantize_products=products,
        num_redundant_experts=places,
        layers=options.layers,
    )


@dataclasses.dataclass(frozen=True)
class Result:
    """Result of a training run."""

    history: list[dict]  # metrics of each step
    before: float  # held-out bits per byte
    after: float

    @property
    def losses(self) -> list[float]:
        return [float(metrics["loss"]) for metrics in self.history]

    @property
    def dropped(self) -> list[int]:
        return [int(metrics["dropped"]) for metrics in self.history]


def train_and_evaluate(
    config: model.Config,
    mesh: jax.sharding.Mesh,
    text: np.ndarray,
    held_out: np.ndarray,
    options: argparse.Namespace,
    console: Console,
) -> Result:
    """Trains a model from the start, and returns its result."""
    sequences = SEQUENCES * config.group.size
    trainer = Trainer(config, mesh, options.steps, options.seed)
    held_out_batches = list(
        itertools.islice(data.batches(held_out, sequences, config.window, 1), HELD_OUT_BATCHES)
    )
    before = trainer.bits_per_byte(held_out_batches)
    batches = data.batches(text, sequences, config.window, options.seed)
    history = train(trainer, batches, options.steps, console)
    return Result(history, before, trainer.bits_per_byte(held_out_batches))


def run(options: argparse.Namespace) -> int:
    """Runs the demo, and returns its exit status."""
    console = Console(quiet=jax.process_index() > 0)  # because all processes would print the same
    devices = jax.devices()
    mesh = jax.make_mesh((options.devices,), ("ep",), (AxisType.Auto,), devices=devices[: options.devices])
    with jax_ep.Group(mesh, "ep") as group:
        info = group.info()
        implementation = options.implementation or info.implementation
        config = make_config(options, group, implementation)
        text, held_out = data.load(options.text, config.window)
        sequences = SEQUENCES * group.size
        shapes = jax.eval_shape(lambda key: model.init(config, key), jax.random.key(0))
        count = sum(leaf.size for leaf in jax.tree.leaves(shapes))
        console.print(
            f"{count / 1e6:.1f} M parameters, {options.experts} experts (top-{options.top_k}) on "
            f"{group.size} {ranks_of(group).platform} devices, implementation {implementation!r};\n"
            f"{len(text) / 1e6:.1f} MB of text, {sequences * config.window} tokens per step"
        )
        if ranks_of(group).platform == "cpu":
            console.print("the devices share this machine's cores, so the speed is not that of GPUs")
        if options.balance:
            console.print(f"with {config.num_redundant_experts} redundant experts per device:")
        results = [train_and_evaluate(config, mesh, text, held_out, options, console)]
        if options.balance:
            console.print("without redundant experts, at the same capacity:")
            plain = dataclasses.replace(config, num_redundant_experts=0)
            results.append(train_and_evaluate(plain, mesh, text, held_out, options, console))

        losses = results[0].losses
        show_experts(console, results[0].history[-1]["tokens_per_expert"], group.size)
        names = [f"{config.num_redundant_experts} redundant experts", "none"] if options.balance else [""]
        table = Table("", *names, show_header=options.balance)
        table.add_row(
            "loss, first and last step (nats per byte)",
            *(f"{result.losses[0]:.3f} → {result.losses[-1]:.3f}" for result in results),
        )
        table.add_row(
            "held-out bits per byte, before and after",
            *(f"{result.before:.3f} → {result.after:.3f}" for result in results),
        )
        table.add_row("rows dropped in the last step", *(str(result.dropped[-1]) for result in results))
        table.add_row("rows dropped in all steps", *(str(sum(result.dropped)) for result in results))
        agree = True
        if info.reason:
            table.add_row("'ffi' was not compared with 'xla'", info.reason)
        else:
            other = "xla" if implementation == "ffi" else "ffi"
            steps = min(COMPARED_STEPS, options.steps)
            console.print(f"repeating the first {steps} steps with {other!r}")
            twin = Trainer(make_config(options, group, other), mesh, options.steps, options.seed)
            batches = data.batches(text, sequences, config.window, options.seed)
            twin_losses = [float(twin.step(next(batches))["loss"]) for _ in range(steps)]
            difference = max(abs(a - b) for a, b in zip(losses, twin_losses, strict=False))
            agree = difference < (AGREEMENT_IN_FP8 if options.fp8 else AGREEMENT[ranks_of(group).platform])
            table.add_row(
                f"first {steps} losses, {implementation!r} against {other!r}",
                f"{'agree' if agree else 'DISAGREE'}, largest difference {difference:.1e}",
            )
        console.print(table)
    return 0 if agree else 1


def train(trainer: Trainer, batches: Iterator[np.ndarray], steps: int, console: Console) -> list[dict]:
    """Trains for a number of steps, and returns the metrics of every step.

    Shows a progress bar on a terminal. Elsewhere it prints a line every 20 steps.
    """
    history: list[dict] = []
    tokens = SEQUENCES * trainer.config.group.size * trainer.config.window
    bar = Progress(
        TextColumn("step {task.completed}/{task.total}"),
        BarColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task("compiling", total=steps)
        begin = time.perf_counter()
        for step in range(steps):
            history.append(trainer.step(next(batches)))
            if step == 0:
                begin = time.perf_counter()  # the first step compiled the program
            seconds = time.perf_counter() - begin
            speed = f"{step * tokens / seconds:,.0f} tokens/s  " if step else ""
            loads = history[-1]["tokens_per_expert"]
            line = (
                f"loss {history[-1]['loss']:.3f}  {speed}"
                f"experts {loads.min()}-{loads.max()}  dropped {int(history[-1]['dropped'])}"
            )
            bar.update(task, advance=1, description=line)
            if not console.is_terminal and (step % 20 == 0 or step == steps - 1):
                console.print(f"step {step + 1}/{steps}  {line}")
    return history


def show_experts(console: Console, tokens: np.ndarray, devices: int) -> None:
    """Prints the number of tokens per expert as bars, one line per device."""
    console.print("tokens per expert in the last step, all layers, by device:")
    per_device = len(tokens) // devices
    scale = (
        24
        * per_device
        / max(1, max(int(tokens[i : i + per_device].sum()) for i in range(0, len(tokens), per_device)))
    )
    for device in range(devices):
        counts = tokens[device * per_device : (device + 1) * per_device]
        bars = "".join(
            shade * round(count * scale / per_device) for shade, count in zip(itertools.cycle("█▓"), counts)
        )
        console.print(f"  {device:3d} {bars} {' + '.join(map(str, counts))}", highlight=False)
