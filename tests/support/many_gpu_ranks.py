"""Ops of more ranks than there are GPUs: `python tests/support/many_gpu_ranks.py RANKS`.

Each rank is a process. Several share a GPU, so this shows what the ops do and not how fast they are. Every rank
compares its own part with NumPy's, so no library for collectives is needed. Then the last but one rank leaves out an op,
and all others must name it; a new group works again. At last that rank's process ends in an op.
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time

INDEX, ADDRESS = "JAX_EP_TEST_RANK", "JAX_EP_TEST_COORDINATOR"
LIMIT_S, TIMEOUT_S = 280, 40


def main(ranks: int) -> int:
    from jax_ep.bench.processes import visible_gpus
    from jax_ep.command.options import free_address

    gpus = visible_gpus()
    # Besides JAX's memory each process needs about half a gigabyte.
    shared = {
        "JAX_PLATFORMS": "cuda",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.5 / -(-ranks // len(gpus)):.4f}",
        "XLA_FLAGS": "--xla_gpu_autotune_level=0 --xla_gpu_force_compilation_parallelism=1",
        ADDRESS: free_address(),
    }
    outputs = [tempfile.TemporaryFile("w+") for _ in range(ranks)]
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, str(ranks)],
            env=os.environ | shared | {INDEX: str(rank), "CUDA_VISIBLE_DEVICES": gpus[rank % len(gpus)]},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        for rank, output in enumerate(outputs)
    ]
    deadline = time.monotonic() + LIMIT_S
    lost = ranks - 2  # ends by itself
    living = [worker for rank, worker in enumerate(workers) if rank != lost]
    while time.monotonic() < deadline and any(worker.poll() is None for worker in living):
        if any(worker.poll() for worker in living):
            time.sleep(5)  # the others may be about to say why, too
            break
        time.sleep(0.2)
    failed = 0
    for rank, (worker, output) in enumerate(zip(workers, outputs, strict=True)):
        code = worker.poll()
        worker.kill()  # jax.distributed catches SIGTERM
        output.seek(0)
        text = output.read()
        if rank != lost and (code != 0 or f"rank {rank}: done" not in text):
            failed += 1
            if failed <= 3:
                print(f"--- rank {rank}, exit status {code}:\n{text[-4000:]}", flush=True)
        elif rank == 0:
            print(text, flush=True)
    print(f"{ranks} ranks on {len(gpus)} GPUs: {ranks - 1 - failed} of {ranks - 1} as they should")
    return min(failed, 1)


def work(ranks: int, rank: int) -> None:
    import jax

    jax.distributed.initialize(
        os.environ[ADDRESS], ranks, rank, local_device_ids=[0], initialization_timeout=300
    )
    import jax.numpy as jnp
    import numpy as np
    import oracle
    from cases import BF16, assert_close, floats, quantize, routing, same_bits
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    import jax_ep
    from jax_ep._group import handshake

    # NCCL's communicators of so many ranks on one GPU would take all of its memory.
    client, exchanges = jax._src.distributed.global_state.client, itertools.count()

    def exchange(devices, message, limit_s, step):
        key = f"exchange {next(exchanges)} of"
        client.key_value_set(f"{key} {rank}", json.dumps(message))
        read = lambda process: json.loads(
            client.blocking_key_value_get(f"{key} {process}", int(1000 * limit_s))
        )
        return {process: read(process) for process in {device.process_index for device in devices}}

    handshake.exchange = exchange

    begin = time.monotonic()
    mesh = Mesh(np.array(jax.devices()), ("ep",))
    group = jax_ep.Group(mesh, "ep", timeout_s=TIMEOUT_S)
    info = group.info()
    assert info.implementation == "ffi", info
    experts = 2 * ranks
    sharding = NamedSharding(mesh, P("ep"))

    def say(text):
        print(f"rank {rank}: {text} ({time.monotonic() - begin:.0f} s)", flush=True)

    def spread(array):
        flat = array.reshape(-1, *array.shape[2:])
        return jax.make_array_from_callback(flat.shape, sharding, lambda index: flat[index])

    def own(tree):
        return jax.tree.map(lambda array: np.asarray(array.addressable_data(0)), tree)

    def run(shard, *arrays):
        mapped = jax.shard_map(shard, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False)
        return own(jax.jit(mapped)(*(spread(array) for array in arrays)))

    say(f"{info.device_bytes >> 20} MiB of control blocks")

    def check_order(order, tokens, k, width, kind, capacity, quantizes=False):
        """Rows and weights bit for bit, sums as they are documented."""
        ids, x = routing(kind, ranks, tokens, k, experts), floats((ranks, tokens, width), BF16)
        w = floats((ranks, tokens, k), seed=2)
        options = {"group": group, "num_experts": experts, "order": order, "implementation": "ffi"}
        if order != "expert_padded":
            options["capacity"] = capacity
        if quantizes:
            options["quantize"] = "fp8"

        def shard(x, ids, w):
            sent = jax_ep.dispatch(x, ids, w, **options)
            rows = jax_ep.dequantize_fp8(sent.x, jnp.bfloat16) if quantizes else sent.x
            row_weights = sent.row_weights if order != "rank" else None
            back = jax_ep.combine(rows, sent.handle, row_weights=row_weights)
            weights = sent.row_weights if order != "rank" else sent.topk_weights
            return sent.x, rows, weights, sent.num_dropped.reshape(1), back

        sent, rows, weights, dropped, back = run(shard, x, ids, w)
        moved = np.asarray(quantize(x).values) if quantizes else x
        want = oracle.dispatch(moved, ids, w, experts, order, capacity=options.get("capacity"))
        values = sent.values if quantizes else sent
        # Rows that no token fills are zero, but in the padded order they may be anything.
        rows_here = len(want[rank].x)
        filled = [source is not None for source in want[rank].sources]
        filled = np.resize(filled if order == "expert_padded" else [True], rows_here)
        assert same_bits(values.reshape(want[rank].x.shape)[filled], want[rank].x[filled])
        assert same_bits(weights.reshape(want[rank].weights.shape)[filled], want[rank].weights[filled])
        np.testing.assert_array_equal(dropped[0], want[rank].num_dropped)
        whole = oracle.dispatch(x, ids, w, experts, order, capacity=options.get("capacity"))
        row_weights = np.stack([one.weights for one in whole]) if order != "rank" else None
        y = np.stack([one.x for one in whole])
        if quantizes:
            y = np.asarray(jax_ep.dequantize_fp8(quantize(y), jnp.bfloat16))
        sums = oracle.combine(y, whole, tokens, row_weights, folds=order != "rank")
        assert_close(back, sums[rank], BF16, terms=k)
        say(f"{order}, {tokens} tokens of {width}, {kind}{', FP8' if quantizes else ''}: right")

    check_order("expert", 48, 5, 256, "sprinkled", 300)
    check_order("rank", 48, 5, 256, "sprinkled", 220)
    check_order("expert_padded", 24, 5, 128, "random", None)
    check_order("expert", 40, 4, 256, "zipf", 200, quantizes=True)
    check_order("rank", 300, 3, 1024, "random", 800)

    # A token's sum is the sum of its weights times the token, so all of it is known. First tokens that are many and
    # long enough for rings, of which each process has only its own.
    tokens, k, width = 1100, 6, 4096
    mine = floats((tokens, width), BF16, seed=8 + rank)
    long = jax.make_array_from_callback((ranks * tokens, width), sharding, lambda index: mine)
    ids, w = routing("random", ranks, tokens, k, experts), floats((ranks, tokens, k), seed=9)
    w = np.where(ids >= 0, w, 0)

    def there_and_back(x, ids, w):
        sent = jax_ep.dispatch(
            x, ids, w, group=group, num_experts=experts, capacity=8000, implementation="ffi"
        )
        return jax_ep.combine(sent.x, sent.handle, row_weights=sent.row_weights), sent.num_dropped.reshape(1)

    mapped = jax.shard_map(there_and_back, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False)
    back, dropped = own(jax.jit(mapped)(long, spread(ids), spread(w)))
    assert dropped[0] == 0
    sums = w[rank].sum(axis=-1, keepdims=True) * mine.astype(np.float32)
    np.testing.assert_allclose(back.astype(np.float32), sums, rtol=0.05, atol=0.1)
    say(f"{tokens} tokens of {width}: right")
    tokens, k, width = 96, 6, 512
    ids, x, cotangent = (
        routing("random", ranks, tokens, k, experts),
        *(floats((ranks, tokens, width), seed=seed) for seed in (3, 4)),
    )
    ids = np.abs(ids) % experts
    w = floats((ranks, tokens, k), seed=5)

    def gradient(x, ids, w, cotangent):
        def layer(x, w):
            sent = jax_ep.dispatch(x, ids, w, group=group, num_experts=experts, implementation="ffi")
            return jax_ep.combine(sent.x, sent.handle, row_weights=sent.row_weights)

        y, transposed = jax.vjp(layer, x, w)
        return y, *transposed(cotangent)

    y, dx, dw = run(gradient, x, ids, w, cotangent)
    total = w[rank].sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(y, total * x[rank], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(dx, total * cotangent[rank], rtol=1e-4, atol=1e-4)
    dots = (x[rank] * cotangent[rank]).sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(dw, np.broadcast_to(dots, dw.shape), rtol=1e-3, atol=1e-3)
    say("gradients: right")

    # Redundant experts: matrices of the busiest experts go to other ranks, whose gradients come back.
    def balanced(x, ids, weights):
        placement = jax_ep.balance(ids, group=group, num_experts=experts, num_redundant_experts=1, min_rows=1)

        def loss(weights):
            physical = jax_ep.replicate(weights, placement, group=group)
            factors = jnp.arange(1, 4, dtype=weights.dtype)[:, None, None]
            loss = jnp.sum(physical.home * factors[:2]) + jnp.sum(physical.redundant * factors[2:])
            return loss, physical.redundant

        gradient, redundant = jax.grad(loss, has_aux=True)(weights)
        return placement.physical_to_logical[None], redundant, gradient

    ids = np.zeros((ranks, 64, 2), np.int32)
    ids[..., 1] = 1 + np.arange(64) % 3
    matrices = floats((ranks, 2, 256, 128), BF16, seed=6)
    logical, redundant, gradient_ = run(balanced, x[:, :64], ids, matrices)
    logical = logical[0]
    flat = matrices.reshape(experts, 256, 128)
    places = len(logical) // ranks
    copied = logical[rank * places + 2]
    if copied >= 0:
        assert same_bits(redundant[0], flat[copied]), copied
    factor = np.zeros(experts)
    for physical, expert in enumerate(logical):
        if expert >= 0:
            factor[expert] += physical % places + 1
    for local in range(2):
        np.testing.assert_allclose(gradient_[local].astype(np.float32), factor[2 * rank + local], rtol=2e-2)
    copies = int((logical >= 0).sum()) - experts
    assert copies > 8, copies
    say(f"replicate: {copies} copies and their gradients: right")

    # Many ops with other routings, as one program.
    tokens, k, width = 64, 4, 128
    x = floats((ranks, tokens, width))

    def steps(x, ids):
        def step(x, ids):
            sent = jax_ep.dispatch(x, ids, group=group, num_experts=experts, implementation="ffi")
            back = jax_ep.combine(sent.x, sent.handle)
            return back / k, None

        return jax.lax.scan(step, x, ids)[0]

    rng = np.random.default_rng(7)
    many = rng.integers(0, experts, (ranks, 10, tokens, k)).astype(np.int32)
    mapped = jax.shard_map(
        lambda x, ids: steps(x, ids[0]), mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False
    )
    ids_in = jax.make_array_from_callback(many.shape, sharding, lambda index: many[index])
    program = jax.jit(mapped)
    for _ in range(2):
        out = own(program(spread(x), ids_in))
        np.testing.assert_allclose(out, x[rank], rtol=1e-5, atol=1e-5)
    group.check()
    say("20 ops in a scan: right")

    # A rank that leaves out an op, which all have called before.
    lost = ranks - 2
    if rank != lost:
        out = own(program(spread(x), ids_in))
        assert np.isnan(out).any()
        try:
            group.check()
        except jax_ep.PeerTimeoutError as error:
            assert f"rank(s) {lost} " in str(error), error
            say(f"{error}"[:150])
        else:
            raise AssertionError("no error")
    client.wait_at_barrier("left out", 200_000)
    again = jax_ep.Group(mesh, "ep", timeout_s=TIMEOUT_S)
    out = own(program(spread(x), ids_in))
    np.testing.assert_allclose(out, x[rank], rtol=1e-5, atol=1e-5)
    again.check()
    say("a new group: right")
    if rank == lost:
        os._exit(0)
    time.sleep(1)
    out = own(program(spread(x), ids_in))
    assert np.isnan(out).any()
    try:
        again.check()
    except jax_ep.PeerTimeoutError as error:
        assert f"rank(s) {lost} " in str(error) or f"rank {lost}" in str(error), error
        say(f"{error}"[:150])
    else:
        raise AssertionError("no error")
    say("done")
    others = [other for other in range(ranks) if other != lost]
    client.wait_at_barrier("done", 100_000, others)
    os._exit(0)  # jax.distributed would wait for the lost rank


if __name__ == "__main__":
    if INDEX in os.environ:
        work(int(sys.argv[1]), int(os.environ[INDEX]))
    else:
        sys.exit(main(int(sys.argv[1])))
