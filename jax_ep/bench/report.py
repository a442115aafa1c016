"""Results as a table, as JSON and as a plot."""

import dataclasses
import datetime
import json
from collections import defaultdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jax_ep import _info
from jax_ep.bench.shapes import Shape


@dataclasses.dataclass(frozen=True)
class Result:
    """One op, timed. Times in microseconds a step; bytes of the rank that receives most."""

    name: str
    shape: Shape
    ranks: int
    op: str
    order: str
    routing: str
    by: str
    device_us: float | None
    end_to_end_us: float
    logical_bytes: int
    wire_bytes: int

    @property
    def us(self) -> float:
        return self.device_us or self.end_to_end_us


def _rate(size: int, us: float) -> str:
    return f"{size / us / 1e3:.1f}" if size else ""


def show(console: Console, results: list[Result]) -> None:
    """A table for each shape. GB/s are of the device time where there is one."""
    tables: dict[str, Table] = {}
    for r in results:
        title = (
            f"{r.name}: {r.shape.tokens} tokens x {r.shape.hidden}, top-{r.shape.top_k} of "
            f"{r.shape.experts}, {r.ranks} ranks"
        )
        if title not in tables:
            tables[title] = Table("op", "order", "by", title=title)
            for column in ("device us", "end to end us", "logical GB/s", "wire GB/s"):
                tables[title].add_column(column, justify="right")
        tables[title].add_row(
            r.op,
            r.order,
            r.by,
            "" if r.device_us is None else f"{r.device_us:.1f}",
            f"{r.end_to_end_us:.1f}",
            _rate(r.logical_bytes, r.us),
            _rate(r.wire_bytes, r.us),
        )
    for table in tables.values():
        console.print(table)


def write_json(path: Path, results: list[Result]) -> None:
    """With versions and hardware, so that the figures can be compared later."""
    report = {
        "date": datetime.date.today().isoformat(),
        "environment": _info.collect(),
        "results": [dataclasses.asdict(result) for result in results],
    }
    path.write_text(json.dumps(report, indent=2) + "\n")


def plot(path: Path, results: list[Result], swept: str) -> None:
    """Time against the swept quantity, a line for each shape, order and way."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    lines: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for r in results:
        x = r.ranks if swept == "ranks" else getattr(r.shape, swept)
        label = f"{r.name}, {r.by}" + (f", by {r.order}" if r.order else "")
        lines[label].append((x, r.us))
    for label, points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=label)
    axes.set(xscale="log", yscale="log", xlabel=f"{swept}{' a rank' if swept == 'tokens' else ''}")
    axes.set_ylabel("microseconds a round trip")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    figure.savefig(path)
