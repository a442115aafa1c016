"""Debug mode: checks of numbers that only a running program has, if `JAX_EP_DEBUG` is set while it is traced.

An op passes its results through `check`, with the findings that apply to it. A finding on one device raises
on all devices, because otherwise the others would wait for it in their next op.
"""

import functools
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jax_ep import checkpoint_names
from jax_ep._extension import warn_once
from jax_ep._group.ranks import Ranks
from jax_ep._rows.counts import sum_of_counts
from jax_ep._transport.routing import Handle, Routing, row_experts

Tree = TypeVar("Tree")

KINDS = ("drops", "holes", "ids", "nan", "sizes")


class Finding(NamedTuple):
    """Counts of one kind of error. It is raised if the first number is positive."""

    kind: str
    text: str  # with {0}, {1}, ... in place of the numbers
    numbers: tuple[jax.Array, ...]  # integers, each a single number


def requested() -> frozenset[str]:
    """Returns the kinds of findings that JAX_EP_DEBUG requests. Raises ValueError if it names others."""
    value = os.environ.get("JAX_EP_DEBUG", "")
    if value in ("", "0", "1"):
        return frozenset(KINDS if value == "1" else ())
    kinds = frozenset(value.replace(" ", "").split(","))
    if not kinds <= set(KINDS):
        raise ValueError(
            f"the environment variable JAX_EP_DEBUG must be 1, 0, or some of {','.join(KINDS)}, got {value!r}"
        )
    return kinds


def dropped_rows(routing: Routing, num_dropped: jax.Array, num_kept: jax.Array) -> Finding:
    """Counts the rows that a dispatch dropped at this rank."""
    of_each = "" if routing.padded_rows is None else " of each expert"
    domain = " or domain_capacity" if routing.num_domains > 1 else ""
    return _dropped(f"{routing.padded_rows or routing.capacity}{of_each}", domain, num_dropped, num_kept)


def dropped_choices(capacity: int, num_dropped: jax.Array, tokens_per_expert: jax.Array) -> Finding:
    """Counts the choices that a permute dropped."""
    return _dropped(str(capacity), "", num_dropped, jnp.sum(tokens_per_expert, dtype=jnp.int32))


def _dropped(capacity: str, other: str, num_dropped: jax.Array, num_kept: jax.Array) -> Finding:
    text = (
        f"{{0}} rows of {{1}} were dropped because the buffer was full (capacity {capacity}); raise "
        f"capacity{other}, or if rows may be dropped, request the other checks only: "
        f"JAX_EP_DEBUG={','.join(kind for kind in KINDS if kind != 'drops')}"
    )
    return Finding("drops", text, (num_dropped, num_dropped.reshape(()) + num_kept.reshape(())))


def invalid_ids(ids: jax.Array, num_experts: int) -> Finding:
    """Counts the ids that are neither an expert nor -1."""
    text = (
        f"{{0}} of {ids.size} ids in topk_idx are neither an expert, 0 to {num_experts - 1}, nor -1; the ids "
        "are from {1} to {2}; count experts from 0, and mark unused choices by -1"
    )
    invalid = (ids < -1) | (ids >= num_experts)
    least, most = _least(ids), _most(ids)
    return Finding("ids", text, (jnp.sum(invalid, dtype=jnp.int32), least, most))


def holes(hosted: jax.Array, num_experts: int, num_ranks: int) -> Finding:
    """Counts what is wrong with a given map [P] of a placement."""
    text = (
        "physical_to_logical has {1} experts without an instance, {2} experts twice on a rank, and {3} "
        f"numbers above {num_experts - 1}; make the Placement outside of jit, where this is an error"
    )
    by_rank = hosted.reshape(num_ranks, -1)
    is_expert = (hosted >= 0) & (hosted < num_experts)
    number = jnp.zeros((num_experts,), jnp.int32).at[jnp.where(is_expert, hosted, num_experts)].add(1)
    ordered = jnp.sort(by_rank, axis=1)
    wrong = (
        number == 0,
        (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0),
        hosted >= num_experts,
    )
    counts = [jnp.sum(places, dtype=jnp.int32) for places in wrong]
    return Finding("holes", text, (sum(counts[1:], counts[0]), *counts))


