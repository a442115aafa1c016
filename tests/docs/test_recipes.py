"""Every recipe of examples/recipes_*.py, its values and gradients, against the same sum without any ranks.

The reference works in float32, and puts every token through each of its experts.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import recipes_balance
import recipes_experts
import recipes_tokens
from cases import assert_close, floats, routing
from devices import make_mesh, most_ranks

pytestmark = pytest.mark.no_gpu

R, T, K, E, H, F = most_ranks(), 6, 3, 16, 8, 12
N = R * T


@pytest.fixture
def on_ranks(open_group):
    """The mesh and the group that every recipe takes."""
    mesh = make_mesh((R,), ("ep",))
    return mesh, open_group(mesh, "ep")


def feed_forward_parameters(num_experts=E):
    return {
        "up": floats((num_experts, H, F), seed=3) / H**0.5,
        "down": floats((num_experts, F, H), seed=4) / F**0.5,
    }


def tokens(num_experts=E, count=T):
    """Rows [N, H], ids [N, K] with unused, repeated and impossible ones among them, weights [N, K]."""
    ids = routing("sprinkled", R, count, K, num_experts).reshape(-1, K)
    return floats((len(ids), H)), jnp.asarray(ids), floats((len(ids), K), seed=2)


def each_expert(parameters, rows):
    """[E, N, H]: every row through every expert."""
    hidden = jnp.einsum("nh,ehf->enf", rows, parameters["up"])
    if "up_bias" in parameters:
        hidden = hidden + parameters["up_bias"][:, None]
    y = jnp.einsum("enf,efh->enh", jax.nn.gelu(hidden), parameters["down"])
    return y + parameters["down_bias"][:, None] if "down_bias" in parameters else y


@jax.jit
def dense(parameters, x, ids, weights):
    """The layer written out, biases included where there are some."""
    num_experts = parameters["up"].shape[0]
    chosen = jax.nn.one_hot(ids, num_experts) * weights[..., None]
    return jnp.einsum("nke,enh->nh", chosen, each_expert(parameters, x))


def assert_equal(got, want):
    """All arrays of the pytrees, up to the rounding of float32; XLA rounds the dense sums as well."""
    jax.tree.map(lambda one, other: assert_close(one, other, terms=10), got, want)


def check(recipe, reference, *arguments):
    """Equal values, and equal gradients in all arguments."""

    def run(function):
        def loss(*arguments):
            out = function(*arguments)
            return jnp.sum(out**2), out

        everything = tuple(range(len(arguments)))
        (_, out), gradients = jax.jit(jax.value_and_grad(loss, everything, has_aux=True))(*arguments)
        return out, gradients

    (got, gradients), (want, wanted) = run(recipe), run(reference)
    assert np.abs(want).max() > 0.1
    assert_equal((got, gradients), (want, wanted))


@pytest.mark.one_jax
def test_expert_biases(on_ranks):
    biases = {"up_bias": floats((E, F), seed=5), "down_bias": floats((E, H), seed=6)}
    x, ids, weights = tokens()
    check(
        lambda p, x, w: recipes_experts.expert_biases(*on_ranks, p, x, ids, w),
        lambda p, x, w: dense(p, x, ids, w),
        feed_forward_parameters() | biases,
        x,
        weights,
    )


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 1e-5), pytest.param("bfloat16", 3e-2, marks=pytest.mark.one_jax)]
)
def test_int8_experts(on_ranks, dtype, tolerance):
    """Against the same integers times their scales, and not far from the matrices themselves."""
    parameters = feed_forward_parameters()
    quantized = {name: jax.jit(recipes_experts.quantize_int8)(matrix) for name, matrix in parameters.items()}
    restored = {name: values * scales[:, None] for name, (values, scales) in to_float(quantized).items()}
    x, ids, weights = tokens()
    x = jnp.asarray(x, dtype)
    got = jax.jit(lambda *given: recipes_experts.int8_experts(*on_ranks, *given))(quantized, x, ids, weights)
    assert got.dtype == dtype
    got, x = got.astype(jnp.float32), x.astype(jnp.float32)
    np.testing.assert_allclose(got, dense(restored, x, ids, weights), rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(got, dense(parameters, x, ids, weights), atol=0.05)


def to_float(quantized):
    return jax.tree.map(lambda leaf: np.asarray(leaf).astype(np.float32), quantized)


@pytest.mark.one_jax
def test_weights_inside_experts(on_ranks):
    x, ids, weights = tokens()

    def reference(parameters, x, weights):
        one_choice = lambda k: dense(
            parameters, x * weights[:, k, None], ids[:, k : k + 1], jnp.ones_like(weights[:, :1])
        )
        return sum(one_choice(k) for k in range(K))

    check(
        lambda p, x, w: recipes_experts.weights_inside_experts(*on_ranks, p, x, ids, w),
        reference,
        feed_forward_parameters(),
        x,
        weights,
    )


@pytest.mark.one_jax
def test_shared_experts(on_ranks):
    shared = {"up": floats((H, 5), seed=7) / H**0.5, "down": floats((5, H), seed=8)}
    x, ids, weights = tokens()
    check(
        lambda p, s, x, w: recipes_experts.shared_experts(*on_ranks, p, s, x, ids, w),
        lambda p, s, x, w: dense(p, x, ids, w) + jax.nn.gelu(x @ s["up"]) @ s["down"],
        feed_forward_parameters(),
        shared,
        x,
        weights,
    )


def gated_dense(parameters, x, ids, weights):
    gate, up = jnp.einsum("nh,ehif->ienf", x, parameters["up"])
    y = jnp.einsum("enf,efh->enh", jax.nn.silu(gate) * up, parameters["down"])
    return jnp.einsum("nke,enh->nh", jax.nn.one_hot(ids, E) * weights[..., None], y)


@pytest.mark.parametrize(
    ("recipe", "axis"),
    [(recipes_experts.tensor_parallel_experts, "tp"), (recipes_experts.fsdp_experts, "fsdp")],
)
def test_sharded_gated_experts(open_group, recipe, axis):
    split = min(2, R)
    mesh = make_mesh((R // split, split), ("ep", axis))
    group = open_group(mesh, "ep")
    parameters = {"up": floats((E, H, 2, R), seed=3) / H**0.5, "down": floats((E, R, H), seed=4) / R**0.5}
    x, ids, weights = tokens()
    check(
        lambda p, x, w: recipe(mesh, group, p, x, ids, w),
        lambda p, x, w: gated_dense(p, x, ids, w),
        parameters,
        x,
        weights,
    )


@pytest.mark.slow
def test_last_batch_runs_the_same_program(on_ranks):
    """Rows that are no tokens hold some numbers here; they get zeros, and give no gradient."""
    parameters, router, x = feed_forward_parameters(), floats((H, E), seed=9), floats((N, H))
    traced = []

    @jax.jit
    def run(parameters, router, x, num_tokens):
        traced.append(num_tokens)

        def loss(parameters, router, x):
            y = recipes_tokens.last_batch(*on_ranks, parameters, router, K, x, num_tokens)
            return jnp.sum(y**2), y

        return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(parameters, router, x)

    def reference(parameters, router, x):
        weights, ids = jax.lax.top_k(jax.nn.softmax(x @ router), K)
        y = dense(parameters, x, ids, weights)
        return jnp.sum(y**2), y

    for num_tokens in (N, N // 2 - 1, 0):
        (_, got), gradients = run(parameters, router, x, jnp.int32(num_tokens))
        (_, want), wanted = jax.value_and_grad(reference, (0, 1, 2), has_aux=True)(
            parameters, router, x[:num_tokens]
        )
        assert not np.any(got[num_tokens:])
        assert not np.any(gradients[2][num_tokens:])
        gradients = (*gradients[:2], gradients[2][:num_tokens])
        assert_equal((got[:num_tokens], gradients), (want, wanted))
    assert len(traced) == 1


@pytest.mark.one_jax
@pytest.mark.parametrize("count", [1, 5])
def test_replicated_tokens(on_ranks, count):
    x, ids, weights = (array[:count] for array in tokens())
    ids = ids.at[0].set(jnp.arange(K, dtype=jnp.int32) * E // K)  # on several ranks
    check(
        lambda p, x, w: recipes_tokens.replicated_tokens(*on_ranks, p, x, ids, w),
        lambda p, x, w: dense(p, x, ids, w),
        feed_forward_parameters(),
        x,
        weights,
    )


def mask_of(ids):
    """Bool [N, E] of the used choices in ids."""
    return np.asarray(jax.nn.one_hot(ids, E).any(axis=1))


def test_routing_map(on_ranks):
    """Tokens of no, some and K experts."""
    x, ids, _ = tokens()
    chosen = mask_of(ids)
    assert {0, K} <= set(chosen.sum(axis=1))
    check(
        lambda p, x, w: recipes_tokens.routing_map(*on_ranks, p, K, x, chosen, w),
        lambda p, x, w: jnp.einsum("ne,enh->nh", jnp.where(chosen, w, 0), each_expert(p, x)),
        feed_forward_parameters(),
        x,
        floats((N, E), seed=10),
    )


def test_a_mask_of_too_many_experts():
    chosen = np.zeros((2, 6), bool)
    chosen[0, [1, 3, 4, 5]] = chosen[1, 2] = True
    ids, weights = recipes_tokens.ids_of_mask(chosen, np.arange(12, dtype=np.float32).reshape(2, 6), 2)
    np.testing.assert_array_equal(ids, [[1, 3], [2, -1]])
    np.testing.assert_array_equal(weights[0], [1, 3])
    assert weights[1, 0] == 8


def balanced_reference(parameters, router, bias, x):
    scores = jax.nn.sigmoid(x @ router)
    _, ids = jax.lax.top_k(scores + bias[None], K)
    weights = jnp.take_along_axis(scores, ids, axis=1)
    y = dense(parameters, x, ids, weights / weights.sum(axis=1, keepdims=True))
    counts = jax.nn.one_hot(ids, E).sum(axis=(0, 1))
    mean = jnp.mean(scores / scores.sum(axis=1, keepdims=True), axis=0)
    return y, E * jnp.sum(counts / counts.sum() * mean), counts


def test_balanced_layer(on_ranks):
    """Its result, the loss and the counts; the bias has no gradient, as it only chooses."""
    given = feed_forward_parameters(), floats((H, E), seed=9), floats((E,), seed=11), floats((N, H))

    def loss(function):
        def total(*given):
            y, balance, counts, *stats = function(*given)
            return jnp.sum(y**2) + 3 * balance, (y, balance, counts.astype(jnp.float32), stats)

        return jax.jit(jax.value_and_grad(total, (0, 1, 2, 3), has_aux=True))(*given)

    (_, (*got, (stats,))), gradients = loss(
        lambda *given: recipes_balance.balanced_layer(*on_ranks, *given, top_k=K)
    )
    (_, (*want, _)), wanted = loss(balanced_reference)
    assert not np.any(stats.num_dropped)
    np.testing.assert_array_equal(stats.tokens_per_expert, got[2])
    assert not np.any(gradients[2])
    assert_equal((got, gradients), (want, wanted))


@pytest.mark.one_jax
def test_counts_have_what_a_full_buffer_drops(on_ranks):
    bias = jnp.zeros(E).at[0].set(100.0)  # every token chooses expert 0
    capacity = N // 2
    _, _, counts, stats = jax.jit(
        lambda *given: recipes_balance.balanced_layer(*on_ranks, *given, top_k=K, capacity=capacity)
    )(feed_forward_parameters(), floats((H, E), seed=9), bias, floats((N, H)))
    assert counts[0] == N
    assert counts.sum() == N * K
    dropped = np.maximum(counts.reshape(R, -1).sum(axis=1) - capacity, 0)
    np.testing.assert_array_equal(stats.num_dropped, dropped)
    assert dropped[0] > 0
    assert stats.tokens_per_expert[0] == capacity


@pytest.mark.one_jax
def test_biases_bring_balance(on_ranks):
    """By updates of the bias alone: a router that prefers few experts comes to use all of them."""
    parameters, x = feed_forward_parameters(), floats((N, H))
    x[:, 0] = 1
    router = floats((H, E), seed=9)
    router[0] += np.linspace(-2, 2, E)
    layer = jax.jit(
        lambda bias: recipes_balance.balanced_layer(*on_ranks, parameters, router, bias, x, top_k=K)
    )
    step = jax.jit(lambda bias, counts: recipes_balance.updated_bias(bias, counts, 0.01))
    bias = jnp.zeros(E)
    most = []
    for _ in range(100):
        _, _, counts, _ = layer(bias)
        bias = step(bias, counts)
        most.append(int(counts.max()) / (N * K / E))
    assert most[0] > 2
    assert np.mean(most[-10:]) < 1.6


def test_an_updated_bias():
    bias = recipes_balance.updated_bias(jnp.zeros(4), jnp.asarray([0, 4, 2, 2], jnp.int32), speed=0.5)
    np.testing.assert_array_equal(bias, [0.5, -0.5, 0, 0])


def test_placed_experts(on_ranks):
    """With the placement of the same tokens' counts: values and gradients, also of the weights at home."""
    x, ids, weights = tokens()
    ids = ids.at[:, 0].set(0)  # every token chooses expert 0
    counts = np.stack(
        [np.bincount(rank[(rank >= 0) & (rank < E)], minlength=E) for rank in np.asarray(ids).reshape(R, -1)]
    )
    placement = recipes_balance.plan_placement(on_ranks[0], counts.astype(np.int32), 1)
    assert R == 1 or np.sum(placement.physical_to_logical == 0) > 1

    def recipe(parameters, x, weights):
        placed = recipes_balance.replicate_experts(*on_ranks, parameters, placement)
        return recipes_balance.placed_experts(*on_ranks, placed, placement, x, ids, weights)[0]

    check(recipe, lambda p, x, w: dense(p, x, ids, w), feed_forward_parameters(), x, weights)


