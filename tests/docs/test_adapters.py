"""The layer as a module of other libraries: results, gradients and places of the parameters.

The reference is the same layer written densely, in float32, for the same parameters.
"""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import moe_equinox
import moe_linen
import moe_nnx
import numpy as np
import optax
import pytest
from cases import assert_close, floats
from devices import make_mesh, most_ranks
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

pytestmark = pytest.mark.no_gpu

R, E, H, F, K = most_ranks(), 16, 8, 12, 2
SIZES = {"hidden": F, "num_experts": E, "top_k": K}


def loss(layer, x):
    out = layer(x)
    return jnp.sum(out**2), out


@pytest.fixture
def place(open_group):
    """What every module takes: the mesh and the group."""
    mesh = make_mesh((R,), ("ep",))
    return {"mesh": mesh, "group": open_group(mesh, "ep")}


@pytest.fixture
def x():
    """Sequences of three tokens, so that the tokens have two leading axes."""
    return jnp.asarray(floats((R, 3, H)))


def check(parameters, x, out, gradients, d_x):
    """Against the layer written densely; parameters and gradients are (router, up, down)."""

    def dense(parameters, x):
        router, up, down = parameters
        weights, ids = jax.lax.top_k(jax.nn.softmax(x @ router), K)
        gate, up = jnp.split(jnp.einsum("bsh,ehf->bsef", x, up), 2, axis=-1)
        every = jnp.einsum("bsef,efh->bseh", jax.nn.silu(gate) * up, down)
        return jnp.einsum("bske,bseh->bsh", jax.nn.one_hot(ids, E) * weights[..., None], every)

    run = jax.jit(jax.grad(lambda p, x: loss(lambda x: dense(p, x), x), (0, 1), has_aux=True))
    wanted, want = jax.device_get(run(parameters, x))
    assert np.abs(want).max() > 0.1
    close = lambda one, other: assert_close(one, other, terms=10)
    jax.tree.map(close, (out, (gradients, d_x)), (want, wanted))


def is_spread(array, mesh):
    return array.sharding.is_equivalent_to(NamedSharding(mesh, P("ep")), array.ndim)


def test_nnx(place, x):
    model = moe_nnx.MoE(H, **SIZES, **place, rngs=nnx.Rngs(0))
    assert is_spread(model.up[...], place["mesh"])
    (gradients, d_x), out = nnx.jit(nnx.grad(loss, argnums=(0, 1), has_aux=True))(model, x)
    leaves = lambda tree: tuple(tree[name][...] for name in ("router", "up", "down"))
    check(leaves(nnx.state(model)), x, out, leaves(gradients), d_x)


@pytest.mark.parametrize("metadata", [{}, {nnx.PARTITION_NAME: None}])
def test_moments_of_stacked_nnx_layers(metadata, place):
    """They are sharded like the parameters with the metadata of docs/howto/flax_nnx.md, and not without.

    If this fails without, flax has changed, and the page need no longer warn.
    """

    @nnx.jit
    def create():
        @nnx.split_rngs(splits=R)
        @nnx.vmap(transform_metadata=metadata)
        def stack(rngs):
            return moe_nnx.MoE(H, **SIZES, **place, rngs=rngs)

        model = stack(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)

    model, optimizer = create()
    sharding = NamedSharding(place["mesh"], P(None, "ep"))
    up, moments = model.up[...], optimizer.opt_state[0].mu["up"][...]
    assert up.sharding.is_equivalent_to(sharding, up.ndim)
    assert moments.sharding.is_equivalent_to(sharding, moments.ndim) == bool(metadata)


def test_linen(place, x):
    model = moe_linen.MoE(**SIZES, **place)
    shapes = jax.eval_shape(model.init, jax.random.key(0), x)
    where = nn.get_sharding(shapes, place["mesh"])
    variables = jax.jit(model.init, out_shardings=where)(jax.random.key(0), x)
    parameters = nn.unbox(variables)["params"]
    assert is_spread(parameters["up"], place["mesh"])
    of_parameters = lambda parameters, x: loss(lambda x: model.apply({"params": parameters}, x), x)
    (gradients, d_x), out = jax.jit(jax.grad(of_parameters, (0, 1), has_aux=True))(parameters, x)
    leaves = lambda tree: (tree["router"], tree["up"], tree["down"])
    check(leaves(parameters), x, out, leaves(gradients), d_x)


def test_equinox(place, x):
    model = moe_equinox.MoE(H, **SIZES, **place, key=jax.random.key(0))
    assert is_spread(model.experts.w_up, place["mesh"])
    both = lambda model_and_x: loss(*model_and_x)
    (gradients, d_x), out = eqx.filter_jit(eqx.filter_grad(both, has_aux=True))((model, x))
    leaves = lambda model: (model.router, model.experts.w_up, model.experts.w_down)
    check(leaves(model), x, out, leaves(gradients), d_x)
