"""No two ops of a layer can be in flight at once on different streams."""

import dataclasses
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest
from cases import floats, ranks
from jax.sharding import PartitionSpec as P
from ordered import unordered

import jax_ep
from jax_ep._transport import ffi, stream

R, T, K, E, H, F = 4, 8, 2, 8, 128, 64
PAGE = pathlib.Path(__file__).parents[2] / "docs" / "howto" / "overlap.md"
SPECS = {"router": P(), "up": P("ep"), "down": P("ep")}


@pytest.fixture(autouse=True)
def on_gpus(monkeypatch):
    """As if there were a stream for communication, and many tokens."""
    real = stream.has_stream
    pretend = lambda ranks: real(dataclasses.replace(ranks, platform="gpu"))
    monkeypatch.setattr(stream, "has_stream", pretend)
    monkeypatch.setattr(ffi, "goes_through_arena", lambda *_: False)


def parameters():
    shared = {"up": floats((H, F), seed=4), "down": floats((F, H), seed=5)}
    own = {"router": floats((H, E)), "up": floats((E, H, F), seed=1), "down": floats((E, F, H), seed=2)}
    return own, shared, floats((R * T, H), seed=3)


def functions_of_the_page():
    """Those that the page defines, by name."""
    group = ranks(R).group
    names = {"jax": jax, "jnp": jnp, "jax_ep": jax_ep, "group": group, "EXPERTS": E, "TOP_K": K}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    definitions = re.findall(r"^(?:from|def) .*?(?=^\S|\Z)", "\n".join(blocks), re.DOTALL | re.MULTILINE)
    exec("\n".join(definitions), names)
    return names


def pairs_of(layer, gradient, around=lambda layer: layer):
    """Of layer(parameters, shared, x), or of its gradient."""
    function = jax.shard_map(
        around(layer), mesh=ranks(R).mesh, in_specs=(SPECS, P(), P("ep")), out_specs=P("ep")
    )
    loss = lambda *arrays: jnp.mean(jnp.sin(function(*arrays)))
    return unordered(jax.grad(loss, (0, 1, 2)) if gradient else function, *parameters())


@pytest.mark.parametrize("name", ["moe_with_shared_expert", "layer_in_order", "two_halves"])
@pytest.mark.parametrize(
    ("gradient", "around"),
    [
        (False, lambda layer: layer),
        (True, lambda layer: layer),
        (True, jax.checkpoint),
        (True, lambda layer: jax.checkpoint(layer, policy=jax_ep.save_ep_residuals)),
    ],
    ids=["forward", "plain", "checkpoint", "save_ep_residuals"],
)
def test_programs_of_the_page(name, gradient, around):
    function = functions_of_the_page()[name]
    takes_shared = name != "two_halves"
    layer = function if takes_shared else lambda own, _, x: function(own, x)
    assert pairs_of(layer, gradient, around) == []


def test_what_is_not_in_order_is_found():
    """The second op uses nothing of the first."""
    group = ranks(R).group

    def layer(own, _, x):
        weights, ids = jax.lax.top_k(x @ own["router"], K)
        sent = jax_ep.dispatch_start(x, ids, weights, group=group, num_experts=E).done()
        again = jax_ep.redispatch(jnp.sin(x), sent.handle)
        return jax_ep.combine(sent.x + again, sent.handle, row_weights=sent.row_weights)

    ((one, other),) = pairs_of(layer, False)
    assert {one.split()[0], other.split()[0]} == {"apart", "main"}
