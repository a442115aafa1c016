"""Checks of the arrays and numbers that users pass."""

import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# More than any GPU has; the extension counts them in 32 bits.
MOST_SMS = 2**16


def integer(value: Any) -> int | None:
    """A Python or NumPy integer as an int; None if it is none, or is known only when the program runs."""
    if isinstance(value, bool | np.bool_):
        return None
    try:
        return operator.index(value)
    except TypeError:  # of traced arrays, too
        return None


def time_out(value: Any) -> float:
    """A Group's timeout_s: a positive number of seconds, infinity included."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(f"Group: timeout_s must be a number of seconds, got {value!r}")
    if not value > 0:  # nor is nan
        raise ValueError(f"Group: timeout_s must be positive, got {value}")
    try:
        return float(value)
    except OverflowError:
        return float("inf")


def most_sms(of: str, value: Any) -> int | None:
    """The num_sms of a Group or a product: the most SMs that an op may take, or None."""
    if value is None:
        return None
    number = integer(value)
    if number is None:
        raise TypeError(f"{of}: num_sms must be an int of at least 2 (or None), got {value!r}")
    if not 2 <= number <= MOST_SMS:
        raise ValueError(f"{of}: num_sms must be between 2 and {MOST_SMS} (or None), got {number}")
    return number


# Counts of rows are int32.
MOST_ROWS = 2**31 - 1


# Far more than any model has, and so few that counts of experts and rows together fit into an int32.
MOST_EXPERTS = 2**20


def is_float(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def shape_text(array: Any) -> str:
    return f"{array.dtype.name}{list(array.shape)}"


def array(op: str, name: str, value: Any) -> jax.Array:
    """The value as an array; TypeError if there is none, ValueError for integers that do not fit into it."""
    if value is not None:
        try:
            given = jnp.asarray(value)
        except OverflowError as error:
            raise ValueError(
                f"{op}: {name} must hold integers that JAX can hold (up to 32 bits, unless jax_enable_x64 is "
                f"set): {error}"
            ) from error
        except (TypeError, ValueError):
            pass
        else:
            _require_same_integers(op, name, value, given.dtype)
            return on_device(op, name, given)
    kind = f" of {value.dtype}" if isinstance(value, np.ndarray) else ""
    raise TypeError(f"{op}: {name} must be an array that JAX can hold, got {type(value).__name__}{kind}")


def _require_same_integers(op: str, name: str, value: Any, dtype: Any) -> None:
    """ValueError if JAX has cut off the upper halves of NumPy's integers, of which it says nothing."""
    if not isinstance(value, np.ndarray | np.generic) or value.dtype.kind not in "iu" or not value.size:
        return
    kept = np.iinfo(dtype)
    if value.min() < kept.min or value.max() > kept.max:
        raise ValueError(
            f"{op}: {name} must hold numbers from {kept.min} to {kept.max}, for JAX makes {dtype} of "
            f"{value.dtype} unless jax_enable_x64 is set; got some from {value.min()} to {value.max()}"
        )


def on_device(op: str, name: str, array: jax.Array) -> jax.Array:
    """The array, or ValueError if it waits in the host's memory."""
    if jax.typeof(array).memory_space == jax.memory.Space.Host:
        raise ValueError(
            f"{op}: {name} must lie in the memory of the device, got {shape_text(array)} on the host; "
            "bring it back first: jax.device_put(array, jax.memory.Space.Device)"
        )
    return array


def topk_idx(op: str, ids: Any) -> jax.Array:
    """`ids` as an array [T, K] of int32 or int64."""
    ids = array(op, "topk_idx", ids)
    if ids.ndim > 2 and ids.dtype in (jnp.int32, jnp.int64):
        raise ValueError(
            f"{op}: topk_idx must be [T, K], with the tokens of all sequences in one axis, "
            f"got {shape_text(ids)}; reshape to [{math.prod(ids.shape[:-1])}, {ids.shape[-1]}], and x alike "
            "(jax_ep.moe does so itself)"
        )
    if ids.ndim != 2 or ids.dtype not in (jnp.int32, jnp.int64):
        raise ValueError(f"{op}: topk_idx must be int32 or int64 [T, K], got {shape_text(ids)}")
    if ids.shape[1] < 1:
        raise ValueError(f"{op}: topk_idx needs at least one choice a token, got {shape_text(ids)}")
    return ids


