"""The benchmark's runs: the choice of programs, shapes and devices, and their measurement."""

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

import jax_ep
from jax_ep.bench import (
    ceilings,
    decode,
    deep_gemm,
    layers,
    measure,
    model,
    plots,
    processes,
    products,
    programs,
    progress,
    report,
    skew,
)
from jax_ep.bench.arguments import CPU_CAPACITY, ORDERS
from jax_ep.bench.routings import bytes_received, capacity_of, domain_rows_of, route, rows_of_hops
from jax_ep.bench.shapes import MOST_PADDED_TOKENS, SHAPES, Shape
from jax_ep.bench.sms import bytes_of, sms_of

# Op -> how often its rows cross the links.
NUM_TRANSFERS = {
    "dispatch": 1,
    "dispatch FP8": 1,
    "combine": 1,
    "combine FP8": 1,
    "layout": 0,
    "permute": 0,
    "unpermute": 0,
    "round trip": 2,
    "chained pair": 2,
    "forward + backward": 4,
}
# Op -> its own kernels. The benchmark adds other kernels to the program to repeat these ops. The times of ops
# that are not listed include all kernels, such as the cast of a dispatch in FP8.
KERNELS = {
    "dispatch": ("CountKernel", "PushKernel"),
    "combine": ("PullKernel",),
    "combine FP8": ("PullKernel",),
    "layout": ("LayoutKernel",),
    "permute": ("CountKernel", "PushKernel"),
    "unpermute": ("UnpermuteKernel",),
}
SMS = (4, 8, 12, 16, 24, 32, 48, 64, 96, 128)


@dataclasses.dataclass(frozen=True)
class Case:
    """One program to time."""

    name: str
    shape: Shape
    ranks: int
    op: str
    order: str  # empty for ops without an order
    by: str
    num_sms: int | None
    per_domain: int | None = None  # ranks per domain; None: all ranks share one, and rows make one hop


def swept_shapes(shape: Shape, ranks: int, swept: str | None) -> Iterator[tuple[Shape, int]]:
    """Yields the shapes and numbers of ranks of a sweep, or only the given ones without a sweep."""
    if swept == "tokens":
        for tokens in (4**i for i in range(8)):
            if tokens <= 4 * shape.tokens:
                yield dataclasses.replace(shape, tokens=tokens), ranks
    elif swept == "ranks":
        yield from ((shape, count) for count in range(2, ranks + 1) if shape.experts % count == 0)
    elif swept == "experts":
        counts = (ranks * 2**i for i in range(8))
        yield from (
            (dataclasses.replace(shape, experts=count), ranks)
            for count in counts
            if shape.top_k <= count <= 512
        )
    else:
        yield shape, ranks


def on_gpus() -> bool:
    return jax.devices()[0].platform == "gpu"


def names_of(options: argparse.Namespace) -> list[str]:
    """Returns the names of the shapes to time."""
    return options.shapes or (["deepseek_v3", "deepseek_v3_decode"] if on_gpus() else ["cpu_256_tokens"])


def parts_of(options: argparse.Namespace) -> list[str]:
    """Returns the parts of the benchmark to run."""
    if options.sweep:
        return ["communication"]
    return options.parts or (["communication", "layer"] if on_gpus() else ["communication"])


def capacity_factor_of(options: argparse.Namespace) -> float | None:
    """Returns the capacity of communication relative to uniform routing, or None for the worst case."""
    if options.capacity is None:  # other routings would drop rows, which count as moved
        return CPU_CAPACITY if options.routing == "uniform" and not on_gpus() else None
    return options.capacity or None


def orders_of(options: argparse.Namespace, op: str, shape: Shape) -> list[str]:
    """Returns the orders in which to time an op."""
    if op in programs.ORDERLESS:
        return [""]
    if op in programs.IN_FP8 and shape.hidden % 128:  # rows of FP8 have a scale for each 128 elements
        return []
    # Padded experts are for decoding, with few tokens and without gradients.
    padded = shape.tokens <= MOST_PADDED_TOKENS and op != "forward + backward"
    return [order for order in options.orders or ORDERS if order != "expert_padded" or padded]


