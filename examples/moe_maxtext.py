"""MaxText whose `RoutedMoE` computes its experts by `jax_ep.moe`. For maxtext 0.2.5.

Run it in the place of `maxtext.trainers.pre_train.train`, with the same arguments.
"""

import jax
import jax.numpy as jnp
from absl import app
from flax import nnx
from jax.sharding import PartitionSpec as P
from maxtext.layers import moe
from maxtext.trainers.pre_train import train

import jax_ep


def sparse_matmul(self, x, logits, scores, w_gate, w_up, w_down, *biases, input_ids=None, **forced):
    """Replaces `RoutedMoE.sparse_matmul`. Returns the sums of the experts, the loss and the bias update."""
    config, E = self.config, self.num_experts
    options = config.quantization, config.mlp_bias, config.defer_small_all_reduces
    if any(options) or config.decoder_block.value == "llama4" or config.moe_dropless_fallback == "layer":
        names = "quantization, mlp_bias, defer_small_all_reduces, llama4 or moe_dropless_fallback=layer"
        raise ValueError(f"moe_maxtext.py: one of {names} is set, which it does not support; unset it")
    weights, ids = self.get_topk(logits, scores, self.rngs, input_ids, **forced)
    scores = logits if scores is None else scores  # without the router's bias, if it has one
    loss = update = None
    if config.load_balance_loss_weight > 0 and not self.is_hash_routing:
        megatron = moe.uses_megatron_seq_aux_loss(config)
        softmax = jax.nn.softmax(scores.astype(jnp.float32)).astype(self.dtype)
        loss = self.megatron_seq_aux_loss(scores) if megatron else self.load_balance_loss(ids, softmax)
    if self.should_update_load_balance():
        update = moe.calculate_expert_counts(ids, E)
        if config.gradient_accumulation_steps == 1:  # otherwise MaxText sums the counts first
            update = moe.load_balance_updates_from_counts(update, E, config.routed_bias_update_rate)

    group = jax_ep.Group(self.mesh, self._expert_parallelism_name)
    ep, tp = group.axis_name, self._tensor_parallelism_name
    tokens = self._logical_to_mesh_axes(("activation_batch", "activation_norm_length", None))
    axes = tuple(axis for dimension in tokens for axis in moe.mesh_axes_for_dim(dimension))
    specs = tokens, tokens, tokens, P(ep, None, tp), P(ep, None, tp), P(ep, tp)
    is_silu = config.mlp_activations[0] == "silu" and config.mlp_activations_limit <= 0
    factor = self.get_ragged_buffer_factor()
    factor = None if factor <= 0 or self.force_dropless else factor  # None drops no rows

    @jax.shard_map(mesh=self.mesh, in_specs=specs, out_specs=(tokens, P(axes)), check_vma=config.check_vma)
    def layer(x, ids, weights, w_gate, w_up, w_down):
        activation = "silu" if is_silu else self.apply_ffn_activation
        experts = jax_ep.GatedExperts(jnp.concatenate([w_gate, w_up], -1), w_down, activation=activation)
        y, stats = jax_ep.moe(
            x, ids, weights, experts, group=group, capacity_factor=factor, return_stats=True
        )
        return jax.lax.psum(y, tp), jnp.expand_dims(stats.num_dropped > 0, 0)

    y, has_dropped = layer(x, ids, weights, w_gate, w_up, w_down)
    self.sow(nnx.Intermediate, "moe_has_overflow", has_dropped)  # for moe_dropless_fallback=step
    return y, loss, update


if not hasattr(moe.RoutedMoE, "sparse_matmul"):
    raise ImportError("moe_maxtext.py: this MaxText has no RoutedMoE.sparse_matmul; install maxtext==0.2.5")
moe.RoutedMoE.sparse_matmul = sparse_matmul

if __name__ == "__main__":
    app.run(train.main)
