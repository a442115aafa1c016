"""Times of dispatch and combine on the GPUs of this host, beside what JAX itself has.

    python benchmarks/gpu.py [--shape deepseek_v3] [--order rank] [--peers] [--processes 4]

Kernel times are from JAX's profiler, the slowest rank's median. Of the peers, whose ops are many kernels,
it is the wall time of a program of many round trips, over their number. Logical GB/s count every received
row, wire GB/s only those from other ranks.
"""

import argparse
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import peers
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from shapes import SHAPES, Shape

import jax_ep

STEPS = 16  # ops of each kind in one program
PARTS = {"layout": "LayoutKernel", "count": "CountKernel", "move": "MoveKernel", "combine": "CombineKernel"}
PEERS = {"ragged_all_to_all": peers.ragged_all_to_all, "all_gather + psum_scatter": peers.all_gather}


def kernel_us(folder: str) -> dict[str, dict[str, list[float]]]:
    """Part -> device -> durations in microseconds, from the profile in a folder."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        if "GPU" not in plane.name:
            continue
        for line in plane.lines:
            for event in line.events:
                for part, kernel in PARTS.items():
                    if kernel in event.name:
                        found[part][plane.name].append(event.duration_ns / 1e3)
    return found


def repeat(mesh: jax.sharding.Mesh, round_trip: Callable) -> Callable:
    """STEPS round trips x -> x in one program; each takes the result of the one before."""

    def shard(x: jax.Array, ids: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, _: (round_trip(x, ids), None), x, None, length=STEPS, unroll=STEPS)[0]

    return jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False))


def kernel_times(run: Callable, *arguments: jax.Array) -> dict[str, float]:
    """Part -> microseconds: the median of each device, then the slowest."""
    for _ in range(2):
        jax.block_until_ready(run(*arguments))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run(*arguments))
        found = kernel_us(folder)
    return {part: max(statistics.median(times) for times in by.values()) for part, by in found.items()}


def wall_us(run: Callable, *arguments: jax.Array) -> float:
    """Microseconds of one of STEPS round trips."""
    times = []
    for _ in range(4):
        begin = time.perf_counter()
        jax.block_until_ready(run(*arguments))
        times.append(1e6 * (time.perf_counter() - begin) / STEPS)
    return statistics.median(times[1:])  # the first call compiles


def bytes_received(shape: Shape, ids: np.ndarray, size: int, order: str) -> tuple[int, int]:
    """Of the rank that receives most: all its rows', and those from other ranks."""
    ranks = ids // (shape.experts // size)
    sources = np.repeat(np.arange(size), shape.tokens)
    hits = [ranks == rank for rank in range(size)]
    sent = np.stack([hit.any(axis=1) if order == "rank" else hit.sum(axis=1) for hit in hits])
    remote = max(sent[rank][sources != rank].sum() for rank in range(size))
    return int(sent.sum(axis=1).max()) * shape.hidden * 2, int(remote) * shape.hidden * 2


def slowest_anywhere(us: dict[str, float]) -> dict[str, float]:
    """Each part's time in the slowest process."""
    times = multihost_utils.process_allgather(np.array([us[part] for part in sorted(us)], np.float32))
    worst = np.asarray(times).reshape(-1, len(us)).max(axis=0)
    return dict(zip(sorted(us), map(float, worst), strict=True))


def run_in_processes(count: int) -> int:
    """Runs the program once in each of several processes that share the GPUs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    workers = [
        subprocess.Popen([sys.executable, *sys.argv, "--join", address, str(process)])
        for process in range(count)
    ]
    try:
        return max(worker.wait(timeout=600) for worker in workers)
    finally:
        for worker in workers:
            worker.kill()  # jax.distributed catches SIGTERM


def join_processes(count: int, address: str, process: int) -> None:
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    each = len(listed.splitlines()) // count
    mine = list(range(process * each, (process + 1) * each))
    jax.distributed.initialize(address, count, process, local_device_ids=mine)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="deepseek_v3")
    parser.add_argument("--order", choices=["rank", "expert"], default="rank")
    parser.add_argument("--peers", action="store_true", help="time JAX's own collectives too")
    parser.add_argument("--processes", type=int, default=1, help="that share the GPUs (default: %(default)s)")
    parser.add_argument("--join", nargs=2, metavar=("ADDRESS", "PROCESS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.join:
        join_processes(options.processes, options.join[0], int(options.join[1]))
    elif options.processes > 1:
        return run_in_processes(options.processes)
    order: Any = options.order
    shape = SHAPES[options.shape]
    mesh = jax.make_mesh((len(jax.devices()),), ("ep",), axis_types=(AxisType.Auto,))
    group = jax_ep.Group(mesh, "ep")
    rng = np.random.default_rng(0)
    tokens = group.size * shape.tokens
    ids = np.argsort(rng.random((tokens, shape.experts)), axis=1)[:, : shape.top_k].astype(np.int32)
    rows = rng.standard_normal((tokens, shape.hidden), np.float32).astype(jnp.bfloat16)
    sharding = NamedSharding(mesh, P("ep"))
    arguments = [
        jax.make_array_from_callback(array.shape, sharding, lambda index, array=array: array[index])
        for array in (rows, ids)
    ]

    def round_trip(x: jax.Array, ids: jax.Array) -> jax.Array:
        sent = jax_ep.dispatch(x, ids, group=group, num_experts=shape.experts, order=order)
        return jax_ep.combine(sent.x, sent.handle, group=group)

    def layout(ids: jax.Array) -> Any:
        return jax_ep.get_dispatch_layout(ids, num_experts=shape.experts, num_ranks=group.size)

    run = repeat(mesh, round_trip)
    us = kernel_times(run, *arguments)
    us |= kernel_times(jax.jit(layout), jax.device_put(ids[: shape.tokens], jax.local_devices()[0]))
    us = slowest_anywhere(us)
    end_to_end = wall_us(run, *arguments) / 2
    peer_us = {}
    for name, make in PEERS.items() if options.peers else ():
        dispatch, combine = make(shape, group.size)
        peer = repeat(mesh, lambda x, ids, d=dispatch, c=combine: c(*d(x, ids)))
        peer_us[name] = wall_us(peer, *arguments) / 2
    if jax.process_index() != 0:
        return 0
    received, remote = bytes_received(shape, ids, group.size, order)
    print(
        f"{options.shape}, order {order}, {group.size} x {jax.devices()[0].device_kind} in "
        f"{jax.process_count()} process(es), jax {jax.__version__}"
    )

    def show(name: str, time: float, note: str) -> None:
        print(
            f"{name:26s} {time:9.1f} us  logical {received / time / 1e3:6.1f} GB/s  "
            f"wire {remote / time / 1e3:6.1f} GB/s  {note}"
        )

    show("dispatch", us["count"] + us["move"], f"(count {us['count']:.1f} us, move {us['move']:.1f} us)")
    show("combine", us["combine"], "")
    print(f"{'layout alone':26s} {us['layout']:9.1f} us")
    for name, time_us in {"both, end to end": end_to_end, **peer_us}.items():
        show(name, time_us, "(half of a round trip)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
