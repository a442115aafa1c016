"""The command line: `python -m jax_ep demo | info | doctor | bench`."""

import argparse
import os
import sys

import jax_ep
from jax_ep.bench import arguments as bench_arguments
from jax_ep.command import doctor, info
from jax_ep.command.options import run_all
from jax_ep.demo import arguments as demo_arguments


def run_demo(options: argparse.Namespace) -> int:
    # JAX initializes its devices at their first use, so their number must be set before that.
    demo_arguments.set_up_devices(options)
    if options.processes > 1 and not options.join:
        return run_all([{}] * options.processes)
    from jax_ep.demo import train

    return train.run(options)


def run_bench(options: argparse.Namespace) -> int:
    bench_arguments.set_up_devices(options)
    from jax_ep.bench import processes, run

    if options.processes > 1 and not options.join:
        return processes.start(options.processes)
    return run.run(options)


def run_doctor(options: argparse.Namespace) -> int:
    if options.processes > 1 and not options.join:
        from jax_ep.bench import processes

        gpus = processes.visible_gpus() if "cpu" not in os.environ.get("JAX_PLATFORMS", "") else []
        return processes.start(options.processes) if gpus else run_all([{}] * options.processes)
    doctor.set_up_devices(options)
    return doctor.run()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m jax_ep", description="Expert parallelism for JAX.")
    parser.add_argument("--version", action="version", version=f"jax_ep {jax_ep.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="train a small Mixture-of-Experts language model")
    demo_arguments.add_to(demo)
    demo.set_defaults(run=run_demo)
    info_command = commands.add_parser("info", help="show versions, devices and the ops' implementation")
    info_command.add_argument("--json", action="store_true", help="as JSON")
    info_command.set_defaults(run=lambda options: info.run(options.json))
    check = commands.add_parser("doctor", help="check the installation and the devices, and try each op")
    doctor.add_to(check)
    check.set_defaults(run=run_doctor)
    bench = commands.add_parser("bench", help="time the ops on the available devices")
    bench_arguments.add_to(bench)
    bench.set_defaults(run=run_bench)
    options = parser.parse_args(argv)
    try:
        return options.run(options)
    except ModuleNotFoundError as error:
        install = f"pip install 'jax_ep[{options.command}]'"
        print(f"python -m jax_ep {options.command} needs {error.name}: {install}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
