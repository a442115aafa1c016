"""Results of the benchmark, and their output as tables and JSON."""

import dataclasses
import datetime
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from jax_ep.bench.decode import DecodeStep, Latency
from jax_ep.bench.layers import Layer
from jax_ep.bench.model import ModelStep
from jax_ep.bench.products import ExpertProduct
from jax_ep.bench.shapes import Shape
from jax_ep.bench.skew import LocalOp, SkewedLayer
from jax_ep.command import info

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Hops:
    """Data that the rank with the most rows receives from other ranks in each of two hops."""

    copies: float  # rows from other domains, per token of a rank
    between_bytes: int  # of the rows from other domains
    carried_bytes: int  # of the blocks that hold these rows, including unused space
    within_bytes: int  # from other ranks of the domain


@dataclasses.dataclass(frozen=True)
class Result:
    """Measurement of one op.

    Times are in microseconds per step. Bytes are those of the rank that receives the most rows.
    """

    name: str
    shape: Shape
    ranks: int
    op: str
    order: str
    by: str
    num_sms: int | None  # as requested
    routing: str
    capacity: int | None  # None: the worst case
    sms: int | None  # as used by the kernels
    device_us: float | None
    end_to_end_us: float
    logical_bytes: int  # of all rows that the rank receives
    wire_bytes: int  # of the rows that must cross a link
    bound_bytes: int  # limited by the ceiling: on the links, or in memory for local ops
    ceiling_gbs: float | None  # None on CPUs
    per_domain: int | None  # ranks per domain, if rows make two hops
    hops: Hops | None

    @property
    def us(self) -> float:
        return self.device_us or self.end_to_end_us

    @property
    def label(self) -> str:
        """The program, and all that a sweep varies."""
        sizes = f"{self.shape.tokens} tokens, {self.shape.experts} experts, {self.ranks} ranks"
        sms = "" if self.num_sms is None else f", at most {self.num_sms} SMs"
        order = f" by {self.order}" if self.order else ""
        domains = "" if self.per_domain is None else f", {self.per_domain} ranks a domain"
        return f"{self.op}{order}, {self.by}{domains}, {self.name}, {sizes}{sms}"

    @property
    def share(self) -> float | None:
        """Share of the ceiling, which is the rate of plain copies."""
        if self.ceiling_gbs is None or self.bound_bytes == 0:
            return None
        return self.bound_bytes / self.us / 1e3 / self.ceiling_gbs


def _rate(size: int, us: float) -> str:
    return f"{size / us / 1e3:.3g}" if size else ""


def _print_table(
    console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], num_texts: int
) -> None:
    """Prints a table without its empty columns. The first `num_texts` hold text, the others numbers."""
    table = Table(title=title)
    filled = [index for index in range(len(columns)) if any(row[index] for row in rows)]
    for index in filled:
        table.add_column(columns[index], justify="left" if index < num_texts else "right")
    for row in rows:
        table.add_row(*(row[index] for index in filled))
    console.print(table)


def show(console: Console, results: list[Result]) -> None:
    """Prints a table for each shape. The GB/s use the device time if it is available."""
    tables: dict[str, list[list[str]]] = defaultdict(list)
    for r in results:
        title = (
            f"{r.name}: {r.shape.tokens} tokens x {r.shape.hidden}, top-{r.shape.top_k} of "
            f"{r.shape.experts}, {r.ranks} ranks"
        )
        tables[title].append(
            [
                r.op,
                r.order,
                r.by if r.hops is None else f"{r.by}, {r.per_domain} a domain",
                "" if r.sms is None else str(r.sms),
                "" if r.device_us is None else f"{r.device_us:.1f}",
                f"{r.end_to_end_us:.1f}",
                _rate(r.logical_bytes, r.us),
                "" if r.device_us is None else _rate(r.wire_bytes, r.us),  # CPUs have no links
                "" if r.share is None else f"{r.share:.0%}",
            ]
        )
    times = ("device\nus", "end to\nend us", "logical\nGB/s", "wire\nGB/s", "of the\nceiling")
    for title, rows in tables.items():
        _print_table(console, title, ("op", "order", "by", "SMs", *times), rows, 3)


