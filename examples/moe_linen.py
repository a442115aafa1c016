"""A Mixture-of-Experts layer as a flax.linen module, with its experts sharded over the devices of a group."""

import flax.linen as nn
import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_ep


class MoE(nn.Module):
    """A layer to call outside of shard_map, with x [B, ..., width]; B is sharded over the group's axis."""

    hidden: int
    num_experts: int
    top_k: int
    mesh: Mesh
    group: jax_ep.Group

    @nn.compact
    def __call__(self, x):
        width, axis = x.shape[-1], self.group.axis_name
        matrix = nn.initializers.lecun_normal()
        matrices = nn.initializers.lecun_normal(batch_axis=0)  # one for each expert
        # nn.get_sharding reads the parameters' shardings from this.
        spread = nn.with_partitioning(matrices, (axis, None, None), mesh=self.mesh)
        router = self.param("router", matrix, (width, self.num_experts))
        up = self.param("up", spread, (self.num_experts, width, 2 * self.hidden))  # gate and up
        down = self.param("down", spread, (self.num_experts, self.hidden, width))

        @jax.shard_map(mesh=self.mesh, in_specs=(P(), P(axis), P(axis)), out_specs=P(axis))
        def layer(router, experts, x):
            weights, topk_idx = jax.lax.top_k(nn.softmax(x @ router), self.top_k)
            # The default buffers drop no rows. With a capacity, pass return_stats=True and watch num_dropped.
            return jax_ep.moe(x, topk_idx, weights, experts, group=self.group)

        return layer(router, jax_ep.GatedExperts(up, down), x)
