"""Checks of the arrays and numbers that users pass."""

import dataclasses
import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

PyTree = Any
"""A pytree of arrays, as users pass it."""


class TreeDef(Protocol):
    """The structure of a pytree, as `jax.tree.flatten` returns it."""

    def unflatten(self, leaves: Iterable[object]) -> PyTree: ...
    def flatten_up_to(self, xs: PyTree) -> list[PyTree]: ...


# Row counts are int32.
MOST_ROWS = 2**31 - 1
# Far more than any model has. Counts of experts and rows together still fit into an int32.
MOST_EXPERTS = 2**20
# More than any GPU has. The extension counts SMs in 32 bits.
MOST_SMS = 2**16


def integer(value: object) -> int | None:
    """Returns a Python or NumPy integer as an int, and None for everything else, including traced values."""
    if isinstance(value, bool | np.bool_):
        return None
    try:
        return operator.index(value) if isinstance(value, SupportsIndex) else None
    except TypeError:  # traced arrays raise this
        return None


def clamped(numbers: jax.Array, least: int, most: int) -> jax.Array:
    """Returns integers of any dtype as int32, limited to `least` ... `most`, which fit in int32."""
    limits = jnp.iinfo(numbers.dtype)
    return jnp.clip(numbers, max(least, limits.min), min(most, limits.max)).astype(jnp.int32)


def timeout_seconds(value: object) -> float | None:
    """Checks a Group's `timeout_s`, a positive number of seconds, infinity or None, and returns it."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(f"Group: timeout_s must be a number of seconds, got {value!r}")
    if not value > 0:  # rejects NaN too
        raise ValueError(f"Group: timeout_s must be positive, got {value}")
    try:
        return float(value)
    except OverflowError:
        return float("inf")


def is_float(dtype: DTypeLike) -> bool:
    """Returns whether a dtype is floating."""
    return jnp.issubdtype(dtype, jnp.floating)


class Shaped(Protocol):
    """Anything with a shape and a dtype."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype: ...


