"""One of several processes of CPU devices, of which the last one dies or stands still while they run ops.

`host_fault_worker.py killed|stopped|swapped ADDRESS PROCESSES PROCESS`; "swapped": nobody dies, but two ranks
of the first process run in each other's place.
"""

import os
import signal
import sys
import threading
import time

import jax

task, address, processes, process = *sys.argv[1:3], *map(int, sys.argv[3:])
jax.config.update("jax_platforms", "cpu")
jax.distributed.initialize(address, processes, process)

import numpy as np  # noqa: E402
from cases import floats, routing  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import jax_ep  # noqa: E402

R, T, K, E, H = len(jax.devices()), 6, 3, 16, 5
mesh = Mesh(np.array(jax.devices()), ("ep",))
group = jax_ep.Group(mesh, "ep", timeout_s=4)
if task == "swapped":
    mesh = Mesh(mesh.devices[[0, 2, 1, *range(3, R)]], ("ep",))
spec = NamedSharding(mesh, P("ep"))


def spread(array):
    flat = array.reshape(-1, *array.shape[2:])
    return jax.make_array_from_callback(flat.shape, spec, lambda index: flat[index])


def layer(x, ids, w):
    sent = jax_ep.dispatch(x, ids, w, group=group, num_experts=E)
    return jax_ep.combine(sent.x, sent.handle, row_weights=sent.row_weights)


run = jax.jit(jax.shard_map(layer, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
inputs = spread(floats((R, T, H))), spread(routing("uniform", R, T, K, E)), spread(floats((R, T, K)))
if task == "swapped":
    compiled, begin = run.lower(*inputs).compile(), time.monotonic()
    try:
        jax.block_until_ready(compiled(*inputs))
    except jax.errors.JaxRuntimeError as error:
        print(f"after {time.monotonic() - begin:.1f} s: {error}", flush=True)
    group.check()
    os._exit(0)
first = np.asarray(run(*inputs).addressable_shards[0].data)
group.check()
if process == processes - 1:
    number = signal.SIGKILL if task == "killed" else signal.SIGSTOP
    threading.Timer(1.0, os.kill, (os.getpid(), number)).start()

done, last = 0, time.monotonic()
try:
    while True:
        y = run(*inputs)
        y.block_until_ready()
        np.testing.assert_array_equal(y.addressable_shards[0].data, first)
        done, last = done + 1, time.monotonic()
except jax.errors.JaxRuntimeError as error:
    print(f"after {time.monotonic() - last:.1f} s and {done} ops: {error}", flush=True)
while True:
    try:
        group.check()
    except jax_ep.PeerTimeoutError as error:
        print(f"check after {time.monotonic() - last:.1f} s: {error}", flush=True)
        break
    time.sleep(0.1)
os._exit(0)  # jax.distributed would wait for the dead
