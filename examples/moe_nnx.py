"""A Mixture-of-Experts layer as a flax.nnx module, with its experts sharded over the devices of a group."""

import jax
from flax import nnx
from jax.sharding import PartitionSpec as P

import jax_ep


class MoE(nnx.Module):
    """A layer to call outside of shard_map, with x [B, ..., width]; B is sharded over the group's axis."""

    def __init__(self, width, hidden, num_experts, top_k, *, mesh, group, rngs):
        matrix = nnx.initializers.lecun_normal()
        matrices = nnx.initializers.lecun_normal(batch_axis=0)  # one for each expert
        # Each device stores only its own experts.
        spread = nnx.with_partitioning(matrices, (group.axis_name, None, None), mesh=mesh)
        self.router = nnx.Param(matrix(rngs.params(), (width, num_experts)))
        self.up = nnx.Param(spread(rngs.params(), (num_experts, width, 2 * hidden)))  # gate and up
        self.down = nnx.Param(spread(rngs.params(), (num_experts, hidden, width)))
        self.num_experts, self.top_k = num_experts, top_k
        self.mesh, self.group = mesh, group

    def __call__(self, x):
        ep = P(self.group.axis_name)

        @jax.shard_map(mesh=self.mesh, in_specs=(P(), ep, ep), out_specs=ep)
        def layer(router, experts, x):
            weights, topk_idx = jax.lax.top_k(jax.nn.softmax(x @ router), self.top_k)
            # The default buffers drop no rows. With a capacity, pass return_stats=True and watch num_dropped.
            return jax_ep.moe(x, topk_idx, weights, experts, group=self.group)

        return layer(self.router[...], jax_ep.GatedExperts(self.up[...], self.down[...]), x)
