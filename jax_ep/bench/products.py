"""Benchmark of expert products alone, on one device.

The rows are those of the rank that receives the most. Each product takes turns with the dense product of as
many rows, with each group padded to a multiple of 128 rows, because a tile of the kernels has 128. If groups
have fewer rows on average, memory is the limit. Such products are compared with the time to read the matrices
once, or to write their gradients.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_ep
from jax_ep._experts.choice import choose_engine
from jax_ep._experts.engine import Options
from jax_ep._experts.gated import Fp8
from jax_ep.bench import deep_gemm, measure
from jax_ep.bench.routings import route
from jax_ep.bench.shapes import Shape

FORWARD, OF_ROWS, OF_WEIGHTS = DIRECTIONS = ("forward", "gradient of rows", "gradient of weights")
TILE = 128  # rows

Run = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class ExpertProduct:
    """Measurement of a product of rows [C, M] and matrices [L, M, N], or of a gradient of it."""

    name: str
    shape: Shape
    ranks: int
    routing: str
    matrices: str  # "up" or "down"
    height: int  # M
    width: int  # N
    direction: str
    by: str
    dtype: str  # "bfloat16" or "FP8"
    rows: int
    groups: int  # that have rows
    smallest_group: int  # rows of the smallest of them, and of the largest
    largest_group: int
    us: float  # per call
    dense_us: float | None  # of the dense product in bfloat16; None if there are few rows
    memory_us: float  # to read the matrices of these groups once, or to write the gradients of all

    @property
    def op(self) -> str:
        return f"{self.matrices} {self.direction}"

    @property
    def label(self) -> str:
        return f"{self.op}, {self.by}, {self.dtype}, {self.name}"

    @property
    def tflops(self) -> float:
        """TFLOP/s of the rows that exist, without padding."""
        return 2.0 * self.rows * self.height * self.width / self.us / 1e6

    @property
    def share(self) -> float:
        """The dense product's time relative to this one, or with few rows that of the matrices' memory."""
        return (self.memory_us if self.dense_us is None else self.dense_us) / self.us


def group_sizes_of(routing: str, shape: Shape, ranks: int) -> np.ndarray:
    """Returns the rows int32 [L] of each expert of the rank that receives the most rows."""
    ids = route(routing, shape, ranks)
    counts = np.bincount(ids[ids >= 0], minlength=shape.experts).reshape(ranks, -1)
    return counts[counts.sum(axis=1).argmax()].astype(np.int32)


def can_be_fp8(height: int, width: int) -> bool:
    """Returns whether the scales of FP8 divide matrices [height, width]."""
    return height % 128 == 0 and width % 128 == 0


def pause_s() -> float:
    """Returns the seconds between two bursts."""
    # GPUs that run without pauses reach their power limit, and lower their clock.
    return 0.3 if jax.default_backend() == "gpu" else 0.0


def results(
    name: str, shape: Shape, ranks: int, options: argparse.Namespace, memory_gbs: float
) -> Iterator[ExpertProduct]:
    """Yields the measurements of a shape. `memory_gbs` is the rate of the device's memory in GB/s."""
    sizes = group_sizes_of(options.routing, shape, ranks)
    num_groups = int(np.count_nonzero(sizes))
    is_few = int(sizes.sum()) < TILE * num_groups
    for matrices, height, width in (
        ("up", shape.hidden, 2 * shape.inner),
        ("down", shape.inner, shape.hidden),
    ):
        product = functools.partial(
            ExpertProduct,
            name=name,
            shape=shape,
            ranks=ranks,
            routing=options.routing,
            matrices=matrices,
            height=height,
            width=width,
            rows=int(sizes.sum()),
            groups=num_groups,
            smallest_group=int(sizes[sizes > 0].min()),
            largest_group=int(sizes.max()),
        )
        operands = Operands(sizes, height, width)
        for direction in DIRECTIONS:
            runs = {} if is_few else {("dense", "bfloat16"): operands.dense(direction)}
            runs["grouped_dot", "bfloat16"] = operands.grouped(direction)
            if can_be_fp8(height, width):
                runs["grouped_dot", "FP8"] = operands.grouped_fp8(direction)
            times = measure.bursts_us(
                list(runs.values()), jax.block_until_ready, options.repeats, pause_s=pause_s()
            )
            dense_us = None if is_few else times[0]
            for (by, dtype), us in zip(runs, times, strict=True):
                size = 1 if dtype == "FP8" and direction != OF_WEIGHTS else 2
                groups = len(sizes) if direction == OF_WEIGHTS else num_groups
                memory_us = groups * height * width * size / memory_gbs / 1e3
                yield product(
                    direction=direction, by=by, dtype=dtype, us=us, dense_us=dense_us, memory_us=memory_us
                )


