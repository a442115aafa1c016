"""Ops of more ranks than there are GPUs: `python tests/support/many_gpu_ranks.py RANKS`.

Each rank is a process (many_gpu_ranks_worker.py). Several share a GPU, so this shows what the ops do and not
how fast they are.
"""

import os
import pathlib
import subprocess
import sys
import tempfile
import time

from jax_ep.bench.processes import visible_gpus
from jax_ep.command.options import free_address

WORKER = pathlib.Path(__file__).with_name("many_gpu_ranks_worker.py")
LIMIT_S = 280


def main(ranks: int) -> int:
    """Returns 0 if every rank says that it is done, except the one that ends in the middle."""
    gpus, address = visible_gpus(), free_address()
    # Besides JAX's memory each process needs about half a gigabyte.
    shared = {
        "JAX_PLATFORMS": "cuda",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.5 / -(-ranks // len(gpus)):.4f}",
        "XLA_FLAGS": "--xla_gpu_autotune_level=0 --xla_gpu_force_compilation_parallelism=1",
    }
    with tempfile.TemporaryDirectory() as folder:
        logs, workers = [pathlib.Path(folder) / str(rank) for rank in range(ranks)], []
        for rank, log in enumerate(logs):
            command = [sys.executable, str(WORKER), address, str(ranks), str(rank)]
            environment = os.environ | shared | {"CUDA_VISIBLE_DEVICES": gpus[rank % len(gpus)]}
            with log.open("w") as output:
                workers.append(
                    subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
                )
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline and any(worker.poll() is None for worker in workers):
            if any(worker.poll() for worker in workers):
                time.sleep(5)  # the others may be about to say why, too
                break
            time.sleep(0.2)
        for worker in workers:
            worker.kill()  # jax.distributed catches SIGTERM
            worker.wait()
        failed = [rank for rank, worker in enumerate(workers) if worker.returncode != 0]
        for rank in failed[:3]:
            print(
                f"--- rank {rank}, exit status {workers[rank].returncode}:\n{logs[rank].read_text()[-4000:]}"
            )
        if 0 not in failed:
            print(logs[0].read_text())
    print(f"{ranks} ranks on {len(gpus)} GPUs: {ranks - len(failed)} as they should", flush=True)
    return min(len(failed), 1)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
