"""Other kinds of experts: biased, quantized, weighted inside, shared, or sharded over several devices.

Each function takes whole arrays and contains its `shard_map`. E is the number of experts, H
the width of a token, F the width inside an expert. `parameters` has the matrices "up" [E, H, F] and "down"
[E, F, H]. `group` is the `jax_ep.Group` of the axis "ep" of `mesh`. `x` [N, H] has the tokens of all ranks,
and `topk_idx` and `topk_weights` [N, K] their choices. docs/recipes.md shows when to use each.
The default buffers drop no rows; with a capacity, watch the `num_dropped` of `dispatch` and `moe`.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jax_ep


def feed_forward(parameters, rows, group_sizes):
    """Applies the experts to rows that are sorted by expert."""
    hidden = jax.nn.gelu(jax_ep.grouped_dot(rows, parameters["up"], group_sizes))
    return jax_ep.grouped_dot(hidden, parameters["down"], group_sizes)


def expert_biases(mesh, group, parameters, x, topk_idx, topk_weights):
    """Adds biases to the experts: "up_bias" [E, F] and "down_bias" [E, H]."""
    num_experts = parameters["up"].shape[0]

    @jax.shard_map(mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    def layer(parameters, x, topk_idx, topk_weights):
        def experts(sent):
            # This is -1 in padding and tail rows, which selects the last expert's bias. Combine does not read
            # these rows, and gives them no gradient.
            expert = sent.row_experts()
            hidden = jax_ep.grouped_dot(sent.x, parameters["up"], sent.group_sizes)
            hidden = jax.nn.gelu(hidden + parameters["up_bias"][expert])
            y = jax_ep.grouped_dot(hidden, parameters["down"], sent.group_sizes)
            return y + parameters["down_bias"][expert]

        return jax_ep.moe(x, topk_idx, topk_weights, experts, group=group, num_experts=num_experts)

    return layer(parameters, x, topk_idx, topk_weights)


def quantize_int8(matrices):
    """Returns int8 [E, M, N] and float32 scales [E, N], one for each column of each expert."""
    scales = jnp.maximum(jnp.max(jnp.abs(matrices), axis=1), 1e-12) / 127
    values = jnp.round(matrices / scales[:, None]).astype(jnp.int8)
    return values, scales.astype(jnp.float32)


def int8_experts(mesh, group, parameters, x, topk_idx, topk_weights):
    """Runs int8 experts, for inference: "up" and "down" are pairs that `quantize_int8` returned."""
    num_experts = parameters["up"][0].shape[0]

    @jax.shard_map(mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    def layer(parameters, x, topk_idx, topk_weights):
        def experts(sent):
            expert = sent.row_experts()

            def product(rows, matrices):
                values, scales = matrices
                # A scale belongs to a whole column, so it can be applied after the product. The integers are
                # exact in bfloat16 too.
                out = jax_ep.grouped_dot(rows, values.astype(rows.dtype), sent.group_sizes)
                return (out.astype(jnp.float32) * scales[expert]).astype(rows.dtype)

            return product(jax.nn.gelu(product(sent.x, parameters["up"])), parameters["down"])

        return jax_ep.moe(x, topk_idx, topk_weights, experts, group=group, num_experts=num_experts)

    return layer(parameters, x, topk_idx, topk_weights)


def weights_inside_experts(mesh, group, parameters, x, topk_idx, topk_weights):
    """Multiplies each token by its weight before the expert, as in Llama 4, instead of after it."""
    num_experts = parameters["up"].shape[0]

    @jax.shard_map(mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    def layer(parameters, x, topk_idx, topk_weights):
        def experts(sent):
            rows = sent.x * sent.row_weights[:, None].astype(sent.x.dtype)
            return feed_forward(parameters, rows, sent.group_sizes)

        return jax_ep.moe(
            x,
            topk_idx,
            topk_weights,
            experts,
            experts_apply_weights=True,
            group=group,
            num_experts=num_experts,
        )

    return layer(parameters, x, topk_idx, topk_weights)


def shared_experts(mesh, group, parameters, shared, x, topk_idx, topk_weights):
    """Adds an expert that sees all tokens: `shared` has "up" [H, S] and "down" [S, H]."""
    num_experts = parameters["up"].shape[0]

    # The shared expert is on every rank, P(), so its tokens need not travel.
    @jax.shard_map(mesh=mesh, in_specs=(P("ep"), P(), P("ep"), P("ep"), P("ep")), out_specs=P("ep"))
    def layer(parameters, shared, x, topk_idx, topk_weights):
        sent = jax_ep.dispatch(x, topk_idx, topk_weights, group=group, num_experts=num_experts)
        for_all = jax.nn.gelu(x @ shared["up"]) @ shared["down"]
        y = feed_forward(parameters, sent.x, sent.group_sizes)
        # Combine adds a bias in float32, before it rounds the sum to the dtype of y.
        return jax_ep.combine(y, sent.handle, row_weights=sent.row_weights, bias=for_all)

    return layer(parameters, shared, x, topk_idx, topk_weights)


def tensor_parallel_experts(mesh, group, parameters, x, topk_idx, topk_weights):
    """Splits each gated expert along F over the axis "tp" of a mesh ("ep", "tp").

    "up" is [E, H, 2, F]: gate and up. Tokens are sharded over "ep" and replicated along "tp".
    """
    split = {"up": P("ep", None, None, "tp"), "down": P("ep", "tp", None)}

    # Without axis_names all axes of the mesh are manual, "tp" too.
    @jax.shard_map(mesh=mesh, in_specs=(split, P("ep"), P("ep"), P("ep")), out_specs=P("ep"))
    def layer(parameters, x, topk_idx, topk_weights):
        experts = jax_ep.GatedExperts(parameters["up"], parameters["down"])
        # Each device has only a part of every sum over F. Combine is linear, so the parts are added after
        # it, because it returns fewer rows than the experts.
        part = jax_ep.moe(x, topk_idx, topk_weights, experts, group=group)
        return jax.lax.psum(part, "tp")

    return layer(parameters, x, topk_idx, topk_weights)


def fsdp_experts(mesh, group, parameters, x, topk_idx, topk_weights):
    """Shards each gated expert along F over the axis "fsdp" of a mesh ("ep", "fsdp"), and gathers it.

    "up" is [E, H, 2, F]: gate and up. Tokens are sharded over both axes.
    """
    split = {"up": P("ep", None, None, "fsdp"), "down": P("ep", "fsdp", None)}
    tokens = P(("ep", "fsdp"))

    @jax.shard_map(mesh=mesh, in_specs=(split, tokens, tokens, tokens), out_specs=tokens)
    def layer(parameters, x, topk_idx, topk_weights):
        # The gradient of a gather is the sum of the gradients, of which each device keeps its shard.
        up = jax.lax.all_gather(parameters["up"], "fsdp", axis=3, tiled=True)
        down = jax.lax.all_gather(parameters["down"], "fsdp", axis=1, tiled=True)
        return jax_ep.moe(x, topk_idx, topk_weights, jax_ep.GatedExperts(up, down), group=group)

    return layer(parameters, x, topk_idx, topk_weights)
