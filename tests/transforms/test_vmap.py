"""`jax.vmap` of every op over subsets of its operands, against a loop: values and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ranks

import jax_ep

pytestmark = pytest.mark.processes

R, T, K, E, H, F, B = 2, 4, 2, 4, 8, 4, 2
L, C = E // R, 2 * T * K
RNG = np.random.default_rng(3)


def numbers(*shape):
    return RNG.standard_normal((R, B, *shape)).astype(np.float32)


def choices():
    return np.stack([RNG.permutation(E)[:K] for _ in range(R * B * T)]).reshape(R, B, T, K).astype(np.int32)


def sizes():
    return RNG.integers(0, C // L, (R, B, L)).astype(np.int32)


def dispatch(options, x, ids, weights, **more):
    return jax_ep.dispatch(x, ids, weights, group=ranks(R).group, num_experts=E, **options, **more)


def by_rank(options, x, ids, weights):
    sent = dispatch(options, x, ids, weights, order="rank")
    return sent.x, sent.topk_weights, sent.tokens_per_expert


def by_expert(options, x, ids, weights):
    sent = dispatch(options, x, ids, weights)
    return sent.x, sent.row_weights, sent.group_sizes


def by_padded_expert(options, x, ids, weights):
    sent = dispatch(options, x, ids, weights, order="expert_padded")
    is_row = jnp.arange(sent.x.shape[1])[None] < sent.group_sizes[:, None]
    return jnp.where(is_row[..., None], sent.x, 0), jnp.where(is_row, sent.row_weights, 0)


def by_fp8(options, x, ids, weights):
    sent = dispatch(options, x, ids, weights, quantize="fp8_dequantize")
    return sent.x, sent.row_weights


def started(options, x, ids, weights):
    pending = jax_ep.dispatch_start(x, ids, weights, group=ranks(R).group, num_experts=E, **options)
    sent = pending.done()
    return sent.x, sent.row_weights


def combine(options, y, ids, weights, bias, **more):
    sent = dispatch(options, jnp.ones((T, 1)), ids, None)
    return jax_ep.combine(y, sent.handle, row_weights=weights, bias=bias, **options, **more)


def redispatch(options, x, ids, weights):
    sent = dispatch(options, jnp.ones((T, 1)), ids, None)
    return jax_ep.redispatch(x, sent.handle, topk_weights=weights, **options)


def moe(options, x, ids, weights, matrices, **more):
    # Otherwise GPUs round to tf32 before or after the sum over the batch.
    experts = lambda sent, w: jax_ep.grouped_dot(sent.x, w, sent.group_sizes, precision="highest")
    return jax_ep.moe(
        x,
        ids,
        weights,
        experts,
        group=ranks(R).group,
        num_experts=E,
        expert_params=matrices,
        **options,
        **more,
    )


def replicate(options, ids, w, **more):
    plan = jax_ep.balance(ids, group=ranks(R).group, **options, **more)
    physical = jax_ep.replicate(w, plan, group=ranks(R).group, **options)
    return jax.tree.leaves(physical), plan.physical_to_logical


def placed(options, placement, ids, w):
    placement = jax_ep.Placement.from_map(placement, num_logical_experts=E, num_ranks=R)
    return replicate(options, ids, w, placement=placement)


def permute(options, x, ids, weights):
    sent = jax_ep.permute(x, ids, topk_weights=weights, num_local_experts=E, **options)
    return sent.x, sent.row_weights, sent.group_sizes


def unpermute(options, y, ids, weights, bias):
    maps = jax_ep.permute(jnp.ones((T, 1)), ids, num_local_experts=E, **options).row_map
    return jax_ep.unpermute(y, maps, topk_weights=weights, bias=bias, topk_idx=ids, **options)


def physical(rows, home, redundant, group_sizes):
    return jax_ep.grouped_dot(rows, jax_ep.PhysicalWeights(home, redundant), group_sizes)


def gated_mlp(*arrays):
    rows, up, down, group_sizes, b_up, b_down, weights = arrays
    return jax_ep.gated_mlp(rows, up, down, group_sizes, b_up=b_up, b_down=b_down, row_weights=weights)


def of_local(function):
    """Returns a local op without the choice of an implementation."""
    return lambda options, *arrays: function(*arrays)


ROUTED = {"x": numbers(T, H), "ids": choices(), "weights": numbers(T, K)}
PLACEMENT = np.concatenate([RNG.permutation(E) for _ in range(B * 2)]).reshape(1, B, 2 * E).astype(np.int32)
OPS = {
    "dispatch by rank": (by_rank, ROUTED),
    "dispatch by expert": (by_expert, ROUTED),
    "dispatch by padded expert": (by_padded_expert, ROUTED),
    "dispatch through FP8": (by_fp8, ROUTED | {"x": numbers(T, 128)}),
    "dispatch_start": (started, ROUTED),
    "redispatch": (redispatch, ROUTED),
    "combine": (
        combine,
        {
            "y": numbers(R * T * K, H),
            "ids": choices(),
            "row_weights": numbers(R * T * K),
            "bias": numbers(T, H),
        },
    ),
    "moe": (moe, ROUTED | {"matrices": numbers(L, H, F)}),
    "moe with redundant experts": (
        functools.partial(moe, num_redundant_experts=1),
        ROUTED | {"matrices": numbers(L, H, F)},
    ),
    "replicate": (
        functools.partial(replicate, num_experts=E, num_redundant_experts=1),
        {"ids": np.minimum(choices(), 1), "w": numbers(L, F)},
    ),
    "replicate to a placement": (
        placed,
        {"placement": PLACEMENT.repeat(R, 0), "ids": choices(), "w": numbers(L, F)},
    ),
    "permute": (permute, ROUTED),
    "unpermute": (
        unpermute,
        {"y": numbers(T * K, H), "ids": choices(), "weights": numbers(T, K), "bias": numbers(E, H)},
    ),
    "grouped_dot": (
        of_local(jax_ep.grouped_dot),
        {"rows": numbers(C, H), "w": numbers(L, H, F), "group_sizes": sizes()},
    ),
    "grouped_dot of physical weights": (
        of_local(physical),
        {
            "rows": numbers(C, H),
            "home": numbers(L - 1, H, F),
            "redundant": numbers(1, H, F),
            "group_sizes": sizes(),
        },
    ),
    "gated_mlp": (
        of_local(gated_mlp),
        {
            "rows": numbers(C, H),
            "w_up": numbers(L, H, 2 * F),
            "w_down": numbers(L, F, H),
            "group_sizes": sizes(),
            "b_up": numbers(L, 2 * F),
            "b_down": numbers(L, H),
            "row_weights": numbers(C),
        },
    ),
}
LOCAL = {"grouped_dot", "grouped_dot of physical weights", "gated_mlp"}
# `make test` has these with "ffi", and with the operands that are listed here, if any.
QUICK = {
    "dispatch by expert": None,
    "moe with redundant experts": [("ids",)],  # one plan per element for the same matrices
    "replicate": None,
    "permute": None,
}
# With the newest JAX, those that have the rules of the others, too.
ANY_JAX = ("dispatch by expert", "moe with redundant experts")


def marks_of(name, implementation):
    if name not in QUICK or implementation != "ffi":
        return pytest.mark.slow
    return [] if name in ANY_JAX else pytest.mark.one_jax


CASES = [
    pytest.param(name, implementation, marks=marks_of(name, implementation))
    for name in OPS
    for implementation in ((None,) if name in LOCAL else ("ffi", "xla"))
]


def subsets(names, each_alone):
    """Returns which operands are batched: all, and each alone, or without `each_alone` only the last one.

    So any two operands are batched together, and one without the other.
    """
    alone = [(name,) for name in names]
    return [tuple(names), *(alone if each_alone else alone[-1:])]


def loss_of(function, options, element, *operands):
    """Returns a loss that weights the results by the number of the batch element; and the results."""
    results = function(options, *operands)
    total = jnp.zeros(())
    for leaf in jax.tree.leaves(results):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            factors = jnp.cos(jnp.arange(leaf.size, dtype=jnp.float32) + element).reshape(leaf.shape)
            total += jnp.sum(leaf.astype(jnp.float32) * factors)
    return total, results


def on_ranks(program):
    """Returns a program of one rank's operands as a compiled one of arrays [R, ...]."""
    add_axis = functools.partial(jax.tree.map, lambda array: array[None])
    return jax.jit(ranks(R).map(lambda *arrays: add_axis(program(*(array[0] for array in arrays)))))


