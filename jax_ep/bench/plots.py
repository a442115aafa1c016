"""Plots of the benchmark's results."""

import math
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from jax_ep.bench.decode import DecodeStep
from jax_ep.bench.layers import Span, Timeline
from jax_ep.bench.measure import KINDS
from jax_ep.bench.model import ModelStep
from jax_ep.bench.products import DIRECTIONS, ExpertProduct
from jax_ep.bench.report import Result, by_shape
from jax_ep.bench.skew import SkewedLayer

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot(path: Path, results: list[Result], swept: str) -> None:
    """Plots the time over the swept quantity: a line for each shape, order and implementation.

    One more line shows plain copies of the same rows.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    lines: dict[str, dict[int, float]] = defaultdict(dict)
    for r in results:
        x = {"ranks": r.ranks, "sms": r.sms or r.num_sms}.get(swept) or getattr(r.shape, swept, 0)
        label = f"{r.name}, {r.by}" + (f", by {r.order}" if r.order else "")
        lines[label][x] = r.us
        if r.by == "ffi" and r.ceiling_gbs is not None:
            # The minimum over the orders, because some orders copy more bytes than others.
            copies = lines[f"{r.name}, plain copies of the same rows"]
            us = r.bound_bytes / r.ceiling_gbs / 1e3
            copies[x] = min(us, copies.get(x, us))
    for label, points in lines.items():
        style = "k:" if "plain copies" in label else "o-"
        axes.plot(*zip(*sorted(points.items()), strict=True), style, label=label)
    axes.set(xscale="log", yscale="log", xlabel={"tokens": "tokens a rank", "sms": "SMs"}.get(swept, swept))
    axes.set_ylabel("microseconds a round trip")
    axes.yaxis.set_major_formatter("{x:g}")  # without exponents, which are too small to read on a phone
    ticks = sorted({x for points in lines.values() for x in points})
    axes.set_xticks(ticks, _labels(ticks))
    axes.set_xticks([], minor=True)
    axes.set_title(_title(results, swept), fontsize="medium")
    axes.grid(True, which="both", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2)  # so that it hides no line
    _save(figure, path)


def plot_skew(path: Path, results: list[SkewedLayer]) -> None:
    """Plots the fullest rank's rows and the time of the last op, the layer, by routing: two axes a shape.

    A bar is a number of redundant experts and a capacity. Without redundant experts it shows the rows before
    the balance.
    """
    from matplotlib.figure import Figure

    shapes = by_shape(results)
    figure = Figure(figsize=(max(8, 6 * len(shapes)), 7), layout="constrained")
    grid = figure.subplots(2, len(shapes), squeeze=False)
    for column, ((name, shape), layers) in enumerate(shapes.items()):
        routings = list(dict.fromkeys(r.routing for r in layers))
        bars = list(dict.fromkeys((r.num_redundant_experts, r.capacity) for r in layers))
        op, width = list(layers[0].times)[-1], 0.8 / len(bars)
        for r in layers:
            bar = bars.index((r.num_redundant_experts, r.capacity))
            x = routings.index(r.routing) + (bar - (len(bars) - 1) / 2) * width
            label = f"S = {r.num_redundant_experts}, buffers {r.capacity_ratio:.2f} x"
            label = label if r.routing == routings[0] else "_"  # because a legend skips such labels
            milliseconds = r.times[op].us / 1e3
            for axes, height in zip(grid[:, column], (r.after, milliseconds), strict=True):
                axes.bar(x, height, width, color=f"C{bar}", label=label)
        for axes, quantity in zip(
            grid[:, column],
            ("fullest rank's rows, relative to the mean", f"milliseconds, {op}"),
            strict=True,
        ):
            axes.set_xticks(range(len(routings)), routings)
            axes.set_ylabel(quantity)
            axes.grid(True, axis="y", alpha=0.3)
        grid[0, column].axhline(1, color="black", linestyle=":")
        title = f"{name}: {shape.tokens} tokens a rank, top-{shape.top_k} of {shape.experts}"
        grid[0, column].set_title(f"{title}, {layers[0].ranks} ranks", fontsize="medium")
        below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.1)}
        grid[1, column].legend(ncols=2, **below)
    _save(figure, path)


def plot_products(path: Path, results: list[ExpertProduct]) -> None:
    """Plots the share of each product by shape: a column for each dtype, a bar for each direction.

    The upper axes compare with dense products in bfloat16. The lower axes are for few rows, and compare with
    the rate of the memory. A line across a bar is DeepGEMM's share.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    grouped = [r for r in results if r.by != "dense"]
    dtypes = list(dict.fromkeys(r.dtype for r in grouped))
    references = {
        "share of the dense bfloat16 product": [r for r in grouped if r.dense_us is not None],
        "few rows: share of the memory's rate": [r for r in grouped if r.dense_us is None],
    }
    references = {reference: rows for reference, rows in references.items() if rows}
    cases = {reference: list(dict.fromkeys(map(_case, rows))) for reference, rows in references.items()}
    counts = [len(names) for names in cases.values()]
    figure = Figure(figsize=(7, 1.6 + 0.65 * sum(counts)), layout="constrained")
    grid = figure.subplots(
        len(references), len(dtypes), squeeze=False, sharex="col", sharey="row", height_ratios=counts
    )
    width = 0.8 / len(DIRECTIONS)
    for axes_row, (reference, rows) in zip(grid, references.items(), strict=True):
        names = cases[reference]
        for r in rows:
            axes = axes_row[dtypes.index(r.dtype)]
            bar = DIRECTIONS.index(r.direction)
            y = names.index(_case(r)) + (bar - (len(DIRECTIONS) - 1) / 2) * width
            if r.by == "grouped_dot":
                axes.barh(y, 100 * r.share, width, color=f"C{bar}")
            else:
                axes.plot([100 * r.share] * 2, [y - width / 2, y + width / 2], color="black")
        for axes, dtype in zip(axes_row, dtypes, strict=True):
            axes.axvline(100, color="black", linestyle=":")
            axes.set_title(dtype, fontsize="medium")
            axes.set_xlabel("%")
            axes.tick_params(labelbottom=True)
            axes.grid(True, axis="x", alpha=0.3)
        axes_row[0].set_yticks(range(len(names)), names)
        axes_row[0].invert_yaxis()
        axes_row[0].set_ylabel(reference)
    bars = [Patch(color=f"C{bar}", label=direction) for bar, direction in enumerate(DIRECTIONS)]
    has_peer = any(r.by == "DeepGEMM" for r in grouped)
    lines = [Line2D([], [], color="black", label="DeepGEMM")] if has_peer else []
    figure.legend(handles=[*bars, *lines], loc="outside lower center", ncols=2)
    _save(figure, path)


