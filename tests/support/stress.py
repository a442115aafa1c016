"""Random shapes, routings and options, many ops in a program, every result checked on the device.

    python tests/support/stress.py [--programs 40] [--steps 150] [--seed 0] [--small] [--epochs 64]

Each step dispatches rows that say where they come from and combines them; the sum must be the row times
its number of copies, exactly, and the weights that travelled along must come back as they were. A step
also sends another payload through the handle. By chance the rows of a program travel as FP8, its buffers are
too small for them, each step has another number of valid tokens, dispatches add up statistics, or other ranks
take part in each step: all numbers are small and whole enough that every result is exact nevertheless, and
how many rows each rank must get and drop follows from the ids.

On GPUs JAX_EP_STRESS_US (150 if not set) holds each rank up for a random time on the device, before it enters
and before it leaves an op, and outputs are first filled with a poison pattern. `--epochs N` lets the ops of
each program pass from N before 2**31, or 2**32 by turns, to beyond. Many ops in a row, in two minutes on two
GPUs:

    JAX_EP_STRESS_US=2 python tests/support/stress.py --programs 20 --steps 1250 --small --epochs 500
"""

import argparse
import dataclasses
import os
import sys
import time
from typing import Any

os.environ.setdefault("NPROC", "32")
os.environ.setdefault("JAX_EP_STRESS_US", "150")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep import _extension
from jax_ep._group.group import ranks_of

FEW = 100  # so few tokens that ranks can be left out, whatever else is drawn: docs/howto/failing_ranks.md


@dataclasses.dataclass(frozen=True)
class Drawn:
    """What the steps of a program do."""

    tokens: int
    k: int
    experts: int
    width: int
    dtype: jnp.dtype
    order: Any
    alignment: int
    capacity: int | None
    quantize: Any
    round_scale: bool
    partly_valid: bool
    on_timeout: Any  # None: all ranks take part in every step
    statistics: bool

    @property
    def largest(self) -> int:
        """The largest element of each block of a row. FP8 has 0 to 14 times 2**5, and 0 to 15 times 2**4."""
        return 15 if self.round_scale else 14

    @property
    def levels(self) -> int:
        """Weights are multiples of one in so many: weighted sums of eight rows are exact in every dtype."""
        return 256 if self.dtype == jnp.float32 else 2

    @property
    def ops(self) -> int:
        """How many there are in a step: a dispatch, and combines of rows, of weights and, by expert, of both.

        Where all ranks take part, also a redispatch, and by expert the gradient of the last combine.
        """
        by_expert, all_take_part = self.order != "rank", self.on_timeout is None
        return 3 + by_expert + all_take_part * (1 + by_expert)

    def __str__(self) -> str:
        parts = [f"{self.tokens} tokens x {self.width} {self.dtype.name}, top-{self.k} of {self.experts}"]
        parts += [f"order {self.order}"] + [f"alignment {self.alignment}"] * (self.alignment > 1)
        parts += [] if self.capacity is None else [f"capacity {self.capacity}"]
        parts += [] if self.quantize is None else [self.quantize + " round" * self.round_scale]
        parts += ["partly valid"] * self.partly_valid + ["statistics"] * self.statistics
        parts += [] if self.on_timeout is None else [f"some ranks, {self.on_timeout}"]
        return ", ".join(parts)


def draw(rng: np.random.Generator, group: jax_ep.Group, small: bool) -> Drawn:
    # Many tokens are moved in several waves.
    tokens = int(rng.integers(1, rng.choice([FEW] if small else [FEW, 200, 3000])))
    k, experts = int(rng.integers(1, 9)), group.size * int(rng.integers(1, 17))
    width = int(rng.choice([1, 3, 8, 64, 128, 256] if small else [1, 3, 8, 64, 128, 520, 1024, 4096]))
    order = str(rng.choice(["rank", "expert", "expert_padded"]))
    dtype = jnp.dtype(str(rng.choice(["float32", "bfloat16"])))
    alignment = int(rng.choice([1, 8])) if order == "expert" else 1
    fits = order == "expert_padded" or rng.random() < 0.5
    capacity = None if fits else int(rng.integers(alignment, alignment + tokens * k))
    quantize = [None, "fp8", "fp8_dequantize"][rng.integers(3)] if width % 128 == 0 else None
    leaves_out = tokens <= FEW and group.ranks_per_domain == group.size and rng.random() < 0.5
    return Drawn(
        tokens=tokens,
        k=k,
        experts=experts,
        width=width,
        dtype=dtype,
        order=order,
        alignment=alignment,
        capacity=capacity,
        quantize=quantize,
        round_scale=quantize is not None and bool(rng.random() < 0.5),
        partly_valid=bool(rng.random() < 0.3),
        on_timeout=str(rng.choice(["raise", "mask"])) if leaves_out else None,
        statistics=bool(rng.random() < 0.3),
    )


