"""The precision of products of float32: it reaches every product, forward and backward, and holds there."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_products import problem, reference

import jax_ep
from jax_ep import _extension

SIZES = np.array([5, 0, 9], np.int32)
OPERANDS = [(16, 8), (3, 8, 12), (3, 6, 8), (3, 12)]  # rows, w_up, w_down, b_up
# argument, jax_default_matmul_precision, what the products get
TABLE = [
    (None, None, "DEFAULT"),
    ("highest", None, "HIGHEST"),
    (None, "highest", "HIGHEST"),
    (None, "float32", "HIGHEST"),
    (None, "tensorfloat32", "HIGH"),
    ("default", "highest", "DEFAULT"),
    (jax.lax.Precision.HIGH, "highest", "HIGH"),
    ("float32", "bfloat16", "HIGHEST"),
    (None, "BF16_BF16_F32_X9", "HIGHEST"),
    (None, "TF32_TF32_F32", "DEFAULT"),
]


def dot(rows, up, down, b_up, precision):
    return jax_ep.grouped_dot(rows, up, SIZES, precision=precision)


def mlp(rows, up, down, b_up, precision):
    return jax_ep.gated_mlp(rows, up, down, SIZES, b_up=b_up, precision=precision)


def precisions(jaxpr):
    return re.findall(r"precision=(?:\(Precision\.)?(\w+)", jaxpr)


def gradient(function, precision, config, dtype=jnp.float32):
    """Returns the traced value and gradients. The backward pass is traced where the config is another one."""
    given = [jax.ShapeDtypeStruct(shape, dtype) for shape in OPERANDS]

    def run(*given):
        with jax.default_matmul_precision(config):
            out, backward = jax.vjp(lambda *given: function(*given, precision), *given)
        with jax.default_matmul_precision("highest" if config is None else None):
            return out, backward(out)

    return jax.jit(run).trace(*given)


@pytest.mark.parametrize(("argument", "config", "want"), TABLE, ids=str)
def test_precision_names(argument, config, want, monkeypatch):
    monkeypatch.setattr(_extension, "runs_kernels", lambda implementation: False)
    with jax.default_matmul_precision(config):
        given = [jnp.ones(shape) for shape in OPERANDS]
        text = str(jax.make_jaxpr(lambda *given: dot(*given, argument))(*given))
    assert set(precisions(text)) == {want}


@pytest.mark.parametrize(("argument", "config", "want"), TABLE[1:6:2] + TABLE[6:7], ids=str)
@pytest.mark.parametrize(("function", "products"), [(dot, 3), (mlp, 6)], ids=["grouped_dot", "gated_mlp"])
def test_precision_reaches_all_products(function, products, argument, config, want, monkeypatch):
    """In the kernels' calls, and in XLA's products. The gradient of a bias is a sum in float32."""
    biases = int(function is mlp)
    monkeypatch.setattr(_extension, "runs_kernels", lambda implementation: False)
    found = precisions(str(gradient(function, argument, config).jaxpr))
    assert len(found) >= products + biases
    assert set(found) - ({"HIGHEST"} if biases else set()) == {want} - ({"HIGHEST"} if biases else set())
    if want != "HIGHEST":
        assert found.count("HIGHEST") <= 2 * biases  # both loops over tiles
    monkeypatch.setattr(_extension, "runs_kernels", lambda implementation: True)
    lowered = gradient(function, argument, config).lower(lowering_platforms=("cuda",)).as_text()
    allowed = re.findall(r"@jax_ep_grouped_dot\b.*allow_tf32 = (\d)", lowered)
    assert sorted(allowed) == sorted(["0"] * biases + [str(int(want != "HIGHEST"))] * products)


def test_precision_has_no_effect_on_other_dtypes():
    texts = {str(gradient(dot, p, None, jnp.bfloat16).jaxpr) for p in ("default", "highest")}
    assert len(texts) == 1


@pytest.mark.parametrize("op", ["grouped_dot", "gated_mlp"])
@pytest.mark.parametrize(
    ("precision", "text"),
    [
        ("exact", "got 'exact'$"),
        (2.0, "got 2.0$"),
        (("high", "high"), "got .'high', 'high'.$"),
        ("fp8_all", "got 'fp8_all'; quantize='fp8_all' of gated_mlp makes products in FP8$"),
    ],
)
def test_rejects_precision(op, precision, text):
    function = {"grouped_dot": dot, "gated_mlp": mlp}[op]
    with pytest.raises(ValueError, match=f"{op}: precision must be None, 'default', .*{text}"):
        function(*(np.ones(shape, np.float32) for shape in OPERANDS), precision)


ON_GPU = jax.default_backend() == "gpu"
# rows, inner, outer, groups: unaligned and whole tiles, more groups than lanes, long sums. XLA has one loop.
SHAPES = [(130, 251, 66, 3)]
if ON_GPU:
    SHAPES += [(513, 72, 520, 5), (700, 136, 392, 40), (1040, 1200, 136, 2), (4, 8, 8, 1)]


@functools.partial(jax.jit, static_argnums=4)
def value_and_gradients(rows, w, cotangent, sizes, precision):
    product = lambda rows, w: jax_ep.grouped_dot(rows, w, sizes, precision=precision)
    out, backward = jax.vjp(product, rows, w)
    return out, *backward(cotangent)


@pytest.mark.one_jax
@pytest.mark.parametrize("kind", ["uneven", "gaps", "all in the last", "none"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_errors_of_float32(shape, kind):
    """Against float64, the value and both gradients: each is one kind of product."""
    arrays = problem(shape, kind, "float32")
    wanted = reference(*arrays)
    bounds = {"highest": 1e-6, "high": 1e-3, "default": 1e-3}
    for precision in bounds if ON_GPU else ["highest"]:  # to XLA on a CPU they are the same
        got, repeated = (jax.device_get(value_and_gradients(*arrays, precision)) for _ in range(2))
        for one, again, want in zip(got, repeated, wanted, strict=True):
            assert one.tobytes() == again.tobytes()
            value, magnitude = want[..., 0], want[..., 1]
            error = np.abs(one.astype(np.float64) - value)
            assert (error <= bounds[precision] * magnitude).all()
            if ON_GPU and precision != "highest" and value.size > 1000 and magnitude.any():
                assert error.max() > 1e-5 * magnitude.max()  # tf32 is in use, so "highest" is another kernel


@pytest.mark.one_jax
def test_nan_rows_stay_in_their_group():
    rows, w, cotangent, sizes = problem(SHAPES[0], "uneven", "float32")
    first = int(sizes[0])
    rows[first - 1] = np.nan
    out, d_rows, d_w = value_and_gradients(rows, w, cotangent, sizes, "highest")
    used = int(sizes.sum())
    assert np.isnan(out[first - 1]).all()
    assert np.isfinite(np.delete(np.asarray(out), first - 1, axis=0)).all()
    assert np.isfinite(d_rows[:used]).all()
    assert np.isfinite(d_w[1:]).all()
