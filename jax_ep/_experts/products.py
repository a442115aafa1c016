"""The grouped products of a rank's rows: by this package's kernels on GPUs, elsewhere by XLA."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jax_ep import _extension
from jax_ep._experts import ffi_products, xla_products
from jax_ep._experts.engine import Product
from jax_ep._experts.fp8_passes import Columns
from jax_ep._jax.custom_vjp import custom_vjp
from jax_ep._jax.sharding import axes_of
from jax_ep._jax.vmap import vmap_by_loop
from jax_ep._rows.fp8 import QuantizedArray, dequantize_fp8
from jax_ep._rows.quantize import KERNEL_DTYPES
from jax_ep._rows.weights import PhysicalWeights, home_of, num_redundant_of

PrecisionName = Literal[
    "default", "high", "highest", "fastest", "bfloat16", "bfloat16_3x", "tensorfloat32", "float32"
]


@dataclasses.dataclass(frozen=True)
class ProductOptions:
    """Options of products that are the same in a forward pass and in its backward pass."""

    num_sms: int = 0  # the most SMs that CUTLASS's kernels use; 0: all
    precision: jax.lax.Precision = jax.lax.Precision.DEFAULT  # as `precision_of` returns it


@custom_vjp(0, 1, 2)
def product(
    kind: Product,
    options: ProductOptions,
    num_redundant: int,
    rows: jax.Array,
    others: Any,
    group_sizes: jax.Array,
    first_row: jax.Array | None = None,
) -> Any:
    """Computes a product. The groups begin at `first_row` (int32 scalar), or at row 0 if it is None.

    The matrices of others are an array or `PhysicalWeights`. So are those that a product WEIGHTS returns:
    with num_redundant > 0 the last groups are redundant experts. Each product is linear in both operands, and
    its gradients are the two others, so gradients of any order are products of these kinds.
    """

    def one(rows: jax.Array, others: Any, group_sizes: jax.Array, *first_row: jax.Array) -> Any:
        if _extension.runs_kernels() and rows.dtype in KERNEL_DTYPES:
            return ffi_products.grouped_dot(
                kind,
                options.num_sms,
                options.precision,
                num_redundant,
                rows,
                others,
                group_sizes,
                *first_row,
            )
        matrices = xla_products.grouped_dot(
            kind, options.precision, rows, jnp.asarray(others), group_sizes, *first_row
        )
        return _split(num_redundant, matrices)

    return _sharded(kind, one, rows, others, group_sizes, *(() if first_row is None else (first_row,)))


def _split(num_redundant: int, matrices: jax.Array) -> Any:
    if num_redundant == 0:
        return matrices
    num_home = matrices.shape[0] - num_redundant
    return PhysicalWeights(matrices[:num_home], matrices[num_home:])


def _product_fwd(kind: Product, options: ProductOptions, num_redundant: int, *operands: Any) -> Any:
    return product(kind, options, num_redundant, *operands), operands


def _product_bwd(
    kind: Product, options: ProductOptions, num_redundant: int, saved: tuple[Any, ...], cotangent: Any
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
            one,
            options,
            num_redundant_of(others) if one is Product.WEIGHTS else 0,
            left,
            right,
            group_sizes,
            first_row,
        )
        for one, left, right in gradients[kind]
    )
    if jax.sharding.get_abstract_mesh().explicit_axes:
        reshard = lambda d, primal: jax.sharding.reshard(d, jax.typeof(primal).sharding.spec)
        d_rows, d_others = jax.tree.map(reshard, (d_rows, d_others), (rows, others))
    return d_rows, d_others, None, None


product.defvjp(_product_fwd, _product_bwd)


def precision_of(op: str, precision: Any, dtype: Any) -> jax.lax.Precision:
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
            f"{op}: precision must be None, 'default', 'high', 'highest' or another name or value of "
            f"jax.lax.Precision, got {precision!r}{advice}"
        ) from None
    return found if dtype == jnp.float32 else jax.lax.Precision.DEFAULT


def fp8_product(
    num_sms: int,
    rows: jax.Array,
    matrices: jax.Array | PhysicalWeights,
    scales: jax.Array,
    matrix_scales: jax.Array | PhysicalWeights,
    group_sizes: jax.Array,
) -> jax.Array:
    """Multiplies values [C, M] and [L, M, N] with scales [C, M / 128] and [L, M / 128, N / 128]: bfloat16."""

    def one(
        rows: jax.Array, matrices: Any, scales: jax.Array, matrix_scales: Any, sizes: jax.Array
    ) -> jax.Array:
        if _has_fp8_kernels():
            transpose = lambda w: jax.tree.map(lambda a: a.swapaxes(1, 2), w)
            transposed = transpose(matrices), transpose(matrix_scales)
            return ffi_products.grouped_dot_fp8(rows, scales, *transposed, sizes, num_sms)
        wide_rows, wide_matrices = (
            dequantize_fp8(QuantizedArray(jnp.asarray(values), jnp.asarray(scales)), jnp.float32)
            for values, scales in ((rows, scales), (matrices, matrix_scales))
        )
        out: jax.Array = product(Product.ROWS, ProductOptions(num_sms), 0, wide_rows, wide_matrices, sizes)
        return out.astype(jnp.bfloat16)

    return _sharded(Product.ROWS, one, rows, matrices, scales, matrix_scales, group_sizes)


def fp8_weight_gradient(
    num_sms: int, num_redundant: int, rows: Columns, others: Columns, group_sizes: jax.Array
) -> Any:
    """Multiplies, group by group, rows [C, M], transposed, by rows [C, N]. Returns bfloat16 matrices.

    Both are given transposed, as `fp8_passes` makes them. `num_redundant` is as for `product`.
    """

    def one(
        rows: jax.Array, others: jax.Array, scales: jax.Array, other_scales: jax.Array, sizes: jax.Array
    ) -> Any:
        if _has_fp8_kernels():
            operands = rows, scales, others, other_scales, sizes
            return ffi_products.grouped_dot_fp8_weights(*operands, num_sms, num_redundant)
        left, right = (Columns(*pair).dequantized() for pair in ((rows, scales), (others, other_scales)))
        padded = Columns.padded_sizes(sizes, rows.shape[1])
        out = product(Product.WEIGHTS, ProductOptions(num_sms), num_redundant, left, right, padded)
        return jax.tree.map(lambda matrices: matrices.astype(jnp.bfloat16), out)

    return vmap_by_loop(one)(rows.values, others.values, rows.scales, others.scales, group_sizes)


def _has_fp8_kernels() -> bool:
    return _extension.runs_kernels() and _extension.has_fp8_products()


def _sharded(kind: Product, function: Any, *operands: Any) -> Any:
    """Returns function(*operands). The first two operands are those of the product.

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
        spec = {
            Product.ROWS: [own[0], other[2]],
            Product.ROWS_TRANSPOSED: [own[0], other[1]],
            Product.WEIGHTS: [None, own[1], other[1]],
        }[kind]
        if axes_of(spec[-1]) & axes_of(spec[-2]):  # a mesh axis shards one dimension
            spec[-1] = None
        result = jax.sharding.PartitionSpec(*spec)
        automatic: Any = jax.sharding.auto_axes(function, axes=explicit, out_sharding=result)
        return automatic(*operands)

    return call(*leaves)
