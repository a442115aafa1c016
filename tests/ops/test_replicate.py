"""Weights of redundant experts, their gradients, and layers that use them."""

import functools
import math

import balance_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BF16, FP8, floats, quantize, ranks, same_bits, tagged_rows
from devices import most_ranks

import jax_ep
from jax_ep._placement.pieces import num_pieces

pytestmark = pytest.mark.processes

R, T, K, L = most_ranks(), 16, 2, 4
E, S, H, F = R * L, 2, 8, 6
# So many elements are sent as pieces, which go through a GPU's shared memory.
LONG = 9 * 2**18 if jax.default_backend() == "gpu" else 5


@functools.cache
def skewed():
    """Ids [R, T, K] of a router that likes the first experts, and the plan's placement [R, N]."""
    score = np.random.default_rng(0).random((R, T, E)) * np.arange(E, 0, -1) ** 1.5
    ids = np.argsort(-score, axis=-1)[..., :K].astype(np.int32)
    counts = np.stack([np.bincount(one.reshape(-1), minlength=E) for one in ids]).astype(np.int32)
    placement = balance_oracle.plan(counts, S, 20).physical_to_logical.reshape(R, -1)
    assert R == 1 or (placement[:, L:] >= 0).any()
    return ids, placement


def replicated(on, w, ids, function=jax_ep.replicate, **options):
    """Returns arrays [R, L + S, ...] of home and redundant experts."""

    def shard(w, ids):
        plan = jax_ep.balance(ids, group=on.group, num_experts=E, num_redundant_experts=S)
        return function(w, plan, group=on.group, **options)

    whole = lambda w: np.concatenate([w.home, w.redundant], axis=1)
    return jax.tree.map(whole, on.run(shard, w, ids), is_leaf=lambda w: isinstance(w, jax_ep.PhysicalWeights))


def per_domain():
    return [None, R // 2] if R > 2 else [None]


@pytest.mark.one_jax
@pytest.mark.moves_rows
@pytest.mark.parametrize("domains", per_domain())
def test_weights_arrive_bit_for_bit(domains, implementation):
    ids, placement = skewed()
    dtypes = {"bfloat16": BF16, "float32": np.float32, "int8": np.int8, "float8": FP8}
    w = {name: tagged_rows(R, L * 3, 5, dtype).reshape(R, L, 3, 5) for name, dtype in dtypes.items()}
    w["bias"] = tagged_rows(R, L, 1, np.int32)
    got = replicated(ranks(R, domains), w, ids, implementation=implementation)
    for name, array in w.items():
        everyone = array.reshape(E, *array.shape[2:])
        want = np.where((placement >= 0).reshape(*placement.shape, *[1] * (array.ndim - 2)), 1, 0)
        want = everyone[np.maximum(placement, 0)].view(np.uint8) * want.astype(np.uint8)
        assert same_bits(got[name].view(np.uint8), want)


@pytest.mark.one_jax
@pytest.mark.moves_rows
def test_large_arrays_travel_in_pieces(implementation):
    """Arrays of several lengths, of which some are cut, and quantized weights."""
    ids, placement = skewed()
    w = [floats((R, L, 96, 512)), floats((R, L, 512, 96), BF16), floats((R, L, 3))]
    quantized = quantize(w[0], block=(32, 128))
    got, q = replicated(ranks(R), (w, quantized), ids, implementation=implementation)
    for have, array in zip([*got, q.values, q.scales], [*w, quantized.values, quantized.scales], strict=True):
        want = np.asarray(array).reshape(E, *array.shape[2:])[np.maximum(placement, 0)]
        assert same_bits(have[placement >= 0], want[placement >= 0])


@pytest.mark.one_jax
def test_quantized_weights_travel_as_fp8():
    """A placement sends what a forward pass reads, 1 byte for each element."""
    ids, _ = skewed()
    w = floats((R, L, 256, 2, 128))
    quantize = jax.vmap(functools.partial(jax_ep.quantize_weights, gradients=False))
    got = replicated(ranks(R), jax.jit(quantize)(w), ids)
    want = jax.jit(quantize)(replicated(ranks(R), w, ids)).transposed
    is_filled = skewed()[1] >= 0
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert same_bits(np.asarray(one)[is_filled], np.asarray(other)[is_filled])
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(got)) <= 1.04 * math.prod((R, L + S, *w.shape[2:]))


def test_pieces_are_short_and_aligned():
    for elements, bits, want in [
        (7168 * 2048, 16, 224),
        (512, 32, 1),
        (3 * 2**20, 8, 24),
        (10**6 + 3, 32, 1),
    ]:
        assert num_pieces(elements, bits) == want
        assert elements % want == 0