def group_sizes(sizes: jax.Array, num_rows: int, rows_per_group: int) -> Finding:
    """Checks that the groups of a product have no more rows than there are."""
    if rows_per_group > 0:
        largest, least = _most(sizes), _least(sizes)
        text = f"group_sizes must be numbers of rows from 0 to {rows_per_group}, but are from {{2}} to {{1}}"
        return Finding("sizes", text, ((largest > rows_per_group) | (least < 0), largest, least))
    total, least = sum_of_counts(sizes), _least(sizes)
    wrong = (total > num_rows) | (least < 0) | jnp.any(sizes > num_rows)
    text = (
        f"group_sizes must be numbers of rows, of which there are {num_rows}, but they sum to {{1}}, and the "
        "smallest is {2}"
    )
    return Finding("sizes", text, (wrong, total, least))


def in_range(name: str, number: jax.Array, most: int) -> Finding:
    """Checks that a number is from 0 to `most`."""
    return Finding(
        "sizes", f"{name} must be from 0 to {most}, got {{1}}", ((number < 0) | (number > most), number)
    )


def not_negative(name: str, numbers: jax.Array) -> Finding:
    """Counts the negative ones among numbers of rows."""
    text = f"{name} must not be negative, but {{0}} of {numbers.size} are; the smallest is {{1}}"
    return Finding("sizes", text, (jnp.sum(numbers < 0, dtype=jnp.int32), _least(numbers)))


def rows_beyond(row_map: jax.Array, num_rows: int) -> Finding:
    """Counts the rows of a row_map that do not exist."""
    text = f"{{0}} of {row_map.size} rows in row_map are not among the {num_rows} of y; the largest is {{1}}"
    return Finding("sizes", text, (jnp.sum(row_map >= num_rows, dtype=jnp.int32), _most(row_map)))


def _least(numbers: jax.Array) -> jax.Array:
    return jnp.min(numbers, initial=jnp.iinfo(numbers.dtype).max)  # there may be none


def _most(numbers: jax.Array) -> jax.Array:
    return jnp.max(numbers, initial=jnp.iinfo(numbers.dtype).min)


def nan_rows(handle: Handle, leaves: Sequence[jax.Array]) -> Finding:
    """Counts the rows with NaN that hold a token, if there are empty rows that they can come from."""
    text = (
        "{0} of {1} rows that hold tokens are NaN; empty rows of order='expert_padded' are not cleared, and "
        "debug mode fills them with NaN: select by is_row() before rows are summed or normalized over them"
    )
    is_row = row_experts(handle) >= 0
    is_nan = jnp.zeros_like(is_row)
    for leaf in leaves if handle.routing.padded_rows is not None else ():
        is_nan |= jnp.any(jnp.isnan(leaf.reshape(leaf.shape[0], -1)), axis=1)
    counts = (jnp.sum(is_row & is_nan, dtype=jnp.int32), jnp.sum(is_row, dtype=jnp.int32))
    return Finding("nan", text, counts)


