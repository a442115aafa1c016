"""dispatch and combine are each other's transpose: <dispatch x, y> = <x, combine y>, whatever the routing.

Everything is a small integer in float32, so both sides are exact. New examples at every run; hypothesis
prints the one that fails.
"""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ranks

import jax_ep

R, E = 4, 8
# Few shapes, so that few programs are compiled: tokens, K, capacity, alignment.
SIZES = {"rank": [(5, 2, None, 1), (6, 3, 9, 1)], "expert": [(5, 2, None, 1), (6, 3, 11, 2), (3, 4, None, 4)]}
WIDTH = 3


@functools.cache
def both_sides(order, capacity, alignment, implementation):
    """Returns <dispatch x, y> and <x, combine y> of x, noise, ids and weights; by expert also weighted."""
    on = ranks(R)

    def shard(x, noise, ids, weights):
        by = {"implementation": implementation}
        sent = jax_ep.dispatch(
            x,
            ids,
            weights,
            group=on.group,
            num_experts=E,
            order=order,
            capacity=capacity,
            expert_alignment=alignment,
            **by,
        )
        y = noise[: sent.x.shape[0]] + 0 * sent.x
        sides = [jnp.vdot(sent.x, y), jnp.vdot(x, jax_ep.combine(y, sent.handle, row_weights=None, **by))]
        if order == "expert":
            scaled = jax_ep.combine(y, sent.handle, row_weights=sent.row_weights, **by)
            sides += [jnp.vdot(sent.x * sent.row_weights[:, None], y), jnp.vdot(x, scaled)]
        return jnp.stack(sides)

    return jax.jit(on.map(shard))


@pytest.mark.one_jax
@pytest.mark.parametrize("order", ["rank", "expert"])
def test_adjointness(order, implementation):
    @hypothesis.given(data=st.data())
    @hypothesis.settings(max_examples=12, derandomize=False, deadline=None, print_blob=True)
    def holds(data):
        tokens, k, capacity, alignment = data.draw(st.sampled_from(SIZES[order]))
        seed = data.draw(st.integers(0, 2**32 - 1))
        rng = np.random.default_rng(seed)
        # Few experts now and then, so that capacities are exceeded and ids repeated.
        experts = int(rng.integers(1, E + 1))
        ids = rng.integers(-2, experts + 1, (R, tokens, k)).astype(np.int32)
        x = rng.integers(-4, 5, (R, tokens, WIDTH)).astype(np.float32)
        noise = rng.integers(-4, 5, (R, 200, WIDTH)).astype(np.float32)
        weights = rng.integers(0, 5, (R, tokens, k)).astype(np.float32)
        program = both_sides(order, capacity, alignment, implementation)
        sides = ranks(R).apply(program, x, noise, ids, weights).sum(axis=0)
        np.testing.assert_array_equal(sides[0::2], sides[1::2])

    holds()