@pytest.mark.one_jax
@pytest.mark.moves_rows
@pytest.mark.parametrize("domains", per_domain())
@pytest.mark.parametrize("dtype", [BF16, np.float32])
def test_gradients_are_summed_at_home(dtype, domains, implementation):
    """In float32: places in the order of the ranks, then the home expert. An empty place adds nothing."""
    ids, placement = skewed()
    on = ranks(R, domains)
    width = LONG if dtype == np.float32 else 5
    w, cotangent = floats((R, L, width), dtype), floats((R, L + S, width), dtype, seed=3)

    def shard(w, ids, cotangent):
        plan = jax_ep.balance(ids, group=on.group, num_experts=E, num_redundant_experts=S)
        run = lambda w: jnp.asarray(jax_ep.replicate(w, plan, group=on.group, implementation=implementation))
        return jax.vjp(run, w)[1](cotangent)[0]

    got = on.run(shard, w, ids, cotangent)
    want = np.zeros((E, width), np.float32)
    for r in range(R):
        for n in range(S):
            if placement[r, L + n] >= 0:
                want[placement[r, L + n]] += cotangent[r, L + n].astype(np.float32)
    want += cotangent[:, :L].reshape(E, width).astype(np.float32)
    if domains is None:
        assert same_bits(got, want.reshape(R, L, width).astype(dtype))
    else:
        tolerance = 2**-7 if dtype == BF16 else 1e-6  # each domain's sum, of up to 8, is rounded too
        np.testing.assert_allclose(
            got.astype(np.float32).reshape(E, width), want, rtol=tolerance, atol=tolerance
        )


def layer(x, ids, weights, w, places, **options):
    """A layer whose experts take their weights as an argument."""
    on = ranks(R, options.pop("domains", None))

    def experts(sent, w):
        x = (
            jax_ep.dequantize_fp8(sent.x, jnp.float32)
            if isinstance(sent.x, jax_ep.QuantizedArray)
            else sent.x
        )
        hidden = jnp.tanh(jax_ep.grouped_dot(x, w["up"], sent.group_sizes))
        return jax_ep.grouped_dot(hidden, w["down"], sent.group_sizes)

    def shard(x, ids, weights, w):
        return jax_ep.moe(
            x,
            ids,
            weights,
            experts,
            group=on.group,
            num_experts=E,
            num_redundant_experts=places,
            expert_params=w,
            return_stats=True,
            **options,
        )

    return on.map(shard)(x, ids, weights, w)


@functools.cache
def inputs(width=H):
    w = {"up": floats((E, width, F), seed=3), "down": floats((E, F, width), seed=4)}
    return floats((R * T, width)), skewed()[0].reshape(-1, K), floats((R * T, K), seed=2), w


OPTIONS = [
    {},
    {"capacity": 3 * T * K, "expert_alignment": 4, "num_valid_tokens": 9, "quantize": "fp8_dequantize"},
    *({"domains": domains} for domains in per_domain()[1:]),
]


@functools.cache
def differentiated(places, is_twice, **options):
    """Returns the result of a layer, its statistics, its gradients, and if `is_twice` a gradient of these."""
    x, ids, weights, w = inputs(128 if "quantize" in options else H)

    def loss(x, weights, w):
        out, stats = layer(x, ids, weights, w, places, **options)
        return jnp.sum(jnp.sin(out)), (out, stats)

    gradient = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)

    def curvature(x, weights, w):
        first, aux = gradient(x, weights, w)
        return jnp.sum(first[0] ** 2), (first, aux)

    def run(x, weights, w):
        if not is_twice:
            return gradient(x, weights, w), ()
        # The gradient of a gradient goes through replicate once more.
        second, first_and_aux = jax.grad(curvature, argnums=2, has_aux=True)(x, weights, w)
        return first_and_aux, second

    with jax.default_matmul_precision("highest"):
        (first, (out, stats)), second = jax.device_get(jax.jit(run)(x, weights, w))
    return out, stats, first, second


