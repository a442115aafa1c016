"""grouped_dot against a loop over the experts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import assert_close, floats, ranks
from devices import make_mesh
from jax.sharding import AxisType
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


grouped_dot = jax.jit(jax_ep.grouped_dot)


@jax.jit
def with_gradients(rows, weights, sizes, cotangent):
    """Returns the product, and its gradients in both operands."""
    value, transposed = jax.vjp(lambda r, w: jax_ep.grouped_dot(r, w, sizes), rows, weights)
    return value, *transposed(cotangent)


def loop(rows, weights, sizes):
    out = np.zeros((len(rows), weights.shape[2]))
    begin = 0
    for group, size in enumerate(sizes):
        out[begin : begin + size] = rows[begin : begin + size].astype(float) @ weights[group].astype(float)
        begin += size
    return out


@pytest.mark.one_jax
@pytest.mark.parametrize(("inner", "outer"), [(16, 32), (5, 3), (40, 150)])
@pytest.mark.parametrize("sizes", SIZES)
def test_products_and_gradients(sizes, inner, outer):
    sizes = np.array(SIZES[sizes], np.int32)
    rows, weights = floats((C, inner), seed=1), floats((4, inner, outer), seed=2)
    cotangent = floats((C, outer), seed=3)
    value, d_rows, d_weights = jax.device_get(with_gradients(rows, weights, sizes, cotangent))
    np.testing.assert_allclose(value, loop(rows, weights, sizes), rtol=TOLERANCE, atol=20 * TOLERANCE)
    want = loop(cotangent, weights.swapaxes(1, 2), sizes)
    np.testing.assert_allclose(d_rows, want, rtol=TOLERANCE, atol=20 * TOLERANCE)
    begin = 0
    for group, size in enumerate(sizes):
        part = slice(begin, begin + size)
        np.testing.assert_allclose(
            d_weights[group], rows[part].T @ cotangent[part], rtol=TOLERANCE, atol=20 * TOLERANCE
        )
        begin += size


@pytest.mark.one_jax
@pytest.mark.parametrize(
    ("num_rows", "inner", "outer"), [(40, 0, 8), (40, 8, 0), (0, 8, 8), (40, 0, 0)], ids=str
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_products_of_width_0(num_rows, inner, outer, dtype):
    """Sums of nothing are zero, and results without elements are no launch of nothing."""
    dtype = jnp.dtype(dtype)
    rows, weights = np.ones((num_rows, inner), dtype), np.ones((4, inner, outer), dtype)
    sizes, cotangent = np.full(4, num_rows // 4, np.int32), np.ones((num_rows, outer), dtype)
    value, d_rows, d_weights = with_gradients(rows, weights, sizes, cotangent)
    np.testing.assert_array_equal(value, np.zeros((num_rows, outer)))
    np.testing.assert_array_equal(d_rows, np.zeros((num_rows, inner)))
    np.testing.assert_array_equal(d_weights, np.zeros((4, inner, outer)))


@pytest.mark.parametrize("dtype", [pytest.param("bfloat16", marks=pytest.mark.one_jax), "float32"])
def test_a_window_of_experts(dtype):
    """Has the bits of all experts where rows are its own; other rows are zero, and are not read."""
    sizes, C, M, N = np.array([130, 40, 0, 200, 9], np.int32), 400, 64, 24
    dtype = jnp.dtype(dtype)
    rows, w = (floats(shape, dtype, seed=i) for i, shape in enumerate([(C, M), (5, M, N)]))
    cotangent = floats((C, N), dtype, seed=3)
    expert = np.repeat(np.arange(6), [*sizes, C - sizes.sum()])

    @jax.jit
    def run(offset, rows, w, *sizes):
        product = lambda rows, w: jax_ep.grouped_dot(rows, w, *sizes, group_offset=offset)
        value, transposed = jax.vjp(product, rows, w)
        return value, *transposed(cotangent)

    value, d_rows, d_w = run(None, rows, w, sizes)
    for offset in (0, 1, 3):
        is_row = ((expert >= offset) & (expert < offset + 2))[:, None]
        given = np.where(is_row, rows, np.asarray(np.nan, rows.dtype)), w[offset : offset + 2]
        got = run(jnp.int32(offset), *given, sizes)
        wanted = np.where(is_row, value, 0), np.where(is_row, d_rows, 0), d_w[offset : offset + 2]
        for one, other in zip(got, wanted, strict=True):
            np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))
        assert got[0].any()


@pytest.mark.one_jax
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("spoilt", [0, 1, 3])
def test_a_matrix_that_is_not_finite_spoils_the_rows_of_its_expert_alone(spoilt, dtype):
    """Expert 1 has none."""
    sizes = np.array([12, 0, 9, 7], np.int32)
    rows, weights, ones = (np.ones(shape, jnp.dtype(dtype)) for shape in ((C, 16), (4, 16, 24), (C, 24)))
    weights[spoilt] = np.inf
    of = np.append(np.repeat(np.arange(4), sizes), np.full(C - sizes.sum(), 4))
    want = np.append(np.where(np.arange(4) == spoilt, np.inf, 16), 0.0)[of]
    got, d_rows, _ = with_gradients(rows, weights, sizes, ones)
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.broadcast_to(want[:, None], (C, 24)))
    want = np.where(want == 16, 24, want)
    np.testing.assert_array_equal(np.asarray(d_rows, np.float32), np.broadcast_to(want[:, None], (C, 16)))


@pytest.mark.one_jax
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits_are_summed_in_float32(dtype):
    sizes = np.array([300, 0, 212], np.int32)
    rows, weights = floats((600, 256)).astype(dtype), floats((3, 256, 64)).astype(dtype)
    got = grouped_dot(rows, weights, sizes)
    assert got.dtype == dtype
    assert_close(got, loop(rows, weights, sizes), terms=256)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_where_numbers_have_64_bits(dtype):
    """The suite promotes no types (conftest.py), so nothing inside may be int64 or float64 by default."""
    sizes = np.array([5, 0, 7], np.int32)
    with jax.enable_x64(True):
        rows, weights = floats((15, 8)).astype(dtype), floats((3, 8, 4)).astype(dtype)
        value, *gradients = with_gradients(rows, weights, sizes, np.ones((15, 4), dtype))
    assert [a.dtype for a in (value, *gradients)] == [dtype] * 3
    tolerance = TOLERANCE if dtype == np.float32 else 1e-13  # sums of eight products
    np.testing.assert_allclose(value, loop(rows, weights, sizes), rtol=tolerance, atol=20 * tolerance)


@pytest.mark.one_jax
def test_rows_past_the_groups_do_not_matter():
    """Padding inside a group counts as rows of it; what lies past all groups is zero in the results."""
    sizes = np.array([130, 0, 7, 129], np.int32)
    rows, weights = floats((500, 24)), floats((4, 24, 40))
    rows[266:] = 1e30
    cotangent = np.ones((500, 40), np.float32)
    cotangent[266:] = 1e30
    value, d_rows, d_weights = with_gradients(rows, weights, sizes, cotangent)
    np.testing.assert_allclose(value, loop(rows, weights, sizes), rtol=TOLERANCE, atol=50 * TOLERANCE)
    assert not np.asarray(d_rows)[266:].any()
    cotangent[266:] = 0
    _, want_rows, want_weights = with_gradients(rows, weights, sizes, cotangent)
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

    mapped = on.map(shard)
    np.testing.assert_allclose(jax.jit(mapped)(x, ids, w), dense(x, ids, w), rtol=TOLERANCE, atol=TOLERANCE)
    grads = jax.jit(jax.grad(lambda x, w: jnp.sum(mapped(x, ids, w) ** 2), argnums=(0, 1)))(x, w)
    for got, want in zip(grads, dense_gradients(x, ids, w), strict=True):
        np.testing.assert_allclose(got, want, rtol=TOLERANCE, atol=20 * TOLERANCE)


@pytest.mark.parametrize(
    ("rows", "weights", "sizes", "text"),
    [
        (
            (4, 3),
            (2, 5, 6),
            (2,),
            r"M of rows .* got 3 in rows float32\[4, 3\] and 5 in w float32\[2, 5, 6\]",
        ),
        ((4, 3), (2, 5, 3), (2,), r"got 3 in rows .* and 5 in w .*; pass w.swapaxes\(1, 2\)"),
        ((4, 3), (2, 3, 6), (3,), "there must be a matrix for each of the 3 experts of this rank, got 2"),
        ((4, 3), (2, 3, 6), (1,), "a matrix for each of the 1 experts of this rank, got 2"),
        ((1, 4, 3, 1), (2, 3, 6), (2,), r"two dimensions .*, got float32\[1, 4, 3, 1\]; reshape the leading"),
        ((4, 3), (3, 6), (2,), r"w must have three dimensions \[L, M, N\], .* pass w\[None\]"),
    ],
)
def test_rejects_shapes_that_do_not_fit(rows, weights, sizes, text):
    with pytest.raises(ValueError, match=f"grouped_dot: .*{text}"):
        jax_ep.grouped_dot(jnp.ones(rows), jnp.ones(weights), jnp.ones(sizes, jnp.int32))


def test_dtypes_that_do_not_fit():
    with pytest.raises(TypeError, match="one floating dtype, got float32 and bfloat16"):
        jax_ep.grouped_dot(jnp.ones((4, 3)), jnp.ones((2, 3, 6), jnp.bfloat16), jnp.ones(2, jnp.int32))
    with pytest.raises(ValueError, match=r"group_sizes must be int32 \[2\]"):
        jax_ep.grouped_dot(jnp.ones((4, 3)), jnp.ones((2, 3, 6)), jnp.ones(2))


def batch(shared):
    """Three problems, of which those named in `shared` are the same; and their axes for vmap."""
    sizes = np.array([[3, 0, 9], [0, 0, 20], [5, 6, 7]], np.int32)
    parts = {"rows": floats((3, 20, 8), seed=1), "weights": floats((3, 3, 8, 16), seed=2), "sizes": sizes}
    axes = tuple(None if name in shared else 0 for name in parts)
    return [parts[name][0] if name in shared else parts[name] for name in parts], axes


def one_by_one(function, arrays, axes):
    results = [
        function(*(a if axis is None else a[i] for a, axis in zip(arrays, axes, strict=True)))
        for i in range(3)
    ]
    return jax.tree.map(lambda *parts: np.stack(parts), *results)


def assert_same(got, want):
    close = functools.partial(np.testing.assert_allclose, rtol=10 * TOLERANCE, atol=10 * TOLERANCE)
    jax.tree.map(close, got, want)


def test_vmap_twice_and_along_other_axes():
    (rows, weights, sizes), axes = batch(())
    want = one_by_one(grouped_dot, (rows, weights, sizes), axes)
    twice = jax.jit(jax.vmap(jax.vmap(jax_ep.grouped_dot), in_axes=(None, 0, None)))
    got = twice(rows, np.stack([weights, 2 * weights]), sizes)
    assert_same(got, np.stack([want, 2 * want]))
    along = jax.jit(jax.vmap(jax_ep.grouped_dot, in_axes=(1, 3, 0), out_axes=2))
    assert_same(along(rows.swapaxes(0, 1), np.moveaxis(weights, 0, 3), sizes), np.moveaxis(want, 0, 2))


def test_jacobian():
    (rows, weights, sizes), _ = batch(("rows", "weights", "sizes"))
    jacobian = jax.jit(jax.jacrev(jax_ep.grouped_dot, argnums=(0, 1)))
    of_rows, of_weights = jacobian(rows, weights, sizes)
    groups = np.repeat([0, 2], [3, 9])
    want_rows, want_weights = np.zeros(of_rows.shape), np.zeros(of_weights.shape)
    for row, group in enumerate(groups):
        want_rows[row, :, row] = weights[group].T
        for column in range(weights.shape[2]):
            want_weights[row, column, group, :, column] = rows[row]
    assert_same((of_rows, of_weights), (want_rows, want_weights))


def test_in_a_scan_over_layers():
    sizes = np.array([3, 0, 9], np.int32)
    layers = floats((4, 3, 8, 8), seed=2)

    def loss(rows, layers):
        step = lambda rows, weights: (jnp.tanh(jax_ep.grouped_dot(rows, weights, sizes)), None)
        return jnp.sum(jax.lax.scan(step, rows, layers)[0])

    def unrolled(rows, layers):
        for weights in layers:
            rows = jnp.tanh(jax_ep.grouped_dot(rows, weights, sizes))
        return jnp.sum(rows)

    rows = floats((20, 8), seed=1)
    got, want = (jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(rows, layers) for f in (loss, unrolled))
    assert_same(got, want)


def test_gradients_of_gradients():
    (rows, weights, sizes), _ = batch(("rows", "weights", "sizes"))

    def loss(product, rows, weights):
        first = jax.grad(lambda r, w: jnp.sum(jnp.tanh(product(r, w, sizes)) ** 2), argnums=(0, 1))
        d_rows, d_weights = first(rows, weights)
        return jnp.sum(jnp.sin(d_rows)) + jnp.sum(d_weights**2)

    def plain(rows, weights, sizes):
        group = np.repeat([0, 2, 0], [3, 9, 8])  # of each row; past the sum there is none
        there = (np.arange(20) < 12)[:, None]
        return jnp.where(there, jnp.einsum("cm,cmn->cn", rows, weights[group]), 0)

    got, want = (
        jax.jit(jax.grad(functools.partial(loss, product), argnums=(0, 1)))(rows, weights)
        for product in (jax_ep.grouped_dot, plain)
    )
    for a, b in zip(got, want, strict=True):
        # Of numbers up to 60.
        np.testing.assert_allclose(a, b, rtol=10 * TOLERANCE, atol=200 * TOLERANCE)


@pytest.mark.parametrize(
    "sharded",
    [
        *(pytest.param(axes, marks=pytest.mark.one_jax) for axes in ((None, None), ("a", None), (None, "a"))),
        ("a", "b"),
        pytest.param(("a", "a"), marks=pytest.mark.one_jax),
        (("a", "b"), "a"),
    ],
    ids=str,
)
def test_explicit_sharding(sharded):
    """The result is sharded as the rows' first and the matrices' last dimension."""
    mesh = make_mesh((2, 2), ("a", "b"), AxisType.Explicit)
    (rows, weights, sizes), _ = batch(("rows", "weights", "sizes"))

    def value_and_gradients(rows, weights):
        value, transposed = jax.vjp(lambda r, w: jax_ep.grouped_dot(r, w, sizes), rows, weights)
        return value, *transposed(jnp.tanh(value))

    want = jax.jit(value_and_gradients)(rows, weights)
    with jax.set_mesh(mesh):
        rows = jax.device_put(rows, P(sharded[0], None))
        weights = jax.device_put(weights, P(None, None, sharded[1]))
        got = jax.jit(value_and_gradients)(rows, weights)
    taken = sharded[1] is not None and sharded[1] in (sharded[0] or ())
    assert got[0].sharding.spec == P(sharded[0], None if taken else sharded[1])
    assert_same(got, want)