def cases(options: argparse.Namespace, ranks: int) -> Iterator[Case]:
    """Yields the programs to time."""
    on_gpu = on_gpus()
    ops = ["round trip"] if options.sweep else programs.OPS
    for name in names_of(options):
        for shape, count in swept_shapes(SHAPES[name], ranks, options.sweep):
            for op in ops:
                implementations = ["ffi", "xla"] if options.peers and op == "round trip" else ["ffi"]
                for order in orders_of(options, op, shape):
                    for sms in SMS if options.sweep == "sms" else [options.num_sms]:
                        yield from (Case(name, shape, count, op, order, by, sms) for by in implementations)
                    for per_domain in options.ranks_per_domain if order else ():
                        yield Case(name, shape, count, op, order, "ffi", options.num_sms, per_domain)
            # XLA:CPU has no ragged_all_to_all.
            peers = [peer for peer in programs.PEERS if on_gpu or peer != "ragged_all_to_all"]
            for peer in peers if options.peers else ():
                yield Case(name, shape, count, "round trip", "", peer, None)


def shard(array: Any, mesh: jax.sharding.Mesh) -> jax.Array:
    """Returns an array that is sharded over the ranks along its first axis."""
    sharding = NamedSharding(mesh, P("ep"))
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def inputs(shape: Shape, ids: np.ndarray, mesh: jax.sharding.Mesh) -> Any:
    """Returns x, ids and weights, sharded over the ranks."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((len(ids), shape.hidden), np.float32).astype(jax.numpy.bfloat16)
    weights = rng.random(ids.shape, np.float32)
    return shard(x, mesh), shard(ids, mesh), shard(weights, mesh)


def mesh_of(ranks: int) -> jax.sharding.Mesh:
    return jax.make_mesh((ranks,), ("ep",), (AxisType.Auto,), devices=jax.devices()[:ranks])


def time_case(case: Case, options: argparse.Namespace, rates: dict[str, float | None]) -> report.Result:
    """Times one program. `rates` holds the GB/s of plain copies over the links and in memory."""
    on_gpu = on_gpus()
    steps = programs.LAYERS if case.op == "chained pair" else 16 if on_gpu else 4
    mesh = mesh_of(case.ranks)
    ids = route(options.routing, case.shape, case.ranks)
    arguments = inputs(case.shape, ids, mesh)
    factor = capacity_factor_of(options)
    capacity = capacity_of(factor, case.shape, case.ranks, case.order or "rank")
    domains = case.ranks // (case.per_domain or case.ranks)
    domain_rows = domain_rows_of(factor, case.shape, domains)
    with jax_ep.Group(mesh, "ep", ranks_per_domain=case.per_domain, num_sms=case.num_sms) as group:
        if case.by in programs.PEERS:
            prepare = programs.of_peer(case.by, group, case.shape)
        else:
            rows = (capacity, domains * domain_rows)
            by: Any = case.by  # "ffi" or "xla"
            prepare = programs.of_ours(case.op, case.order, group, case.shape, by, rows)
        run = programs.repeated(mesh, prepare, steps)
        end_to_end = measure.end_to_end_us(run, arguments, steps, options.repeats)
        one_hop = case.by == "ffi" and domains == 1
        names = KERNELS.get(case.op, ()) if one_hop else ()
        device = measure.kernels_us(run, arguments, steps, names) if on_gpu else None
        group.check()
        plan = (case.op, case.order, case.shape, case.ranks, capacity, case.num_sms)
        sms = sms_of(group, *plan) if one_hop else None
    received = bytes_received(ids, case.shape, case.ranks, case.order or "rank")
    logical, wire = (round(NUM_TRANSFERS[case.op] * bytes_of(case.op, size)) for size in received)
    ceiling, bound = rates["links"] if domains == 1 else None, wire
    if case.op in programs.LOCAL:
        logical = case.shape.tokens * (case.shape.top_k + 1) * case.shape.hidden * 2
        ceiling, bound = rates["memory"], logical
    if not on_gpu:  # the rows fit into caches, so copies of larger arrays bound nothing
        ceiling = None
    return report.Result(
        **{field.name: getattr(case, field.name) for field in dataclasses.fields(case)},
        routing=options.routing,
        capacity=capacity,
        sms=sms,
        device_us=processes.slowest(device),
        end_to_end_us=processes.slowest(end_to_end) or end_to_end,
        logical_bytes=logical,
        wire_bytes=wire,
        bound_bytes=bound,
        ceiling_gbs=ceiling,
        hops=hops_of(case, ids, domains, domain_rows) if domains > 1 else None,
    )


def hops_of(case: Case, ids: np.ndarray, domains: int, domain_rows: int) -> report.Hops:
    """Returns the bytes of each hop, for bfloat16 rows."""
    assert case.per_domain is not None
    between, within = rows_of_hops(ids, case.shape, case.ranks, case.per_domain)
    carried = (domains - 1) * domain_rows
    row_bytes = case.shape.hidden * 2
    transfers = NUM_TRANSFERS[case.op]
    sizes = (transfers * bytes_of(case.op, rows * row_bytes) for rows in (between, carried, within))
    return report.Hops(between / case.shape.tokens, *map(round, sizes))


def of_layer(name: str, ranks: int, options: argparse.Namespace) -> tuple[Any, ...]:
    """Returns the arguments of the benchmark of a shape's layer."""
    mesh, shape = mesh_of(ranks), SHAPES[name]
    arguments = inputs(shape, route(options.routing, shape, ranks), mesh)
    capacity = capacity_of(options.capacity or 1.25, shape, ranks, "expert")
    return name, shape, mesh, arguments, capacity, options