def weights(op: str, name: str, value: Any, shape: tuple[int, ...], axes: str) -> jax.Array:
    """The weights as float32 of the given shape."""
    given = array(op, name, value)
    if given.shape != shape or not is_float(given.dtype):
        raise ValueError(f"{op}: {name} must be floating {axes} = {list(shape)}, got {shape_text(given)}")
    if jnp.finfo(given.dtype).bits < 16:
        raise TypeError(
            f"{op}: {name} must be floating of 16 bits or more, for narrower values leave out their scales, "
            f"and their gradient would have as few bits; got {shape_text(given)}; cast them to a wider dtype"
        )
    return given.astype(jnp.float32)


def num_experts(op: str, experts: Any, num_ranks: int) -> int:
    number = integer(experts)
    if number is None:
        raise ValueError(f"{op}: num_experts must be an int, got {experts!r}")
    if number < 1 or number % num_ranks != 0:
        raise ValueError(
            f"{op}: num_experts must be a positive multiple of the {num_ranks} ranks, got {number}"
        )
    if number > MOST_EXPERTS:
        raise ValueError(f"{op}: num_experts must be at most {MOST_EXPERTS}, got {number}")
    return number


def at_least_one(op: str, name: str, value: Any, most: int = MOST_ROWS) -> int:
    number = integer(value)
    if number is None or not 1 <= number <= most:
        raise ValueError(f"{op}: {name} must be an int between 1 and {most}, got {value!r}")
    return number


def capacity(op: str, value: Any, worst: int, alignment: int) -> int:
    """Rows of a result. `worst` is what None means; one expert's block of `alignment` rows must fit."""
    if value is None:
        if jax.export.is_symbolic_dim(worst):
            raise ValueError(
                f"{op}: the worst case is {worst} rows, a number that is not known when a program is traced; "
                "export a program for each number of tokens"
                + (", or pass a capacity and implementation='xla'" if op == "permute" else "")
            )
        if worst > MOST_ROWS:
            raise ValueError(
                f"{op}: the worst case is {worst} rows, and a buffer has at most {MOST_ROWS}; pass a capacity"
                f", or a smaller expert_alignment than {alignment}"
            )
        return worst
    if isinstance(value, float | np.floating):
        raise ValueError(
            f"{op}: capacity counts rows, so it must be an int, got {value!r}; for a multiple of what "
            "a uniform routing brings, pass int(factor * rows)"
        )
    rows = at_least_one(op, "capacity", value)
    if rows < alignment:
        raise ValueError(
            f"{op}: a capacity of {rows} rows cannot hold even one expert's block, which is a multiple of "
            f"expert_alignment = {alignment} rows; pass a larger capacity or a smaller expert_alignment"
        )
    return rows


def leaves(
    op: str, name: str, arrays: Sequence[Any], first: tuple[int, ...], axes: str, source: str
) -> list[jax.Array]:
    """The leaves of a payload as arrays of these first dimensions; `source` says where they come from."""
    result = []
    for value in arrays:
        leaf = array(op, f"every leaf of {name}", value)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise TypeError(f"{op}: {name} cannot hold {leaf.dtype}; for keys pass jax.random.key_data(...)")
        if leaf.shape[: len(first)] != first:
            sizes = first[0] if len(first) == 1 else list(first)
            raise ValueError(
                f"{op}: every array of {name} must be [{axes}, ...] with {axes} = {sizes} ({source}), "
                f"got {shape_text(leaf)}"
            )
        result.append(leaf)
    return result


def floating(op: str, name: str, arrays: Sequence[jax.Array]) -> None:
    for array in arrays:
        if not is_float(array.dtype):
            raise TypeError(f"{op}: {name} is summed, so it must be floating; got {shape_text(array)}")
        if jnp.finfo(array.dtype).bits < 16:
            raise TypeError(
                f"{op}: {name} is summed, so it must be floating of 16 bits or more, for a sum of narrower "
                f"values leaves out their scales; got {shape_text(array)}; pass jax_ep.dequantize_fp8 of the "
                "QuantizedArray, or cast the values to a wider dtype if they have no scales"
            )


def floating_dtype(op: str, name: str, value: Any) -> Any:
    try:
        dtype = None if value is None else jnp.dtype(value)  # NumPy takes None for float64
    except (TypeError, ValueError):
        dtype = None
    if dtype is None or not is_float(dtype):
        raise TypeError(f"{op}: {name} must be floating, got {value if dtype is None else dtype}")
    return dtype
