"""A Mixture-of-Experts layer as an equinox module, with its experts sharded over the devices of a group."""

import equinox as eqx
import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep


class MoE(eqx.Module):
    """A layer to call outside of shard_map, with x [B, ..., width]; B is sharded over the group's axis."""

    router: jax.Array
    experts: jax_ep.GatedExperts
    top_k: int = eqx.field(static=True)
    mesh: Mesh = eqx.field(static=True)
    group: jax_ep.Group = eqx.field(static=True)

    def __init__(self, width, hidden, num_experts, top_k, *, mesh, group, key):
        router, up, down = jax.random.split(key, 3)
        matrix = jax.nn.initializers.lecun_normal()
        matrices = jax.nn.initializers.lecun_normal(batch_axis=0)  # one for each expert
        # Each device creates and stores only its own experts.
        spread = jax.jit(matrices, static_argnums=1, out_shardings=NamedSharding(mesh, P(group.axis_name)))
        self.router = matrix(router, (width, num_experts))
        self.experts = jax_ep.GatedExperts(
            spread(up, (num_experts, width, 2 * hidden)),  # gate and up
            spread(down, (num_experts, hidden, width)),
        )
        self.top_k, self.mesh, self.group = top_k, mesh, group

    def __call__(self, x):
        ep = P(self.group.axis_name)

        @jax.shard_map(mesh=self.mesh, in_specs=(P(), ep, ep), out_specs=ep)
        def layer(router, experts, x):
            weights, topk_idx = jax.lax.top_k(jax.nn.softmax(x @ router), self.top_k)
            # The default buffers drop no rows. With a capacity, pass return_stats=True and watch num_dropped.
            return jax_ep.moe(x, topk_idx, weights, experts, group=self.group)

        return layer(self.router, self.experts, x)
