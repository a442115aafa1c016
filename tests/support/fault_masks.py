"""Ops with on_timeout="mask" on GPUs, where a rank is late or dead: the others go on without it."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import oracle
from cases import assert_close, floats, routing, same_bits
from fault_rig import FEW_ENOUGH_FOR_SLOTS, Rig, fetch_or_none, require
from jax.sharding import PartitionSpec as P

import jax_ep

TOKENS, K, WIDTH = FEW_ENOUGH_FOR_SLOTS, 4, 256
ORDERS = ("rank", "expert", "expert_padded")


class Masked:
    """A dispatch, and a combine of its rows twice over, by those ranks that the program says take part."""

    def __init__(self, rig: Rig, order: str):
        self.rig, self.order, self.experts = rig, order, 4 * rig.size
        self.x = floats((rig.size, TOKENS, WIDTH))
        self.ids = routing("sprinkled", rig.size, TOKENS, K, self.experts, 5)
        self.arguments = rig.put((self.x.reshape(-1, WIDTH), self.ids.reshape(-1, K)))
        mapped = jax.shard_map(
            self._shard, mesh=rig.mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False
        )
        everybody = rig.put(np.ones(rig.size * rig.size, np.int32))
        self.compiled = jax.jit(mapped).lower(everybody, *self.arguments).compile()
        with rig.patience():
            self.require_right(self.run(), range(rig.size), range(rig.size))

    def _shard(self, active, x, ids):
        options = {"on_timeout": "mask", "implementation": "ffi"}
        routing = {"group": self.rig.group, "num_experts": self.experts, "order": self.order}
        sent = jax_ep.dispatch(x, ids, active_ranks=active, **routing, **options)
        is_row = sent.is_row() if self.order != "rank" else jnp.ones(sent.x.shape[:1], bool)
        y = jnp.where(is_row[..., None], 2 * sent.x, jnp.nan)  # nobody reads what is no row
        sums, after = jax_ep.combine(y, sent.handle, active_ranks=sent.active_ranks, **options)
        return sent.active_ranks, after, sent.num_tokens, sums

    def run(self, views=None):
        """The shards of each rank here, which may be late; `views` [R, R] are whom each rank counts on."""
        size = self.rig.size
        views = np.ones((size, size), np.int32) if views is None else views
        return self.rig.shards(list(self.compiled(self.rig.put(views.reshape(-1)), *self.arguments)))

    def require_right(self, shards, ranks, there):
        """What `ranks` have made of the tokens and experts of those that were there."""
        active = np.isin(np.arange(self.rig.size), list(there)).astype(np.int32)
        ids = oracle.mask_inactive(self.ids, self.experts, active)
        want = oracle.dispatch(self.x, ids, None, self.experts, self.order)
        sums = oracle.combine(np.stack([2 * one.x for one in want]), want, TOKENS, active=active)
        for rank in ranks:
            if rank not in self.rig.local:
                continue
            leaves = fetch_or_none(shards[rank])
            require(leaves is not None, f"rank {rank} has an error")
            after_dispatch, after_combine, num_tokens, out = leaves
            for after in (after_dispatch, after_combine):
                require(same_bits(after, active), f"rank {rank} says that {after} were there, not {active}")
            require(num_tokens == want[rank].num_tokens, f"rank {rank} has {num_tokens} rows")
            assert_close(out, sums[rank], terms=K)


def masked_once(program: Masked) -> str:
    """One rank is late; the others go on without it, then again, and with a new group with it."""
    rig = program.rig
    late, seconds = int(rig.rng.integers(rig.size)), rig.timeout_s * float(rig.rng.uniform(3, 5))
    others = [rank for rank in range(rig.size) if rank != late]
    rig.stall(late, 1, seconds)
    begin = time.monotonic()
    shards = program.run()
    program.require_right(shards, others, others)
    took = time.monotonic() - begin
    rig.end_stalls()
    require(
        took < seconds, f"the others were done after {took:.2f} s, the late rank came after {seconds:.2f}"
    )
    require(fetch_or_none(shards[late]) is not None, "the late rank has an error")
    rig.group.check()
    views = np.ones((rig.size, rig.size), np.int32)
    views[:, late] = 0
    views[late] = np.arange(rig.size) == late
    begin = time.monotonic()
    shards = program.run(views)
    program.require_right(shards, others, others)
    program.require_right(shards, [late], [late])
    again = time.monotonic() - begin
    require(again < rig.timeout_s, f"without the late rank the others took {again:.2f} s")
    rig.regroup()
    with rig.patience():
        program.require_right(program.run(), range(rig.size), range(rig.size))
    return f"the others were done after {took:.2f} s, then after {again:.3f} s"
