"""Arrays that ops refuse for what they hold or where they lie, and sizes that do not fit each other."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from wrong import GROUPS, IDS, MATRICES, E, K, R, T, W, X, dispatch, moe, traced, wide

import jax_ep


def hosts(array):
    return jax.device_put(array, jax.memory.Space.Host)


# What was offloaded, and not brought back.
ON_THE_HOST = {
    "dispatch: every leaf of x": lambda x: dispatch(hosts(x)),
    "dispatch: topk_idx": lambda x: dispatch(x, hosts(IDS[:T])),
    "dispatch: topk_weights": lambda x: dispatch(x, weights=hosts(W[:T])),
    "dispatch: active_ranks": lambda x: dispatch(x, active_ranks=hosts(jnp.ones((R,), jnp.int32))),
    "dispatch: statistics.wait_us": lambda x: dispatch(
        x, statistics=jax_ep.DispatchStatistics(jnp.zeros((E // R,), jnp.int32), hosts(jnp.zeros((R,))))
    ),
    "combine: every leaf of y": lambda x: jax_ep.combine(hosts(dispatch(x).x), dispatch(x).handle),
    "combine: bias": lambda x: jax_ep.combine(dispatch(x).x, dispatch(x).handle, bias=hosts(x)),
    "combine: handle.topk_idx": lambda x: jax_ep.combine(x, jax.tree.map(hosts, dispatch(x).handle)),
    "redispatch: every leaf of x": lambda x: jax_ep.redispatch(hosts(x), dispatch(x).handle),
    "moe: x": lambda x: moe(hosts(x), lambda sent: sent.x),
    "moe: what expert_fn returns": lambda x: moe(x, lambda sent: hosts(sent.x)),
    "permute: topk_idx": lambda x: jax_ep.permute(x, hosts(IDS[:T]), num_local_experts=E),
    "unpermute: y": lambda x: jax_ep.unpermute(hosts(x), IDS),
    "get_dispatch_layout: topk_idx": lambda x: jax_ep.get_dispatch_layout(
        hosts(IDS), num_experts=E, num_ranks=R
    ),
    "grouped_dot: w": lambda x: jax_ep.grouped_dot(x, hosts(MATRICES), GROUPS),
    "quantize_fp8: x": lambda x: jax_ep.quantize_fp8(hosts(wide(x))),
    "dequantize_fp8: the values of": lambda x: jax_ep.dequantize_fp8(
        jax.tree.map(hosts, jax_ep.quantize_fp8(wide(x)))
    ),
}


@pytest.mark.parametrize("name", ON_THE_HOST)
def test_an_array_in_the_memory_of_the_host(name):
    text = rf"{re.escape(name)}.* must lie in the memory of the device, .* jax\.memory\.Space\.Device"
    with pytest.raises(ValueError, match=text):
        traced(ON_THE_HOST[name])


def test_rows_that_are_brought_back():
    spaces = []

    def there_and_back(x):
        sent = dispatch(jax.device_put(hosts(x), jax.memory.Space.Device))
        spaces.append({jax.typeof(leaf).memory_space for leaf in jax.tree.leaves(sent)})
        return sent.num_tokens

    traced(there_and_back)
    assert spaces[0] == {jax.memory.Space.Device}


def values(x):
    return jax_ep.quantize_fp8(wide(x)).values


# Their sums would leave out the scales. To move such values is right.
NO_SCALES = {
    "combine": (lambda x: jax_ep.combine(dispatch(values(x)).x, dispatch(x).handle), "combine: y"),
    "combine of a pytree": (
        lambda x: jax_ep.combine({"x": x, "q": values(x)}, dispatch(x, capacity=T).handle),
        "combine: y",
    ),
    "bias": (
        lambda x: jax_ep.combine(dispatch(wide(x)).x, dispatch(x).handle, bias=values(x)),
        "combine: bias",
    ),
    "combine_start": (
        lambda x: jax_ep.combine_start(dispatch(values(x)).x, dispatch(x).handle),
        "combine_start: y",
    ),
    "moe": (
        lambda x: moe(wide(x), lambda sent: sent.x.values, quantize="fp8"),
        "moe: what expert_fn returns",
    ),
    "combine of a QuantizedArray": (
        lambda x: jax_ep.combine(dispatch(wide(x), quantize="fp8").x, dispatch(x).handle),
        "combine: y",
    ),
    "unpermute": (lambda x: jax_ep.unpermute(values(x), IDS), "unpermute: y"),
    "bias of unpermute": (
        lambda x: jax_ep.unpermute(wide(x), IDS, bias=values(x), topk_idx=IDS),
        "unpermute: bias",
    ),
}


@pytest.mark.parametrize("name", NO_SCALES)
def test_sums_without_their_scales(name):
    call, text = NO_SCALES[name]
    with pytest.raises(TypeError, match=f"{text} is summed, .* scales; got float8.*; pass jax_ep.dequantize"):
        traced(call)


NARROW_WEIGHTS = {
    "dispatch: topk_weights": lambda x, w: dispatch(x, weights=w(T, K)).row_weights,
    "redispatch: topk_weights": lambda x, w: jax_ep.redispatch(x, dispatch(x).handle, topk_weights=w(T, K)),
    "combine: row_weights": lambda x, w: jax_ep.combine(dispatch(x).x, dispatch(x).handle, row_weights=w(16)),
    "permute: topk_weights": lambda x, w: jax_ep.permute(
        x, IDS[:T], num_local_experts=E, topk_weights=w(T, K)
    ),
    "unpermute: topk_weights": lambda x, w: jax_ep.unpermute(x, IDS, topk_weights=w(R * T, K)),
}


@pytest.mark.parametrize("name", NARROW_WEIGHTS)
def test_weights_without_their_scales(name):
    weights = lambda *shape: jnp.ones(shape, jnp.float8_e4m3fn)
    with pytest.raises(
        TypeError, match=f"{name} must be floating of 16 bits .* got float8.* to a wider dtype"
    ):
        traced(lambda x: NARROW_WEIGHTS[name](x, weights))


def test_rows_that_are_quantised_already():
    with pytest.raises(ValueError, match=r"a QuantizedArray travels as it is; leave quantize out"):
        traced(lambda x: dispatch(jax_ep.quantize_fp8(wide(x)), quantize="fp8").num_tokens)
    with pytest.raises(
        TypeError, match=r"moe: x must be an array of tokens, got QuantizedArray; .* quantize="
    ):
        traced(lambda x: moe(jax_ep.quantize_fp8(wide(x)), lambda sent: sent.x))
    with pytest.raises(
        TypeError, match=r"quantize_fp8: x must be floating of 16 bits or more, got float8_e4m3"
    ):
        traced(lambda x: jax_ep.quantize_fp8(values(x)).values)


@pytest.mark.parametrize("nothing", [None, (), {"x": []}])
def test_a_redispatch_of_nothing(nothing):
    with pytest.raises(ValueError, match=r"redispatch: x holds no array, got .* pass rows, or topk_weights"):
        traced(lambda x: jax_ep.redispatch(nothing, dispatch(x).handle))


@pytest.mark.parametrize("sizes", [[5, 4], [-1, 2], [2**31 - 1, 2**31 - 1]])
def test_sizes_of_groups_that_are_known(sizes):
    with pytest.raises(ValueError, match=rf"group_sizes .* there are 8, got {re.escape(str(sizes))}"):
        jax_ep.grouped_dot(X, MATRICES, np.array(sizes, np.int32))
