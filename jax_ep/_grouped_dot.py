"""grouped_dot: each expert's rows times that expert's matrix, in time that grows with the rows alone."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep import _check, _extension, _ffi, _reference
from jax_ep._manual import vary_alike


def grouped_dot(rows: Any, weights: Any, group_sizes: Any) -> jax.Array:
    """The product that an `expert_fn` of `jax_ep.moe` is made of.

    Like `jax.lax.ragged_dot`. On NVIDIA GPUs, where XLA multiplies all rows by every matrix for that and for
    its gradient, it uses kernels of this package, on tensor cores (float32 rows as tf32).

    Args:
      rows: floating [C, M]; the rows of expert l follow those of expert l - 1.
      weights: [L, M, N] a matrix for each expert, of the dtype of rows.
      group_sizes: int32 [L] rows of each expert, their sum at most C.

    Returns:
      [C, N] in the dtype of rows, zero in rows past the sum. Products are summed in float32 (float64
      rows: in float64). Differentiable in rows and weights, in reverse mode. Under `jax.vmap` the products
      run one after another.

    Raises:
      ValueError: the shapes do not fit each other.
      TypeError: rows and weights are not floating, or differ in dtype.
    """
    rows, weights, group_sizes = jnp.asarray(rows), jnp.asarray(weights), jnp.asarray(group_sizes)
    if not jnp.issubdtype(rows.dtype, jnp.floating) or rows.dtype != weights.dtype:
        raise TypeError(
            "grouped_dot: rows and weights must have one floating dtype, "
            f"got {rows.dtype} and {weights.dtype}"
        )
    fits = rows.ndim == 2 and weights.ndim == 3 and rows.shape[1] == weights.shape[1]
    if fits and group_sizes.ndim == 1 and weights.shape[0] > group_sizes.shape[0] > 0:
        raise ValueError(
            f"grouped_dot: weights must have a matrix for each of the {group_sizes.shape[0]} experts of this "
            f"rank, got {weights.shape[0]}; shard the experts' axis over the group (shard_map's in_specs)"
        )
    if not fits or group_sizes.shape != weights.shape[:1] or group_sizes.dtype != jnp.int32:
        raise ValueError(
            "grouped_dot: rows [C, M], weights [L, M, N] and group_sizes int32 [L] must fit; got "
            f"{', '.join(map(_check.shape_text, (rows, weights, group_sizes)))}"
        )
    return _product(0, *vary_alike([rows, weights, group_sizes]))


_KERNEL_DTYPES = (jnp.float16, jnp.bfloat16, jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(product: int, rows: jax.Array, others: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """0: rows [C, M] times matrices [L, M, N]; 1: rows [C, N] times their transposes; 2: for each group
    [L, M, N] its rows [C, M], transposed, times others [C, N].

    Each is linear in both operands, and its gradients are two of the three: so gradients of any order are.
    """
    on_gpu = _extension.current_platform() in ("gpu", "cuda")
    kernels = on_gpu and rows.dtype in _KERNEL_DTYPES and not _extension.reason_against_ffi("gpu")
    module = _ffi if kernels else _reference

    # XLA's ragged dots have no rule for other batches than of rows, so a batch is done one by one.
    @jax.custom_batching.sequential_vmap
    def one(rows: jax.Array, others: jax.Array, group_sizes: jax.Array) -> jax.Array:
        return module.grouped_dot(product, rows, others, group_sizes)

    return one(rows, others, group_sizes)


def _product_fwd(product: int, rows: jax.Array, others: jax.Array, group_sizes: jax.Array) -> Any:
    return _product(product, rows, others, group_sizes), (rows, others, group_sizes)


def _product_bwd(product: int, saved: tuple[jax.Array, ...], cotangent: jax.Array) -> Any:
    rows, others, group_sizes = saved
    # For each operand: which product it is, and of what.
    ways = {
        0: ((1, cotangent, others), (2, rows, cotangent)),
        1: ((0, cotangent, others), (2, cotangent, rows)),
        2: ((1, others, cotangent), (0, rows, cotangent)),
    }
    d_rows, d_others = (_product(*way, group_sizes) for way in ways[product])
    if jax.sharding.get_abstract_mesh().explicit_axes:
        d_rows = jax.sharding.reshard(d_rows, jax.typeof(rows).sharding.spec)
        d_others = jax.sharding.reshard(d_others, jax.typeof(others).sharding.spec)
    return d_rows, d_others, np.zeros(group_sizes.shape, jax.dtypes.float0)


_product.defvjp(_product_fwd, _product_bwd)
