"""The cases of DeepEP's intranode test (tests/legacy/test_intranode.py) as ours.

{random bf16, x = rank, FP8 values with scales} x {with, without top-k weights} x {plain, worst case,
cached}: counts, the source rank of every row, ids, tails; combine gives x times the number of ranks.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BF16, FP8, floats, ranks, routing
from devices import most_ranks

import jax_ep

pytestmark = [pytest.mark.one_jax, pytest.mark.processes, pytest.mark.moves_rows]

R, T, H, K, E = most_ranks(), 64, 256, 4, 32
L = E // R


def difference(a, b):
    """DeepEP's measure: 1 - 2 sum((a + 1)(b + 1)) / sum((a + 1)^2 + (b + 1)^2)."""
    a, b = np.asarray(a, np.float64) + 1, np.asarray(b, np.float64) + 1
    return 1 - 2 * (a * b).sum() / (a * a + b * b).sum()


def payload(kind):
    """The x to dispatch, and how its rows read as float32."""
    rank = np.broadcast_to(np.arange(R, dtype=np.float32)[:, None, None], (R, T, H))
    if kind == "random":
        return floats((R, T, H), BF16), lambda x: x.astype(jnp.float32)
    if kind == "rank":
        return rank.astype(BF16), lambda x: x.astype(jnp.float32)
    # Blocks of 128 columns; the rank is in the scales.
    values = np.broadcast_to(np.float32(1), (R, T, H)).astype(FP8)
    scales = np.ascontiguousarray(rank[..., ::128])
    read = lambda x: x[0].astype(jnp.float32) * jnp.repeat(x[1], 128, axis=-1)
    return (values, scales), read


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "how", "with_topk"),
    [  # weights come along with every second one
        (kind, how, (i + j) % 2 == 0)
        for i, kind in enumerate(["random", "rank", "fp8"])
        for j, how in enumerate(["plain", "worst_case", "cached"])
    ],
)
def test_cases_of_deepep(kind, how, with_topk, implementation):
    on = ranks(R)
    ids = routing("uniform", R, T, K, E)
    x, read = payload(kind)
    weights = np.where(ids >= 0, 1.0 if kind == "rank" else floats(ids.shape), 0).astype(np.float32)
    in_rank = np.stack(
        [
            np.asarray(jax_ep.get_dispatch_layout(one, num_experts=E, num_ranks=R).is_token_in_rank)
            for one in ids
        ]
    )
    to_rank = in_rank.sum(axis=1)  # [source, destination]
    capacity = None if how == "worst_case" else int(to_rank.sum(axis=0).max())
    by = {"implementation": implementation}

    def shard(x, ids, weights):
        routing = {"num_experts": E, "order": "rank", "capacity": capacity}
        d = jax_ep.dispatch(x, ids, weights if with_topk else None, group=on.group, **routing, **by)
        rows = jax_ep.redispatch(x, d.handle, **by) if how == "cached" else d.x
        back = jax_ep.combine(read(rows).astype(jnp.bfloat16), d.handle, **by)
        back_weights = jax_ep.combine(d.topk_weights, d.handle, **by) if with_topk else None
        return d, read(rows), back, back_weights

    d, rows, back, back_weights = jax.device_get(on.run(shard, x, ids, weights))

    # Received counts equal the global counts.
    np.testing.assert_array_equal(d.num_tokens[:, 0], to_rank.sum(axis=0))
    np.testing.assert_array_equal(d.num_dropped, 0)
    np.testing.assert_array_equal(
        d.tokens_per_expert.reshape(-1), np.bincount(ids[ids >= 0].reshape(-1), minlength=E)
    )
    prefix = np.cumsum(to_rank, axis=0)
    for rank in range(R):
        np.testing.assert_array_equal(d.handle.rank_prefix_matrix[rank], prefix)
        # Every row carries its source rank, as the prefix matrix says.
        begin = 0
        for source in range(R):
            end = prefix[source, rank]
            if kind != "random":
                np.testing.assert_array_equal(rows[rank, begin:end], source)
            begin = end
        assert not rows[rank, begin:].any()
        # Ids are -1 or local; each row has one; the tail is -1.
        assert ((d.topk_idx[rank] >= -1) & (d.topk_idx[rank] < L)).all()
        assert (d.topk_idx[rank, :begin] >= 0).any(axis=1).all()
        assert (d.topk_idx[rank, begin:] == -1).all()
        if with_topk:
            assert not d.topk_weights[rank][d.topk_idx[rank] < 0].any()

    copies = in_rank.sum(axis=2)
    sent = np.asarray(jax.vmap(read)(jax.tree.map(jnp.asarray, x)))
    assert difference(back.astype(np.float32) / copies[..., None], sent) < 5e-6
    if with_topk:
        assert difference(back_weights, weights) < 1e-9
