"""The grouped products of a rank's rows, with their gradients."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_ep._checks import Arguments
from jax_ep._experts.engine import Engine, Factors, Product
from jax_ep._experts.fp8_operands import Columns
from jax_ep._jax.custom_vjp import custom_vjp
from jax_ep._jax.sharding import axes_of
from jax_ep._jax.vmap import vmap_by_loop
from jax_ep._rows.fp8 import QuantizedArray
from jax_ep._rows.padded import flat_rows, shaped_like
from jax_ep._rows.weights import Matrices, PhysicalWeights, as_array, home_of, num_redundant_of

Given = TypeVar(
    "Given", Factors[jax.Array, Matrices], Factors[QuantizedArray, QuantizedArray], Factors[Columns, Columns]
)
Result = TypeVar("Result", jax.Array, Matrices)
Left = TypeVar("Left")
Right = TypeVar("Right")

PrecisionName = Literal[
    "default", "high", "highest", "fastest", "bfloat16", "bfloat16_3x", "tensorfloat32", "float32"
]


@custom_vjp(0)
def product(engine: Engine, factors: Factors[jax.Array, Matrices]) -> Matrices:
    """Computes `Engine.grouped_dot`.

    Each product is linear in both operands, and its gradients are the two others, so gradients of any order
    are products of these kinds. Rows may also be [L, C, ...], as the result's rows are then.
    """
    rows, others, of_weights = factors.rows, factors.others, factors.kind is Product.WEIGHTS
    # They become flat in here, so that several products of the same rows save one array for their gradients.
    others = flat_rows(as_array(others)) if of_weights else others
    out = _sharded(dataclasses.replace(factors, rows=flat_rows(rows), others=others), engine.grouped_dot)
    return out if of_weights else shaped_like(rows, as_array(out))


def _product_fwd(
    engine: Engine, factors: Factors[jax.Array, Matrices]
) -> tuple[Matrices, Factors[jax.Array, Matrices]]:
    return product(engine, factors), factors


def _product_bwd(
    engine: Engine, factors: Factors[jax.Array, Matrices], cotangent: Matrices
) -> tuple[Factors[jax.Array, Matrices]]:
    rows, others = factors.rows, factors.others
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

    def gradient(kind: Product, left: Matrices, right: Matrices) -> Matrices:
        assert not isinstance(left, PhysicalWeights)  # these are rows
        redundant = num_redundant_of(others) if kind is Product.WEIGHTS else 0
        return product(engine, Factors(left, right, factors.group_sizes, factors.first_row, kind, redundant))

    d_rows, d_others = (gradient(*operands) for operands in gradients[factors.kind])
    if jax.sharding.get_abstract_mesh().explicit_axes:
        reshard = lambda d, primal: jax.sharding.reshard(d, jax.typeof(primal).sharding.spec)
        d_rows, d_others = jax.tree.map(reshard, (d_rows, d_others), (rows, others))
    return (dataclasses.replace(factors, rows=d_rows, others=d_others, group_sizes=None, first_row=None),)


product.defvjp(_product_fwd, _product_bwd)


def factors_of_weights(
    rows: Left, d_rows: Right, group_sizes: jax.Array, num_redundant: int
) -> Factors[Left, Right]:
    """Returns the operands of a gradient of matrices: each group's rows, transposed, times its others."""
    return Factors(rows, d_rows, group_sizes, kind=Product.WEIGHTS, num_redundant=num_redundant)


def precision_of(
    check: Arguments, precision: PrecisionName | jax.lax.Precision | None, dtype: DTypeLike
) -> jax.lax.Precision:
    """Returns the precision of products of operands of a dtype. None is JAX's `jax_default_matmul_precision`.

    It is DEFAULT for all dtypes except float32, because it has no effect on them.
    """
    requested = precision
    if precision is None:
        # JAX also takes names of algorithms there. Those that are more precise than tf32 count as float32.
        requested = jax.config.jax_default_matmul_precision or "default"  # pyright: ignore
        if requested in jax.lax.DotAlgorithmPreset.__members__:
            is_precise = requested.endswith(("_X3", "_X6", "_X9")) or requested.startswith(("F32_", "F64_"))
            requested = "highest" if is_precise else "default"
    try:
        if not isinstance(requested, str | jax.lax.Precision):
            raise ValueError
        chosen = jax.lax.Precision(requested)
    except ValueError:
        is_fp8 = isinstance(requested, str) and requested in ("fp8", "fp8_all")
        advice = f"; quantize={requested!r} of gated_mlp makes products in FP8" if is_fp8 else ""
        raise ValueError(
            f"{check.op}: precision must be None, 'default', 'high', 'highest' or another name or value of "
            f"jax.lax.Precision, got {precision!r}{advice}"
        ) from None
    return chosen if dtype == jnp.float32 else jax.lax.Precision.DEFAULT


def fp8_product(engine: Engine, factors: Factors[QuantizedArray, QuantizedArray]) -> jax.Array:
    """Computes `Engine.grouped_dot_fp8`. Rows may also be [L, C, ...], as the result's are then."""
    flat = dataclasses.replace(factors, rows=flat_rows(factors.rows))
    return shaped_like(factors.rows, _sharded(flat, engine.grouped_dot_fp8))


def fp8_weight_gradient(engine: Engine, factors: Factors[Columns, Columns]) -> Matrices:
    """Computes `Engine.grouped_dot_fp8_weights`."""
    return _sharded(factors, engine.grouped_dot_fp8_weights)


def _sharded(factors: Given, compute: Callable[[Given], Result]) -> Result:
    """Returns compute(factors).

    Under Explicit sharding JAX cannot infer how the result of a ragged dot or a custom call is sharded, so it
    gets the sharding of the operands' other dimensions. XLA's ragged dots have no rule for batches other than
    of rows.
    """
    leaves, tree = jax.tree.flatten(factors)

    @vmap_by_loop
    def call(*leaves: jax.Array) -> Result:
        factors: Given = jax.tree.unflatten(tree, leaves)
        explicit = jax.sharding.get_abstract_mesh().explicit_axes
        if not explicit:
            return compute(factors)
        arrays = map(_array_of, (factors.rows, factors.others))
        rows_spec, others_spec = (
            (*jax.typeof(array).sharding.spec, *[None] * array.ndim) for array in arrays
        )
        width = 0 if isinstance(factors.rows, Columns) else 1  # columns are stored transposed
        spec = {
            Product.ROWS: [rows_spec[0], others_spec[2]],
            Product.ROWS_TRANSPOSED: [rows_spec[0], others_spec[1]],
            Product.WEIGHTS: [None, rows_spec[width], others_spec[width]],
        }[factors.kind]
        if axes_of(spec[-1]) & axes_of(spec[-2]):  # a mesh axis shards one dimension
            spec[-1] = None
        result = jax.sharding.PartitionSpec(*spec)
        automatic: Any = jax.sharding.auto_axes(compute, axes=explicit, out_sharding=result)
        return automatic(factors)

    return call(*leaves)


def _array_of(factor: Matrices | QuantizedArray | Columns) -> jax.Array:
    """Returns the array whose dimensions are those of a factor."""
    return home_of(factor.values if isinstance(factor, QuantizedArray | Columns) else factor)
