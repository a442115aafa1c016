"""One of many ranks that share GPUs: `many_gpu_ranks_worker.py COORDINATOR RANKS RANK`.

Each rank compares its own part with NumPy's. Then the last but one leaves out an op, and the others continue
without it if ranks may be left out; otherwise all must name it. A new group works again. At last that rank's
process ends, and all others must name it again.
"""

import functools
import itertools
import json
import os
import sys
import time

import jax

if __name__ == "__main__":
    ADDRESS, RANKS, RANK = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    jax.distributed.initialize(ADDRESS, RANKS, RANK, local_device_ids=[0], initialization_timeout=300)

import jax.numpy as jnp
import numpy as np
import oracle
from cases import BF16, assert_close, floats, quantize, routing, same_bits
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep._group import handshake

TIMEOUT_S, MASK_S = 40, 10
BEGAN = time.monotonic()


def say(text):
    print(f"{text} ({time.monotonic() - BEGAN:.0f} s)", flush=True)


def exchange_by(client):
    """handshake.exchange, through JAX's coordinator.

    NCCL's communicators of so many ranks on one GPU would take all of its memory.
    """
    exchanges = itertools.count()

    def exchange(devices, message, limit_s, step):
        key, processes = f"exchange {next(exchanges)} of", {device.process_index for device in devices}
        client.key_value_set(f"{key} {jax.process_index()}", json.dumps(message))
        read = functools.partial(client.blocking_key_value_get, timeout_in_ms=int(1000 * limit_s))
        return {process: json.loads(read(f"{key} {process}")) for process in processes}

    return exchange