def different(got: jax.Array, want: Any, where: Any = True) -> jax.Array:
    """How many elements differ, of those that count."""
    return jnp.sum((got != want) & where, dtype=jnp.int32)


def ids_that_count(ids: jax.Array, local: int, rank: jax.Array, valid: Any, active: Any) -> jax.Array:
    """-1 past the valid tokens, and where a rank had a part that takes none; of `local` experts a rank."""
    counts = ids >= 0
    if valid is not None:
        counts &= jnp.arange(len(ids))[:, None] < valid
    if active is not None:
        counts &= active[rank] & active[ids // local]
    return jnp.where(counts, ids, -1)


def wrong_counts(drawn: Drawn, sent: Any, ids: jax.Array, rank: jax.Array, takes_part: Any) -> jax.Array:
    """What a dispatch says of the numbers of rows, against what these ids ask for."""
    handle, by_rank = sent.handle, drawn.order == "rank"
    ranks = handle.rank_prefix_matrix.shape[0]
    goes_to = (ids // (drawn.experts // ranks))[..., None] == jnp.arange(ranks)  # -1 to none
    rows = goes_to.any(axis=1).sum(axis=0) if by_rank else goes_to.sum(axis=(0, 1))
    sums = handle.rank_prefix_matrix
    mine = sums[rank] - jnp.where(rank > 0, sums[rank - 1], 0)
    asked, kept = jnp.where(takes_part, sums[-1, rank], 0), sent.num_tokens[0]
    wrong = different(handle.topk_idx, ids) + different(mine, rows, takes_part)
    wrong += different(kept + sent.num_dropped[0], asked)
    if drawn.order != "expert_padded" and drawn.alignment == 1:
        capacity = handle.routing.capacity if drawn.capacity is None else drawn.capacity
        wrong += different(kept, jnp.minimum(asked, capacity))
    is_choice = sent.topk_idx >= 0 if by_rank else sent.is_row()
    wrong += different(jnp.sum(is_choice.any(axis=-1) if by_rank else is_choice), kept)
    return wrong + different(jnp.sum(is_choice), jnp.sum(sent.tokens_per_expert))


def wrong_statistics(before: Any, sent: Any) -> jax.Array:
    after = sent.statistics
    wrong = different(after.tokens_per_expert - before.tokens_per_expert, sent.tokens_per_expert)
    return wrong + jnp.sum(~(after.wait_us >= before.wait_us), dtype=jnp.int32)


def wrong_gradients(x: jax.Array, rows: jax.Array, weighted: Any, sent: Any, there: Any) -> jax.Array:
    """Of a weighted combine of these rows, where the cotangent is what was sent; and of another payload."""
    wrong = different(jax_ep.redispatch(-x, sent.handle), -rows, there[..., None])
    if isinstance(sent, jax_ep.DispatchedByRank):
        return wrong
    d_y, d_weights = jax.vjp(weighted, rows, sent.row_weights)[1](x)
    wide = rows.astype(jnp.float32)
    wrong += different(d_y, (sent.row_weights[..., None] * wide).astype(rows.dtype), there[..., None])
    return wrong + different(d_weights, jnp.sum(wide * wide, axis=-1), there)


def program(rng: np.random.Generator, group: jax_ep.Group, mesh: Mesh, steps: int, small: bool):
    """One compiled program and what it is: () -> wrong elements over all steps."""
    ranks, drawn, seed = group.size, draw(rng, group, small), int(rng.integers(2**31))
    local, shape = drawn.experts // ranks, (drawn.tokens, drawn.k)
    options: dict[str, Any] = {
        "group": group,
        "num_experts": drawn.experts,
        "order": drawn.order,
        "expert_alignment": drawn.alignment,
        "capacity": drawn.capacity,
        "quantize": drawn.quantize,
        "round_scale": drawn.round_scale,
    }

    def shard(seed: jax.Array) -> jax.Array:
        rank, key = jax.lax.axis_index("ep"), jax.random.key(seed[0])
        own, common = jax.random.fold_in(key, rank), jax.random.fold_in(key, ranks)
        tag = rank * 7 + jnp.arange(drawn.tokens)[:, None] + jnp.arange(drawn.width)

        def step(carry: tuple[jax.Array, Any], i: jax.Array) -> tuple[tuple[jax.Array, Any], None]:
            wrong, statistics = carry
            keys = jax.random.split(jax.random.fold_in(own, i), 3)
            topk_idx = jax.random.randint(keys[0], shape, -1, drawn.experts)
            weights = jax.random.randint(keys[1], shape, 0, drawn.levels + 1) / drawn.levels
            valid = jax.random.randint(keys[2], (), 0, drawn.tokens + 1) if drawn.partly_valid else None
            active, attendance = None, {}
            if drawn.on_timeout is not None:
                active = jax.random.bernoulli(jax.random.fold_in(common, i), 0.7, (ranks,))
                active = active.at[i % ranks].set(True)
                attendance = {"active_ranks": active, "on_timeout": drawn.on_timeout}
            x = ((tag + i) % (drawn.largest + 1)).astype(drawn.dtype)

            sent = jax_ep.dispatch(
                x, topk_idx, weights, num_valid_tokens=valid, statistics=statistics, **options, **attendance
            )

            def combined(y: jax.Array, row_weights: Any = None) -> tuple[jax.Array, jax.Array]:
                """The sums, and how often they say wrongly who took part."""
                out = jax_ep.combine(y, sent.handle, row_weights=row_weights, **attendance)
                return (out, jnp.int32(0)) if active is None else (out[0], different(out[1], active))

            rows = jax_ep.dequantize_fp8(sent.x, drawn.dtype) if drawn.quantize == "fp8" else sent.x
            ids = ids_that_count(topk_idx, local, rank, valid, active)
            takes_part = True if active is None else active[rank]
            wrong += wrong_counts(drawn, sent, ids, rank, takes_part)
            wrong += 0 if active is None else different(sent.active_ranks, active)
            wrong += 0 if statistics is None else wrong_statistics(statistics, sent)

            has_row = sent.handle.sent_rows >= 0
            sums, others = combined(rows)
            wrong += others + different(sums, (x * has_row.sum(axis=1)[:, None]).astype(drawn.dtype))
            if isinstance(sent, jax_ep.DispatchedByRank):
                kept = (ids >= 0) & jnp.take_along_axis(has_row, jnp.maximum(ids // local, 0), axis=1)
                returned, others = combined(sent.topk_weights)
                wrong += others + different(returned, jnp.where(kept, weights, 0))
            else:
                total = jnp.sum(jnp.where(has_row, weights, 0), axis=1)
                returned, others = combined(sent.row_weights)
                wrong += others + different(returned, total)
                returned, others = combined(rows, sent.row_weights)
                wrong += others + different(returned, (x * total[:, None]).astype(drawn.dtype))
            if active is None:
                # Slots of padded experts that no row fills hold anything.
                padded = drawn.order == "expert_padded"
                there = sent.is_row() if padded else jnp.ones(rows.shape[:-1], bool)
                wrong += wrong_gradients(x, rows, lambda *a: combined(*a)[0], sent, there)
            return (wrong, sent.statistics), None

        statistics = jax_ep.DispatchStatistics.zeros(group, drawn.experts) if drawn.statistics else None
        start = (jnp.zeros((), jnp.int32) * rank, statistics)
        return jax.lax.scan(step, start, jnp.arange(steps, dtype=jnp.int32))[0][0][None]

    mapped = jax.shard_map(shard, mesh=mesh, in_specs=P(), out_specs=P("ep"), check_vma=False)
    compiled = jax.jit(mapped)
    domains = "" if group.ranks_per_domain == ranks else f", {group.ranks_per_domain} a domain"
    return (lambda: compiled(jnp.array([seed]))), f"{ranks} ranks{domains}, {drawn}", steps * drawn.ops


def begin_epochs(group: jax_ep.Group, before: int, number: int) -> str:
    """Lets the group's next ops have epochs that soon pass 2**31, or 2**32 by turns; where they begin."""
    module, first = _extension.extension(), 2 ** (31 + number % 2) - before
    assert module is not None
    reason = module.reset_device_group(ranks_of(group).key, first - 1, module.last_call(ranks_of(group).key))
    if reason:
        raise RuntimeError(reason)
    return f", epochs from {first}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--programs", type=int, default=40)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small", action="store_true", help="few and short rows, and all devices: more ops")
    parser.add_argument("--epochs", type=int, default=0, help="on GPUs, begin so far below 2**31 or 2**32")
    parser.add_argument(
        "--domains", action="store_true", help="make up domains, of as many ranks as come by chance"
    )
    options = parser.parse_args()
    rng = np.random.default_rng(options.seed)
    total, begin = 0, time.perf_counter()
    on_gpus = jax.default_backend() == "gpu"
    for number in range(options.programs):
        size = len(jax.devices()) if options.small else int(rng.integers(1, len(jax.devices()) + 1))
        mesh = Mesh(rng.permutation(np.array(jax.devices()))[:size], ("ep",))
        divisors = [n for n in range(1, size + 1) if size % n == 0]
        per_domain = int(rng.choice(divisors)) if options.domains else size
        with jax_ep.Group(mesh, "ep", ranks_per_domain=per_domain) as group:
            run, name, ops = program(rng, group, mesh, options.steps, options.small)
            if options.epochs and on_gpus:
                name += begin_epochs(group, options.epochs, number)
            wrong = int(np.sum(jax.device_get(run())))
            group.check()
        total += ops
        print(f"{total:6d} ops, {time.perf_counter() - begin:4.0f} s: {name}", flush=True)
        if wrong:
            print(f"WRONG: {wrong} elements")
            return 1
    print(
        f"{options.programs} programs, {total} ops on up to {len(jax.devices())} "
        f"{jax.devices()[0].device_kind} devices in {time.perf_counter() - begin:.0f} s: all right"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