def of_deep_gemm(
    measured: list[ExpertProduct], sizes: np.ndarray, repeats: int
) -> tuple[list[ExpertProduct], str | None]:
    """Returns DeepGEMM's times of the products of a shape, and the reason why some are missing, if any.

    It has no gradients of weights of these operands.
    """
    compared = [r for r in measured if r.by == "grouped_dot" and r.direction != OF_WEIGHTS]
    cases = [
        deep_gemm.Case(r.dtype, *((r.height, r.width) if r.direction == FORWARD else (r.width, r.height)))
        for r in compared
    ]
    times, error = deep_gemm.times(cases, sizes, repeats, pause_s())
    # Those that were timed before a failure.
    timed = zip(compared, times, strict=False)
    theirs = [dataclasses.replace(r, by="DeepGEMM", us=us) for r, us in timed]
    if error is None:
        return theirs, None
    return theirs, f"DeepGEMM has no times from {compared[len(times)].label} on: {error}"


class Operands:
    """Rows [C, M], matrices [L, M, N] and cotangents [C, N], and the programs that multiply them."""

    def __init__(self, sizes: np.ndarray, height: int, width: int) -> None:
        self._sizes = jnp.asarray(sizes)
        rows = int(sizes.sum())
        w = _normal(2, len(sizes), height, width)
        self._arrays = _normal(1, rows, height), w, _normal(3, rows, width)
        self._padded_rows = int((-(-sizes // TILE) * TILE).sum())

    def dense(self, direction: str) -> Run:
        """Returns the product of padded rows and one matrix."""
        _, w, _ = self._arrays
        height, width = w.shape[1:]
        rows, d = _normal(4, self._padded_rows, height), _normal(5, self._padded_rows, width)
        function, *arguments = {
            FORWARD: (lambda rows, w: rows @ w, rows, w[0]),
            OF_ROWS: (lambda d, w: d @ w.T, d, w[0]),
            OF_WEIGHTS: (lambda rows, d: rows.T @ d, rows, d),
        }[direction]
        return functools.partial(jax.jit(function), *arguments)

    def grouped(self, direction: str) -> Run:
        dot = jax_ep.grouped_dot
        function = {
            FORWARD: lambda sizes, rows, w, d: dot(rows, w, sizes),
            OF_ROWS: lambda sizes, rows, w, d: jax.vjp(lambda rows: dot(rows, w, sizes), rows)[1](d)[0],
            OF_WEIGHTS: lambda sizes, rows, w, d: jax.vjp(lambda w: dot(rows, w, sizes), w)[1](d)[0],
        }[direction]
        return functools.partial(jax.jit(function), self._sizes, *self._arrays)

    def grouped_fp8(self, direction: str) -> Run:
        """Returns a product of quantized operands, as `gated_mlp(quantize="fp8_all")` computes it."""
        engine = choose_engine(None, Options())
        fp8 = Fp8(engine, weight_gradients=True)
        rows, w, d = self._arrays
        rows_fp8, rows_columns = jax.jit(fp8.prepare)(rows, self._sizes)
        d_fp8, d_columns = jax.jit(fp8.cotangents)(d, self._sizes)
        if direction == OF_WEIGHTS:
            gradient = jax.jit(lambda *operands: fp8.weight_gradient(*operands, num_redundant=0))
            return functools.partial(gradient, rows_columns, d_columns, self._sizes)
        is_forward = direction == FORWARD
        quantize = jax.jit(engine.quantize_matrices, static_argnums=(1, 2))
        # Tensor cores read FP8 operands along the dimension of the sum, so each direction has its layout.
        stored = quantize(w, not is_forward, is_forward)[is_forward]

        def product(rows: Any, stored: Any, sizes: jax.Array) -> jax.Array:
            return jax_ep.grouped_dot(rows, jax.tree.map(lambda leaf: leaf.swapaxes(1, 2), stored), sizes)

        return functools.partial(jax.jit(product), rows_fp8 if is_forward else d_fp8, stored, self._sizes)


def _normal(seed: int, *shape: int) -> jax.Array:
    """Returns random bfloat16 values."""
    return jax.jit(lambda: jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16))()