class Rank:
    """What one of the ranks checks."""

    def __init__(self, devices, rank):
        self.rank, self.ranks, self.experts = rank, len(devices), 2 * len(devices)
        self.mesh = Mesh(np.array(devices), ("ep",))
        self.sharding = NamedSharding(self.mesh, P("ep"))
        self.group = self.open()
        info = self.group.info()
        assert info.implementation == "ffi", info
        say(f"{info.device_bytes >> 20} MiB of control blocks")
        self.dispatch = functools.partial(
            jax_ep.dispatch, group=self.group, num_experts=self.experts, implementation="ffi"
        )

    def open(self):
        return jax_ep.Group(self.mesh, "ep", timeout_s=TIMEOUT_S)

    def spread(self, array):
        """An array [R, n, ...] as one of all ranks, [R * n, ...]."""
        flat = array.reshape(-1, *array.shape[2:])
        return jax.make_array_from_callback(flat.shape, self.sharding, lambda index: flat[index])

    def own(self, tree):
        return jax.tree.map(lambda array: np.asarray(array.addressable_data(0)), tree)

    def program(self, shard):
        mapped = jax.shard_map(shard, mesh=self.mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False)
        return jax.jit(mapped)

    def run(self, shard, *arrays):
        """Returns the rank's part of the results."""
        return self.own(self.program(shard)(*map(self.spread, arrays)))

    def check_order(self, order, tokens, k, width, kind, capacity, quantizes=False):
        """Rows and weights arrive bit for bit, and sums are as they are documented."""
        ids, x = routing(kind, self.ranks, tokens, k, self.experts), floats((self.ranks, tokens, width), BF16)
        w = floats((self.ranks, tokens, k), seed=2)
        more = {} if capacity is None else {"capacity": capacity}

        def shard(x, ids, w):
            sent = self.dispatch(x, ids, w, order=order, quantize="fp8" if quantizes else None, **more)
            rows = jax_ep.dequantize_fp8(sent.x, jnp.bfloat16) if quantizes else sent.x
            weights = sent.topk_weights if order == "rank" else sent.row_weights
            row_weights = None if order == "rank" else weights
            options = {"quantize": "fp8" if quantizes else None}
            back = jax_ep.combine(rows, sent.handle, row_weights=row_weights, **options)
            return sent.x, weights, sent.num_dropped.reshape(1), back

        sent, weights, dropped, back = self.run(shard, x, ids, w)
        received = functools.partial(
            oracle.dispatch, topk_idx=ids, topk_weights=w, num_experts=self.experts, order=order, **more
        )
        want = received(np.asarray(quantize(x).values) if quantizes else x)[self.rank]
        # Rows that no token fills are zero, but in the padded order they may be anything.
        filled = [order != "expert_padded" or source is not None for source in want.sources]
        values = (sent.values if quantizes else sent).reshape(want.x.shape)
        assert same_bits(values[filled], want.x[filled])
        assert same_bits(weights.reshape(want.weights.shape)[filled], want.weights[filled])
        np.testing.assert_array_equal(dropped[0], want.num_dropped)
        everywhere = received(x)
        y, row_weights = (np.stack([getattr(one, name) for one in everywhere]) for name in ("x", "weights"))
        if quantizes:
            y = np.asarray(jax_ep.dequantize_fp8(quantize(y), jnp.bfloat16))
        by_rank = order == "rank"
        row_weights = None if by_rank else row_weights
        as_fp8 = functools.partial(oracle.round_to_fp8, round_scale=False) if quantizes else None
        folds = not by_rank and not quantizes
        sums = oracle.combine(y, everywhere, tokens, row_weights, folds=folds, as_fp8=as_fp8)
        assert_close(back, sums[self.rank], BF16, terms=k)
        say(f"{order}, {tokens} tokens of {width}, {kind}{', FP8' if quantizes else ''}: right")

    def check_long_rows(self, tokens=1100, k=6, width=4096):
        """Tokens that are many and long enough for rings. Each process has only its own.

        A token's sum is the sum of its weights times the token.
        """
        mine = floats((tokens, width), BF16, seed=8 + self.rank)
        x = jax.make_array_from_callback((self.ranks * tokens, width), self.sharding, lambda index: mine)
        ids = routing("random", self.ranks, tokens, k, self.experts)
        w = np.where(ids >= 0, floats((self.ranks, tokens, k), seed=9), 0)

        def shard(x, ids, w):
            sent = self.dispatch(x, ids, w, capacity=8000)
            back = jax_ep.combine(sent.x, sent.handle, row_weights=sent.row_weights)
            return back, sent.num_dropped.reshape(1)

        back, dropped = self.own(self.program(shard)(x, self.spread(ids), self.spread(w)))
        assert dropped[0] == 0
        sums = w[self.rank].sum(axis=-1, keepdims=True) * mine.astype(np.float32)
        np.testing.assert_allclose(back.astype(np.float32), sums, rtol=0.05, atol=0.1)
        say(f"{tokens} tokens of {width}: right")

    def check_gradients(self, tokens=96, k=6, width=512):
        ids = np.abs(routing("random", self.ranks, tokens, k, self.experts)) % self.experts
        x, cotangent = (floats((self.ranks, tokens, width), seed=seed) for seed in (3, 4))
        w = floats((self.ranks, tokens, k), seed=5)

        def shard(x, ids, w, cotangent):
            def layer(x, w):
                sent = self.dispatch(x, ids, w)
                return jax_ep.combine(sent.x, sent.handle, row_weights=sent.row_weights)

            y, transposed = jax.vjp(layer, x, w)
            return y, *transposed(cotangent)

        y, dx, dw = self.run(shard, x, ids, w, cotangent)
        x, w, cotangent = x[self.rank], w[self.rank], cotangent[self.rank]
        total, dots = w.sum(axis=-1, keepdims=True), (x * cotangent).sum(axis=-1, keepdims=True)
        np.testing.assert_allclose(y, total * x, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(dx, total * cotangent, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(dw, np.broadcast_to(dots, dw.shape), rtol=1e-3, atol=1e-3)
        say("gradients: right")

    def check_replicas(self):
        """Matrices of the busiest experts go to other ranks, and their gradients come back."""
        ids = np.zeros((self.ranks, 64, 2), np.int32)
        ids[..., 1] = 1 + np.arange(64) % 3
        matrices = floats((self.ranks, 2, 256, 128), BF16, seed=6)

        def shard(ids, weights):
            placement = jax_ep.balance(
                ids, group=self.group, num_experts=self.experts, num_redundant_experts=1, min_rows=1
            )

            def loss(weights):
                physical = jax_ep.replicate(weights, placement, group=self.group)
                factors = jnp.arange(1, 4, dtype=weights.dtype)[:, None, None]
                loss = jnp.sum(physical.home * factors[:2]) + jnp.sum(physical.redundant * factors[2:])
                return loss, physical.redundant

            gradient, redundant = jax.grad(loss, has_aux=True)(weights)
            return placement.physical_to_logical[None], redundant, gradient

        ((logical,), redundant, gradient) = self.run(shard, ids, matrices)
        copied = logical[3 * self.rank + 2]
        if copied >= 0:
            assert same_bits(redundant[0], matrices.reshape(self.experts, 256, 128)[copied])
        factor = np.zeros(self.experts)
        np.add.at(factor, logical[logical >= 0], (np.arange(len(logical)) % 3 + 1)[logical >= 0])
        for local in range(2):
            want = factor[2 * self.rank + local]
            np.testing.assert_allclose(gradient[local].astype(np.float32), want, rtol=2e-2)
        copies = int((logical >= 0).sum()) - self.experts
        assert copies > self.ranks // 4, copies
        say(f"replicate: {copies} copies and their gradients: right")

    def few_tokens_of(self, active, group, on_timeout, tokens=12, k=4, width=256):
        """A call of a dispatch and a combine, and a check of its results if only `active` ranks take part."""
        ids = routing("random", self.ranks, tokens, k, self.experts)
        x, w = floats((self.ranks, tokens, width)), floats((self.ranks, tokens, k), seed=2)

        def shard(x, ids, w):
            by = {"on_timeout": on_timeout}
            sent = self.dispatch(x, ids, w, group=group, active_ranks=active, **by)
            rows = {"row_weights": sent.row_weights, "active_ranks": sent.active_ranks, **by}
            back, after = jax_ep.combine(sent.x, sent.handle, **rows)
            return sent.x, sent.active_ranks[None], back, after[None]

        program, arrays = self.program(shard), [self.spread(array) for array in (x, ids, w)]

        def check(results, active):
            rows, *after = results[0], results[1], results[3]
            for took_part in after:
                np.testing.assert_array_equal(took_part[0], active)
            masked = oracle.mask_inactive(ids, self.experts, active)
            want = oracle.dispatch(x, masked, w, self.experts, "expert")
            assert same_bits(rows, want[self.rank].x)
            y, row_weights = (np.stack([getattr(one, name) for one in want]) for name in ("x", "weights"))
            sums = oracle.combine(y, want, tokens, row_weights, active=active)
            assert_close(results[2], sums[self.rank], terms=k)

        return lambda: self.own(program(*arrays)), check

    def check_active_ranks(self, lost):
        """The program leaves out ranks, then a rank that is late is left out."""
        everybody = np.ones(self.ranks, np.int32)
        active = everybody.copy()
        active[[1, self.ranks - 1]] = 0
        call, check = self.few_tokens_of(active, self.group, "raise")
        check(call(), active)
        # Equal groups share the limit, so it is also self.group's until one is opened again.
        group = jax_ep.Group(self.mesh, "ep", timeout_s=MASK_S)
        call, check = self.few_tokens_of(everybody, group, "mask")
        check(call(), everybody)
        if self.rank != lost:
            active = everybody.copy()
            active[lost] = 0
            check(call(), active)
        say(f"{self.ranks - 2} and {self.ranks - 1} ranks of {self.ranks}: right")

    def program_of_steps(self, tokens=64, k=4, width=128):
        """A call of ten ops with different routings, which returns this rank's tokens, and the tokens."""
        x = floats((self.ranks, tokens, width))
        ids = np.random.default_rng(7).integers(0, self.experts, (self.ranks, 1, 10, tokens, k))

        def step(x, ids):
            sent = self.dispatch(x, ids)
            return jax_ep.combine(sent.x, sent.handle) / k, None

        program = self.program(lambda x, ids: jax.lax.scan(step, x, ids[0])[0])
        x_in, ids_in = self.spread(x), self.spread(ids.astype(np.int32))
        return lambda: self.own(program(x_in, ids_in)), x[self.rank]


def require_named(group, lost):
    """The error names the rank that was lost."""
    try:
        group.check()
    except jax_ep.PeerTimeoutError as error:
        text = str(error)
    else:
        raise AssertionError("no error")
    if f"rank(s) {lost} " not in text:
        raise AssertionError(text)
    say(text[text.index("rank(s)") :][:80])


def main(rank):
    client = jax._src.distributed.global_state.client
    handshake.exchange = exchange_by(client)
    one = Rank(jax.devices(), rank)
    one.check_order("expert", 48, 5, 256, "sprinkled", 300)
    one.check_order("rank", 48, 5, 256, "sprinkled", 220)
    one.check_order("expert_padded", 24, 5, 128, "random", None)
    one.check_order("expert", 40, 4, 256, "zipf", 200, quantizes=True)
    one.check_order("rank", 40, 4, 256, "zipf", 200, quantizes=True)
    one.check_order("rank", 300, 3, 1024, "random", 800)
    one.check_long_rows()
    one.check_gradients()
    one.check_replicas()
    call, x = one.program_of_steps()
    for _ in range(2):
        np.testing.assert_allclose(call(), x, rtol=1e-5, atol=1e-5)
    one.group.check()
    say("20 ops in a scan: right")
    lost = one.ranks - 2
    one.check_active_ranks(lost)
    client.wait_at_barrier("active ranks", 200_000)
    if rank != lost:
        assert np.isnan(call()).any()
        require_named(one.group, lost)
    client.wait_at_barrier("left out", 200_000)
    again = one.open()
    np.testing.assert_allclose(call(), x, rtol=1e-5, atol=1e-5)
    again.check()
    say("a new group: right")
    if rank != lost:
        assert np.isnan(call()).any()
        require_named(again, lost)
        client.wait_at_barrier("done", 100_000, [other for other in range(one.ranks) if other != lost])
    sys.stdout.flush()
    time.sleep(5 if rank == 0 else 0)  # it runs JAX's coordinator, without which the others would abort
    os._exit(0)  # otherwise jax.distributed waits for the lost rank


if __name__ == "__main__":
    main(RANK)
