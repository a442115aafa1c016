"""One rank calls another op than its peers, or the same with other shapes: nobody may move a byte."""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from cases import BF16, floats, routing
from fault_canaries import Canaries
from fault_rig import (
    EXPERTS,
    FEW,
    FEW_ENOUGH_FOR_SLOTS,
    SLACK_S,
    WIDTH,
    K,
    Rig,
    checked,
    fetch_or_none,
    is_refused,
    require,
    require_named,
)
from jax.sharding import PartitionSpec as P

import jax_ep

PAIRS = ("op", "row width", "dtype", "capacity")
# A call site takes one of eight channels in the order of the first calls; those of few tokens share one.
FIRST, FEW_TOKENS = "at the first call", "through the arena"
WAYS = ("in the same channel", "in another channel", FIRST, FEW_TOKENS, f"{FEW_TOKENS}, {FIRST}")
CHANNELS = 8


class Pair:
    """A program in which each rank is told which of two ops it calls."""

    def __init__(self, rig: Rig, what: str, how: str):
        self.rig, self.what = rig, what
        ranks = rig.size
        self.tokens = tokens = FEW_ENOUGH_FOR_SLOTS if how.startswith(FEW_TOKENS) else FEW
        rows = ranks * tokens
        self.arguments = rig.put(
            (floats((rows, WIDTH), BF16, 3), routing("uniform", ranks, tokens, K, EXPERTS, 3).reshape(-1, K))
        )

        def dispatch(x: jax.Array, ids: jax.Array, capacity: int | None = None) -> jax_ep.DispatchedByRank:
            # The group of the moment: it may have been made anew since.
            return jax_ep.dispatch(
                x,
                ids,
                group=rig.group,
                num_experts=EXPERTS,
                order="rank",
                capacity=capacity,
                implementation="ffi",
            )

        def shard(which: jax.Array, x: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
            sent = dispatch(x, ids)

            def first() -> jax.Array:
                return dispatch(x * 2, ids).x

            def other() -> jax.Array:
                if what == "op":
                    return jax_ep.combine(sent.x, sent.handle, implementation="ffi")
                if what == "row width":
                    return dispatch(x[:, : WIDTH // 2], ids).x
                if what == "dtype":
                    return dispatch(jax.lax.bitcast_convert_type(x, jnp.float16), ids).x
                return dispatch(x, ids, capacity=rows - 8).x

            dtype = jnp.float16 if what == "dtype" else x.dtype
            shape = {
                "op": (tokens, WIDTH),
                "row width": (rows, WIDTH // 2),
                "dtype": (rows, WIDTH),
                "capacity": (rows - 8, WIDTH),
            }[what]
            out = jax.lax.cond(
                which[0] == 0,
                lambda: (first(), jnp.zeros(shape, dtype)),
                lambda: (jnp.zeros((rows, WIDTH), x.dtype), other()),
            )
            return jax.tree.map(lambda leaf: leaf[None, None], out)

        self.compiled = self._compile(shard, self._which([0] * ranks), *self.arguments)
        self._dispatch = dispatch

    def _compile(self, shard: Callable, *arguments: object) -> Callable:
        mapped = jax.shard_map(
            shard, mesh=self.rig.mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False
        )
        options = {"xla_gpu_graph_min_graph_size": 1} if self.rig.style.graph else {}
        return jax.jit(mapped).lower(*arguments).compile(compiler_options=options)

    def _which(self, choices: list[int]) -> jax.Array:
        return self.rig.put(np.array(choices, np.int32))

    def run(self, choices: list[int]) -> list[jax.Array]:
        return list(self.compiled(self._which(choices), *self.arguments))

    def prepare(self, how: str) -> "Pair":
        with self.rig.patience():
            return self._prepare(how)

    def _prepare(self, how: str) -> "Pair":
        """Calls both ops with all ranks; in the same channel if there are eight calls between their first."""
        if how.endswith(FIRST):
            return self
        ranks = self.rig.size
        self.expected = [self.rig.fetch(self.run([0] * ranks))]
        if how == "in the same channel":
            # The program begins with a dispatch that has been called: seven more sites lie between.

            def fill(x: jax.Array, ids: jax.Array) -> jax.Array:
                for i in range(CHANNELS - 1):
                    x = self._dispatch(x + i, ids).x[: self.tokens]
                return x

            jax.block_until_ready(self._compile(fill, *self.arguments)(*self.arguments))
        self.expected.append(self.rig.fetch(self.run([1] * ranks)))
        return self

    def require_right(self) -> None:
        for choice in (0, 1):
            for rank, leaves in self.rig.fetch(self.run([choice] * self.rig.size)).items():
                right = self.expected[choice][rank][choice]
                require(leaves[choice].tobytes() == right.tobytes(), f"{self.what}: rank {rank} is wrong")

    def run_mixed(self, how: str) -> tuple[float, str, Canaries]:
        """A run in which not all ranks call the same; what it took, its error, canaries in its place."""
        rig = self.rig
        choices = [1, *[0] * (rig.size - 1)]
        while not how.endswith(FIRST) and len(set(choices := rig.rng.integers(2, size=rig.size))) < 2:
            pass
        choices = [int(choice) for choice in choices]
        begin = time.monotonic()
        canaries = Canaries(rig.rng)
        raised = ""
        try:
            shards = rig.shards(self.run(choices))
        except jax.errors.JaxRuntimeError as error:
            shards, raised = {}, str(error)
        found = {rank: fetch_or_none(leaves) for rank, leaves in shards.items()}
        took = time.monotonic() - begin
        for rank, leaves in shards.items():
            if found[rank] is not None:
                canaries.note(leaves)
        del shards
        canaries.sing()
        text = checked(rig.group) or raised
        for rank, leaves in found.items():
            refused = leaves is None or is_refused(leaves[choices[rank]])
            require(refused, f"{self.what}: rank {rank} has moved rows")
        # The first run of a program loads it, too.
        allowed = 2 * rig.timeout_s + (2 if how.endswith(FIRST) else SLACK_S)
        require(took <= allowed, f"refused after {took:.2f} s, more than {allowed:.2f}")
        require(text != "", "group.check() knows of nothing")
        both = self.what == "op" and how != "in another channel"
        require_named(text, ("dispatch", "combine") if both else ())
        return took, text, canaries
