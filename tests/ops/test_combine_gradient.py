"""The gradient of a combine by expert, in closed form."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import BF16, floats, ranks, routing

import jax_ep

pytestmark = pytest.mark.moves_rows

R, T, K, E, H = 4, 7, 3, 8, 5


def flat(array):
    return jnp.asarray(array.reshape(-1, *array.shape[2:]))


@pytest.mark.one_jax
@pytest.mark.parametrize("capacity", [None, 10])
def test_closed_form_of_combine(capacity, implementation):
    """With y = 1 everywhere: d out / d weight = H where a row is real, and 0 in padding and tail."""
    ids = routing("sprinkled", R, T, K, E)
    on = ranks(R)
    received = oracle.dispatch(np.zeros((R, T, 1)), ids, None, E, "expert", capacity, 4)
    size = len(received[0].sources)
    real = np.array([[source is not None for source in one.sources] for one in received])
    y = np.where(real[..., None], 1.0, np.nan).astype(np.float32) * np.ones(H, np.float32)
    weights = np.where(real, floats((R, size)), np.nan).astype(np.float32)

    def shard(ids, y, weights, bias):
        handle = jax_ep.dispatch(
            jnp.zeros((T, 1)),
            ids,
            group=on.group,
            num_experts=E,
            order="expert",
            capacity=capacity,
            expert_alignment=4,
            implementation=implementation,
        ).handle
        return jax_ep.combine(y, handle, row_weights=weights, bias=bias, implementation=implementation)

    def loss(y, weights, bias):
        on_all = on.map(shard)
        return jnp.sum(on_all(flat(ids), y, weights, bias))

    bias = jnp.zeros((R * T, H), jnp.bfloat16)
    d_y, d_weights, d_bias = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(flat(y), flat(weights), bias)
    np.testing.assert_array_equal(d_weights, np.where(real, H, 0).reshape(-1))
    np.testing.assert_array_equal(d_y, np.where(real, weights, 0).reshape(-1, 1) * np.ones((1, H)))
    assert d_bias.dtype == jnp.bfloat16
    np.testing.assert_array_equal(d_bias, 1)


def check_weighted(ids, leaves, capacity, implementation, num_experts=E):
    """D y = weight * cotangent of the token, d weight = <y, cotangent>, summed over the leaves.

    `leaves`: of each its shape behind the rows, and its dtype.
    """
    num_ranks, tokens, _ = ids.shape
    received = oracle.dispatch(
        np.zeros((num_ranks, tokens, 1)), ids, None, num_experts, "expert", capacity, 4
    )
    unused = np.array([[source is None for source in one.sources] for one in received])
    y, d_out = {}, {}
    for i, (shape, dtype) in enumerate(leaves):
        y[i] = floats((num_ranks, capacity, *shape), np.float32, seed=10 + i).astype(dtype)
        d_out[i] = floats((num_ranks, tokens, *shape), np.float32, seed=20 + i).astype(dtype)
        y[i][unused] = np.nan
    weights = floats((num_ranks, capacity), seed=5)
    weights[unused] = np.nan
    on = ranks(num_ranks)

    def shard(ids, y, weights, d_out):
        routing = {"num_experts": num_experts, "capacity": capacity, "expert_alignment": 4}
        options = {"implementation": implementation}
        handle = jax_ep.dispatch(jnp.zeros((tokens, 1)), ids, group=on.group, **routing, **options).handle
        combine = lambda y, weights: jax_ep.combine(y, handle, row_weights=weights, **options)
        return jax.vjp(combine, y, weights)[1](d_out)

    d_y, d_weights = on.run(shard, ids, y, weights, d_out)
    for rank, one in enumerate(received):
        sources = np.array([source or (0, 0, 0) for source in one.sources])
        real, (s, t) = ~unused[rank], sources.T[:2]
        dot, size = np.zeros(capacity), np.zeros(capacity)
        for i, leaf in y.items():
            cotangent = d_out[i][s, t].astype(np.promote_types(leaf.dtype, np.float32))
            factor = np.where(real, weights[rank], 0).reshape(-1, *(1,) * (cotangent.ndim - 1))
            want = (factor * cotangent).astype(leaf.dtype)
            np.testing.assert_array_equal(d_y[i][rank], want, f"leaf {i} at rank {rank}")
            product = (leaf[rank].astype(np.float64) * cotangent).reshape(capacity, -1)[real]
            dot[real] += product.sum(axis=1)
            size[real] += np.abs(product).sum(axis=1)
        assert (np.abs(d_weights[rank] - dot) <= 1e-5 + 1e-6 * size).all()
        assert d_weights[rank][real].any()


@pytest.mark.one_jax
@pytest.mark.parametrize("tokens", [T, 1300])
def test_leaves_of_several_dtypes(tokens, implementation):
    ids = routing("sprinkled", R, tokens, K, E)
    # Those of one dtype take one push, which adds their dot products.
    leaves = [((8, 4), np.dtype(np.float32)), ((), BF16), ((3,), np.dtype(np.float32))]
    check_weighted(ids, leaves, R * tokens, implementation)


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [1000, 2800])
@pytest.mark.parametrize(
    "leaves",
    [
        [((4096,), BF16)],
        [((3600,), np.float32)],
        [((8192,), np.float16), ((4112,), np.float16)],
        [((1808,), np.float64)],
    ],
    ids=["bfloat16", "float32", "two of float16", "float64"],
)
def test_long_rows_of_many_tokens(leaves, capacity):
    """On GPUs they are scaled in shared memory, those of more than 14336 bytes in two parts."""
    # Programs for CPUs have no parts, and the oracle takes long.
    share = 1 if jax.default_backend() == "gpu" else 10
    ids = routing("sprinkled", 2, 1100 // share, 2, E)
    with jax.enable_x64(leaves[0][1] == np.float64):
        check_weighted(ids, [(shape, np.dtype(dtype)) for shape, dtype in leaves], capacity // share, "ffi")


def test_more_rows_of_a_token_than_are_loaded_at_a_time():
    """With JAX_EP_NO_ARENA=1 on GPUs: shared memory holds seven of these."""
    ids = routing("uniform", 1, 40, 12, 16)
    check_weighted(ids, [((7168,), BF16)], 40 * 12 + 16 * 3, "ffi", num_experts=16)


@pytest.mark.one_jax
@pytest.mark.parametrize("weighted", [False, True])
def test_cotangents_as_fp8(weighted, implementation):
    """They have the bits of `quantize_fp8`, and those of tiny cotangents are the same scaled."""
    width, capacity = 256, 24
    ids = routing("sprinkled", R, T, K, E)
    y, d_out = floats((R, capacity, width), seed=1), floats((R, T, width), seed=2)
    received = oracle.dispatch(np.zeros((R, T, 1)), ids, None, E, "expert", capacity, 4)
    unused = np.array([[source is None for source in one.sources] for one in received])
    weights = floats((R, capacity), seed=5)
    weights[unused], y[unused] = np.nan, np.nan
    on = ranks(R)

    def shard(ids, y, weights, d_out):
        options = {"implementation": implementation}
        shape = {"num_experts": E, "capacity": capacity, "expert_alignment": 4}
        handle = jax_ep.dispatch(jnp.zeros((T, 1)), ids, group=on.group, **shape, **options).handle

        def gradients(cotangent, quantize):
            def summed(y, weights, bias):
                row_weights = weights if weighted else None
                one = {"row_weights": row_weights, "bias": bias, "quantize_gradient": quantize}
                return jax_ep.combine(y, handle, **one, **options)

            return jax.vjp(summed, y, weights, d_out)[1](cotangent)

        rounded = jax_ep.dequantize_fp8(jax_ep.quantize_fp8(d_out), jnp.float32)
        return gradients(d_out, "fp8"), gradients(d_out * 2.0**-60, "fp8"), gradients(rounded, None)

    (d_y, d_weights, d_bias), tiny, (want_y, want_weights, _) = on.run(shard, ids, y, weights, d_out)
    np.testing.assert_array_equal(d_y, want_y)
    np.testing.assert_allclose(d_weights, want_weights, rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(d_bias, d_out)
    for one, scaled in zip((d_y, d_weights, d_bias), tiny, strict=True):
        np.testing.assert_array_equal(scaled, one * np.float32(2.0**-60))
    assert d_y.any()
    assert d_weights.any() == weighted
