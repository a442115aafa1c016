"""What a layer computes where a hop between domains fails: nothing that is finite and wrong, on any rank.

Hops over rails fail on GPUs alone, so their promises are made up here (docs/protocol.md): from a failed hop
on no op within that domain ends well, and no rank of it hops. The layer must rely on nothing else.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import few_tokens_as_many, floats, ranks, routing, weights_of
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep._transport import ffi
from jax_ep._transport.collectives import domain, rank

# What fails is made up of XLA's ops, so GPUs show nothing more, and take more than a minute.
pytestmark = [pytest.mark.one_jax, pytest.mark.no_gpu]

R, PER_DOMAIN, T, K, E, H = 4, 2, 16, 2, 8, 8
NEVER = 10**9


class Failures:
    """Lets ops fail from a hop on. Ops are numbered in the order in which a program is traced."""

    def __init__(self, monkeypatch):
        self.ops = 0
        self.hops = []
        # Host -> the op after which none of its ops goes well; if it is a hop, its first rank fails of that.
        self.down = None
        for name in ("route", "push", "pull"):
            monkeypatch.setattr(ffi.Ffi, name, self._within(getattr(ffi.Ffi, name)))
        monkeypatch.setattr(ffi.Ffi, "between_domains", self._between(ffi.Ffi.between_domains))

    def _within(self, op):
        def run(*args, **options):
            self.ops += 1
            now, results = self.ops, op(*args, **options)
            here = self.down[jax.lax.axis_index("ep") // PER_DOMAIN] < now
            return jax.tree.map(lambda leaf: jnp.where(here, _filled(leaf), leaf), results)

        return run

    def _between(self, hop):
        def run(backend, blocks):
            self.ops += 1
            self.hops.append(self.ops)
            fails = self.down[domain(backend.ranks)] == self.ops
            fails &= rank(backend.ranks) % PER_DOMAIN == 0
            out = hop(backend, blocks)
            return jnp.where(fails | (self.down.min() < self.ops), _filled(out), out)

        return run


def _filled(leaf):
    return jnp.full_like(leaf, jnp.nan if jnp.issubdtype(leaf.dtype, jnp.floating) else -1)


@pytest.mark.parametrize(
    ("order", "by_counts"),
    [("rank", False), ("rank", True), ("expert", False), ("expert", True), ("expert_padded", False)],
)
def test_no_rank_has_rows_that_are_wrong(order, by_counts, monkeypatch):
    on, failures = ranks(R, PER_DOMAIN), Failures(monkeypatch)
    x, w = floats((R * T, H), seed=1), floats((R * T, K), seed=2)
    ids = routing("sprinkled", R, T, K, E).reshape(-1, K)

    def shard(x, ids, w, down):
        failures.ops, failures.hops, failures.down = 0, [], down

        def layer(x, w):
            sent = jax_ep.dispatch(
                x, ids, w, group=on.group, num_experts=E, order=order, implementation="ffi"
            )
            row_weights = None if order == "rank" else weights_of(sent)
            # If no count has come, padded experts' slots count as empty, so they are zero.
            rows = sent.row_weights if order == "expert_padded" else sent.x
            return jax_ep.combine(jnp.tanh(sent.x), sent.handle, row_weights=row_weights), rows

        with few_tokens_as_many(by_counts):
            y, transposed, rows = jax.vjp(layer, x, w, has_aux=True)
            return y, rows, transposed(jnp.cos(y))

    specs = (P("ep"), P("ep"), P("ep"), P())
    run = jax.jit(jax.shard_map(shard, mesh=on.mesh, in_specs=specs, out_specs=P("ep")))
    results = lambda down: [np.asarray(leaf) for leaf in jax.tree.leaves(run(x, ids, w, np.array(down)))]
    good = results((NEVER, NEVER))
    hops, ops = failures.hops, failures.ops
    assert len(hops) >= (6 if by_counts else 4)
    for at in range(1, ops + 1):
        # The other domain is told at the next hop. Of a hop it may fail as well.
        told = next((hop for hop in hops if hop > at), NEVER)
        for down in {(at, told), (told, at), (at, at) if at in hops else (at, told)}:
            for wanted, found in zip(good, results(down), strict=True):
                wrong = (found != wanted) & np.isfinite(found)
                assert not wrong.any(), f"domains fail at {down}: {wrong.sum()} of {wrong.size}"
    assert np.isnan(results((hops[0], hops[0]))[0]).any()
