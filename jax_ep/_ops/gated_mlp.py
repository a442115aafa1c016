"""gated_mlp: the experts of most models as one differentiable op, in bfloat16 or in FP8."""

import dataclasses
import inspect
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_ep import _checks
from jax_ep._experts.activations import ACTIVATIONS, Activation
from jax_ep._experts.choice import choose_engine
from jax_ep._experts.engine import Options
from jax_ep._experts.fp8_operands import QuantizedWeights
from jax_ep._experts.gated import (
    FloatProducts,
    Fp8,
    Products,
    Rows,
    Weights,
    quantized_weights,
    without_gradient_if_forward_only,
    without_gradient_of_values,
)
from jax_ep._experts.mlp import MlpCall, MlpOperands, mlp
from jax_ep._experts.products import PrecisionName, precision_of
from jax_ep._extension import Implementation
from jax_ep._jax.sharding import merge_dimensions, vary_alike
from jax_ep._ops.arguments import OpArguments
from jax_ep._rows.counts import rows_in_groups
from jax_ep._rows.dtypes import is_differentiable, sum_dtype
from jax_ep._rows.fp8 import BLOCK, QuantizedArray, as_bits, block_of
from jax_ep._rows.padded import flat_rows, shaped_like
from jax_ep._rows.quantize import KERNEL_DTYPES
from jax_ep._rows.weights import PhysicalWeights

_CHECK = OpArguments("gated_mlp")

