"""What is sent, and how often: remat, and the calls in the compiled program."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import count_calls, ranks
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from layers import E, R, inputs, layer

import jax_ep

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("where", ["inside", "around"])
@pytest.mark.parametrize("policy", [None, "save"])
def test_checkpoint(policy, where):
    """Same gradients as without; with the policy nothing is dispatched a second time."""
    on = ranks(R)
    x, ids, w = inputs()
    scale = jnp.float32(1.3)
    policy = jax_ep.save_ep_residuals if policy else None

    def body(x, ids, w, scale):
        expert = lambda sent: jnp.tanh(sent.x * scale)
        return jax_ep.moe(x * 2, ids, w, expert, group=on.group, num_experts=E)

    def shard(x, ids, w, scale):
        block = jax.checkpoint(body, policy=policy) if where == "inside" else body
        return block(block(x, ids, w, scale), ids, w, scale)

    def gradient(function):
        mapped = jax.shard_map(
            function, mesh=on.mesh, in_specs=(*[P("ep")] * 3, P()), out_specs=P("ep"), check_vma=True
        )
        if where == "around" and function is shard:
            mapped = jax.checkpoint(mapped, policy=policy)
        loss = lambda x, w, scale: jnp.sum(mapped(x, ids, w, scale) ** 2)
        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))

    def plain(x, ids, w, scale):
        return body(body(x, ids, w, scale), ids, w, scale)

    got = gradient(shard)(x, w, scale)
    for one, want in zip(got, gradient(plain)(x, w, scale), strict=True):
        np.testing.assert_allclose(one, want, rtol=1e-5, atol=1e-6)
    # Counted before XLA, which may find out by itself that a call is repeated.
    lowered = gradient(shard).lower(x, w, scale).as_text()
    calls = {name: len(re.findall(rf"@jax_ep_{name}\b", lowered)) for name in ("route", "push")}
    # Two layers forward, backward a push each; and without the policy both are routed again.
    assert calls == {"route": 4 if policy is None else 2, "push": 2}


@pytest.mark.parametrize("names", [(), (jax_ep.checkpoint_names.handle, jax_ep.checkpoint_names.weights)])
def test_a_scanned_layer_that_names_its_own_rows(names):
    """With the rows under the caller's name, the handle and the weights are all that must be kept besides."""
    on = ranks(R)
    x, ids, w = inputs()

    policy = jax.checkpoint_policies.save_only_these_names(*names, "mine")

    def shard(x, ids, w):
        def experts(sent):
            return jnp.tanh(checkpoint_name(sent.x, "mine"))

        def body(carry, _):
            return jax_ep.moe(carry, ids, w, experts, group=on.group, num_experts=E), None

        return jax.lax.scan(jax.checkpoint(body, policy=policy), x, None, length=3)[0]

    mapped = on.map(shard)
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(mapped(x, ids, w) ** 2)))
    # Counted before XLA, which may write the body of a loop down twice.
    lowered = gradient.lower(x).as_text()
    assert len(re.findall(r"@jax_ep_route\b", lowered)) == (1 if names else 2)


