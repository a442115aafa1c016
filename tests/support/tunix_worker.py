"""Trains a tiny Qwen3 MoE by tunix's trainer, and prints the losses as JSON.

With the argument "jax_ep", its MoE layers are those of examples/moe_tunix.py.
"""

import json
import sys

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from tunix.models.qwen3 import model as qwen3
from tunix.sft import peft_trainer, utils

if sys.argv[1:] == ["jax_ep"]:
    import moe_tunix  # noqa: F401


def model_inputs(batch):
    mask = batch.input_mask > 0
    positions, attention = utils.build_positions_from_mask(mask), utils.make_causal_attn_mask(mask)
    tokens = {"input_tokens": batch.input_tokens, "input_mask": batch.input_mask}
    return tokens | {"positions": positions, "attention_mask": attention}


sizes = {"num_layers": 2, "vocab_size": 64, "embed_dim": 32, "hidden_dim": 48}
heads = {"num_heads": 4, "head_dim": 8, "num_kv_heads": 2, "rope_theta": 10_000, "norm_eps": 1e-6}
config = qwen3.ModelConfig(**sizes, **heads, num_experts=8, num_experts_per_tok=2)
with jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2):
    model = qwen3.Qwen3(config, rngs=nnx.Rngs(0))
    state = nnx.state(model)
    nnx.update(model, jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state)))
    assert model.layers[0].mlp.gate_proj[...].sharding.spec == P("fsdp", None, "tp")
    options = peft_trainer.TrainingConfig(eval_every_n_steps=100, max_steps=3)
    trainer = peft_trainer.PeftTrainer(model, optax.sgd(0.3), options).with_gen_model_input_fn(model_inputs)
    tokens = np.random.default_rng(0).integers(0, 64, (8, 12)).astype(np.int32)
    trainer.train([peft_trainer.TrainingInput(tokens, np.ones_like(tokens))] * 3)
    losses = trainer.metrics_logger.get_metric_history("", "loss", "train")
    print(json.dumps([float(loss) for loss in losses]))
