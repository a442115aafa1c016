"""Several processes: on the CPU the ops take implementation="xla" by themselves."""

import os
import pathlib
import socket
import subprocess
import sys

import pytest

WORKER = pathlib.Path(__file__).with_name("multiprocess_worker.py")


@pytest.mark.timeout(240)
def test_two_processes_of_four_devices():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "NPROC": "16"}
    workers = [
        subprocess.Popen(
            [sys.executable, str(WORKER), f"127.0.0.1:{port}", str(process)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for process in range(2)
    ]
    try:
        outputs = [worker.communicate(timeout=200)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()  # jax.distributed catches SIGTERM
    for process, (worker, output) in enumerate(zip(workers, outputs, strict=True)):
        assert worker.returncode == 0, output
        assert f"process {process} ok" in output
