"""gated_mlp: the experts of most models as one differentiable op, in bfloat16 or in FP8."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_ep import _checks
from jax_ep._experts.activations import ACTIVATIONS, Activation, Gated, weighted
from jax_ep._experts.choice import choose_engine
from jax_ep._experts.engine import Engine, Options
from jax_ep._experts.fp8_operands import QuantizedWeights
from jax_ep._experts.gated import (
    FloatProducts,
    Fp8,
    Kept,
    Products,
    Rows,
    Weights,
    cotangent_of,
    once_differentiable,
    sharded_like,
    wide_of,
    without_carrier,
    without_gradient_of_values,
    without_values,
)
from jax_ep._experts.products import PrecisionName, precision_of, times_rows
from jax_ep._extension import Implementation
from jax_ep._jax.custom_vjp import custom_vjp
from jax_ep._jax.sharding import merge_dimensions, split_dimension, vary_alike
from jax_ep._ops.arguments import OpArguments
from jax_ep._rows.counts import groups_of_rows, rows_in_groups
from jax_ep._rows.dtypes import is_differentiable, sum_dtype
from jax_ep._rows.fp8 import BLOCK, QuantizedArray, as_bits, block_of, from_bits
from jax_ep._rows.padded import flat_rows, shaped_like
from jax_ep._rows.quantize import KERNEL_DTYPES
from jax_ep._rows.weights import Matrices, PhysicalWeights, as_array, num_redundant_of

Result = TypeVar("Result")
Tree = TypeVar("Tree")
Shape = tuple[int, ...]

_CHECK = OpArguments("gated_mlp")

_NO_GRADIENT = (
    "gated_mlp: FP8 rows without a carrier have no gradient; pass rows of dispatch(quantize='fp8'), rows "
    "that are not quantized, or jax.lax.stop_gradient(...) of them"
)
_ONE_GRADIENT = (
    "gated_mlp: quantize={!r} has no second derivative, because the first one is computed in FP8; pass "
    "quantize=None where it is taken"
)


def gated_mlp(
    rows: ArrayLike | QuantizedArray,
    w_up: ArrayLike | PhysicalWeights | QuantizedWeights,
    w_down: ArrayLike | PhysicalWeights | QuantizedWeights,
    group_sizes: ArrayLike,
    *,
    b_up: ArrayLike | None = None,
    b_down: ArrayLike | None = None,
    row_weights: ArrayLike | None = None,
    activation: str | Activation = "silu",
    precision: PrecisionName | jax.lax.Precision | None = None,
    quantize: Literal["fp8", "fp8_all"] | None = None,
    save: Literal["preactivation", "inputs"] = "preactivation",
    round_scale: bool = False,
    num_sms: int | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Applies each expert's gated MLP to its rows, as `expert_fn` of `jax_ep.moe` does.

    With gate = rows @ w_up[:, :, 0] and up = rows @ w_up[:, :, 1], the result is
    activation(gate, up) @ w_down, expert by expert. The products are those of `grouped_dot`, and the tail
    past the experts' rows is not read.

    For tensor parallelism shard F of w_up [L, H, 2, F] and of w_down, and sum the results over the axis
    (docs/howto/tensor_parallel.md). Do not shard 2F of [L, H, 2F]: the first half of a shard is not the
    gates, so the result is wrong without an error.

    In FP8 the products have FP8 operands and float32 sums: rows and cotangents with scales of 1 x 128
    elements, weights with scales of 128 x 128, and, for "fp8_all", the operands of weights' gradients with
    scales of 128 rows x 1 (the recipe of DeepSeek-V3, arXiv:2412.19437, section 3.3). Activations are
    computed in float32. Blocks of cotangents may be as small as 1e-30, so a loss needs no scaling.

    Args:
      rows: floating [C, H]; the rows of expert l follow those of expert l - 1. Or [L, C, H] of padded
        experts, as for `grouped_dot`. In FP8 also a `QuantizedArray` with scales [..., H / 128]. Rows that
        `dispatch(quantize="fp8")` delivers have a gradient, because they have a carrier.
      w_up: [L, H, 2, F] gate and up projection, of the dtype of rows; in FP8 of any floating dtype, or of
        `quantize_weights`. With redundant experts `PhysicalWeights`. Also [L, H, 2F], whose first F columns
        are the gate. Its gradient has the same shape.
      w_down: [L, F, H], likewise.
      group_sizes: int32 [L] rows of each expert, as for `grouped_dot`.
      b_up: floating [L, 2, F] or [L, 2F], or None.
      b_down: floating [L, H] or None.
      row_weights: floating [C], [L, C] of padded experts, or None. The result is multiplied by them. Do not
        pass them to `combine` again, and set `experts_apply_weights` of `moe`. In FP8 the activation then
        takes a pass of its own.
      activation: "silu", "gelu" (the tanh approximation), "clipped" (gpt-oss: gate at most 7, up within 7,
        (up + 1) * gate * sigmoid(1.702 * gate)), or a function of gate and up, float32 [C, F] each, that
        returns floating [C, F]; of padded experts [L * C, F]. It must not close over arrays that have a
        gradient.
      precision: of products of float32 operands, as for `grouped_dot`. The sums that are gradients of biases
        are always float32.
      quantize: None: products of the dtype of rows. "fp8": in FP8, but weights' gradients in bfloat16.
        "fp8_all": these in FP8, too: faster only if experts have many rows (docs/tuning.md). For both, H and
        F must be multiples of 128.
      save: what the backward pass gets besides the weights. "preactivation": the rows, in "fp8_all" as FP8,
        and z [C, 2F]. "inputs": the rows, so it computes the first product again.
      round_scale: if true, scales are rounded up to powers of two.
      num_sms: as for `grouped_dot`.
      implementation: None, "ffi" or "xla". On CPUs all mean XLA's ops, because these kernels are for GPUs.

    Returns:
      [C, H] or [L, C, H] in the dtype of rows, bfloat16 of FP8 rows; zero in rows of no expert.
      Differentiable in reverse mode in rows, weights, biases and row_weights: in FP8 once, otherwise any
      number of times.

    Raises:
      ValueError: the shapes do not fit each other, or an option is none of those above.
      TypeError: dtypes do not fit each other, activation does not take and return such arrays, or a second
        derivative in FP8 was asked for.
    """
    num_sms = _CHECK.most_sms(num_sms) or 0
    if quantize is not None and not (isinstance(quantize, str) and quantize in ("fp8", "fp8_all")):
        raise ValueError(f"gated_mlp: quantize must be None, 'fp8' or 'fp8_all', got {quantize!r}")
    if save not in ("preactivation", "inputs"):
        raise ValueError(f"gated_mlp: save must be 'preactivation' or 'inputs', got {save!r}")
    if round_scale and quantize is None:
        raise ValueError("gated_mlp: round_scale needs quantize, because only FP8 has scales")
    operands = _check(quantize, rows, w_up, w_down, group_sizes, b_up, b_down, row_weights)
    given_rows = operands.rows
    rows_per_group = _CHECK.rows_per_group(given_rows.shape, wide_of(operands.w_down).shape[0])
    options = Options(num_sms=num_sms, round_scale=bool(round_scale), rows_per_group=rows_per_group)
    engine = choose_engine(implementation, options)
    operands = _with_flat_rows(operands, rows_per_group)
    products_precision = precision_of(_CHECK, precision, operands.dtype())
    if quantize is None:
        products: Products = FloatProducts(engine.with_precision(products_precision))
    else:
        products = Fp8(engine, quantize == "fp8_all")
    half_shape = operands.rows.shape[0], wide_of(operands.w_down).shape[1]
    half = jax.ShapeDtypeStruct(half_shape, sum_dtype(operands.dtype()))
    call = _Call(_activation(activation, half), engine, products, save == "preactivation", quantize)
    with jax.named_scope("jax_ep.gated_mlp"):
        out = shaped_like(given_rows, _gated_mlp(call, as_bits(vary_alike(operands))))
        return without_gradient_of_values(_NO_GRADIENT, rows, out)


