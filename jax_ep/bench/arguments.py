"""Options of the benchmark."""

import argparse
from pathlib import Path

from jax_ep.bench.routings import ROUTINGS
from jax_ep.bench.shapes import MOST_PADDED_TOKENS, SHAPES
from jax_ep.command.options import join_others, output_file, set_up_virtual_devices

ORDERS = ("rank", "expert", "expert_padded")
PARTS = ("communication", "layer", "products", "skew", "model", "decode")
CPU_CAPACITY = 1.25  # because clearing the buffers of the worst case would take most of the time there
SWEPT = ("tokens", "ranks", "experts", "sms")


def add_to(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the benchmark to a parser."""
    parser.add_argument(
        "--shapes",
        nargs="+",
        choices=SHAPES,
        metavar="SHAPE",
        help="default: deepseek_v3 and deepseek_v3_decode on GPUs, and cpu_256_tokens elsewhere, which takes "
        f"less than a minute. All: {', '.join(SHAPES)}",
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        help="communication: dispatch, combine and their related ops; layer: a layer in sequence, and with "
        "communication beside its products; products: expert products alone on one device, in "
        "bfloat16 and FP8, next to dense ones of padded rows, in bursts after pauses; skew: layers with and "
        "without redundant experts under skewed routings; model: a training step of a decoder, of the shapes "
        "qwen3_30b_a3b, qwen3_moe_235b, deepseek_v3 and tiny, with as many layers as fit; decode: a decoding "
        "step of eight layers, one or several in a program, with 1, 16 and 128 tokens per rank, and "
        "percentiles of its latency over 2000 steps for each of --repeats, but at most 2 s (4 steps on CPUs) "
        "(default: communication and layer on GPUs, communication elsewhere)",
    )
    parser.add_argument(
        "--orders",
        nargs="+",
        choices=ORDERS,
        help=f"default: all, but expert_padded only for at most {MOST_PADDED_TOKENS} tokens per rank, "
        "because its buffers would not fit otherwise",
    )
    parser.add_argument(
        "--routing",
        choices=ROUTINGS,
        default="uniform",
        help="of all parts except skew, model and decode (default: %(default)s)",
    )
    parser.add_argument(
        "--skews",
        nargs="+",
        choices=ROUTINGS,
        default=ROUTINGS,
        metavar="ROUTING",
        help="routings of the part skew (default: all)",
    )
    parser.add_argument(
        "--redundant-experts",
        nargs="+",
        type=int,
        default=[1, 2, 4],
        metavar="S",
        help="redundant experts per rank in the part skew, at most its home experts (default: 1 2 4)",
    )
    parser.add_argument(
        "--peers",
        action="store_true",
        help="also time round trips, layers, models and decoding steps with JAX's own collectives, and in "
        "the part products those of DeepGEMM (pip install torch sgl-deep-gemm), and in the part model "
        "MaxText's layer if it is installed (docs/howto/maxtext.md)",
    )
    parser.add_argument(
        "--sweep", choices=SWEPT, help="vary one quantity of each shape, and time only round trips"
    )
    parser.add_argument(
        "--devices", type=int, help="number of ranks (default: all GPUs, or 8 virtual CPU devices)"
    )
    parser.add_argument(
        "--fsdp",
        type=int,
        default=1,
        metavar="F",
        help="in the part model, F groups of ranks with all experts each, whose parameters and optimizer "
        "state are divided among F devices (default: %(default)s)",
    )
    parser.add_argument(
        "--ways",
        nargs="+",
        metavar="WAY",
        help="in the part model, how the layer of experts is made, of 'jax_ep', 'jax_ep, FP8', 'jax_ep, "
        "redundant experts', 'all_gather', 'maxtext', and on GPUs 'ragged_all_to_all' (default: the first "
        "three, with --peers all of them)",
    )
    parser.add_argument(
        "--ranks-per-domain",
        nargs="+",
        type=int,
        default=[],
        metavar="N",
        help="also time the ops in two hops, as if each domain had N ranks, and show the bytes of each hop",
    )
    parser.add_argument(
        "--processes", type=int, default=1, help="processes that share the GPUs (default: %(default)s)"
    )
    parser.add_argument(
        "--capacity",
        type=float,
        metavar="FACTOR",
        help="capacity of a rank, and of the hop between domains, relative to the rows that arrive under "
        "uniform routing; 0: the worst case, which padded experts always have room for (default: "
        f"{CPU_CAPACITY} on CPUs with uniform routing, otherwise the worst case). In the part skew that of "
        "the layer that may drop rows, and in the parts layer and model (default, and with 0: 1.25). The "
        "part decode has room for all rows",
    )
    parser.add_argument(
        "--num-sms", type=int, help="maximum number of SMs of an op on GPUs (default: chosen from the shapes)"
    )
    parser.add_argument("--join", nargs=2, metavar=("ADDRESS", "PROCESS"), help=argparse.SUPPRESS)
    parser.add_argument("--repeats", type=int, default=5, help="runs of each program (default: %(default)s)")
    parser.add_argument(
        "--json",
        type=output_file(".json"),
        metavar="FILE",
        help="also write the results to this file, after each row",
    )
    parser.add_argument(
        "--plot",
        type=output_file(".png", ".svg", ".pdf"),
        metavar="FILE",
        help="draw the sweep, or the part layer (its kernels), products, skew, model or decode (its "
        "latency), to this file (.png, .svg or .pdf)",
    )
    parser.add_argument(
        "--from-json",
        type=Path,
        metavar="FILE",
        help="time nothing, and draw the part products, model or decode of this file, which --json wrote",
    )


def set_up_devices(options: argparse.Namespace) -> None:
    """Sets up the processes of `--processes`, or virtual CPU devices, which are used if there are no GPUs.

    Must be called before JAX initializes its devices.
    """
    drawn = {"layer", "products", "skew", "model", "decode"} & set(options.parts or ())
    if options.plot and not (options.sweep or options.from_json) and len(drawn) != 1:
        raise SystemExit(
            "bench: --plot draws a sweep, or one of the parts layer, products, skew, model and decode; "
            "choose the quantity to vary with --sweep, or pass --parts with one of them"
        )
    if options.from_json and not options.plot:
        raise SystemExit("bench: --from-json needs the file to draw to; pass --plot")
    if options.join:
        join_others(options)
        return
    set_up_virtual_devices(options.devices or 8)
