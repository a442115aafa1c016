"""The command line: `python -m jax_ep demo | info`."""

import argparse
import sys

from jax_ep import _info
from jax_ep.demo import arguments


def run_demo(options: argparse.Namespace) -> int:
    try:
        # The devices must be set up before anything asks JAX for them.
        arguments.set_up_devices(options)
        from jax_ep.demo import train
    except ModuleNotFoundError as error:
        print(f"The demo needs {error.name}: pip install 'jax_ep[demo]'", file=sys.stderr)
        return 1
    return train.run(options)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m jax_ep", description="Expert parallelism for JAX.")
    commands = parser.add_subparsers(required=True)
    demo = commands.add_parser("demo", help="train a small Mixture-of-Experts language model")
    arguments.add_to(demo)
    demo.set_defaults(run=run_demo)
    info = commands.add_parser("info", help="show versions, devices and what the ops will run on")
    info.add_argument("--json", action="store_true", help="as JSON")
    info.set_defaults(run=lambda options: _info.run(options.json))
    options = parser.parse_args(argv)
    return options.run(options)


if __name__ == "__main__":
    sys.exit(main())