@pytest.mark.one_jax
def test_a_new_placement_runs_the_same_program(on_ranks):
    """A server: two steps, a placement from their counts, and a step with it, without a new compilation."""
    parameters, (x, ids, weights) = feed_forward_parameters(), tokens()
    ids = ids.at[:, 0].set(0)
    traced = []

    @jax.jit
    def serve(placed, placement):
        traced.append(placement)
        return recipes_balance.placed_experts(*on_ranks, placed, placement, x, ids, weights)

    place = jax.jit(lambda placement: recipes_balance.replicate_experts(*on_ranks, parameters, placement))
    placement = recipes_balance.plan_placement(on_ranks[0], jnp.zeros((R, E), jnp.int32), 1)
    assert placement.physical_to_logical.reshape(R, -1)[:, -1].tolist() == [-1] * R
    placed, counts = place(placement), 0
    for _ in range(2):
        y, step_counts = serve(placed, placement)
        counts += step_counts
    assert_equal(y, dense(parameters, x, ids, weights))
    used = np.asarray(ids)
    used = used[(used >= 0) & (used < E)]
    np.testing.assert_array_equal(counts.sum(axis=0), 2 * np.bincount(used, minlength=E))
    placement = recipes_balance.plan_placement(on_ranks[0], counts, 1)
    y, _ = serve(place(placement), placement)
    assert_equal(y, dense(parameters, x, ids, weights))
    assert len(traced) == 1