@dataclasses.dataclass(frozen=True)
class _Call:
    """The static part of a call."""

    activation: Activation
    engine: Engine
    products: Products
    saves_preactivation: bool
    quantize: str | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Operands:
    """The arrays of a call, and in the backward pass their gradients."""

    rows: Rows  # [C, H], or a QuantizedArray
    w_up: Weights  # [L, H, 2F], or QuantizedWeights, with gate and up in one dimension
    w_down: Weights  # [L, F, H], or QuantizedWeights
    group_sizes: jax.Array  # [L]
    b_up: jax.Array | None
    b_down: jax.Array | None
    row_weights: jax.Array | None

    def dtype(self) -> np.dtype:
        """Returns the dtype of the result."""
        return jnp.dtype(jnp.bfloat16) if isinstance(self.rows, QuantizedArray) else self.rows.dtype


_Saved = tuple[_Operands, Kept | None, jax.Array | None]
"""The arrays of a call, the rows as they are kept, and the preactivation."""


@custom_vjp(0)
def _gated_mlp(call: _Call, operands: _Operands) -> jax.Array:
    operands = _merged(from_bits(operands))
    return _from_preactivation(call, operands, _preactivation(call, operands, operands.rows))


def _preactivation(call: _Call, operands: _Operands, rows: Rows) -> jax.Array:
    z = call.products.times(rows, operands.w_up, operands.group_sizes)
    if operands.b_up is None:
        return z
    bias = _per_row(call, operands.b_up, operands.group_sizes, z)
    return (z.astype(sum_dtype(z.dtype)) + bias).astype(z.dtype)