_NO_GRADIENT = (
    "gated_mlp: FP8 rows without a carrier have no gradient; pass rows of dispatch(quantize='fp8'), rows "
    "that are not quantized, or jax.lax.stop_gradient(...) of them"
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
      Differentiable in reverse mode in rows, weights, biases and row_weights: in FP8 once, with weights of
      `quantize_weights(gradients=False)` not at all, otherwise any number of times.

    Raises:
      ValueError: the shapes do not fit each other, or an option is none of those above.
      TypeError: dtypes do not fit each other, activation does not take and return such arrays, or a second
        derivative in FP8 was asked for.
    """
    call, operands = prepare(
        rows,
        w_up,
        w_down,
        group_sizes,
        b_up=b_up,
        b_down=b_down,
        row_weights=row_weights,
        activation=activation,
        precision=precision,
        quantize=quantize,
        save=save,
        round_scale=round_scale,
        num_sms=num_sms,
        implementation=implementation,
    )
    with jax.named_scope("jax_ep.gated_mlp"):
        out = mlp(call, as_bits(vary_alike(operands)))
        out = shaped_like(rows if isinstance(rows, QuantizedArray) else jnp.asarray(rows), out)
        out = without_gradient_of_values(_NO_GRADIENT, rows, out)
        return without_gradient_if_forward_only("gated_mlp", operands, out)


def prepare(
    rows: ArrayLike | QuantizedArray,
    w_up: ArrayLike | PhysicalWeights | QuantizedWeights,
    w_down: ArrayLike | PhysicalWeights | QuantizedWeights,
    group_sizes: ArrayLike,
    *,
    b_up: ArrayLike | None,
    b_down: ArrayLike | None,
    row_weights: ArrayLike | None,
    activation: str | Activation,
    precision: PrecisionName | jax.lax.Precision | None,
    quantize: Literal["fp8", "fp8_all"] | None,
    save: Literal["preactivation", "inputs"],
    round_scale: bool,
    num_sms: int | None,
    implementation: Implementation | None,
    clears_rows: bool = True,
) -> tuple[MlpCall, MlpOperands]:
    """Returns the arguments of `gated_mlp`, checked. Rows have one dimension then.

    `clears_rows`: rows of no expert become zero. Otherwise they may be undefined.
    """
    num_sms = _CHECK.most_sms(num_sms) or 0
    if quantize is not None and not (isinstance(quantize, str) and quantize in ("fp8", "fp8_all")):
        raise ValueError(f"gated_mlp: quantize must be None, 'fp8' or 'fp8_all', got {quantize!r}")
    if save not in ("preactivation", "inputs"):
        raise ValueError(f"gated_mlp: save must be 'preactivation' or 'inputs', got {save!r}")
    if round_scale and quantize is None:
        raise ValueError("gated_mlp: round_scale needs quantize, because only FP8 has scales")
    is_fp8 = quantize is not None
    operands = MlpOperands(
        rows=_rows(is_fp8, rows),
        w_up=_weights(is_fp8, "w_up", w_up),
        w_down=_weights(is_fp8, "w_down", w_down),
        group_sizes=_CHECK.array("group_sizes", group_sizes),
        b_up=_or_none("b_up", b_up),
        b_down=_or_none("b_down", b_down),
        row_weights=_or_none("row_weights", row_weights),
    )
    _check_dtypes(is_fp8, operands)
    _check_shapes(is_fp8, operands)
    shape, num_experts = operands.rows.shape, operands.w_down.shape[0]
    rows_per_group = _CHECK.rows_per_group(shape, num_experts)
    sizes = _CHECK.group_sizes(operands.group_sizes, num_experts, shape[0], rows_per_group)
    operands = dataclasses.replace(operands, group_sizes=sizes)
    options = Options(
        num_sms=num_sms,
        round_scale=bool(round_scale),
        rows_per_group=rows_per_group,
        clears_rows=clears_rows,
    )
    engine = choose_engine(implementation, options)
    operands = _with_flat_rows(operands, rows_per_group)
    products_precision = precision_of(_CHECK, precision, operands.dtype())
    if quantize is None:
        products: Products = FloatProducts(engine.with_precision(products_precision))
    else:
        products = Fp8(engine, quantize == "fp8_all")
    half_shape = operands.rows.shape[0], operands.w_down.shape[1]
    half = jax.ShapeDtypeStruct(half_shape, sum_dtype(operands.dtype()))
    call = MlpCall(_activation(activation, half), engine, products, save == "preactivation", quantize)
    return call, operands


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


def _or_none(name: str, value: ArrayLike | None) -> jax.Array | None:
    return None if value is None else _CHECK.array(name, value)


def _rows(is_fp8: bool, given: ArrayLike | QuantizedArray) -> Rows:
    """Returns the rows as an array, or those in FP8 without gradients of their own."""
    if not isinstance(given, QuantizedArray):
        return _CHECK.array("rows", given)
    if not is_fp8 or block_of(_CHECK, given) != (1, BLOCK):
        raise TypeError(
            "gated_mlp: a QuantizedArray of rows needs quantize='fp8', and scales of 1 x 128 elements"
        )
    values, scales = jax.lax.stop_gradient((given.values, given.scales))
    return dataclasses.replace(given, values=values, scales=scales)


def _weights(is_fp8: bool, name: str, w: ArrayLike | PhysicalWeights | QuantizedWeights) -> Weights:
    """Returns matrices as arrays, or those in FP8."""
    if not isinstance(w, QuantizedWeights):
        return _CHECK.matrices(name, w)
    if not is_fp8:
        raise TypeError(f"gated_mlp: {name} of quantize_weights needs quantize='fp8' or 'fp8_all'")
    return quantized_weights(_CHECK, name, w)


def _check_dtypes(is_fp8: bool, operands: MlpOperands) -> None:
    given = operands.rows, operands.w_up, operands.w_down
    numbers = [array for array in given if not isinstance(array, QuantizedArray | QuantizedWeights)]
    dtypes = {array.dtype for array in numbers}
    fits = all(dtype in KERNEL_DTYPES for dtype in dtypes) if is_fp8 else len(dtypes) == 1
    if not fits or not all(map(is_differentiable, dtypes)):
        raise TypeError(
            "gated_mlp: rows, w_up and w_down must have one floating dtype of 16 bits or more, or in "
            f"FP8 any of 16 or 32 bits, got {', '.join(map(_checks.shape_text, numbers))}"
        )


def _with_flat_rows(operands: MlpOperands, rows_per_group: int) -> MlpOperands:
    """Returns the arrays with one dimension of rows, and row weights that are zero in rows of no group."""
    rows, row_weights = flat_rows(operands.rows), operands.row_weights
    if row_weights is not None:
        row_weights = merge_dimensions(row_weights, 0) if row_weights.ndim == 2 else row_weights
        is_row = rows_in_groups(operands.group_sizes, rows.shape[0], rows_per_group)
        row_weights = jnp.where(is_row, row_weights, 0)  # others may be NaN
    return dataclasses.replace(operands, rows=rows, row_weights=row_weights)


def _check_shapes(is_fp8: bool, operands: MlpOperands) -> None:
    rows, up, down = operands.rows.shape, operands.w_up.shape, operands.w_down.shape
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
