"""Programs lowered for CUDA on any machine: what a GPU would be asked to run."""

import jax
import jax.numpy as jnp
import pytest
from cases import count_calls, ranks
from jax.sharding import PartitionSpec as P
from layers import E, R, inputs, layer

import jax_ep


@pytest.mark.parametrize("order", ["rank", "expert"])
def test_every_op_lowers_for_cuda(order):
    on = ranks(R)
    x, ids, w = inputs()

    def shard(x, ids, w):
        sent = jax_ep.dispatch(x, ids, w, group=on.group, num_experts=E, order=order, implementation="ffi")
        again = jax_ep.redispatch(x, sent.handle, implementation="ffi")
        out = jax_ep.combine(sent.x + again, sent.handle, implementation="ffi")
        layout = jax_ep.get_dispatch_layout(ids, num_experts=E, num_ranks=R, implementation="ffi")
        moved = jax_ep.permute(x, ids, num_local_experts=E, implementation="ffi")
        back = jax_ep.unpermute(moved.x, moved.row_map, topk_weights=w, implementation="ffi")
        return out + back, layout.num_tokens_per_expert

    mapped = jax.jit(jax.shard_map(shard, mesh=on.mesh, in_specs=P("ep"), out_specs=P("ep")))
    text = mapped.trace(x, ids, w).lower(lowering_platforms=("cuda",)).as_text("hlo")
    counts = count_calls(text)
    assert counts == dict.fromkeys(["layout", "permute", "pull", "push", "route", "unpermute"], 1)


def test_a_layer_and_its_gradient_lower_for_cuda():
    on = ranks(R)
    x, ids, w = inputs()
    mapped = jax.shard_map(
        lambda *a: layer(*a, on.group, implementation="ffi"),
        mesh=on.mesh,
        in_specs=P("ep"),
        out_specs=P("ep"),
    )
    gradient = jax.jit(jax.value_and_grad(lambda x, w: jnp.sum(mapped(x, ids, w)), argnums=(0, 1)))
    text = gradient.trace(x, w).lower(lowering_platforms=("cuda",)).as_text("hlo")
    assert count_calls(text) == {"route": 1, "pull": 2, "push": 1}
