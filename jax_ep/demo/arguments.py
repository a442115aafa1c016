"""Options of the demo, and the set-up of its devices."""

import argparse
from pathlib import Path

import jax

from jax_ep.command.options import join_others, set_up_virtual_devices


def add_to(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the demo to a parser."""
    parser.add_argument("--steps", type=int, default=100, help="training steps (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="layers of the model (default: %(default)s)")
    parser.add_argument(
        "--experts", type=int, default=16, help="total number of experts (default: %(default)s)"
    )
    parser.add_argument("--top-k", type=int, default=2, help="experts per token (default: %(default)s)")
    parser.add_argument(
        "--capacity",
        type=float,
        default=1.5,
        help="maximum number of rows per device, as a multiple of the mean; 0 for the worst case, which "
        "drops nothing (default: %(default)s)",
    )
    parser.add_argument(
        "--balance",
        action="store_true",
        help="train with two redundant experts per device, and once more without them, at the same capacity",
    )
    parser.add_argument(
        "--quantize", action="store_true", help="send tokens to their experts as FP8 (default: as float32)"
    )
    parser.add_argument(
        "--fp8", action="store_true", help="send tokens as FP8, and also compute the experts' products in FP8"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the parameters and batches (default: %(default)s)"
    )
    parser.add_argument("--implementation", choices=["ffi", "xla"], help="default: chosen for the devices")
    parser.add_argument("--platform", choices=["cpu", "cuda"], default="cpu", help="default: %(default)s")
    parser.add_argument(
        "--devices", type=int, help="default: 8 virtual CPU devices, or all the GPUs of this host"
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=1,
        help="processes that share the virtual CPU devices, like hosts of a cluster (default: %(default)s)",
    )
    parser.add_argument("--join", nargs=2, metavar=("ADDRESS", "PROCESS"), help=argparse.SUPPRESS)
    parser.add_argument(
        "--text",
        type=Path,
        help="file or folder of files to train on (default: the sources of Python's standard library)",
    )


def set_up_devices(options: argparse.Namespace) -> None:
    """Sets up the devices and processes of the options. Must be called before JAX initializes its devices."""
    jax.config.update("jax_platforms", options.platform)
    if options.processes > 1 and options.platform == "cuda":
        raise SystemExit("demo: --processes needs virtual CPU devices; leave out --platform cuda")
    if options.platform == "cuda":
        options.devices = options.devices or len(jax.devices())
        return
    options.devices = options.devices or 8
    if options.devices % options.processes:
        raise SystemExit(
            f"demo: --processes must divide the {options.devices} devices, got {options.processes}"
        )
    set_up_virtual_devices(options.devices // options.processes)
    if options.join:
        join_others(options)