def plot_timelines(path: Path, timelines: list[Timeline]) -> None:
    """Plots the kernels of layers over time, a lane for each kind: in sequence above, overlapped below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.6 + 2.2 * len(timelines)), layout="constrained")
    grid = figure.subplots(2 * len(timelines), 1, squeeze=False, sharex=True)[:, 0]
    rows: list[tuple[str, list[Span]]] = []
    for t in timelines:
        rows += [(f"{t.label}, in sequence", t.sequence), (f"{t.label}, overlapped", t.overlapped)]
    kinds = [kind for kind in KINDS if any(kind == span[0] for _, spans in rows for span in spans)]
    for axes, (label, spans) in zip(grid, rows, strict=True):
        for lane, kind in enumerate(kinds):
            bars = [(begin / 1e3, (end - begin) / 1e3) for of, begin, end in spans if of == kind]
            axes.broken_barh(bars, (lane - 0.4, 0.8), color=f"C{lane}", linewidth=0)
        last = max(end for _, _, end in spans) / 1e3
        axes.axvline(last, color="black", linestyle=":")
        axes.set_yticks(range(len(kinds)), kinds)
        axes.invert_yaxis()
        axes.set_title(f"{label}: {last:.1f} ms", fontsize="medium", loc="left")
        axes.grid(True, axis="x", alpha=0.3)
    grid[-1].set_xlabel("milliseconds")
    _save(figure, path)


def plot_models(path: Path, results: list[ModelStep]) -> None:
    """Plots where the time of training steps goes: a bar for each step, its kernels by kind."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(r.name for r in results))
    figure = Figure(figsize=(8, 1.2 + 0.45 * len(results) + 0.3 * len(names)), layout="constrained")
    counts = [sum(r.name == name for r in results) for name in names]
    grid = figure.subplots(len(names), 1, squeeze=False, height_ratios=counts)[:, 0]
    kinds = [kind for kind in (*KINDS, "all") if any(kind in r.kinds_us for r in results)]
    for axes, name in zip(grid, names, strict=True):
        steps = [r for r in results if r.name == name]
        begins = [0.0] * len(steps)
        for number, kind in enumerate(kinds):
            widths = [r.kinds_us.get(kind, 0.0) / 1e3 for r in steps]
            label = kind if name == names[0] else "_"
            axes.barh(range(len(steps)), widths, left=begins, color=f"C{number}", label=label)
            begins = [begin + width for begin, width in zip(begins, widths, strict=True)]
        axes.plot([r.us / 1e3 for r in steps], range(len(steps)), "k|", markersize=14, label="_")
        axes.set_yticks(range(len(steps)), [r.by for r in steps])
        axes.invert_yaxis()
        axes.set_title(f"{name}, {steps[0].layers} layers, {steps[0].ranks} devices", fontsize="medium")
        axes.grid(True, axis="x", alpha=0.3)
    grid[-1].set_xlabel("milliseconds of kernels; the line is the time end to end")
    figure.legend(loc="outside lower center", ncols=3)
    _save(figure, path)


