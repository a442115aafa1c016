"""One of several processes with GPUs: `gpu_worker.py TASK COORDINATOR PROCESSES PROCESS`."""

import contextlib
import hashlib
import os
import sys
import threading
import time

import fake_fabric
import jax
from processes import own_gpus

task, address = sys.argv[1:3]
processes, process = map(int, sys.argv[3:])
if processes > 1:
    jax.distributed.initialize(address, processes, process, local_device_ids=own_gpus())

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from cases import BF16, floats, routing, weights_of  # noqa: E402
from jax.experimental import multihost_utils  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import jax_ep  # noqa: E402
from jax_ep._group import handshake  # noqa: E402

if host := os.environ.get("JAX_EP_TEST_HOST"):  # processes of one host that are to think they are on several
    handshake.host_id = lambda: host
if cluster := os.environ.get("JAX_EP_TEST_CLUSTER"):
    fake_fabric.install(cluster)
per_domain = int(os.environ.get("JAX_EP_TEST_RANKS_PER_DOMAIN", "0")) or None

R, T, K, H = len(jax.devices()), int(os.environ.get("JAX_EP_TEST_TOKENS", "64")), 4, 512
E = 16 * R
mesh = Mesh(np.array(jax.devices()), ("ep",))
spec = NamedSharding(mesh, P("ep"))


def spread(array):
    flat = array.reshape(-1, *array.shape[2:])
    return jax.make_array_from_callback(flat.shape, spec, lambda index: flat[index])


inputs = (
    spread(floats((R, T, H), BF16)),
    spread(routing("sprinkled", R, T, K, E)),
    spread(floats((R, T, K))),
)


def forward_and_backward(group, order):
    """All that a layer moves, forward and backward."""

    def shard(x, ids, w):
        def layer(x, w):
            sent = jax_ep.dispatch(x, ids, w, group=group, num_experts=E, order=order, implementation="ffi")
            row_weights = weights_of(sent) if order == "expert" else None
            return jax_ep.combine(sent.x, sent.handle, row_weights=row_weights), sent

        y, transposed, sent = jax.vjp(layer, x, w, has_aux=True)
        return y, sent.x, weights_of(sent), sent.handle.sent_rows, transposed(jnp.cos(y))

    return jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))


def whole(value):
    return np.asarray(jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))(value))


def hash_of(results):
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(results):
        found.update(np.ascontiguousarray(whole(leaf)).tobytes())
    return found.hexdigest()


