"""One Mixture-of-Experts layer and its gradient over the devices of several processes.

    python examples/multi_process.py --start 4     # starts four processes, each with a share of the GPUs;
                                                   # with fewer than four GPUs, processes share a GPU;
                                                   # without GPUs, each has a share of 8 CPU devices
    srun --ntasks 4 --gpus-per-node 4 python examples/multi_process.py
    mpirun -n 4 python examples/multi_process.py --mpi

Only `jax.distributed` and the creation of arrays depend on the number of processes.
"""

import argparse
import itertools
import os
import re
import shutil
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep

EXPERTS, TOP_K, TOKENS, WIDTH, HIDDEN = 16, 2, 128, 128, 256
VIRTUAL = 8  # CPU devices, if the machine has no GPU


def shares(count: int) -> list[dict[str, str]]:
    """Returns the environment of each of `count` processes, which shows it only its own devices."""
    gpus = []
    if shutil.which("nvidia-smi") is not None:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
        every = [str(gpu) for gpu in range(len(re.findall(r"^GPU ", listed, re.M)))]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(every)).replace(" ", "").split(",")
        # CUDA ignores all names after the first invalid one, such as -1.
        gpus = list(
            itertools.takewhile(lambda gpu: gpu in every or gpu.startswith(("GPU-", "MIG-")), visible)
        )
    if not gpus:
        each = {
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(VIRTUAL // count),
            "NPROC": str(2 * VIRTUAL),
        }
        return [each] * count
    if count > len(gpus):
        # With this, NCCL 2.30 and newer accept several processes on one GPU. They divide its memory.
        part = 0.75 / -(-count // len(gpus))
        shared = {
            "NCCL_MULTI_RANK_GPU_ENABLE": "1",
            "NCCL_MAX_NCHANNELS": "2",  # otherwise each communicator takes a gigabyte of every process
            "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{part:.3f}",
        }
        return [shared | {"CUDA_VISIBLE_DEVICES": gpus[process % len(gpus)]} for process in range(count)]
    each = len(gpus) // count
    mine = [gpus[process * each : (process + 1) * each] for process in range(count)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(names)} for names in mine]


def start(count: int) -> int:
    """Runs the program in `count` processes, and prints the output of the first one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    workers = []
    for process, share in enumerate(shares(count)):
        command = [sys.executable, __file__, "--join", address, str(count), str(process)]
        output = subprocess.PIPE if process == 0 else subprocess.DEVNULL
        environment = os.environ | share | {"JAX_LOCAL_DEVICE_IDS": ""}  # all that it sees
        workers.append(subprocess.Popen(command, env=environment, stdout=output, text=True))
    for line in workers[0].stdout:
        if not line.startswith("[Gloo]"):  # Gloo prints its connections
            print(line, end="", flush=True)
    return max(worker.wait() for worker in workers)


def train_step() -> None:
    mesh = jax.make_mesh((jax.device_count(),), ("ep",), axis_types=(AxisType.Auto,))
    spread = NamedSharding(mesh, P("ep"))
    rng = np.random.default_rng(0)  # the same on every process; each uses its own part

    def array(*shape: int) -> jax.Array:
        whole = rng.standard_normal(shape, np.float32)
        return jax.make_array_from_callback(shape, spread, lambda index: whole[index])

    x = array(TOKENS * mesh.size, WIDTH)
    parameters = {"up": array(EXPERTS, WIDTH, HIDDEN) / 11, "down": array(EXPERTS, HIDDEN, WIDTH) / 16}
    router = jnp.asarray(rng.standard_normal((WIDTH, EXPERTS), np.float32))

    with jax_ep.Group(mesh, "ep") as group:

        def layer(parameters, x, router):
            weights, topk_idx = jax.lax.top_k(jax.nn.softmax(x @ router), TOP_K)

            def experts(sent):
                hidden = jax.nn.gelu(jax_ep.grouped_dot(sent.x, parameters["up"], sent.group_sizes))
                return jax_ep.grouped_dot(hidden, parameters["down"], sent.group_sizes)

            # The default buffers drop no rows. With a capacity, pass return_stats=True and watch num_dropped.
            return jax_ep.moe(x, topk_idx, weights, experts, group=group, num_experts=EXPERTS)

        mapped = jax.shard_map(layer, mesh=mesh, in_specs=(P("ep"), P("ep"), P()), out_specs=P("ep"))

        @jax.jit
        def step(parameters, x, router):
            loss = lambda parameters: jnp.mean((mapped(parameters, x, router) - x) ** 2)
            value, gradients = jax.value_and_grad(loss)(parameters)
            return value, jax.tree.map(lambda p, g: p - 100.0 * g, parameters, gradients)

        for i in range(5):
            value, parameters = step(parameters, x, np.asarray(router))
            if jax.process_index() == 0:
                print(f"step {i}: loss {float(value):.5f}", flush=True)
        group.check()
        if jax.process_index() == 0:
            info = group.info()
            print(f"{mesh.size} ranks in {jax.process_count()} processes: {info}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--start", type=int, metavar="N", help="start N processes on this host")
    parser.add_argument("--join", nargs=3, metavar=("ADDRESS", "N", "PROCESS"), help=argparse.SUPPRESS)
    parser.add_argument("--mpi", action="store_true", help="join the other processes of mpirun, by mpi4py")
    options = parser.parse_args()
    if options.start:
        return start(options.start)
    if options.join:
        address, count, process = options.join
        # With all devices that this process sees. In a job of Slurm, JAX would otherwise take only one.
        jax.distributed.initialize(address, int(count), int(process), cluster_detection_method="deactivate")
    else:
        jax.distributed.initialize(cluster_detection_method="mpi4py" if options.mpi else None)
    train_step()
    jax.distributed.shutdown()  # waits for the others, which still need the first process
    return 0


if __name__ == "__main__":
    sys.exit(main())