def show_hops(console: Console, results: list[Result]) -> None:
    """Prints a table of the bytes of each hop, if any op made two hops."""
    table = Table("shape", "op", "order", title="two hops, MB of the rank that receives most")
    for column in ("ranks a domain", "us", "hop 1: copies a token", "needed", "carried", "hop 2"):
        table.add_column(column, justify="right")
    for r in results:
        if r.hops is None:
            continue
        sizes = (r.hops.between_bytes, r.hops.carried_bytes, r.hops.within_bytes)
        megabytes = [f"{size / 1e6:.4g}" for size in sizes]
        copies = f"{r.hops.copies:.2f}"
        table.add_row(r.name, r.op, r.order, str(r.per_domain), f"{r.us:.1f}", copies, *megabytes)
    if table.row_count:
        console.print(table)


def show_layers(console: Console, results: list[Layer]) -> None:
    """Prints a table of layers for each shape."""
    tables: dict[str, list[list[str]]] = defaultdict(list)
    for r in results:
        sizes = f"{r.shape.tokens} tokens a rank, {r.shape.experts} experts {r.shape.inner} wide"
        times = (f"{us / 1e3:.3g}" for us in (r.communication_us, r.sequence_us, r.us))
        alternative = "" if r.alternative_us is None else f"{r.alternative_us / 1e3:.3g}"
        megabytes = (f"{size / 1e6:.4g}" for size in (r.sequence_bytes, r.bytes))
        title = f"{r.name}: {sizes}, {r.ranks} ranks, capacity {r.capacity}; ms"
        tables[title].append([r.op, *times, f"{r.hidden:.0%}", alternative, *megabytes])
    columns = ("communication", "in sequence", "overlapped", "hidden", "all_gather", "MB", "MB overlapped")
    for title, rows in tables.items():
        _print_table(console, title, ("layer", *columns), rows, 1)
    if tables:
        console.print(
            "hidden: of the communication, by overlapping it with products. all_gather: all tokens on all "
            "ranks, with the same products (--peers). MB: temporary memory, in sequence and overlapped."
        )


def show_products(console: Console, results: list[ExpertProduct]) -> None:
    """Prints a table of expert products for each shape, with the times of the fastest bursts."""
    tables: dict[tuple[str, int], Table] = {}
    for r in sorted(results, key=lambda r: [one.op for one in results].index(r.op)):
        if (r.name, r.rows) not in tables:
            sizes = f"{r.rows} rows in {r.groups} groups of {r.smallest_group} to {r.largest_group}"
            table = Table("op", "M x N", "by", "dtype", title=f"{r.name}: {sizes}")
            reference = "dense bfloat16" if r.dense_us is not None else "memory, each matrix once"
            for column in ("us", "TFLOP/s", f"of {reference}"):
                table.add_column(column, justify="right")
            tables[r.name, r.rows] = table
        tables[r.name, r.rows].add_row(
            r.op,
            f"{r.height} x {r.width}",
            r.by,
            r.dtype,
            f"{r.us:.0f}",
            f"{r.tflops:.3g}",
            "" if r.by == "dense" else f"{r.share:.0%}",
        )
    for table in tables.values():
        console.print(table)


def show_skew(console: Console, results: list[SkewedLayer]) -> None:
    """Prints two tables for each shape: rows and memory, and times. Times are device times if available."""
    rows_columns = ("max/mean before", "after", "replicas", "moved", "dropped", "buffers", "temp MB")
    for (name, shape), layers in by_shape(results).items():
        timed_on = "device" if layers[0].times["round trip"].device_us else "end to end"
        ranks = layers[0].ranks
        sizes = f"{name}: {shape.tokens} tokens x {shape.hidden}, top-{shape.top_k} of {shape.experts}, "
        ops = list(max((layer.times for layer in layers), key=len))
        tables = [
            Table("routing", "S", title=f"{sizes}{ranks} ranks, rows under skew"),
            Table("routing", "S", title=f"{sizes}{ranks} ranks, {timed_on} us under skew"),
        ]
        for table, columns in zip(tables, (rows_columns, ("buffers", *ops)), strict=True):
            for column in columns:
                table.add_column(column, justify="right")
        for r in layers:
            case = (r.routing, str(r.num_redundant_experts))
            buffers = f"{r.capacity_ratio:.2f} x"
            counts = map(str, (r.replicas, r.moved_rows, r.dropped_rows))
            temp = "" if r.temp_bytes is None else f"{r.temp_bytes / 1e6:.4g}"
            tables[0].add_row(*case, f"{r.before:.2f}", f"{r.after:.2f}", *counts, buffers, temp)
            times = (f"{r.times[op].us:.1f}" if op in r.times else "" for op in ops)
            tables[1].add_row(*case, buffers, *times)
        for table in tables:
            console.print(table)