def poison_empty_rows(handle: Handle, rows: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Fills the empty ones of floating rows [C, ...] with NaN in debug mode, as GPUs may leave them."""
    if handle.routing.padded_rows is None or "nan" not in requested():
        return rows
    is_row = row_experts(handle) >= 0

    def poisoned(row: jax.Array) -> jax.Array:
        if not jnp.issubdtype(row.dtype, jnp.inexact):
            return row
        return jnp.where(
            jax.lax.expand_dims(is_row, range(1, row.ndim)), row, jnp.asarray(jnp.nan, row.dtype)
        )

    return tuple(map(poisoned, rows))


def check(
    op: str,
    results: Tree,
    find: Callable[[], Sequence[Finding]],
    ranks: Ranks | None = None,
    *,
    alone: bool = False,
) -> Tree:
    """Returns an op's results. In debug mode, a finding on any device raises before they can be used.

    `find` is called in debug mode only. All devices along the manual axes meet, unless the op goes on
    without some of them (`alone`).
    """
    kinds = requested()
    findings = [finding for finding in (find() if kinds else ()) if finding.kind in kinds]
    if not findings:
        return results
    mesh = jax.sharding.get_abstract_mesh()
    axes = tuple(axis for axis in mesh.axis_names if axis in mesh.manual_axes)
    if axes and len(axes) < len(mesh.axis_names):
        warn_once(
            "jax_ep: JAX_EP_DEBUG checks nothing inside a shard_map that is manual over some mesh axes only, "
            "because JAX cannot call Python there; name all axes in its axis_names"
        )
        return results
    sizes = tuple(mesh.shape[axis] for axis in axes)
    device = jax.lax.axis_index(axes) if axes else jnp.zeros((), jnp.int32)
    numbers = [number for finding in findings for number in finding.numbers]
    all_counts = jnp.stack([device, *(number.reshape(()).astype(jnp.int32) for number in numbers)])
    all_counts = all_counts[None]
    if axes and not alone:
        all_counts = (
            jnp.zeros((int(np.prod(sizes)), all_counts.shape[1]), jnp.int32).at[device].set(all_counts[0])
        )
        all_counts = jax.lax.psum(all_counts, axes)
    texts = tuple((finding.text, len(finding.numbers)) for finding in findings)
    report = functools.partial(_report, op, texts, axes, sizes, () if ranks is None else ranks.axes)
    passed = jax.pure_callback(
        report, jax.ShapeDtypeStruct((), jnp.bool_), all_counts, vmap_method="sequential"
    )
    jax.debug.callback(_nothing, passed)  # so that nothing removes the other callback
    passed = checkpoint_name(passed, checkpoint_names.handle)
    return jax.tree.map(lambda leaf: jax.lax.select(passed, leaf, jnp.zeros_like(leaf)), results)


def _nothing(passed: np.ndarray) -> None:
    """Does nothing. `pure_callback` may be removed, but `debug.callback` may not."""


def _report(
    op: str,
    texts: tuple[tuple[str, int], ...],
    axes: tuple[str, ...],
    sizes: tuple[int, ...],
    group_axes: tuple[str, ...],
    all_counts: np.ndarray,
) -> np.ndarray:
    """Raises ValueError if there are findings. `all_counts` has a row per device: its number, then counts."""
    places: dict[str, list[tuple[int, str]]] = {}
    for device, *numbers in np.asarray(all_counts).tolist():
        for text, length in texts:
            counts, numbers = numbers[:length], numbers[length:]
            if counts[0] > 0:
                at = _place(device, axes, sizes, group_axes)
                places.setdefault(text.format(*counts), []).append(at)
    if places:
        lines = [f"JAX_EP_DEBUG: {op}{_on(devices)}: {text}" for text, devices in places.items()]
        raise ValueError("\n".join(lines))
    return np.ones((), np.bool_)


def _place(
    device: int, axes: tuple[str, ...], sizes: tuple[int, ...], group_axes: tuple[str, ...]
) -> tuple[int, str]:
    """Returns the rank of a device, or -1 without a group, and its position along the other mesh axes."""
    position = dict(zip(axes, map(int, np.unravel_index(device, sizes)), strict=True))
    others = ", ".join(f"{axis}={index}" for axis, index in position.items() if axis not in group_axes)
    shape = dict(zip(axes, sizes, strict=True))
    rank = 0 if group_axes else -1
    for axis in group_axes:
        rank = rank * shape[axis] + position[axis]
    return rank, others


def _on(devices: list[tuple[int, str]]) -> str:
    """Returns the devices of a finding for its message."""
    if devices[0][0] < 0:
        places = " and at ".join(others for _, others in devices)
        return f" at {places}" if places else ""
    ranks = [f"{rank} ({others})" if others else str(rank) for rank, others in devices]
    return f" on rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"
