"""The self test of `python -m jax_ep doctor`: each op on small inputs, compared with NumPy."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep._group.group import Group

TOKENS, TOP_K, WIDTH, LOCAL_EXPERTS = 16, 2, 128, 2


class SelfTest:
    """The inputs, their references, and one test for each op. A test returns the largest relative error."""

    def __init__(self, group: Group, mesh: jax.sharding.Mesh):
        rng = np.random.default_rng(0)
        self.group, self.mesh = group, mesh
        self.num_experts = LOCAL_EXPERTS * group.size
        tokens, shape = TOKENS * group.size, (self.num_experts, WIDTH, WIDTH)
        self.x = rng.standard_normal((tokens, WIDTH), np.float32)
        self.factors = rng.standard_normal((tokens, WIDTH), np.float32)  # the cotangents of a layer's sums
        self.w = rng.standard_normal(shape, np.float32) / np.float32(WIDTH**0.5)
        self.weights = rng.random((tokens, TOP_K), np.float32)
        # Most tokens choose expert 0, so that redundant experts have something to do.
        other = rng.integers(1, self.num_experts, tokens)
        self.ids = np.stack([np.zeros_like(other), other], axis=1).astype(np.int32)
        # By expert, then token: the rows of dispatch and permute.
        self.order = np.argsort(self.ids.ravel(), kind="stable") // TOP_K
        self.sizes = np.bincount(self.ids.ravel(), minlength=self.num_experts).astype(np.int32)

    def tests(self) -> dict[str, Callable[[], float]]:
        """Returns the tests, by the names of their ops."""
        return {
            "layout": self.layout,
            "dispatch": self.dispatch,
            "combine": self.combine,
            "redispatch": self.redispatch,
            "permute": self.permute,
            "quantize": self.quantize,
            "grouped_dot": self.grouped_dot,
            "in FP8": self.grouped_dot_fp8,
            "gated_mlp": self.gated_mlp,
            "moe": self.moe,
            "replicate": self.replicate,
        }

    def _shards(self, function: Callable[..., Any], *operands: Any) -> Any:
        """Calls a function of shards in one program, on all ranks."""
        mapped = jax.shard_map(function, mesh=self.mesh, in_specs=P("ep"), out_specs=P("ep"))
        return jax.tree.map(np.asarray, jax.jit(mapped)(*operands))

    def _dispatch(self, x: Any, ids: Any) -> Any:
        return jax_ep.dispatch(x, ids, group=self.group, num_experts=self.num_experts)

    def _arrived(self, rows: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Returns the rows of all ranks without the tails of their buffers."""
        counts = sizes.reshape(self.group.size, -1).sum(axis=1)
        blocks = np.split(rows, self.group.size)
        return np.concatenate([block[:count] for block, count in zip(blocks, counts, strict=True)])

    def layout(self) -> float:
        layout = jax.jit(
            lambda ids: (
                jax_ep.get_dispatch_layout(
                    ids, num_experts=self.num_experts, num_ranks=self.group.size
                ).num_tokens_per_expert
            )
        )
        return _error(layout(self.ids), self.sizes)

    def dispatch(self) -> float:
        def shard(x: Any, ids: Any) -> Any:
            sent = self._dispatch(x, ids)
            return sent.x, sent.group_sizes

        rows, sizes = self._shards(shard, self.x, self.ids)
        return max(_error(sizes, self.sizes), _error(self._arrived(rows, self.sizes), self.x[self.order]))

    def combine(self) -> float:
        def shard(x: Any, ids: Any) -> Any:
            sent = self._dispatch(x, ids)
            return jax_ep.combine(sent.x, sent.handle)

        return _error(self._shards(shard, self.x, self.ids), TOP_K * self.x)

    def redispatch(self) -> float:
        def shard(x: Any, ids: Any) -> Any:
            return jax_ep.redispatch(-x, self._dispatch(x, ids).handle)

        rows = self._shards(shard, self.x, self.ids)
        return _error(self._arrived(rows, self.sizes), -self.x[self.order])

    def permute(self) -> float:
        def both(x: Any, ids: Any, weights: Any) -> Any:
            sent = jax_ep.permute(x, ids, num_local_experts=self.num_experts)
            return sent.x, jax_ep.unpermute(sent.x, sent.row_map, topk_weights=weights)

        rows, sums = jax.jit(both)(self.x, self.ids, self.weights)
        total = self.weights.sum(axis=1, keepdims=True)
        return max(_error(rows[: self.order.size], self.x[self.order]), _error(sums, total * self.x))

    def quantize(self) -> float:
        there_and_back = lambda x: jax_ep.dequantize_fp8(jax_ep.quantize_fp8(x), jnp.float32)
        return _error(self._shards(there_and_back, self.x), self.x)

    def _dense(self, rows: np.ndarray, w: np.ndarray) -> np.ndarray:
        """Returns the products of rows in expert order."""
        ends = np.cumsum(self.sizes)[:-1]
        return np.concatenate([rows @ w for rows, w in zip(np.split(rows, ends), w, strict=True)])

    def grouped_dot(self) -> float:
        rows, w = jnp.asarray(self.x[self.order], jnp.bfloat16), jnp.asarray(self.w, jnp.bfloat16)
        return _error(jax.jit(jax_ep.grouped_dot)(rows, w, self.sizes), self._dense(_wide(rows), _wide(w)))

    def grouped_dot_fp8(self) -> float:
        def product(rows: Any, w: Any, sizes: Any) -> Any:
            quantized = jax_ep.quantize_fp8(rows), jax_ep.quantize_fp8(w, block=(128, 128))
            return jax_ep.grouped_dot(*quantized, sizes)

        rows = self.x[self.order]
        return _error(jax.jit(product)(rows, self.w, self.sizes), self._dense(rows, self.w))

    def gated_mlp(self) -> float:
        up = np.concatenate([self.w, self.w[::-1]], axis=2)
        rows, up, down = (jnp.asarray(a, jnp.bfloat16) for a in (self.x[self.order], up, self.w))
        gate, value = np.split(self._dense(_wide(rows), _wide(up)), 2, axis=1)
        expected = self._dense(gate / (1 + np.exp(-gate)) * value, _wide(down))
        return _error(jax.jit(jax_ep.gated_mlp)(rows, up, down, self.sizes), expected)

    def moe(self) -> float:
        return self._layer(0)

    def replicate(self) -> float:
        """Tests balance and replicate, in a layer whose expert 0 has half of the rows."""
        return self._layer(1)

    def _layer(self, num_redundant: int) -> float:
        options = {
            "group": self.group,
            "num_experts": self.num_experts,
            "num_redundant_experts": num_redundant,
        }

        def shard(x: Any, w: Any, weights: Any, ids: Any) -> Any:
            experts = lambda sent, w: jax_ep.grouped_dot(sent.x, w, sent.group_sizes)
            return jax_ep.moe(x, ids, weights, experts, expert_params=w, **options)

        def loss(x: Any, w: Any, weights: Any, ids: Any, factors: Any) -> Any:
            layer = jax.shard_map(shard, mesh=self.mesh, in_specs=P("ep"), out_specs=P("ep"))
            y = layer(x, w, weights, ids)
            return jnp.sum(y * factors), y

        program = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))
        (d_x, d_w, d_weights), y = program(self.x, self.w, self.weights, self.ids, self.factors)
        products = np.einsum("th,tkhf->tkf", self.x, self.w[self.ids])
        expected = np.zeros_like(self.w)
        weighted = self.weights[..., None, None] * self.x[:, None, :, None] * self.factors[:, None, None, :]
        np.add.at(expected, self.ids, weighted)
        return max(
            _error(y, np.einsum("tk,tkf->tf", self.weights, products)),
            _error(d_x, np.einsum("tk,tf,tkhf->th", self.weights, self.factors, self.w[self.ids])),
            _error(d_w, expected),
            _error(d_weights, np.einsum("tf,tkf->tk", self.factors, products)),
        )


def _wide(array: Any) -> np.ndarray:
    return np.asarray(array).astype(np.float32)


def _error(got: Any, expected: np.ndarray) -> float:
    """Returns the norm of the difference, as a fraction of that of the expected values. NaN counts as 1."""
    difference = np.linalg.norm(_wide(got) - expected) / max(np.linalg.norm(expected), 1e-30)
    return float(difference) if np.isfinite(difference) else 1.0


def tolerance(name: str) -> float:
    """Returns the largest error of a right result. GPUs multiply float32 as tf32, with 10 bits."""
    exact = {"layout": 0.0, "dispatch": 0.0, "redispatch": 0.0}
    return exact.get(name, 0.1 if name in ("quantize", "in FP8") else 0.02)
