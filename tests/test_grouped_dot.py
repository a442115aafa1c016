"""grouped_dot against a loop over the experts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import assert_close, floats, ranks
from jax.sharding import PartitionSpec as P
from layers import E, H, R, dense, dense_gradients, inputs

import jax_ep

SIZES = {
    "even": [8, 8, 8, 8],
    "empty groups": [0, 20, 0, 7],
    "all empty": [0, 0, 0, 0],
    "exactly full": [1, 2, 36, 1],
    "one row": [0, 0, 0, 1],
}
C = 40

# Tensor cores take float32 rows as tf32, of 10 bits.
TOLERANCE = 2e-3 if jax.default_backend() == "gpu" else 1e-6


def loop(rows, weights, sizes):
    out = np.zeros((len(rows), weights.shape[2]))
    begin = 0
    for group, size in enumerate(sizes):
        out[begin : begin + size] = rows[begin : begin + size].astype(float) @ weights[group].astype(float)
        begin += size
    return out


@pytest.mark.parametrize(("inner", "outer"), [(16, 32), (5, 3), (40, 150)])
@pytest.mark.parametrize("sizes", SIZES)
def test_products_and_gradients(sizes, inner, outer):
    sizes = np.array(SIZES[sizes], np.int32)
    rows, weights = floats((C, inner), seed=1), floats((4, inner, outer), seed=2)
    cotangent = floats((C, outer), seed=3)
    value, transposed = jax.vjp(lambda r, w: jax_ep.grouped_dot(r, w, sizes), rows, weights)
    np.testing.assert_allclose(value, loop(rows, weights, sizes), rtol=TOLERANCE, atol=20 * TOLERANCE)
    d_rows, d_weights = transposed(jnp.asarray(cotangent))
    want = loop(cotangent, weights.swapaxes(1, 2), sizes)
    np.testing.assert_allclose(d_rows, want, rtol=TOLERANCE, atol=20 * TOLERANCE)
    begin = 0
    for group, size in enumerate(sizes):
        part = slice(begin, begin + size)
        np.testing.assert_allclose(
            d_weights[group], rows[part].T @ cotangent[part], rtol=TOLERANCE, atol=20 * TOLERANCE
        )
        begin += size


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits_are_summed_in_float32(dtype):
    sizes = np.array([300, 0, 212], np.int32)
    rows, weights = floats((600, 256)).astype(dtype), floats((3, 256, 64)).astype(dtype)
    got = jax_ep.grouped_dot(rows, weights, sizes)
    assert got.dtype == dtype
    assert_close(got, loop(rows, weights, sizes), terms=256)


def test_rows_past_the_groups_do_not_matter():
    """Padding inside a group counts as rows of it; what lies past all groups is zero in the results."""
    sizes = np.array([130, 0, 7, 129], np.int32)
    rows, weights = floats((500, 24)), floats((4, 24, 40))
    rows[266:] = 1e30
    value, transposed = jax.vjp(lambda r, w: jax_ep.grouped_dot(r, w, sizes), rows, weights)
    np.testing.assert_allclose(value, loop(rows, weights, sizes), rtol=TOLERANCE, atol=50 * TOLERANCE)
    ones = jnp.ones_like(value)
    d_rows, d_weights = transposed(ones.at[266:].set(1e30))
    assert not np.asarray(d_rows)[266:].any()
    want_rows, want_weights = transposed(ones.at[266:].set(0))
    np.testing.assert_array_equal(d_rows, want_rows)
    np.testing.assert_array_equal(d_weights, want_weights)
    assert np.asarray(want_weights).any()


def test_in_a_layer_under_remat():
    """The same function for every expert, so that the layer has a closed form."""
    on = ranks(R)
    x, ids, w = inputs()
    same = jnp.tile(jnp.eye(H) * 1.5, (E // R, 1, 1))

    def shard(x, ids, w):
        def experts(sent):
            return jax_ep.grouped_dot(jnp.tanh(sent.x), same, sent.group_sizes)

        def layer(x, w):
            return jax_ep.moe(x, ids, w, experts, group=on.group, num_experts=E)

        return jax.checkpoint(layer, policy=jax_ep.save_ep_residuals)(x, w)

    mapped = jax.shard_map(shard, mesh=on.mesh, in_specs=P("ep"), out_specs=P("ep"))
    np.testing.assert_allclose(jax.jit(mapped)(x, ids, w), dense(x, ids, w), rtol=TOLERANCE, atol=TOLERANCE)
    grads = jax.jit(jax.grad(lambda x, w: jnp.sum(mapped(x, ids, w) ** 2), argnums=(0, 1)))(x, w)
    for got, want in zip(grads, dense_gradients(x, ids, w), strict=True):
        np.testing.assert_allclose(got, want, rtol=TOLERANCE, atol=20 * TOLERANCE)


@pytest.mark.parametrize(
    ("rows", "weights", "sizes", "error", "text"),
    [
        (
            (4, 3),
            (2, 5, 6),
            (2,),
            ValueError,
            r"must fit; got float32\[4, 3\], float32\[2, 5, 6\], int32\[2\]",
        ),
        ((4, 3), (2, 3, 6), (3,), ValueError, "must fit"),
        ((4, 3, 1), (2, 3, 6), (2,), ValueError, "must fit"),
    ],
)
def test_shapes_that_do_not_fit(rows, weights, sizes, error, text):
    with pytest.raises(error, match=text):
        jax_ep.grouped_dot(jnp.ones(rows), jnp.ones(weights), jnp.ones(sizes, jnp.int32))


def test_dtypes_that_do_not_fit():
    with pytest.raises(TypeError, match="one floating dtype, got float32 and bfloat16"):
        jax_ep.grouped_dot(jnp.ones((4, 3)), jnp.ones((2, 3, 6), jnp.bfloat16), jnp.ones(2, jnp.int32))
    with pytest.raises(ValueError, match="group_sizes int32"):
        jax_ep.grouped_dot(jnp.ones((4, 3)), jnp.ones((2, 3, 6)), jnp.ones(2))