def plot_decode(path: Path, results: list[DecodeStep]) -> None:
    """Plots the share of decode steps that take longer than a time: a row for each shape, a column a dtype.

    A color is a number of tokens. Dashed lines are programs of several steps, thin ones those of all_gather.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    names = list(dict.fromkeys(r.name for r in results))
    dtypes = list(dict.fromkeys(r.dtype for r in results))
    tokens = list(dict.fromkeys(r.shape.tokens for r in results))
    figure = Figure(figsize=(max(7, 4.5 * len(dtypes)), 1 + 3.2 * len(names)), layout="constrained")
    grid = figure.subplots(len(names), len(dtypes), squeeze=False, sharey=True)
    labels = {}
    for r in results:
        axes = grid[names.index(r.name), dtypes.index(r.dtype)]
        for latency in (r.single, r.several):
            shares = ((us, 100 - float(key)) for key, us in latency.percentiles_us.items())
            points = [(us, share) for us, share in shares if share * latency.calls >= 100]
            (line,) = axes.plot(
                *zip(*points, strict=True),
                color=f"C{tokens.index(r.shape.tokens)}",
                linestyle="-" if latency.steps == 1 else "--",
                linewidth=2 if r.by == "jax_ep" else 0.8,
            )
            steps = "1 step" if latency.steps == 1 else f"{latency.steps} steps"
            labels.setdefault(f"{r.shape.tokens} tokens a rank, {steps} a program, {r.by}", line)
        axes.set(xscale="log", yscale="log")
        title = f"{r.name}, {r.layers} layers, {r.ranks} ranks, {r.dtype}"
        axes.set_title(title, fontsize="medium")
        axes.set_xlabel("microseconds a step")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
        axes.yaxis.set_major_formatter("{x:g} %")
        axes.grid(True, which="both", alpha=0.3)
    for axes_row in grid:
        axes_row[0].set_ylabel("steps that take longer")
    figure.legend(labels.values(), labels, loc="outside lower center", ncols=2, fontsize="small")
    _save(figure, path)


def _case(r: ExpertProduct) -> str:
    """Returns a label of a shape and a matrix, on three lines."""
    return f"{r.name}\n{r.matrices}, {r.height} x {r.width}\n{r.rows // r.groups} rows a group"


def _save(figure: "Figure", path: Path) -> None:
    """Writes a figure. Text in an SVG file stays text, so that it can be searched and recolored."""
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(path)


def _labels(ticks: list[int]) -> list[str]:
    """Returns the ticks' labels. A label that would overlap the one before it is empty."""
    digit_width = 0.015  # as a fraction of the axis
    labels, last = [str(ticks[0])], ticks[0]
    for tick in ticks[1:]:
        gap = math.log(tick / last) / math.log(ticks[-1] / ticks[0])
        fits = gap > digit_width * (len(str(last)) + len(str(tick))) / 2
        labels.append(str(tick) if fits else "")
        last = tick if fits else last
    return labels


def _title(results: list[Result], swept: str) -> str:
    """Returns a title of the properties that all lines share, except the swept one."""
    facts = {
        "ranks": lambda r: f"{r.ranks} ranks",
        "tokens": lambda r: f"{r.shape.tokens} tokens a rank",
        "hidden": lambda r: f"{r.shape.hidden} wide",
        "experts": lambda r: f"top-{r.shape.top_k} of {r.shape.experts}",
        "routing": lambda r: f"bfloat16, {r.routing} routing",
    }
    values = [{fact(r) for r in results} for name, fact in facts.items() if name != swept]
    return ", ".join(next(iter(texts)) for texts in values if len(texts) == 1)