def time_products(
    name: str, ranks: int, options: argparse.Namespace, memory_gbs: float, notes: list[str]
) -> Iterator[products.ExpertProduct]:
    """Times the expert products of a shape, one by one. Appends the reasons of missing times to `notes`."""
    shape = SHAPES[name]
    measured = []
    for row in products.results(name, shape, ranks, options, memory_gbs):
        measured.append(row)
        yield row
    if options.peers and deep_gemm.missing() is None:
        sizes = products.group_sizes_of(options.routing, shape, ranks)
        rows, reason = products.of_deep_gemm(measured, sizes, options.repeats)
        notes += [] if reason is None else [reason]
        yield from rows


def time_skew(name: str, ranks: int, options: argparse.Namespace) -> Iterator[skew.SkewedLayer]:
    """Times the layer of a shape under skewed routings, with and without redundant experts, one by one."""
    mesh, shape = mesh_of(ranks), skew.shape_on(ranks, SHAPES[name])
    x, _, weights = inputs(shape, route("uniform", shape, ranks), mesh)
    ids_of = {routing: shard(route(routing, shape, ranks), mesh) for routing in options.skews}
    yield from skew.results(name, shape, mesh, x, weights, ids_of, options)


def models_of(options: argparse.Namespace) -> list[str]:
    """Returns the names of the models to train."""
    names = options.shapes or (["qwen3_30b_a3b"] if on_gpus() else ["tiny"])
    unknown = [name for name in names if name not in model.DECODERS]
    if unknown:
        raise SystemExit(f"bench: the part model has {', '.join(model.DECODERS)}, got {', '.join(unknown)}")
    return names


def time_models(ranks: int, options: argparse.Namespace, notes: list[str]) -> Iterator[model.ModelStep]:
    """Times training steps of all models, one by one. Appends the reasons of missing ways to `notes`."""
    names, ways = models_of(options), model.ways_of(options, on_gpus(), notes)
    for name in names:
        yield from model.results(name, mesh_of(ranks), ways, options, on_gpus())


def time_decode(ranks: int, options: argparse.Namespace) -> Iterator[decode.DecodeStep]:
    """Times decode steps of all shapes, one by one."""
    for name in options.shapes or (["deepseek_v3_decode"] if on_gpus() else ["tiny"]):
        yield from decode.results(name, SHAPES[name], mesh_of(ranks), options)