@pytest.mark.parametrize(("name", "implementation"), CASES)
def test_vmap_equals_a_loop(name, implementation):
    function, operands = OPS[name]
    loss = functools.partial(loss_of, function, {"implementation": implementation})
    elements = 3 * np.tile(np.arange(B, dtype=np.float32), (R, 1))
    floating = [i for i, array in enumerate(operands.values(), 1) if array.dtype == np.float32]
    one = on_ranks(jax.value_and_grad(loss, floating, has_aux=True))
    # JAX's own ops, which make up "xla", need no rules of this package.
    for subset in QUICK.get(name) or subsets(operands, each_alone=implementation != "xla"):
        is_batched = [True, *(operand in subset for operand in operands)]
        axes = [0 if batched else None for batched in is_batched]
        arrays = [elements, *operands.values()]
        arrays = [
            array if batched else array[:, 0] for array, batched in zip(arrays, is_batched, strict=True)
        ]

        def sum_of_losses(*arrays, axes=axes):
            losses, results = jax.vmap(loss, axes)(*arrays)
            return jnp.sum(losses), results

        (_, results), gradients = on_ranks(jax.value_and_grad(sum_of_losses, floating, has_aux=True))(*arrays)
        pairs = list(zip(arrays, is_batched, strict=True))
        loop = [one(*(array[:, b] if batched else array for array, batched in pairs)) for b in range(B)]
        (_, wanted), wanted_gradients = jax.tree.map(lambda *parts: np.stack(parts, 1), *loop)
        check = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
        jax.tree.map(functools.partial(check, err_msg=f"results, batched: {subset}"), results, wanted)
        for i, got, want in zip(floating, gradients, wanted_gradients, strict=True):
            want = want if is_batched[i] else want.sum(axis=1)
            check(got, want, err_msg=f"gradient of {list(operands)[i - 1]}, batched: {subset}")


