"""The command line: `python -m jax_ep demo`."""

import argparse
import sys

from jax_ep.demo import arguments


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m jax_ep", description="Expert parallelism for JAX.")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="train a small Mixture-of-Experts language model")
    arguments.add_to(demo)
    options = parser.parse_args(argv)
    try:
        # The devices must be set up before anything asks JAX for them.
        arguments.set_up_devices(options)
        from jax_ep.demo import train
    except ModuleNotFoundError as error:
        print(f"The demo needs {error.name}: pip install 'jax_ep[demo]'", file=sys.stderr)
        return 1
    return train.run(options)


if __name__ == "__main__":
    sys.exit(main())
