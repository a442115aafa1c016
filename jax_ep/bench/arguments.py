"""Options of the benchmark."""

import argparse

import jax

from jax_ep.bench.routings import ROUTINGS
from jax_ep.bench.shapes import MOST_PADDED_TOKENS, SHAPES
from jax_ep.command.options import output_file, set_up_virtual_devices

ORDERS = ("rank", "expert", "expert_padded")
PARTS = ("communication", "layer")
SWEPT = ("tokens", "ranks", "experts", "sms")


def add_to(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shapes",
        nargs="+",
        choices=SHAPES,
        help="default: deepseek_v3 and deepseek_v3_decode on GPUs, cpu elsewhere",
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        help="communication: dispatch, combine and what belongs to them; layer: expert products beside dense "
        "ones, and the whole layer beside its parts (default: both on GPUs, communication elsewhere)",
    )
    parser.add_argument(
        "--orders",
        nargs="+",
        choices=ORDERS,
        help=f"default: all; expert_padded with up to {MOST_PADDED_TOKENS} tokens a rank only, which is also "
        "the most that its buffers are made for",
    )
    parser.add_argument("--routing", choices=ROUTINGS, default="uniform", help="default: %(default)s")
    parser.add_argument(
        "--peers",
        action="store_true",
        help="time round trips by implementation='xla' and by JAX's own collectives too",
    )
    parser.add_argument(
        "--sweep", choices=SWEPT, help="vary one quantity of each shape, and time round trips only"
    )
    parser.add_argument("--devices", type=int, help="ranks (default: all GPUs, or 8 virtual CPU devices)")
    parser.add_argument(
        "--ranks-per-node",
        nargs="+",
        type=int,
        default=[],
        metavar="N",
        help="time the ops in two hops too, as if each host had N ranks, and show the bytes of each hop",
    )
    parser.add_argument("--processes", type=int, default=1, help="that share the GPUs (default: one)")
    parser.add_argument(
        "--capacity",
        type=float,
        metavar="FACTOR",
        help="of a receiver, relative to the rows it gets under uniform routing, also between hosts "
        "(default: the worst case, which padded experts always have)",
    )
    parser.add_argument("--num-sms", type=int, help="of an op on GPUs (default: chosen from the shapes)")
    parser.add_argument("--join", nargs=2, metavar=("ADDRESS", "PROCESS"), help=argparse.SUPPRESS)
    parser.add_argument("--repeats", type=int, default=5, help="runs of each program (default: %(default)s)")
    parser.add_argument(
        "--json", type=output_file(".json"), metavar="FILE", help="write the results there too"
    )
    parser.add_argument(
        "--plot",
        type=output_file(".png", ".svg", ".pdf"),
        metavar="FILE",
        help="draw a sweep there (.png, .svg or .pdf)",
    )


def set_up_devices(options: argparse.Namespace) -> None:
    """Where there are no GPUs, virtual CPU devices; to be called before anything asks JAX for devices."""
    if options.plot and not options.sweep:
        raise SystemExit("bench: --plot draws a sweep: say what to vary with --sweep")
    if options.join:
        address, process = options.join
        jax.distributed.initialize(address, options.processes, int(process))
        return
    set_up_virtual_devices(options.devices or 8)
