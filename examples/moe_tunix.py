"""tunix whose Qwen3 MoE layers compute their experts by `jax_ep.moe`. For google-tunix 0.1.7.

Import it before you train. The mesh is tunix's: the experts and the batch are sharded over "fsdp".
"""

import jax
import jax.numpy as jnp
from jax.interpreters import pxla
from jax.sharding import PartitionSpec as P
from tunix.models.qwen3 import model

import jax_ep


def moe_layer(self, x, use_megablox=True):
    """Replaces `MoELayer.__call__`. Returns the sums of the experts."""
    weights, ids = jax.lax.top_k(jax.nn.softmax(self.router(x).astype(jnp.float32)), self.experts_per_tok)
    weights = (weights / jnp.sum(weights, -1, keepdims=True)).astype(self.dtype)
    mesh, (ep, _, tp) = pxla.thread_resources.env.physical_mesh, self.shd_config.exp_weight_edf
    group, tokens, up = jax_ep.Group(mesh, ep), P(*self.shd_config.act_btd[:2]), P(ep, None, tp)

    @jax.shard_map(mesh=mesh, in_specs=(tokens, tokens, tokens, up, up, P(ep, tp)), out_specs=tokens)
    def layer(x, ids, weights, gate, up, down):
        experts = jax_ep.GatedExperts(jnp.concatenate([gate, up], -1), down)
        return jax.lax.psum(jax_ep.moe(x, ids, weights, experts, group=group), tp)

    matrices = (self.gate_proj, self.up_proj, self.down_proj)
    return layer(x, ids, weights, *(matrix[...].astype(self.dtype) for matrix in matrices))


model.MoELayer.__call__ = moe_layer
