"""Routings and rows for the tests, and the ops run on all ranks at once."""

import contextlib
import dataclasses
import functools
import itertools
import re
from typing import Any
from unittest import mock

import devices
import jax
import ml_dtypes
import numpy as np
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep._transport import hop_1

BF16 = ml_dtypes.bfloat16
FP8 = ml_dtypes.float8_e4m3fn

# Rounding of one value of the dtype, relative; sums in float32 add little to it.
TOLERANCE = {
    np.dtype(BF16): 2**-8,
    np.dtype(np.float16): 2**-11,
    np.dtype(np.float32): 2e-6,
    np.dtype(np.float64): 1e-14,
}

# Compiled as a whole: op by op, each primitive would be a program of its own.
quantize = jax.jit(jax_ep.quantize_fp8, static_argnames=("block", "round_scale"))
dequantize = jax.jit(jax_ep.dequantize_fp8, static_argnames="dtype")

ROUTINGS = ("uniform", "random", "zipf", "one_rank", "empty_experts", "sprinkled", "unused")


def few_tokens_as_many(as_many: bool) -> contextlib.AbstractContextManager[object]:
    """While a program is traced: few tokens between domains go the way of many, if `as_many`."""
    most = -1 if as_many else hop_1.MOST_BYTES_OF_ONE_EXCHANGE
    return mock.patch.object(hop_1, "MOST_BYTES_OF_ONE_EXCHANGE", most)


def routing(kind: str, ranks: int, tokens: int, k: int, experts: int, seed: int = 0) -> np.ndarray:
    """topk_idx [R, T, K] int32."""
    rng = np.random.default_rng(seed)
    shape = (ranks, tokens, experts)
    if kind == "unused":
        return np.full((ranks, tokens, k), -1, np.int32)
    if kind == "random":  # a token may choose an expert several times
        return rng.integers(-1, experts, (ranks, tokens, k)).astype(np.int32)
    score = rng.random(shape)
    if kind == "zipf":
        score = score ** np.arange(1, experts + 1)  # expert 0 is in nearly every token
    if kind == "one_rank":
        score[..., : experts // ranks] += 1  # first the experts of rank 0
    if kind == "empty_experts":
        score[..., ::2] -= 1
    ids = np.argsort(-score, axis=-1)[..., :k].astype(np.int32)
    if ids.shape[-1] < k:  # fewer experts than choices
        ids = np.concatenate([ids, np.full((ranks, tokens, k - ids.shape[-1]), -1, np.int32)], axis=-1)
    if kind == "sprinkled":
        ids[rng.random(ids.shape) < 0.3] = -1
        out_of_range = rng.random(ids.shape) < 0.1  # unused, from the first such id on
        ids[out_of_range] = experts + np.arange(out_of_range.sum()) % 4
        ids[rng.random(ids.shape) < 0.1] = -7
        ids[..., -1] = np.where(rng.random(ids.shape[:-1]) < 0.3, ids[..., 0], ids[..., -1])  # repeated
    return ids


def pairwise(*parameters: Any) -> list[tuple]:
    """Returns combinations of values such that any two values of different parameters meet in one.

    Returns all combinations on GPUs, whose kernels have more branches, and where programs compile faster.
    """
    rows = list(itertools.product(*map(range, map(len, parameters))))
    pairs = lambda row: set(itertools.combinations(enumerate(row), 2))
    if jax.default_backend() == "gpu":
        chosen = rows
    else:
        chosen, missing = [], set().union(*map(pairs, rows))
        while missing:
            chosen.append(max(rows, key=lambda row: len(missing & pairs(row))))
            missing -= pairs(chosen[-1])
    return [tuple(values[i] for values, i in zip(parameters, row, strict=True)) for row in chosen]


def more_on_gpus(cases: list, more: list) -> list:
    """Returns the cases of a test: on GPUs, whose kernels have more branches, also those of `more`."""
    return [*cases, *more] if jax.default_backend() == "gpu" else cases


def weights_of(sent):
    """The weights that a dispatch of either order brought: [C, K] by rank, [C] by expert."""
    return sent.topk_weights if isinstance(sent, jax_ep.DispatchedByRank) else sent.row_weights


def tagged_rows(ranks: int, tokens: int, width: int, dtype: Any) -> np.ndarray:
    """[R, T, width] rows whose content says where they come from: rank, token, then noise."""
    rng = np.random.default_rng(7)
    dtype = np.dtype(dtype)
    rows = rng.integers(0, 256, (ranks, tokens, width * dtype.itemsize), np.uint8)  # any bits: NaN too
    tag = np.arange(ranks * tokens, dtype=np.uint32).reshape(ranks, tokens, 1)
    tag_bytes = np.frombuffer(tag.tobytes(), np.uint8).reshape(ranks, tokens, 4)
    size = min(4, rows.shape[-1])
    rows[..., :size] = tag_bytes[..., :size]
    if dtype.kind == "b":
        return (rows & 1).astype(bool)
    return rows.view(dtype)


def floats(shape: tuple[int, ...], dtype: Any = np.float32, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def same_bits(a: Any, b: Any) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def assert_close(actual: Any, expected: Any, dtype: Any = None, terms: int = 1) -> None:
    """actual, rounded to its dtype, against an unrounded sum of `terms` values."""
    actual = np.asarray(actual)
    tolerance = TOLERANCE[np.dtype(dtype or actual.dtype)]
    expected = np.asarray(expected, np.float64)
    scale = max(1.0, float(np.abs(expected).max(initial=0.0)))
    np.testing.assert_allclose(actual.astype(np.float64), expected, rtol=tolerance, atol=2e-6 * scale * terms)


@dataclasses.dataclass(frozen=True)
class Ranks:
    """Runs a function of one rank's shards on all ranks: arrays [R, ...] in and out."""

    size: int
    check_vma: bool = True
    per_domain: int | None = None

    @functools.cached_property
    def mesh(self) -> jax.sharding.Mesh:
        return devices.make_mesh((self.size,), ("ep",))

    @functools.cached_property
    def group(self) -> jax_ep.Group:
        return jax_ep.Group(self.mesh, "ep", ranks_per_domain=self.per_domain)

    def map(self, function: Any, check_vma: bool | None = None) -> Any:
        """Returns `function` of one rank's shards as a function of whole arrays."""
        check_vma = self.check_vma if check_vma is None else check_vma
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=check_vma
        )

    def run(self, function: Any, *arrays: Any) -> Any:
        """function(*shards) -> pytree of shards, each with a leading axis."""
        return self.apply(jax.jit(self.map(function)), *arrays)

    def apply(self, program: Any, *arrays: Any) -> Any:
        """Runs a program of whole arrays, jax.jit(self.map(...)), as `run` does."""
        flat = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), arrays)
        out = jax.device_get(program(*flat))
        return jax.tree.map(lambda a: a.reshape(self.size, -1, *a.shape[1:]), out)


@functools.cache
def ranks(size: int, per_domain: int | None = None) -> Ranks:
    return Ranks(size, per_domain=per_domain)


def count_calls(text):
    """How often a compiled program calls each of our targets."""
    names = re.findall(r'custom_call_target="(jax_ep_\w+)"', text)
    return {name.removeprefix("jax_ep_"): names.count(name) for name in sorted(set(names))}