def shape_text(array: Shaped) -> str:
    """Returns an array's dtype and shape as text for an error message, such as `float32[4, 8]`."""
    return f"{array.dtype.name}{list(array.shape)}"


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Checks of the arguments of an op, whose errors name the op."""

    op: str

    def at_least_one(self, name: str, value: object, most: int = MOST_ROWS) -> int:
        """Checks that an argument is an int between 1 and `most`, and returns it."""
        number = integer(value)
        if number is None or not 1 <= number <= most:
            raise ValueError(f"{self.op}: {name} must be an int between 1 and {most}, got {value!r}")
        return number

    def most_sms(self, value: object) -> int | None:
        """Checks `num_sms`, the maximum number of SMs that an op may use (or None), and returns it."""
        if value is None:
            return None
        number = integer(value)
        if number is None:
            raise TypeError(f"{self.op}: num_sms must be an int of at least 2 (or None), got {value!r}")
        if not 2 <= number <= MOST_SMS:
            raise ValueError(f"{self.op}: num_sms must be between 2 and {MOST_SMS} (or None), got {number}")
        return number

    def num_experts(self, experts: object, num_ranks: int, name: str = "num_experts") -> int:
        """Checks that the number of experts is a multiple of the number of ranks, and returns it."""
        number = integer(experts)
        if number is None:
            raise ValueError(f"{self.op}: {name} must be an int, got {experts!r}")
        if number < 1 or number % num_ranks != 0:
            raise ValueError(
                f"{self.op}: {name} counts the experts of all ranks, so it must be a positive multiple of "
                f"the {num_ranks} ranks, got {number}"
            )
        if number > MOST_EXPERTS:
            raise ValueError(f"{self.op}: {name} must be at most {MOST_EXPERTS}, got {number}")
        return number

    def capacity(self, value: object, worst: int, alignment: int) -> int:
        """Returns the number of rows of a result.

        None means `worst`, the worst case. At least one expert's block of `alignment` rows must fit.
        """
        if value is None:
            if jax.export.is_symbolic_dim(worst):
                raise ValueError(
                    f"{self.op}: the worst case is {worst} rows, a number that is not known when a program "
                    "is traced; export a program for each number of tokens"
                    + (", or pass a capacity and implementation='xla'" if self.op == "permute" else "")
                )
            if worst > MOST_ROWS:
                raise ValueError(
                    f"{self.op}: the worst case is {worst} rows, but a buffer has at most {MOST_ROWS}; pass "
                    f"a capacity, or a smaller expert_alignment than {alignment}"
                )
            return worst
        if isinstance(value, float | np.floating):
            raise ValueError(
                f"{self.op}: capacity counts rows, so it must be an int, got {value!r}"
                + (
                    ""
                    if self.op == "permute"
                    else "; pass a multiple of a uniform routing's rows as capacity_factor"
                )
            )
        rows = self.at_least_one("capacity", value)
        if rows < alignment:
            raise ValueError(
                f"{self.op}: a capacity of {rows} rows cannot hold even one expert's block, which is a "
                f"multiple of expert_alignment = {alignment} rows; pass a larger capacity or a smaller "
                "expert_alignment"
            )
        return rows

    def rows_of_factor(
        self, factor: object, capacity: object, uniform_rows: float, worst: int, alignment: int
    ) -> int:
        """Returns the capacity that a `capacity_factor` means, rounded up to a multiple of the alignment.

        `uniform_rows` is the number of rows that a uniform routing fills, and `worst` the worst case, which
        the result does not exceed.
        """
        if capacity is not None:
            raise ValueError(
                f"{self.op}: pass either capacity or capacity_factor, got {capacity!r} and {factor!r}"
            )
        if isinstance(factor, bool) or not isinstance(factor, int | float | np.integer | np.floating):
            raise TypeError(f"{self.op}: capacity_factor must be a number, got {type(factor).__name__}")
        if not 0 < factor < float("inf"):
            raise ValueError(f"{self.op}: capacity_factor must be positive and finite, got {factor}")
        rows = math.ceil(round(float(factor) * uniform_rows, 6))  # 1.1 * 10 is 11.000000000000002
        return min(max(-(-rows // alignment), 1) * alignment, max(worst, alignment))

    def floating_dtype(self, name: str, value: DTypeLike | None) -> np.dtype:
        """Checks that an argument names a floating dtype, and returns the dtype."""
        try:
            dtype = None if value is None else jnp.dtype(value)  # NumPy takes None for float64
        except (TypeError, ValueError):
            dtype = None
        if dtype is None or not is_float(dtype):
            raise TypeError(f"{self.op}: {name} must be floating, got {value if dtype is None else dtype}")
        return dtype

    def array(self, name: str, value: object) -> jax.Array:
        """Converts an argument to an array on the device.

        Raises TypeError if JAX cannot hold the value, and ValueError if it holds integers that do not fit.
        """
        if value is not None:
            try:
                converted = jnp.asarray(value)
            except OverflowError as error:
                raise ValueError(
                    f"{self.op}: {name} must hold integers that JAX can hold (up to 32 bits, unless "
                    f"jax_enable_x64 is set): {error}"
                ) from error
            except (TypeError, ValueError):
                pass
            else:
                self._require_same_integers(name, value, converted.dtype)
                return self.on_device(name, converted)
        kind = f" of {value.dtype}" if isinstance(value, np.ndarray) else ""
        raise TypeError(
            f"{self.op}: {name} must be an array that JAX can hold, got {type(value).__name__}{kind}"
        )

    def _require_same_integers(self, name: str, value: object, dtype: np.dtype) -> None:
        """Raises ValueError if NumPy integers do not fit into `dtype`, because JAX truncates them."""
        if not isinstance(value, np.ndarray | np.generic) or value.dtype.kind not in "iu" or not value.size:
            return
        limits = np.iinfo(dtype)
        if value.min() < limits.min or value.max() > limits.max:
            raise ValueError(
                f"{self.op}: {name} must hold numbers from {limits.min} to {limits.max}, because JAX "
                f"converts {value.dtype} to {dtype} unless jax_enable_x64 is set; got numbers from "
                f"{value.min()} to {value.max()}"
            )

    def on_device(self, name: str, array: jax.Array) -> jax.Array:
        """Checks that an array lies in the device's memory, and returns it."""
        if jax.typeof(array).memory_space == jax.memory.Space.Host:
            raise ValueError(
                f"{self.op}: {name} must lie in the memory of the device, got {shape_text(array)} on the "
                "host; move it to the device first: jax.device_put(array, jax.memory.Space.Device)"
            )
        return array

    def topk_idx(self, ids: object) -> jax.Array:
        """Checks the expert ids, and returns them as an array [T, K] of int32 or int64."""
        ids = self.array("topk_idx", ids)
        if ids.dtype == jnp.bool_:
            raise ValueError(
                f"{self.op}: topk_idx must be expert ids, int32 or int64 [T, K], got a routing map "
                f"{shape_text(ids)}; make ids of a map [T, E]: chosen, ids = "
                "jax.lax.top_k(routing_map.astype(jnp.int32), K), then jnp.where(chosen > 0, ids, -1)"
            )
        if ids.ndim > 2 and ids.dtype in (jnp.int32, jnp.int64):
            raise ValueError(
                f"{self.op}: topk_idx must be [T, K], with the tokens of all sequences in one axis, got "
                f"{shape_text(ids)}; reshape it to [{math.prod(ids.shape[:-1])}, {ids.shape[-1]}], and x in "
                "the same way (jax_ep.moe does this itself)"
            )
        if ids.ndim != 2 or ids.dtype not in (jnp.int32, jnp.int64):
            remedy = "; jax.lax.top_k returns weights first, then ids" if is_float(ids.dtype) else ""
            raise ValueError(
                f"{self.op}: topk_idx must be int32 or int64 [T, K], got {shape_text(ids)}{remedy}"
            )
        if ids.shape[1] < 1:
            raise ValueError(
                f"{self.op}: topk_idx needs at least one choice per token, got {shape_text(ids)}"
            )
        return ids

    def weights(self, name: str, value: object, shape: tuple[int, ...], axes: str) -> jax.Array:
        """Checks that weights are floating and of the given shape, and returns them as float32."""
        values = self.array(name, value)
        if values.shape != shape or not is_float(values.dtype):
            raise ValueError(
                f"{self.op}: {name} must be floating {axes} = {list(shape)}, got {shape_text(values)}"
            )
        if jnp.finfo(values.dtype).bits < 16:
            raise TypeError(
                f"{self.op}: {name} must be floating of 16 bits or more, because narrower values come "
                f"without their scales and their gradient would be as narrow; got {shape_text(values)}; cast "
                "them to a wider dtype"
            )
        return values.astype(jnp.float32)

    def leaf(self, name: str, value: object, first: tuple[int, ...], axes: str, source: str) -> jax.Array:
        """Checks a leaf of a payload, and returns it as an array.

        Its dimensions must begin with `first`. The error message calls these dimensions `axes`, and gives
        `source` as the place that they come from.
        """
        leaf = self.array(f"every leaf of {name}", value)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise TypeError(
                f"{self.op}: {name} cannot hold {leaf.dtype}; for keys pass jax.random.key_data(...)"
            )
        if leaf.shape[: len(first)] != first:
            sizes = first[0] if len(first) == 1 else list(first)
            raise ValueError(
                f"{self.op}: every array of {name} must be [{axes}, ...] with {axes} = {sizes} ({source}), "
                f"got {shape_text(leaf)}"
            )
        return leaf

    def floating(self, name: str, arrays: Sequence[jax.Array]) -> None:
        """Checks that arrays can be summed: they must be floating, of 16 bits or more."""
        for array in arrays:
            if not is_float(array.dtype):
                raise TypeError(
                    f"{self.op}: {name} is summed, so it must be floating; got {shape_text(array)}"
                )
            if jnp.finfo(array.dtype).bits < 16:
                raise TypeError(
                    f"{self.op}: {name} is summed, so it must be floating of 16 bits or more, because a sum "
                    f"of narrower values would ignore their scales; got {shape_text(array)}; pass "
                    "jax_ep.dequantize_fp8 of the QuantizedArray, or cast the values to a wider dtype if "
                    "they have no scales"
                )
