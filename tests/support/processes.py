"""The suite in several processes: `python tests/support/processes.py 4 [pytest arguments]` runs it in 4.

Every process runs the same tests in the same order. It owns its share of the host's GPUs, or one of them
together with other processes if there are more processes than GPUs. `join` is called by conftest.py in each;
it also makes what `jax.jit` returns whole on every process, so that the tests read results as they do in one.
"""

import functools
import os
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

ADDRESS, NUM, INDEX, GPUS = (
    f"JAX_EP_TEST_{name}" for name in ("COORDINATOR", "PROCESSES", "PROCESS", "GPUS")
)


def num_processes() -> int:
    return int(os.environ.get(NUM, "1"))


def own_gpus() -> list[int]:
    """The GPUs of this process, as it counts those that it sees."""
    return [int(gpu) for gpu in os.environ[GPUS].split(",")]


def join() -> None:
    """Joins the other processes that `main` has started; nothing if this one is alone."""
    if num_processes() == 1:
        return
    import jax

    process = int(os.environ[INDEX])
    jax.distributed.initialize(os.environ[ADDRESS], num_processes(), process, local_device_ids=own_gpus())
    original = jax.jit

    @functools.wraps(original)
    def jit(function: Any, **options: Any) -> Any:
        # JAX itself uses jax.jit, too, as to compare what the processes put on the devices.
        is_of_jax = getattr(function, "__module__", "").partition(".")[0] == "jax"
        return original(function, **options) if is_of_jax else _Whole(original, function, **options)

    jax.jit = jit  # pyright: ignore


class _Whole:
    """jax.jit, whose results are whole NumPy arrays, and whose local arguments may be jax.Arrays."""

    def __init__(self, jit: Any, function: Any, **options: Any):
        self._compiled = jit(function, **options)
        self._copy = jit
        functools.update_wrapper(self, function, updated=())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        import jax

        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((args, kwargs))):
            return self._compiled(*args, **kwargs)
        args, kwargs = jax.tree.map(self._local, (args, kwargs))
        return jax.tree.map(self._whole, self._compiled(*args, **kwargs))

    def _local(self, value: Any) -> Any:
        import jax
        import numpy as np

        is_key = isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
        if isinstance(value, jax.Array) and value.is_fully_addressable and not is_key:
            return np.asarray(value)
        return value

    def _whole(self, value: Any) -> Any:
        import jax
        import numpy as np
        from jax.sharding import NamedSharding, PartitionSpec

        if not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer):
            return value
        if value.is_fully_addressable:
            return value
        if not value.is_fully_replicated:
            everywhere = NamedSharding(value.sharding.mesh, PartitionSpec())  # pyright: ignore
            value = self._copy(lambda x: x, out_shardings=everywhere)(value)
        return np.asarray(value)


def run_all(
    commands: list[list[str]],
    environments: list[dict[str, str]],
    *,
    timeout: float,
    may_die: tuple[int, ...] = (),
) -> list[str]:
    """What the commands print, run at once.

    All must succeed but those that may die, which nobody waits for.
    """
    workers = [
        subprocess.Popen(
            command, env=os.environ | own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for command, own in zip(commands, environments, strict=True)
    ]
    outputs = [""] * len(workers)
    try:
        for process, worker in sorted(enumerate(workers), key=lambda one: one[0] in may_die):
            if process in may_die:
                worker.kill()  # it may stand still
            outputs[process] = worker.communicate(timeout=timeout)[0]
    finally:
        for worker in workers:
            worker.kill()  # jax.distributed catches SIGTERM
    for process, (worker, output) in enumerate(zip(workers, outputs, strict=True)):
        assert worker.returncode == 0 or process in may_die, f"process {process}:\n{output}"
    return outputs


def shares(processes: int, gpus: list[str]) -> list[dict[str, str]]:
    """The environment that gives each process its part of the GPUs, named as CUDA does.

    Several may get the same one (docs/multi_process.md: more ranks than GPUs).
    """
    each = len(gpus) // processes
    if each:
        lists = [range(process * each, (process + 1) * each) for process in range(processes)]
        return [{GPUS: ",".join(map(str, mine))} for mine in lists]
    # JAX's part of the memory is half of it: what NCCL takes for 8 processes, and their contexts, is 47 GB.
    shared = {
        GPUS: "0",  # the only one that it sees
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_MAX_NCHANNELS": "2",  # otherwise each communicator takes a gigabyte of every process
        "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.5 / -(-processes // len(gpus)):.3f}",
    }
    return [shared | {"CUDA_VISIBLE_DEVICES": gpus[process % len(gpus)]} for process in range(processes)]


def main(processes: int, arguments: list[str], limit_s: float = 1800) -> int:
    """The largest exit status. All are killed when one fails, or the time is up."""
    from jax_ep.bench.processes import visible_gpus
    from jax_ep.command.options import free_address

    if not visible_gpus():
        raise SystemExit("needs a GPU; nvidia-smi lists none, or CUDA_VISIBLE_DEVICES hides them")
    address = free_address()
    command = [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", "--timeout", "90", *arguments]
    workers, outputs = [], []
    for process, share in enumerate(shares(processes, visible_gpus())):
        own = {ADDRESS: address, NUM: str(processes), INDEX: str(process)}
        # The first one's output is shown, the others' where they fail.
        output = None if process == 0 else tempfile.TemporaryFile("w+")  # noqa: SIM115, it lives as long as this
        outputs.append(output)
        workers.append(
            subprocess.Popen(
                command,
                env=os.environ | share | own,
                stdout=output,
                stderr=subprocess.STDOUT if output else None,
            )
        )
    deadline = time.monotonic() + limit_s
    codes: list[int | None] = [None] * processes
    while None in codes and not any(codes) and time.monotonic() < deadline:
        time.sleep(0.2)
        codes = [worker.poll() for worker in workers]
    time.sleep(5 if any(codes) else 0)  # the others may be about to say why, too
    for process, (worker, output) in enumerate(zip(workers, outputs, strict=True)):
        code = worker.poll()
        if code is None:
            worker.send_signal(signal.SIGKILL)  # jax.distributed catches SIGTERM
        worker.wait()
        if output is not None and code != 0:
            output.seek(0)
            print(f"--- process {process}, exit status {code}:\n{output.read()}", flush=True)
    return max(abs(worker.returncode) for worker in workers)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