def by_shape(results: list[SkewedLayer]) -> dict[tuple[str, Shape], list[SkewedLayer]]:
    """Returns the layers of each shape, sorted by routing."""
    shapes: dict[tuple[str, Shape], list[SkewedLayer]] = defaultdict(list)
    for r in results:
        shapes[r.name, r.shape].append(r)
    for layers in shapes.values():
        routings = list(dict.fromkeys(layer.routing for layer in layers))
        layers.sort(key=lambda layer: routings.index(layer.routing))
    return shapes


def show_local(console: Console, results: list[LocalOp]) -> None:
    """Prints a table of the ops that one device ran by itself, if any."""
    rows = []
    for r in results:
        device = "" if r.time.device_us is None else f"{r.time.device_us:.1f}"
        share = "" if r.share is None else f"{r.share:.0%}"
        rows.append([r.op, r.by, device, f"{r.time.end_to_end_us:.1f}", _rate(r.bytes, r.time.us), share])
    if rows:
        columns = ("op", "by", "device us", "end to end us", "GB/s", "of the copy")
        _print_table(console, "one device", columns, rows, 2)


def show_models(console: Console, results: list[ModelStep]) -> None:
    """Prints a table of training steps for each model."""
    tables: dict[str, list[list[str]]] = defaultdict(list)
    for r in results:
        losses = (f"{loss:.4f}" for loss in (r.losses[0], r.losses[-1]))
        mfu = "" if r.mfu is None else f"{r.mfu:.0%}"
        speed = f"{r.us / 1e3:.1f}", f"{r.tokens_per_second:,.0f}", mfu
        sizes = f"{r.layers} layers, {r.tokens // r.ranks} tokens a device, {r.ranks} devices"
        sizes += f", fsdp {r.fsdp} x ep {r.ranks // r.fsdp}" if r.fsdp > 1 else ""
        tables[f"{r.name}: training step, {sizes}"].append(
            [r.by, *speed, f"{r.memory / 2**30:.1f}", str(r.num_dropped), *losses]
        )
    for title, rows in tables.items():
        last = f"loss {len(results[0].losses)}"
        columns = ("experts by", "ms", "tokens/s", "MFU", "GiB", "dropped", "loss 1", last)
        _print_table(console, title, columns, rows, 1)


