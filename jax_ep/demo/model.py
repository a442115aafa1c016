"""The demo's model: a transformer over bytes whose feed-forward layers are Mixtures of Experts."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep._extension import Implementation

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes and options of the model."""

    group: jax_ep.Group
    num_experts: int
    top_k: int
    capacity: int | None  # maximum number of rows per device; None for the worst case
    implementation: Implementation | None
    quantize: Literal["fp8", "fp8_dequantize"] | None = None  # format of tokens on the way to their experts
    quantize_products: Literal["fp8"] | None = None  # format of the experts' products
    num_redundant_experts: int = 0  # places of a device for instances of hot experts
    layers: int = 2
    width: int = 128
    heads: int = 4
    expert_width: int = 128
    window: int = 128
    balance: float = 0.01  # weight of the load-balancing loss


def init(config: Config, key: jax.Array) -> Params:
    """Returns random initial parameters."""

    def normal(*shape: int, fan_in: int) -> jax.Array:
        nonlocal key
        key, subkey = jax.random.split(key)
        return jax.random.normal(subkey, shape) / fan_in**0.5

    d, f, e = config.width, config.expert_width, config.num_experts
    layers = [
        {
            "qkv": normal(d, 3 * d, fan_in=d),
            "out": normal(d, d, fan_in=d * 2 * config.layers),
            "router": normal(d, e, fan_in=d),
            "up": normal(e, d, 2, f, fan_in=d),  # gate and up projection
            "down": normal(e, f, d, fan_in=f * 2 * config.layers),
        }
        for _ in range(config.layers)
    ]
    return {
        "embed": normal(256, d, fan_in=d),
        "position": normal(config.window, d, fan_in=d),
        "layers": layers,
    }


def param_specs(config: Config) -> Params:
    """Returns the parameters' PartitionSpecs: experts are sharded, all other parameters are replicated."""
    axis = config.group.axis_name
    layer = {"qkv": P(), "out": P(), "router": P(), "up": P(axis), "down": P(axis)}
    return {"embed": P(), "position": P(), "layers": [layer] * config.layers}


def normalize(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def attention(config: Config, layer: Params, x: jax.Array) -> jax.Array:
    sequences, length, width = x.shape
    qkv = (x @ layer["qkv"]).reshape(sequences, length, 3, config.heads, width // config.heads)
    out = jax.nn.dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], is_causal=True)
    return out.reshape(x.shape) @ layer["out"]


def mixture(config: Config, layer: Params, x: jax.Array) -> tuple[jax.Array, jax.Array, Params]:
    """Returns the experts' output [T, d], the load-balancing loss, and the counts of all devices.

    The counts are `tokens_per_expert` [E], as the router chose them, and `dropped`, the rows dropped because
    a buffer was full.
    """
    probabilities = jax.nn.softmax(x @ layer["router"])
    weights, topk_idx = jax.lax.top_k(probabilities, config.top_k)
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)

    experts = jax_ep.GatedExperts(
        layer["up"],
        layer["down"],
        quantize=config.quantize_products,
        implementation=config.implementation,
    )
    y, stats = jax_ep.moe(
        x,
        topk_idx,
        weights,
        experts,
        group=config.group,
        capacity=config.capacity,
        quantize=config.quantize,
        num_redundant_experts=config.num_redundant_experts,
        return_stats=True,
        implementation=config.implementation,
    )
    layout = jax_ep.get_dispatch_layout(topk_idx, num_experts=config.num_experts, num_ranks=config.group.size)
    axis = config.group.axis_name
    tokens = jax.lax.psum(layout.num_tokens_per_expert, axis)
    # As in Switch Transformer (arXiv:2101.03961): the share of tokens times the mean probability.
    share = tokens / jnp.sum(tokens)
    balance = config.num_experts * jnp.sum(share * jax.lax.pmean(jnp.mean(probabilities, axis=0), axis))
    dropped = jax.lax.psum(stats.num_dropped[0], axis)
    return y, balance, {"tokens_per_expert": tokens, "dropped": dropped}


def loss(config: Config, params: Params, batch: jax.Array) -> tuple[jax.Array, Params]:
    """Returns the mean loss in nats per byte, including the load-balancing loss, and metrics.

    Must be called inside `jax.shard_map`.
    """
    inputs, targets = batch[:, :-1], batch[:, 1:]
    x = params["embed"][inputs] + params["position"]
    balance, counts = 0.0, []
    for layer in params["layers"]:
        x = x + attention(config, layer, normalize(x))
        y, layer_balance, layer_counts = mixture(config, layer, normalize(x).reshape(-1, config.width))
        x = x + y.reshape(x.shape)
        balance = balance + layer_balance
        counts.append(layer_counts)
    logits = normalize(x) @ params["embed"].T
    log_probability = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)
    nats = jax.lax.pmean(-jnp.mean(log_probability), config.group.axis_name)
    metrics = {"loss": nats, **jax.tree.map(lambda *layers: sum(layers), *counts)}
    return nats + config.balance * balance, metrics