def check_sums(order, y):
    """Rows that come back as they were sent: each token by its ranks, or its weights, in bfloat16."""
    x, ids, w = (whole(array) for array in inputs)
    used = (ids >= 0) & (ids < E)
    if order == "rank":
        at = np.where(used, ids // (E // R), -1)
        w = np.array([[len(set(ranks) - {-1})] for ranks in at.tolist()], np.float32)
    else:
        w = np.where(used, w, 0)
    wide, scale = x.astype(np.float32), np.sum(np.abs(w), axis=1, keepdims=True)
    expected = wide * np.sum(w, axis=1, keepdims=True)
    # The sums of a rank, of a domain and of all are rounded one after the other, each by 2^-8 at most.
    assert np.all(np.abs(whole(y).astype(np.float32) - expected) <= 3.1 * 2.0**-8 * np.abs(wide) * scale)


def say_digests():
    """What a layer computes: all of it, and what its dispatch brings."""
    with jax_ep.Group(mesh, "ep", ranks_per_domain=per_domain) as group:
        print("on", group.info(), flush=True)
        for order in ("rank", "expert"):
            run = forward_and_backward(group, order)
            results = [run(*inputs) for _ in range(5)]
            check_sums(order, results[-1][0])
            print("digest", order, *{hash_of(result) for result in results}, flush=True)
            print("dispatched", order, *{hash_of(result[1:4]) for result in results}, flush=True)
        group.check()


def say_what_a_death_does():
    """The last process dies; the others' next op says so in time."""
    group = jax_ep.Group(mesh, "ep", timeout_s=3)
    run = forward_and_backward(group, "rank")
    jax.block_until_ready(run(*inputs))
    multihost_utils.sync_global_devices("all have run")
    if process == processes - 1:
        os.kill(os.getpid(), 9)
    time.sleep(1)
    begin = time.monotonic()
    jax.block_until_ready(run(*inputs))
    try:
        group.check()
    except jax_ep.PeerTimeoutError as error:
        print(f"after {time.monotonic() - begin:.1f} s: {error}", flush=True)
    time.sleep(2)  # then stderr has the error, too
    os._exit(0)  # jax.distributed would wait for the dead


def say_what_the_death_of_a_domain_does():
    """The last process dies while all run ops; the others say what JAX and what the group says."""
    group = jax_ep.Group(mesh, "ep", timeout_s=5)
    run = forward_and_backward(group, "expert")
    first = hash_of(run(*inputs)[1])
    multihost_utils.sync_global_devices("all have run")
    if process == processes - 1:
        threading.Timer(1.0, os.kill, (os.getpid(), 9)).start()
    last = time.monotonic()
    try:
        while True:
            result = run(*inputs)
            jax.block_until_ready(result)
            group.check()
            last = time.monotonic()
            assert np.isfinite(np.asarray(result[0].addressable_shards[0].data, np.float32)).all()
    except (jax.errors.JaxRuntimeError, jax_ep.PeerTimeoutError) as error:
        print(f"after {time.monotonic() - last:.1f} s: {error}", flush=True)
    print(f"first {first}", flush=True)
    os._exit(0)  # jax.distributed would wait for the dead


def say_what_another_order_of_ops_does():
    """The last process runs the second program first."""
    group = jax_ep.Group(mesh, "ep", timeout_s=5)
    run, (_, *routed) = forward_and_backward(group, "rank"), inputs
    rows = [spread(floats((R, T, width), BF16)) for width in (H, H // 2)]
    mine = lambda result: np.asarray(result[0].addressable_shards[0].data, np.float32)
    want = [mine(run(x, *routed)) for x in rows]  # also compiles, which JAX does on all processes together
    group.check()
    number = int(process == processes - 1)
    try:
        y = mine(run(rows[number], *routed))
        # Tokens without experts are zero, whatever fails.
        print("wrong", (np.isfinite(y) & (y != want[number])).sum(), flush=True)
        group.check()
    except (jax.errors.JaxRuntimeError, jax_ep.PeerTimeoutError) as error:
        print(f"error: {error}", flush=True)
    os._exit(0)  # a rail that has failed is not used again


def say_what_two_threads_do():
    """Two programs of equal ops, in other orders on two processes: none runs, and then both do."""
    group = jax_ep.Group(mesh, "ep", timeout_s=20)
    rows = spread(floats((R, T, H), BF16))

    def program(name, factor):
        def shard(x, ids):
            sent = jax_ep.dispatch(
                factor * x, ids, group=group, num_experts=E, order="rank", implementation="ffi"
            )
            return jax_ep.combine(sent.x, sent.handle)

        shard.__name__ = name
        mapped = jax.shard_map(shard, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
        return jax.jit(mapped).lower(rows, inputs[1]).compile()  # on all processes together

    programs = [program("first", 1), program("second", 2)]
    errors = ["", ""]

    def run(number):
        time.sleep(1.5 * ((number + process) % 2))
        try:
            jax.block_until_ready(programs[number](rows, inputs[1]))
        except jax.errors.JaxRuntimeError as error:
            errors[number] = str(error).replace("\n", " ")

    multihost_utils.sync_global_devices("all have compiled")
    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        print(f"error: {error}", flush=True)
    multihost_utils.sync_global_devices("all have been refused")
    with contextlib.suppress(jax_ep.PeerTimeoutError):
        group.check()
    first, second = (whole(compiled(rows, inputs[1])).astype(np.float32) for compiled in programs)
    print("doubled", bool(np.abs(first).max() > 0 and (second == 2 * first).all()), flush=True)
    group.check()


def count_descriptors():
    """A hundred groups, made and closed."""
    counts = []
    for _ in range(100):
        with jax_ep.Group(mesh, "ep") as group:
            assert group.info().implementation == "ffi", group.info()
        counts.append(len(os.listdir("/proc/self/fd")))
    print("descriptors", counts[5], counts[-1], flush=True)


def say_what_growing_memory_does():
    """Without preallocation, a large array lies outside of what the processes share."""
    group = jax_ep.Group(mesh, "ep", timeout_s=3)

    def shard(x, ids):
        return jax_ep.dispatch(x, ids, group=group, num_experts=E, capacity=2**20, implementation="ffi").x

    run = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
    try:
        jax.block_until_ready(run(*inputs[:2]))
        group.check()
    except (jax.errors.JaxRuntimeError, jax_ep.PeerTimeoutError) as error:
        print(f"error: {error}", flush=True)
    os._exit(0)


def exit_one_by_one():
    with jax_ep.Group(mesh, "ep") as group:
        jax.block_until_ready(forward_and_backward(group, "expert")(*inputs))
    time.sleep(process)


{
    "digests": say_digests,
    "death": say_what_a_death_does,
    "death of a domain": say_what_the_death_of_a_domain_does,
    "another order": say_what_another_order_of_ops_does,
    "two threads": say_what_two_threads_do,
    "descriptors": count_descriptors,
    "growth": say_what_growing_memory_does,
    "exit": exit_one_by_one,
}[task]()