def show_decode(console: Console, results: list[DecodeStep]) -> None:
    """Prints two tables of decode steps for each shape: microseconds a layer, and the latency of a step."""
    layer_tables: dict[str, list[list[str]]] = defaultdict(list)
    step_tables: dict[str, list[list[str]]] = defaultdict(list)
    for r in results:
        title = f"{r.name}: decode step of {r.layers} layers, top-{r.shape.top_k} of {r.shape.experts}, "
        title += f"{r.ranks} ranks"
        program = [str(r.shape.tokens), r.experts]
        times = (r.several.median_us, r.single.median_us, r.kernels_us, r.communication_us)
        cells = ("" if us is None else f"{us / r.layers:.1f}" for us in times)
        layer_tables[f"{title}; us a layer"].append([*program, *cells])
        for latency in (r.several, r.single):
            percentiles = (f"{latency.percentiles_us[key]:.0f}" for key in ("50", "99", "99.9", "100"))
            counts = (str(latency.steps), str(latency.calls))
            step_tables[f"{title}; us a step"].append([*program, *counts, *percentiles])
    for title, rows in layer_tables.items():
        steps = results[0].several.steps
        columns = (f"{steps} steps a\nprogram", "1 step a\nprogram", "kernels", "of these\ncommunication")
        _print_table(console, title, ("tokens\na rank", "experts by", *columns), rows, 2)
    for title, rows in step_tables.items():
        columns = ("steps a\nprogram", "calls", "p50", "p99", "p99.9", "max")
        _print_table(console, title, ("tokens\na rank", "experts by", *columns), rows, 2)
    for (name, ranks), r in {(r.name, r.ranks): r for r in results}.items():
        megabytes = 3 * r.shape.experts * r.shape.hidden * r.shape.inner * 2 / ranks / 1e6
        console.print(
            f"{name}: all layers have the same routed experts, {megabytes:.4g} MB a rank in bfloat16. If "
            "those that the tokens choose exceed the caches, each layer reads them from memory."
        )
    if results:
        console.print(
            "us a layer: the median step, with embedding and sampling, divided by its layers. The host waits "
            "for the tokens of each program. kernels: their sum on one device. us a step: the time of a "
            "program, divided by its steps. all_gather: all tokens on all ranks, with the same products "
            "(--peers)."
        )


class Record:
    """All measurements so far, written to a JSON file as soon as they are made, if there is a file.

    The file also holds versions and hardware, so that it can be compared with later ones. It can be read at
    any time. Its "complete" is true once the benchmark has ended.
    """

    def __init__(self, path: Path | None) -> None:
        self.results: list[Result] = []
        self.layers: list[Layer] = []
        self.products: list[ExpertProduct] = []
        self.skew: list[SkewedLayer] = []
        self.local: list[LocalOp] = []
        self.models: list[ModelStep] = []
        self.decode: list[DecodeStep] = []
        self._path = path
        self._header: dict[str, Any] = {}
        if path is not None:
            self._header = {"date": datetime.date.today().isoformat(), "environment": info.collect()}
            self.write(is_complete=False)

    def extend(self, measurements: list[T], new: Iterable[T]) -> None:
        """Appends new measurements to one of the lists, and writes the file after each of them."""
        for measurement in new:
            measurements.append(measurement)
            self.write(is_complete=False)

    def write(self, *, is_complete: bool) -> None:
        """Writes the file, if there is one. A reader sees the old or the new file, and never a part of it."""
        if self._path is None:
            return
        report = {
            **self._header,
            "complete": is_complete,
            "results": [dataclasses.asdict(result) for result in self.results],
            "layers": [dataclasses.asdict(result) for result in self.layers],
            "products": [dataclasses.asdict(result) for result in self.products],
            "skew": [dataclasses.asdict(result) for result in self.skew],
            "one device": [dataclasses.asdict(result) for result in self.local],
            "models": [dataclasses.asdict(result) for result in self.models],
            "decode": [dataclasses.asdict(result) for result in self.decode],
        }
        partial = self._path.with_name(f"{self._path.name}.partial")
        partial.write_text(json.dumps(report, indent=2) + "\n")
        os.replace(partial, self._path)


def read(path: Path) -> tuple[list[ExpertProduct], list[ModelStep], list[DecodeStep]]:
    """Returns the expert products, training steps and decode steps of a JSON file that `Record` wrote."""

    def with_shape(row: dict[str, Any]) -> dict[str, Any]:
        return row | {"shape": Shape(**row["shape"])}

    def with_latencies(row: dict[str, Any]) -> dict[str, Any]:
        return with_shape(row) | {key: Latency(**row[key]) for key in ("several", "single")}

    try:
        report = json.loads(path.read_text())
        found = (
            [ExpertProduct(**with_shape(row)) for row in report.get("products", [])],
            [ModelStep(**with_shape(row)) for row in report.get("models", [])],
            [DecodeStep(**with_latencies(row)) for row in report.get("decode", [])],
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        found = [], [], []
    if not any(found):
        raise SystemExit(
            "bench: --from-json needs a file with expert products, steps of models or decode steps, of this "
            f"version of the benchmark, got {path}; write one with --parts and --json"
        )
    return found