@pytest.mark.one_jax
@pytest.mark.parametrize("num_experts", [R + 2, R + R // 2 + 1, 5])
def test_uneven_experts(on_ranks, num_experts):
    x, ids, weights = tokens(num_experts)

    def recipe(parameters, x, weights):
        padded = recipes_balance.pad_experts(parameters, R)
        assert padded["up"].shape[0] % R == 0
        return recipes_balance.uneven_experts(*on_ranks, padded, num_experts, x, ids, weights)

    check(recipe, lambda p, x, w: dense(p, x, ids, w), feed_forward_parameters(num_experts), x, weights)


@pytest.mark.one_jax
@pytest.mark.parametrize(("num_experts", "num_ranks"), [(10, 8), (5, 8), (16, 8), (1, 1), (60, 8)])
def test_experts_are_dealt_out_evenly(num_experts, num_ranks):
    places = recipes_balance.expert_places(num_experts, num_ranks)
    each = -(-num_experts // num_ranks)
    assert len(set(places.tolist())) == num_experts
    on_rank = np.bincount(places // each, minlength=num_ranks)
    assert len(on_rank) == num_ranks
    assert on_rank.max() - on_rank.min() <= 1
    whole = np.arange(1, num_experts + 1)
    padded = recipes_balance.pad_experts(jnp.asarray(whole), num_ranks)
    assert padded.shape == (each * num_ranks,)
    np.testing.assert_array_equal(padded[places], whole)