def run(options: argparse.Namespace) -> int:
    """Runs the benchmark, prints its results, and returns the exit status."""
    if options.from_json:
        expert_products, model_steps, decode_steps = report.read(options.from_json)
        if expert_products:
            plots.plot_products(options.plot, expert_products)
        elif model_steps:
            plots.plot_models(options.plot, model_steps)
        else:
            plots.plot_decode(options.plot, decode_steps)
        return 0
    width = None if sys.stdout.isatty() else 120 if on_gpus() else 80
    is_quiet = jax.process_index() > 0  # because all processes would print the same
    console = Console(quiet=is_quiet, width=width)
    devices = jax.devices()
    ranks = options.devices or len(devices)
    if jax.process_count() > 1 and (options.sweep == "ranks" or ranks < len(devices)):
        raise SystemExit("bench: several processes use all devices; leave out --devices and --sweep ranks")
    if ranks % options.fsdp != 0:
        raise SystemExit(f"bench: --fsdp must divide the {ranks} devices, got {options.fsdp}")
    if options.sweep == "sms" and not on_gpus():
        raise SystemExit("bench: --sweep sms needs GPUs")
    parts = parts_of(options)
    routing = "several routings" if parts == ["skew"] else f"{options.routing} routing"
    if set(parts) <= {"model", "decode"}:
        routing = "routing by the model"
    statistic = "fastest" if set(parts) <= {"products", "layer"} else "median"
    console.print(
        f"{ranks} x {devices[0].device_kind} in {jax.process_count()} process(es), jax {jax.__version__}, "
        f"bfloat16, {routing}, {statistic} of {options.repeats} runs"
    )
    if not on_gpus():
        console.print(
            "these ranks share one machine's cores and memory: compare these numbers with each other, not "
            "with those of GPUs"
        )
    if not (on_gpus() or options.shapes or options.parts or options.sweep):
        console.print(
            "left out by default on CPUs, so that this ends within a minute: shapes of models, more tokens "
            "(--shapes cpu), padded experts (--shapes tiny), and expert products and layers, which take "
            "several minutes (--parts layer)"
        )
    rates = {
        "links": ceilings.links(mesh_of(ranks), options.repeats),
        "memory": ceilings.memory(mesh_of(ranks), options.repeats),
    }
    for medium, rate in rates.items():
        if rate is not None:
            console.print(f"plain copies, {medium}: {rate:.3g} GB/s per device")
    record = report.Record(None if is_quiet else options.json)
    if "communication" in parts:
        factor = capacity_factor_of(options)
        console.print(
            "capacity: the worst case"
            if factor is None
            else f"capacity: {factor:g} times the rows of a uniform routing (--capacity 0: the worst case)"
        )
        todo = list(cases(options, ranks))
        timed = (time_case(case, options, rates) for case in todo)
        record.extend(record.results, progress.track("communication", timed, len(todo), quiet=is_quiet))
    report.show(console, record.results)
    report.show_hops(console, record.results)
    if "layer" in parts:
        timed = (row for name in names_of(options) for row in layers.results(*of_layer(name, ranks, options)))
        record.extend(record.layers, progress.track("layer", timed, None, quiet=is_quiet))
    report.show_layers(console, record.layers)
    if "products" in parts:
        notes: list[str] = []
        if options.peers and (package := deep_gemm.missing()):
            notes.append(
                f"DeepGEMM was not timed, because {package} is not installed; pip install torch sgl-deep-gemm"
            )
        rows = (
            row
            for name in names_of(options)
            for row in time_products(name, ranks, options, rates["memory"], notes)
        )
        record.extend(record.products, progress.track("products", rows, None, quiet=is_quiet))
        report.show_products(console, record.products)
        for note in notes:
            console.print(note, markup=False)
    if "skew" in parts and ranks == 1:
        console.print("skew on one device: the experts of one of eight ranks, and no row can move")
        local = skew.local_results(mesh_of(1), SHAPES["deepseek_v3"], options)
        record.extend(record.local, progress.track("one device", local, None, quiet=is_quiet))
    if "skew" in parts:
        skewed = (row for name in names_of(options) for row in time_skew(name, ranks, options))
        record.extend(record.skew, progress.track("skew", skewed, None, quiet=is_quiet))
    if "model" in parts:
        notes = []
        steps = time_models(ranks, options, notes)
        record.extend(record.models, progress.track("model", steps, None, quiet=is_quiet))
        for note in notes:
            console.print(note, markup=False)
    if "decode" in parts:
        steps = time_decode(ranks, options)
        record.extend(record.decode, progress.track("decode", steps, None, quiet=is_quiet))
    report.show_models(console, record.models)
    report.show_decode(console, record.decode)
    report.show_skew(console, record.skew)
    report.show_local(console, record.local)
    if is_quiet:
        return 0
    record.write(is_complete=True)
    if options.plot and options.sweep:
        plots.plot(options.plot, record.results, options.sweep)
    elif options.plot and "products" in parts:
        plots.plot_products(options.plot, record.products)
    elif options.plot and "layer" in parts:
        plots.plot_timelines(options.plot, layers.timelines(*of_layer(names_of(options)[0], ranks, options)))
    elif options.plot and "model" in parts:
        plots.plot_models(options.plot, record.models)
    elif options.plot and "decode" in parts:
        plots.plot_decode(options.plot, record.decode)
    elif options.plot:
        plots.plot_skew(options.plot, record.skew)
    return 0
