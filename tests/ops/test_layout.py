import functools

import jax
import numpy as np
import oracle
import pytest
from cases import ROUTINGS, routing

import jax_ep

pytestmark = pytest.mark.one_jax


def assert_equal(got, ids, num_experts, num_ranks, ranks_per_domain=None):
    """The layout is the oracle's, with the domains' counts if they were asked for."""
    per_rank, per_domain, per_expert, in_rank = oracle.layout(
        ids, num_experts, num_ranks, ranks_per_domain or 1
    )
    np.testing.assert_array_equal(got.num_tokens_per_rank, per_rank, strict=True)
    if ranks_per_domain is None:
        assert got.num_tokens_per_domain is None
    else:
        np.testing.assert_array_equal(got.num_tokens_per_domain, per_domain, strict=True)
    np.testing.assert_array_equal(got.num_tokens_per_expert, per_expert, strict=True)
    np.testing.assert_array_equal(got.is_token_in_rank, in_rank, strict=True)


@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize(("num_ranks", "num_experts", "k"), [(1, 4, 2), (4, 16, 1), (8, 64, 8), (8, 512, 16)])
def test_counts_equal_the_oracle(kind, num_ranks, num_experts, k, implementation):
    ids = routing(kind, 1, 37, k, num_experts)[0]
    got = jax_ep.get_dispatch_layout(
        ids, num_experts=num_experts, num_ranks=num_ranks, implementation=implementation
    )
    assert_equal(got, ids, num_experts, num_ranks)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize(
    ("tokens", "num_ranks", "num_experts", "k"),
    [
        (512, 8, 256, 8),
        (513, 6, 24, 6),
        (1000, 40, 80, 10),
        (4096, 256, 256, 8),
        (600, 1024, 4096, 8),
        (5000, 2, 6, 3),
        (9000, 8, 64, 12),
    ],
)
def test_many_tokens(tokens, num_ranks, num_experts, k, dtype, implementation):
    """Divided among the blocks of a GPU, some with several tokens a thread."""
    ids = routing("sprinkled", 1, tokens, k, num_experts)[0].astype(dtype)
    with jax.enable_x64(dtype == np.int64):
        options = {
            "num_ranks": num_ranks,
            "ranks_per_domain": num_ranks // 2,
            "implementation": implementation,
        }
        count = functools.partial(jax_ep.get_dispatch_layout, num_experts=num_experts, **options)
        got = jax.jit(count)(ids)
    assert_equal(got, ids, num_experts, num_ranks, num_ranks // 2)


@pytest.mark.parametrize("ranks_per_domain", [1, 2, 8])
def test_a_token_counts_once_for_a_node(ranks_per_domain, implementation):
    ids = routing("uniform", 1, 29, 8, 64)[0]
    got = jax_ep.get_dispatch_layout(
        ids, num_experts=64, num_ranks=8, ranks_per_domain=ranks_per_domain, implementation=implementation
    )
    expected = oracle.layout(ids, 64, 8, ranks_per_domain)[1]
    np.testing.assert_array_equal(got.num_tokens_per_domain, expected, strict=True)


def test_int64_ids(implementation):
    ids = routing("sprinkled", 1, 20, 4, 16)[0].astype(np.int64)
    ids[0, 0] = 2**40  # out of range, and 0 in its lower half
    with jax.enable_x64(True):
        got = jax_ep.get_dispatch_layout(ids, num_experts=16, num_ranks=4, implementation=implementation)
    np.testing.assert_array_equal(got.num_tokens_per_expert, oracle.layout(ids, 16, 4)[2], strict=True)


def test_under_jit_and_vmap(implementation):
    ids = routing("uniform", 3, 10, 2, 8)

    def per_expert(one):
        layout = jax_ep.get_dispatch_layout(one, num_experts=8, num_ranks=2, implementation=implementation)
        return layout.num_tokens_per_expert

    got = jax.jit(jax.vmap(per_expert))(ids)
    np.testing.assert_array_equal(got, [oracle.layout(one, 8, 2)[2] for one in ids])