def _from_preactivation(call: _Call, operands: _Operands, z: jax.Array) -> jax.Array:
    products, sizes = call.products, operands.group_sizes
    hidden = products.activate(Gated(z, operands.row_weights, sizes, call.activation))
    out = products.times(hidden, operands.w_down, sizes)
    if operands.b_down is not None:
        out = out.astype(sum_dtype(z.dtype)) + weighted(
            _per_row(call, operands.b_down, sizes, z), operands.row_weights
        )
    return out.astype(operands.dtype())


def _per_row(call: _Call, bias: jax.Array, sizes: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns the bias of each row's expert, in float32; zero in rows of no expert."""
    expert = groups_of_rows(sizes, rows.shape[0], call.engine.options.rows_per_group)
    return jnp.take(bias, expert, axis=0, mode="fill", fill_value=0).astype(sum_dtype(rows.dtype))


def _gated_mlp_fwd(call: _Call, operands: _Operands) -> tuple[jax.Array, _Saved]:
    return _once_in_fp8(call, _forward, operands)


def _once_in_fp8(call: _Call, function: Callable[..., Result], *operands: object) -> Result:
    """Returns function(call, *operands), half of a first derivative, which in FP8 has no derivative."""
    if call.quantize is None:
        return function(call, *operands)
    error = _ONE_GRADIENT.format(call.quantize)
    return once_differentiable(error, functools.partial(function, call), *operands)


def _forward(call: _Call, operands: _Operands) -> tuple[jax.Array, _Saved]:
    if not call.saves_preactivation:
        rows = without_carrier(operands.rows)
        return _gated_mlp(call, operands), (dataclasses.replace(operands, rows=rows), None, None)
    operands = from_bits(operands)
    merged = _merged(operands)  # what is saved is what came, so that a scan does not store it again
    rows, saved_rows = call.products.prepare(operands.rows, operands.group_sizes)
    z = _preactivation(call, merged, rows)
    out = _from_preactivation(call, merged, z)
    operands = dataclasses.replace(operands, rows=without_values(operands.rows))
    return out, as_bits((operands, saved_rows, z))


def _gated_mlp_bwd(call: _Call, saved: _Saved, d_out: jax.Array) -> tuple[_Operands]:
    return _once_in_fp8(call, _backward, saved, d_out)


def _backward(call: _Call, saved: _Saved, d_out: jax.Array) -> tuple[_Operands]:
    operands, saved_rows, z = from_bits(saved)
    products, sizes = call.products, operands.group_sizes
    if z is None:
        # Without it XLA keeps the product of the forward pass, or computes this one too early to save memory.
        operands, d_out = jax.lax.optimization_barrier((operands, d_out))
        rows, saved_rows = products.prepare(operands.rows, sizes)
        z = _preactivation(call, _merged(operands), rows)
    assert saved_rows is not None
    d_out_rows, d_out_columns = products.cotangents(d_out.astype(z.dtype), sizes)
    d_hidden = products.times_transposed(d_out_rows, operands.w_down, sizes)
    gated = Gated(z, operands.row_weights, sizes, call.activation, needs_wide_d_z=operands.b_up is not None)
    gradients = products.gradients(gated, d_hidden)
    d_w_down = products.weight_gradient(
        gradients.hidden, d_out_columns, sizes, _num_redundant(operands.w_down)
    )
    d_rows = products.times_transposed(gradients.d_z, _merged(operands).w_up, sizes)
    d_w_up = products.weight_gradient(saved_rows, gradients.d_z_columns, sizes, _num_redundant(operands.w_up))
    d_row_weights = gradients.d_row_weights
    d_b_up, d_b_down = None, None
    if operands.b_up is not None:
        assert gradients.d_z_wide is not None
        d_b_up = _sum_of_groups(call.engine, gradients.d_z_wide, sizes).astype(operands.b_up.dtype)
        d_b_up = _split_like(operands.b_up, d_b_up, 1)
    if operands.b_down is not None:
        d_b_down = _sum_of_groups(call.engine, weighted(d_out, operands.row_weights), sizes)
        d_b_down = d_b_down.astype(operands.b_down.dtype)
        if operands.row_weights is not None:
            bias = _per_row(call, operands.b_down, sizes, z)
            assert d_row_weights is not None
            of_bias = jnp.sum(d_out.astype(bias.dtype) * bias, axis=1)
            d_row_weights = d_row_weights + of_bias.astype(d_row_weights.dtype)
    gradients = dataclasses.replace(
        operands,
        rows=cotangent_of(operands.rows, sharded_like(saved_rows, d_rows)),
        w_up=cotangent_of(operands.w_up, _split_like(wide_of(operands.w_up), d_w_up, 2)),
        w_down=cotangent_of(operands.w_down, d_w_down),
        group_sizes=None,
        b_up=d_b_up,
        b_down=d_b_down,
        row_weights=d_row_weights,
    )
    return (gradients,)


_gated_mlp.defvjp(_gated_mlp_fwd, _gated_mlp_bwd)


def _sum_of_groups(engine: Engine, rows: jax.Array, sizes: jax.Array) -> jax.Array:
    """Returns each group's sum of rows [L, ...]: a product, which has the same bits when it is repeated.

    Its operands must not be rounded to tf32, as no other sum's are.
    """
    ones = vary_alike([jnp.ones((rows.shape[0], 8), rows.dtype), rows])[0]
    exact = engine.with_precision(jax.lax.Precision.HIGHEST)
    return as_array(times_rows(exact, ones, rows, sizes, 0))[:, 0]


def _activation(activation: str | Activation, half: jax.ShapeDtypeStruct) -> Activation:
    if isinstance(activation, str):
        if activation in ACTIVATIONS:
            return ACTIVATIONS[activation]
    elif callable(activation):
        _check_activation(activation, half)
        return activation
    raise ValueError(
        f"gated_mlp: activation must be one of {sorted(ACTIVATIONS)}, or a function of gate and up, got "
        f"{activation!r}"
    )


def _check_activation(activation: Activation, half: jax.ShapeDtypeStruct) -> None:
    """Raises TypeError unless an activation of a user takes two arrays and returns one that fits them."""
    takes = "gated_mlp: activation must be a function of two arrays, gate and up"
    try:
        inspect.signature(activation).bind(None, None)
    except TypeError as error:
        raise TypeError(
            f"{takes}, got {activation!r} ({error}); one of gate alone, such as jax.nn.silu, is "
            "lambda gate, up: jax.nn.silu(gate) * up"
        ) from None
    except ValueError:
        pass  # Python does not know its signature
    result = jax.eval_shape(activation, half, half)
    is_array = isinstance(result, jax.ShapeDtypeStruct)
    if not is_array or result.shape != half.shape or not jnp.issubdtype(result.dtype, jnp.floating):
        got = _checks.shape_text(result) if is_array else jax.tree.map(_checks.shape_text, result)
        raise TypeError(f"{takes}, that returns floating {list(half.shape)}, got {got} from {activation!r}")


def _check(
    quantize: str | None,
    given_rows: ArrayLike | QuantizedArray,
    w_up: ArrayLike | PhysicalWeights | QuantizedWeights,
    w_down: ArrayLike | PhysicalWeights | QuantizedWeights,
    group_sizes: ArrayLike,
    b_up: ArrayLike | None,
    b_down: ArrayLike | None,
    row_weights: ArrayLike | None,
) -> _Operands:
    """Returns the arguments as arrays. Those in FP8 get no gradients of their own."""

    def array(name: str, value: ArrayLike | None) -> jax.Array | None:
        return None if value is None else _CHECK.array(name, value)

    is_fp8 = quantize is not None
    rows: Rows
    if isinstance(given_rows, QuantizedArray):
        if not is_fp8 or block_of(_CHECK, given_rows) != (1, BLOCK):
            raise TypeError(
                "gated_mlp: a QuantizedArray of rows needs quantize='fp8', and scales of 1 x 128 elements"
            )
        values, scales = jax.lax.stop_gradient((given_rows.values, given_rows.scales))
        rows = dataclasses.replace(given_rows, values=values, scales=scales)
    else:
        rows = _CHECK.array("rows", given_rows)
    matrices: list[Weights] = []
    for name, w in (("w_up", w_up), ("w_down", w_down)):
        if isinstance(w, QuantizedWeights):
            if not is_fp8:
                raise TypeError(f"gated_mlp: {name} of quantize_weights needs quantize='fp8' or 'fp8_all'")
            fixed = jax.lax.stop_gradient((w.transposed, w.kept))
            matrices.append(QuantizedWeights(w.w, *fixed))
        else:
            matrices.append(_CHECK.matrices(name, w))
    wide = [wide_of(w) for w in matrices]
    numbers = wide if isinstance(rows, QuantizedArray) else [rows, *wide]
    dtypes = {w.dtype for w in numbers}
    fits = all(dtype in KERNEL_DTYPES for dtype in dtypes) if is_fp8 else len(dtypes) == 1
    if not fits or not all(map(is_differentiable, dtypes)):
        raise TypeError(
            "gated_mlp: rows, w_up and w_down must have one floating dtype of 16 bits or more, or in "
            f"FP8 any of 16 or 32 bits, got {', '.join(map(_checks.shape_text, numbers))}"
        )
    operands = _Operands(
        rows=rows,
        w_up=matrices[0],
        w_down=matrices[1],
        group_sizes=_CHECK.array("group_sizes", group_sizes),
        b_up=array("b_up", b_up),
        b_down=array("b_down", b_down),
        row_weights=array("row_weights", row_weights),
    )
    _check_shapes(is_fp8, rows.shape, wide[0].shape, wide[1].shape, operands)
    num_experts = wide[0].shape[0]
    rows_per_group = _CHECK.rows_per_group(rows.shape, num_experts)
    sizes = _CHECK.group_sizes(operands.group_sizes, num_experts, rows.shape[0], rows_per_group)
    return dataclasses.replace(operands, group_sizes=sizes)


def _with_flat_rows(operands: _Operands, rows_per_group: int) -> _Operands:
    """Returns the arrays with one dimension of rows, and row weights that are zero in rows of no group."""
    rows, row_weights = flat_rows(operands.rows), operands.row_weights
    if row_weights is not None:
        row_weights = merge_dimensions(row_weights, 0) if row_weights.ndim == 2 else row_weights
        is_row = rows_in_groups(operands.group_sizes, rows.shape[0], rows_per_group)
        row_weights = jnp.where(is_row, row_weights, 0)  # others may be NaN
    return dataclasses.replace(operands, rows=rows, row_weights=row_weights)


def _num_redundant(w: Weights) -> int:
    return num_redundant_of(wide_of(w))


def _merged(operands: _Operands) -> _Operands:
    """Returns the arrays with w_up [L, H, 2F] and b_up [L, 2F], which copies nothing on a device."""

    def merge(tree: Tree, dimension: int) -> Tree:
        return jax.tree.map(lambda array: merge_dimensions(array, dimension), tree)

    w, b_up = operands.w_up, operands.b_up
    if wide_of(w).ndim == 4:
        if isinstance(w, QuantizedWeights):
            w = QuantizedWeights(merge(w.w, 2), merge(w.transposed, 1), merge(w.kept, 2))
        else:
            w = merge(w, 2)
    if b_up is not None and b_up.ndim == 3:
        b_up = merge(b_up, 1)
    return dataclasses.replace(operands, w_up=w, b_up=b_up)


def _split_like(primal: Matrices, gradient: Tree, dimension: int) -> Tree:
    """Returns the gradient of a merged array in the shape that it came in."""
    if primal.ndim == jax.tree.leaves(gradient)[0].ndim:
        return gradient
    return jax.tree.map(lambda array: split_dimension(array, dimension, 2), gradient)


def _check_shapes(is_fp8: bool, rows: Shape, up: Shape, down: Shape, operands: _Operands) -> None:
    if len(rows) not in (2, 3) or len(up) not in (3, 4) or len(down) != 3:
        raise ValueError(
            "gated_mlp: rows must be [C, H], or [L, C, H] of padded experts, w_up [L, H, 2, F] or "
            f"[L, H, 2F], and w_down [L, F, H], got {list(rows)}, {list(up)} and {list(down)}"
        )
    num_experts, width, inner = down[0], rows[-1], down[1]
    wanted = {
        "w_up": (up, [(num_experts, width, 2, inner), (num_experts, width, 2 * inner)]),
        "w_down": (down, [(num_experts, inner, width)]),
        "b_up": (operands.b_up, [(num_experts, 2, inner), (num_experts, 2 * inner)]),
        "b_down": (operands.b_down, [(num_experts, width)]),
        "row_weights": (operands.row_weights, [rows[:-1]]),
    }
    for name, (got, shapes) in wanted.items():
        if isinstance(got, jax.Array) and not jnp.issubdtype(got.dtype, jnp.floating):
            raise TypeError(f"gated_mlp: {name} must be floating, got {_checks.shape_text(got)}")
        shape = getattr(got, "shape", got)
        if got is not None and tuple(shape) not in shapes:
            raise ValueError(
                f"gated_mlp: {name} must be {' or '.join(str(list(shape)) for shape in shapes)} with rows "
                f"{list(rows)} and w_down {list(down)}, got {list(shape)}"
            )
    if is_fp8 and (width % BLOCK or inner % BLOCK):
        raise ValueError(
            f"gated_mlp: FP8 needs widths H and F that are multiples of 128, got {width} and {inner}"
        )