@pytest.mark.one_jax
@pytest.mark.parametrize(
    ("options", "implementation"),
    [
        ({}, "ffi"),
        *(pytest.param(options, "ffi", marks=pytest.mark.slow) for options in OPTIONS[1:]),
        pytest.param({}, "xla", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_layer_is_that_without_redundant_experts(options, implementation):
    """Values, gradients and their gradients; with nothing dropped, at 1.05 T K rows."""
    is_twice = not options and implementation == "ffi"
    out, stats, first, second = differentiated(S, is_twice, **options, implementation=implementation)
    at_home = {name: value for name, value in options.items() if name not in ("capacity", "domains")}
    out_home, _, first_home, second_home = differentiated(0, not at_home, **at_home)
    assert stats.num_dropped.sum() == 0
    assert stats.loads_after.max() <= 1.02 * stats.loads_before.mean() + 1
    np.testing.assert_allclose(out, out_home, rtol=1e-4, atol=1e-4)
    got, want = (first, second), (first_home, second_home if is_twice else ())
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4 * max(1, np.abs(other).max()))


@pytest.mark.one_jax
@pytest.mark.parametrize("order", ["rank", "expert_padded"])
def test_other_orders_take_the_ids_of_a_plan(order, implementation):
    """The sum of a token's rows, each times the number of its logical expert, whose weight came along."""
    ids, _ = skewed()
    on = ranks(R)
    x, scale = floats((R, T, H)), np.arange(E, dtype=np.float32).reshape(R, L)

    def shard(x, ids, scale):
        plan = jax_ep.balance(ids, group=on.group, num_experts=E, num_redundant_experts=S)
        scale = jnp.asarray(jax_ep.replicate(scale, plan, group=on.group))
        sent = jax_ep.dispatch(x, plan.topk_idx, group=on.group, num_experts=plan.num_experts, order=order)
        if order == "rank":
            here = jnp.where(sent.topk_idx >= 0, jnp.take(scale, sent.topk_idx, mode="clip"), 0)
            y = sent.x * jnp.sum(here, axis=1, keepdims=True)
        else:
            y = jnp.where(sent.is_row()[..., None], sent.x, 0) * scale[:, None, None]
        return jax_ep.combine(y, sent.handle)

    want = x * ids.sum(axis=-1, keepdims=True).astype(np.float32)
    np.testing.assert_allclose(on.run(shard, x, ids, scale), want, rtol=1e-5, atol=1e-5)


SAVE_REPLICAS = jax.checkpoint_policies.save_only_these_names(
    jax_ep.checkpoint_names.handle, jax_ep.checkpoint_names.replicas
)


def scanned(wrap):
    """Returns the gradients of two layers in a scan, and the lowered program."""
    x, ids, weights, w = inputs()

    def loss(x, w):
        body = wrap(lambda x: layer(x, ids, weights, w, S)[0])
        return jnp.sum(jax.lax.scan(lambda x, _: (body(x), None), x, None, length=2)[0] ** 2)

    program = jax.jit(jax.grad(loss, argnums=(0, 1)))
    return jax.device_get(program(x, w)), program.lower(x, w).as_text()


@functools.cache
def scanned_without_remat():
    return scanned(lambda body: body)


@pytest.mark.one_jax
@pytest.mark.parametrize(
    "policy", [pytest.param(None, marks=pytest.mark.slow), jax_ep.save_ep_residuals, SAVE_REPLICAS]
)
def test_remat_and_scan_repeat_the_plan(policy):
    """The same gradients; with the policy the plan is kept, and the replicas are sent again."""
    got, text = scanned(functools.partial(jax.checkpoint, policy=policy))
    want, _ = scanned_without_remat()
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    if jax.default_backend() == "cpu":
        assert text.count("@jax_ep_balance(") == (2 if policy is None else 1)
        # Of weights, of the combine's gradient, and of weights again.
        assert text.count("@jax_ep_push(") == (2 if policy is SAVE_REPLICAS else 3)


def test_a_scan_stores_no_home_weights():
    x, ids, weights, w = inputs()
    layers = {key: np.stack([array] * 3) for key, array in w.items()}

    def loss(w):
        return jnp.sum(jax.lax.scan(lambda x, w: (layer(x, ids, weights, w, S)[0], None), x, w)[0])

    jaxpr = jax.make_jaxpr(lambda w: jax.tree.leaves(jax.vjp(loss, w)[1]))(layers)
    (scan,) = (one for one in jaxpr.eqns if one.primitive.name == "scan")
    stored = [output.aval.shape for output in scan.outvars]
    assert (3, R * S, H, F) in stored
    assert (3, R * L, H, F) not in stored


def test_start_and_done_give_the_same_bits(annotated):
    ids, _ = skewed()
    w = floats((R, L, 7))
    apart = lambda w, plan, group: jax_ep.replicate_start(w, plan, group=group).done()
    assert same_bits(replicated(ranks(R), w, ids, apart), replicated(ranks(R), w, ids))


def test_weights_stay_as_they_are_without_places():
    on, (ids, _), w = ranks(R), skewed(), floats((R, L, 7))

    def shard(w, ids):
        plan = jax_ep.balance(ids, group=on.group, num_experts=E, num_redundant_experts=0)
        return jax_ep.replicate(w, plan, group=on.group)

    assert same_bits(on.run(shard, w, ids), w)


def test_rejects_wrong_weights_and_plans():
    on = ranks(R)
    ids, _ = skewed()
    with pytest.raises(ValueError, match=rf"every array of w must be \[L, ...\] with L = {L}"):
        replicated(on, np.zeros((R, L + 1, 2), np.float32), ids)
    send = lambda placement: on.run(
        lambda w: jax_ep.replicate(w, placement, group=on.group), np.zeros((R, L), np.float32)
    )
    with pytest.raises(TypeError, match=r"replicate: placement must be a Placement, .* got dict"):
        send({})
    with pytest.raises(ValueError, match=f"placement must be of the {R} ranks of the group, got one of {E}"):
        send(jax_ep.Placement.from_map(np.arange(E), num_logical_experts=E, num_ranks=E))
    x, _, weights, _ = inputs()
    with pytest.raises(ValueError, match="num_redundant_experts needs expert_params"):
        layer(x, ids.reshape(-1, K), weights, None, S)