@pytest.mark.parametrize("own", [False, True], ids=["save_ep_residuals", "own_rows"])
@pytest.mark.parametrize("what", ["the experts alone", "redispatch", "by rank"])
def test_what_is_kept_where_the_dispatch_itself_has_no_gradient(what, own):
    on = ranks(R)
    x, ids, w = inputs()
    policy = jax_ep.save_ep_residuals
    if own:
        names = (jax_ep.checkpoint_names.handle, jax_ep.checkpoint_names.weights, "mine")
        policy = jax.checkpoint_policies.save_only_these_names(*names)
    order = "rank" if what == "by rank" else "expert"

    def shard(scale, x, ids, w):
        def body(scale):
            routing = {"group": on.group, "num_experts": E, "order": order}
            if what == "redispatch":
                handle = jax_ep.dispatch((), ids, **routing).handle
                rows, row_weights = jax_ep.redispatch(x * scale, handle, topk_weights=w)
            else:
                sent = jax_ep.dispatch(x, ids, w, **routing)
                rows, handle = sent.x, sent.handle
                row_weights = None if order == "rank" else sent.row_weights
            rows = checkpoint_name(rows, "mine") if own else rows
            return jax_ep.combine(jnp.tanh(rows * scale), handle, row_weights=row_weights)

        return jax.checkpoint(body, policy=policy)(scale)

    mapped = jax.shard_map(shard, mesh=on.mesh, in_specs=(P(), *[P("ep")] * 3), out_specs=P("ep"))
    gradient = jax.jit(jax.grad(lambda scale: jnp.sum(mapped(scale, x, ids, w) ** 2)))
    lowered = gradient.lower(jnp.float32(1.3)).as_text()
    assert len(re.findall(r"@jax_ep_route\b", lowered)) == 1
    if what == "redispatch":  # forward, and the gradient of the combine
        assert len(re.findall(r"@jax_ep_push\b", lowered)) == 2


def test_checkpoint_around_scan():
    on = ranks(R)
    x, ids, w = inputs()

    def shard(x, ids, w):
        block = jax.checkpoint(
            lambda carry, _: (layer(carry, ids, w, on.group), None), policy=jax_ep.save_ep_residuals
        )
        return jax.lax.scan(block, x, None, length=4)[0]

    def plain(x, ids, w):
        for _ in range(4):
            x = layer(x, ids, w, on.group)
        return x

    def run(function):
        mapped = on.map(function)
        return jax.jit(jax.grad(lambda x: jnp.sum(mapped(x, ids, w) ** 2)))(x)

    np.testing.assert_allclose(run(shard), run(plain), rtol=1e-5, atol=1e-6)


def test_one_layer_is_two_calls_and_no_other_collective():
    on = ranks(R)
    x, ids, w = inputs()
    mapped = on.map(lambda *a: layer(*a, on.group))
    text = jax.jit(mapped).lower(x, ids, w).compile().as_text()
    assert count_calls(text) == {"pull": 1, "route": 1}
    for collective in ("all-gather", "all-to-all", "collective-permute", "all-reduce"):
        assert collective not in text
    loss = lambda x, w: jnp.sum(mapped(x, ids, w) ** 2)
    text = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(x, w).compile().as_text()
    assert count_calls(text) == {"pull": 2, "push": 1, "route": 1}
    for collective in ("all-gather", "all-to-all", "collective-permute"):
        assert collective not in text


def test_weights_that_experts_apply_do_not_keep_the_results():
    """Otherwise the gradient of the weights needs the experts' results."""
    on = ranks(R)
    x, ids, w = inputs()
    columns = 13  # of the results, and of nothing else

    def keeps_results(experts_apply_weights):
        def shard(x, ids, w):
            def experts(sent):
                hidden = jnp.tanh(sent.x)
                if experts_apply_weights:
                    hidden *= sent.row_weights[:, None]
                return jnp.tile(hidden.sum(axis=1, keepdims=True), columns)

            options = {"num_experts": E, "experts_apply_weights": experts_apply_weights}
            return jax_ep.moe(x, ids, w, experts, group=on.group, **options)

        kept = jax.eval_shape(lambda x, w: jax.vjp(lambda x, w: on.map(shard)(x, ids, w), x, w)[1], x, w)
        return any(leaf.ndim == 2 and leaf.shape[1] == columns for leaf in jax.tree.leaves(kept))

    assert keeps_results(False)
    assert not keeps_results(True)


def test_unused_results_are_removed():
    """The ops are pure: a dispatch whose result nobody reads is not run."""
    on = ranks(R)
    x, ids, _ = inputs()

    def shard(x, ids):
        jax_ep.dispatch(x, ids, group=on.group, num_experts=E)
        return x * 2

    mapped = jax.jit(on.map(shard))
    assert count_calls(mapped.lower(x, ids).compile().as_text()) == {}
