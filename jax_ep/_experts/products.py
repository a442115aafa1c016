"""The grouped products of a rank's rows, with their gradients."""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jax_ep._checks import Arguments
from jax_ep._experts.engine import Engine, Product
from jax_ep._experts.fp8_operands import Columns
from jax_ep._jax.custom_vjp import custom_vjp
from jax_ep._jax.sharding import axes_of
from jax_ep._jax.vmap import vmap_by_loop
from jax_ep._rows.fp8 import QuantizedArray
from jax_ep._rows.weights import home_of, num_redundant_of

PrecisionName = Literal[
    "default", "high", "highest", "fastest", "bfloat16", "bfloat16_3x", "tensorfloat32", "float32"
]


@custom_vjp(0, 1, 2)
def product(
    kind: Product,
    engine: Engine,
    num_redundant: int,
    rows: jax.Array,
    others: Any,
    group_sizes: jax.Array,
    first_row: jax.Array | None = None,
) -> Any:
    """Computes `Engine.grouped_dot`.

    Each product is linear in both operands, and its gradients are the two others, so gradients of any order
    are products of these kinds.
    """
    compute = functools.partial(engine.grouped_dot, kind, num_redundant)
    return _sharded(kind, compute, rows, others, group_sizes, *(() if first_row is None else (first_row,)))


def _product_fwd(kind: Product, engine: Engine, num_redundant: int, *operands: Any) -> Any:
    return product(kind, engine, num_redundant, *operands), operands


def _product_bwd(
    kind: Product, engine: Engine, num_redundant: int, saved: tuple[Any, ...], cotangent: Any
) -> Any:
    rows, others, group_sizes, first_row = saved
    # The product, and its operands, that is the gradient of each operand.
    gradients = {
        Product.ROWS: (
            (Product.ROWS_TRANSPOSED, cotangent, others),
            (Product.WEIGHTS, rows, cotangent),
        ),
        Product.ROWS_TRANSPOSED: (
            (Product.ROWS, cotangent, others),
            (Product.WEIGHTS, cotangent, rows),
        ),
        Product.WEIGHTS: (
            (Product.ROWS_TRANSPOSED, others, cotangent),
            (Product.ROWS, rows, cotangent),
        ),
    }
    d_rows, d_others = (
        product(
            gradient,
            engine,
            num_redundant_of(others) if gradient is Product.WEIGHTS else 0,
            left,
            right,
            group_sizes,
            first_row,
        )
        for gradient, left, right in gradients[kind]
    )
    if jax.sharding.get_abstract_mesh().explicit_axes:
        reshard = lambda d, primal: jax.sharding.reshard(d, jax.typeof(primal).sharding.spec)
        d_rows, d_others = jax.tree.map(reshard, (d_rows, d_others), (rows, others))
    return d_rows, d_others, None, None


product.defvjp(_product_fwd, _product_bwd)


def precision_of(check: Arguments, precision: Any, dtype: Any) -> jax.lax.Precision:
    """Returns the precision of products of operands of a dtype. None is JAX's `jax_default_matmul_precision`.

    It is DEFAULT for all dtypes except float32, because it has no effect on them.
    """
    given = precision
    if precision is None:
        # JAX also takes names of algorithms there. Those that are more precise than tf32 count as float32.
        given = jax.config.jax_default_matmul_precision or "default"  # pyright: ignore
        if given in jax.lax.DotAlgorithmPreset.__members__:
            is_precise = given.endswith(("_X3", "_X6", "_X9")) or given.startswith(("F32_", "F64_"))
            given = "highest" if is_precise else "default"
    try:
        if not isinstance(given, str | jax.lax.Precision):
            raise ValueError
        found = jax.lax.Precision(given)
    except ValueError:
        is_fp8 = isinstance(given, str) and given in ("fp8", "fp8_all")
        advice = f"; quantize={given!r} of gated_mlp makes products in FP8" if is_fp8 else ""
        raise ValueError(
            f"{check.op}: precision must be None, 'default', 'high', 'highest' or another name or value of "
            f"jax.lax.Precision, got {precision!r}{advice}"
        ) from None
    return found if dtype == jnp.float32 else jax.lax.Precision.DEFAULT


def fp8_product(engine: Engine, rows: QuantizedArray, w: QuantizedArray, group_sizes: jax.Array) -> jax.Array:
    """Computes `Engine.grouped_dot_fp8`."""

    def compute(
        rows: jax.Array, matrices: Any, scales: jax.Array, matrix_scales: Any, sizes: jax.Array
    ) -> jax.Array:
        operands = QuantizedArray(rows, scales), QuantizedArray(matrices, matrix_scales)
        return engine.grouped_dot_fp8(*operands, sizes)

    return _sharded(Product.ROWS, compute, rows.values, w.values, rows.scales, w.scales, group_sizes)


def fp8_weight_gradient(
    engine: Engine, num_redundant: int, rows: Columns, others: Columns, group_sizes: jax.Array
) -> Any:
    """Computes `Engine.grouped_dot_fp8_weights`."""

    def compute(
        rows: jax.Array, others: jax.Array, scales: jax.Array, other_scales: jax.Array, sizes: jax.Array
    ) -> Any:
        operands = Columns(rows, scales), Columns(others, other_scales)
        return engine.grouped_dot_fp8_weights(num_redundant, *operands, sizes)

    operands = rows.values, others.values, rows.scales, others.scales, group_sizes
    return _sharded(Product.WEIGHTS, compute, *operands, is_transposed=True)


def _sharded(kind: Product, function: Any, *operands: Any, is_transposed: bool = False) -> Any:
    """Returns function(*operands). The first two operands are those of the product.

    With `is_transposed` both operands of a product WEIGHTS are stored transposed.

    Under Explicit sharding JAX cannot infer how the result of a ragged dot or a custom call is sharded, so it
    gets the sharding of the operands' other dimensions. XLA's ragged dots have no rule for batches other than
    of rows.
    """
    leaves, tree = jax.tree.flatten(operands)

    @vmap_by_loop
    def call(*leaves: jax.Array) -> Any:
        operands = jax.tree.unflatten(tree, leaves)
        explicit = jax.sharding.get_abstract_mesh().explicit_axes
        if not explicit:
            return function(*operands)
        arrays = map(home_of, operands[:2])
        own, other = ((*jax.typeof(array).sharding.spec, *[None] * array.ndim) for array in arrays)
        width = 0 if is_transposed else 1
        spec = {
            Product.ROWS: [own[0], other[2]],
            Product.ROWS_TRANSPOSED: [own[0], other[1]],
            Product.WEIGHTS: [None, own[width], other[width]],
        }[kind]
        if axes_of(spec[-1]) & axes_of(spec[-2]):  # a mesh axis shards one dimension
            spec[-1] = None
        result = jax.sharding.PartitionSpec(*spec)
        automatic: Any = jax.sharding.auto_axes(function, axes=explicit, out_sharding=result)
        return automatic(*operands)

    return call(*leaves)