@pytest.mark.slow
def test_derivatives_of_vmap_and_vmap_of_derivatives():
    """Of a layer with redundant experts, whose matrices are the same for the whole batch."""
    function, operands = OPS["moe with redundant experts"]
    loss = functools.partial(loss_of, function, {"implementation": "ffi"}, 0.0)
    scalar = lambda *arrays: loss(*arrays)[0]
    gradient = jax.grad(scalar, 3)
    x, ids, weights, matrices = (jnp.asarray(array) for array in operands.values())
    matrices = matrices[:, 0]
    one = on_ranks(gradient)
    want = np.stack([one(x[:, b], ids[:, b], weights[:, b], matrices) for b in range(B)], 1)
    axes = (0, 0, 0, None)

    def derivatives(*arrays):
        losses = jax.vmap(scalar, axes)
        two = tuple(jnp.stack([array, array[::-1]]) for array in arrays[:3])
        return {
            "vmap of grad": jax.vmap(gradient, axes)(*arrays),
            "jacrev of vmap": jax.jacrev(losses, 3)(*arrays),
            "vmap of vmap": jax.grad(lambda m: jnp.sum(jax.vmap(losses, axes)(*two, m)))(arrays[3])[None],
            "vmap of checkpoint": jax.grad(
                lambda m: jnp.sum(jax.vmap(jax.checkpoint(scalar), axes)(*arrays[:3], m))
            )(arrays[3])[None],
        }

    got = on_ranks(derivatives)(x, ids, weights, matrices)
    total = want.sum(axis=1, keepdims=True)
    wanted = {
        "vmap of grad": want,
        "jacrev of vmap": want,
        "vmap of vmap": 2 * total,
        "vmap of checkpoint": total,
    }
    for name, value in wanted.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


def test_vmap_copies_no_weights_of_home_experts():
    """Weights that are the same for the whole batch stay so."""
    ids, w = (jnp.asarray(array) for array in OPS["replicate"][1].values())

    def home(ids, w):
        def one(ids):
            plan = jax_ep.balance(ids, group=ranks(R).group, num_experts=E, num_redundant_experts=1)
            return jax_ep.replicate(w, plan, group=ranks(R).group).home

        return jax.vmap(one, out_axes=None)(ids)

    np.testing.assert_array_equal(on_ranks(home)(ids, w[:, 0]), w[:, 0])
