"""Checks of the arguments: what must hold, what came, what to do."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_ep._group import Group
from jax_ep._handle import Handle
from jax_ep._numbers import integer
from jax_ep._results import Attendance

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


def valid_tokens(op: str, count: Any, ids: jax.Array) -> jax.Array:
    """The ids [T, K], -1 for tokens from `count` on."""
    given = array(op, "num_valid_tokens", count)
    if given.size != 1 or given.ndim > 1 or not jnp.issubdtype(given.dtype, jnp.integer):
        raise TypeError(
            f"{op}: num_valid_tokens must be this rank's number of tokens, an integer scalar or [1], got "
            f"{shape_text(given)}; shard an array of all ranks' numbers over the group's axis"
        )
    if not isinstance(count, Tracer):
        number = int(np.asarray(count).reshape(()))
        if not 0 <= number <= ids.shape[0]:
            raise ValueError(f"{op}: num_valid_tokens must be from 0 to T = {ids.shape[0]}, got {number}")
    tokens = jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None]
    return jnp.where(tokens < given.reshape(()).astype(jnp.int32), ids, jnp.asarray(-1, ids.dtype))


def attendance(op: str, active_ranks: Any, on_timeout: Any, group: Group, waits: bool = False) -> Attendance:
    """Who takes part in an op; `active_ranks` is None there where nobody may be missing."""
    if not isinstance(on_timeout, str) or on_timeout not in ("raise", "mask"):
        raise ValueError(f"{op}: on_timeout must be 'raise' or 'mask', got {on_timeout!r}")
    masks, num_ranks = on_timeout == "mask", group.size
    if group.ranks_per_node < num_ranks and (masks or active_ranks is not None):
        raise ValueError(
            f"{op}: active_ranks and on_timeout='mask' need a group whose ranks share a host, for JAX's "
            f"collectives between hosts wait for all ranks, got {group!r}; leave them out, or choose ranks "
            "of one host"
        )
    if active_ranks is None:
        return Attendance(jnp.ones((num_ranks,), jnp.int32) if masks else None, masks, waits)
    given = array(op, "active_ranks", active_ranks)
    kinds = (jnp.integer, jnp.bool_)
    if given.shape != (num_ranks,) or not any(jnp.issubdtype(given.dtype, kind) for kind in kinds):
        raise ValueError(
            f"{op}: active_ranks must be integers or bools [R] = [{num_ranks}], one for each rank, got "
            f"{shape_text(given)}"
        )
    is_known = not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(active_ranks))
    if is_known and not np.isin(np.asarray(active_ranks), (0, 1)).all():
        raise ValueError(
            f"{op}: active_ranks must hold a 1 for each rank that takes part and a 0 for each other one, not "
            f"their numbers, got {np.asarray(active_ranks).tolist()}"
        )
    return Attendance(given.astype(bool).astype(jnp.int32), masks, waits)


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


def host_rows(op: str, host_capacity: Any, group: Group, num_tokens: int) -> int:
    """The rows that a rank takes from each host in hop 1, no more than a rank has tokens; 0 of one host."""
    hosts = group.size // group.ranks_per_node
    rows = hosts * num_tokens
    if host_capacity is not None:
        rows = at_least_one(op, "host_capacity", host_capacity)
    if hosts == 1:
        return 0
    if 0 < rows < hosts:
        raise ValueError(
            f"{op}: host_capacity counts the rows that a rank takes from all {hosts} hosts, as many from "
            f"each, so it must be at least {hosts}, got {rows}"
        )
    return min(rows // hosts, num_tokens)


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


def handle(op: str, value: Any) -> Handle:
    """The handle, whose arrays must fit its routing."""
    if not isinstance(value, Handle):
        raise TypeError(f"{op}: handle must be the Handle that dispatch returned, got {type(value).__name__}")
    routing = value.routing
    if routing.makes_two_hops:
        handle(op, value.within)
    expected = {
        "topk_idx": (routing.num_tokens, routing.top_k),
        "sent_rows": (routing.num_tokens, routing.rows_per_token),
        "rank_prefix_matrix": (routing.num_ranks, routing.num_ranks),
        "expert_counts": (routing.num_local_experts,),
    }
    if routing.has_row_per_choice:
        expected["received_rows"] = (routing.num_ranks * routing.num_tokens, routing.top_k)
    for name, shape in expected.items():
        array = getattr(value, name)
        if array is None or array.shape != shape or array.dtype != jnp.int32:
            got = None if array is None else shape_text(array)
            raise ValueError(
                f"{op}: handle.{name} must be int32 {list(shape)} on each rank, got {got}; pass the handle "
                "as dispatch returned it, sharded as it came out of shard_map"
            )
        on_device(op, f"handle.{name}", array)
    return value
