"""dispatch and combine by a start and a done: the same bits, and on GPUs other work between the two.

Off GPUs there is no stream for communication. Some of the tests ask for it there all the same: XLA:CPU takes
no notice of the annotation, but JAX transforms the annotated op as it does for a GPU.
"""

import functools
import gc
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import count_calls, floats, pairwise, ranks, routing, same_bits
from devices import most_ranks, need_gpu, skip_or_fail

import jax_ep
from jax_ep._transport import ffi

pytestmark = [pytest.mark.processes, pytest.mark.moves_rows]

R, T, K, E, H = most_ranks(), 8, 3, 16, 128
L = E // R
ORDERS = ["rank", "expert", "expert_padded"]


def arrays(tokens=T):
    """Rows, ids, weights, rows for something else, and how many tokens are valid."""
    ids = routing("sprinkled", R, tokens, K, E).reshape(-1, K)
    counts = (np.arange(R, dtype=np.int32) + tokens - 2) % (tokens + 1)  # of four ranks or more, 0 on one
    rows = [floats((R * tokens, width), seed=seed) for seed, width in ((0, H), (2, K), (3, H))]
    return rows[0], ids, *rows[1:], counts


def together(x, ids, weights, **options):
    return jax_ep.dispatch(x, ids, weights, num_experts=E, **options)


def apart(x, ids, weights, **options):
    return jax_ep.dispatch_start(x, ids, weights, num_experts=E, **options).done()


def combined_together(y, handle, **options):
    return jax_ep.combine(y, handle, **options)


def combined_apart(y, handle, **options):
    return jax_ep.combine_start(y, handle, **options).done()


WAYS = {"together": (together, combined_together), "apart": (apart, combined_apart)}


def layer(way, group, x, ids, weights, other, counts, implementation=None, **options):
    """Experts that double. All that is not an op is exact, however XLA fuses it."""
    dispatch, combine = WAYS[way]
    sent = dispatch(
        x, ids, weights, group=group, num_valid_tokens=counts, implementation=implementation, **options
    )
    y = sent.x * 2
    weighted = {} if options.get("order") == "rank" else {"row_weights": sent.row_weights}
    return combine(y, sent.handle, bias=other, implementation=implementation, **weighted)


def mapped(function, check_vma=True):
    on = ranks(R)
    shard = functools.partial(function, on.group)
    return on.map(shard, check_vma=check_vma)


def assert_same(got, want):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert same_bits(one, other)


@pytest.mark.one_jax
@pytest.mark.parametrize(
    ("travels", "annotated", "implementation"),
    pairwise(
        [("rank", "fp8"), ("expert", None), ("expert", "fp8"), ("expert_padded", None)],
        [False, True],
        ["ffi", "xla"],
    ),
    indirect=["annotated"],
)
def test_results_are_the_same(annotated, implementation, travels):
    order, quantize = travels
    options = {"order": order, "quantize": quantize, "implementation": implementation}

    def shard(way, group, x, ids, weights, _, counts):
        sent = WAYS[way][0](x, ids, weights, group=group, num_valid_tokens=counts, **options)
        if order == "expert_padded":  # slots that no row fills may hold anything
            clear = lambda leaf: jnp.where(sent.is_row()[:, :, None], leaf, jnp.zeros((), leaf.dtype))
            return jax.tree.map(clear, sent.x), sent.row_weights, sent.group_sizes, sent.handle
        return sent

    run = lambda way: jax.jit(mapped(functools.partial(shard, way)))(*arrays())
    assert_same(run("apart"), run("together"))


@pytest.mark.parametrize("on_gpus", [False, True])
def test_start_leaves_no_tracers(on_gpus, gpu_group):
    group = gpu_group if on_gpus else ranks(R).group
    shard = lambda *a: layer("apart", group, *a, order="rank")
    function = ranks(R).map(shard)
    x, *rest = arrays()
    gc.freeze()  # each check collects garbage, and would visit whatever earlier tests have left
    with jax.checking_leaks():
        traced = jax.jit(jax.grad(lambda x: jnp.sum(function(x, *rest)))).trace(x)
        traced.lower(lowering_platforms=("cuda",) if on_gpus else None)


def plainly(step):
    return step


def rematerialised(step):
    return jax.checkpoint(step, policy=jax_ep.save_ep_residuals)


def computed_again(step):
    return jax.checkpoint(step)


@pytest.mark.parametrize(
    ("order", "around", "scanned"),
    [
        pytest.param("rank", rematerialised, True, marks=pytest.mark.one_jax),
        pytest.param("expert", plainly, False, marks=pytest.mark.one_jax),
        ("expert", rematerialised, True),
        pytest.param("expert", computed_again, True, marks=pytest.mark.one_jax),
        pytest.param("expert_padded", plainly, False, marks=pytest.mark.one_jax),
    ],
)
def test_gradients_are_the_same(annotated, order, around, scanned):
    x, ids, weights, other, counts = arrays()

    def shard(way, group, x, ids, weights, other, counts):
        def step(x, _):
            return layer(way, group, x, ids, weights, other, counts, order=order), None

        return jax.lax.scan(around(step), x, length=2)[0] if scanned else around(step)(x, None)[0]

    def run(way):
        function = mapped(functools.partial(shard, way))
        loss = lambda x, weights, other: jnp.sum(function(x, ids, weights, other, counts) ** 2)
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(x, weights, other)

    (value, got), (expected, want) = run("apart"), run("together")
    np.testing.assert_allclose(value, expected, rtol=1e-6)  # XLA's sum, which it may take in another order
    assert_same(got, want)
    d_x, d_weights, d_other = (np.asarray(gradient) for gradient in got)
    assert d_x.any()
    assert d_other.any()
    assert d_weights.any() == (order != "rank")  # by rank nobody applies them here


@pytest.mark.one_jax
@pytest.mark.parametrize("check_vma", [False, True])
def test_rows_that_travel_as_fp8(annotated, check_vma):
    x, ids, weights, other, counts = arrays()

    def run(way):
        shard = lambda group, *a: layer(way, group, *a, order="rank", quantize="fp8_dequantize")

        def loss(x):
            sums = mapped(shard, check_vma)(x, ids, weights, other, counts)
            return jnp.sum(sums**2), sums

        return jax.jit(jax.grad(loss, has_aux=True))(x)

    assert_same(run("apart"), run("together"))


def test_pending_is_a_pytree(annotated):
    """It may leave the function that started the op, by jit and scan too."""
    x, ids, weights, _, _ = arrays()

    def shard(group, x, ids, weights):
        start = jax.jit(lambda x: jax_ep.dispatch_start(x, ids, weights, group=group, num_experts=E))

        def step(pending, _):
            sent = pending.done()
            again = jax_ep.combine_start(sent.x, sent.handle, row_weights=sent.row_weights)
            return start(again.done()), None

        return jax.lax.scan(step, start(x), length=2)[0].done().x

    def expected(group, x, ids, weights):
        for _ in range(2):
            sent = together(x, ids, weights, group=group)
            x = jax_ep.combine(sent.x, sent.handle, row_weights=sent.row_weights)
        return together(x, ids, weights, group=group).x

    assert_same(jax.jit(mapped(shard))(x, ids, weights), jax.jit(mapped(expected))(x, ids, weights))


def test_several_biases(annotated):
    def shard(way, group, x, ids, weights, other, _):
        sent = WAYS[way][0](x, ids, weights, group=group)
        return WAYS[way][1](sent.x, sent.handle, bias=(other, x), row_weights=sent.row_weights)

    run = lambda way: jax.jit(mapped(functools.partial(shard, way)))(*arrays())
    assert_same(run("apart"), run("together"))


def lowered_for_gpus(group, implementation):
    """The program of a layer and its gradient."""
    x, *rest = arrays()

    def shard(x, *rest):
        step = lambda x: layer("apart", group, x, *rest, implementation=implementation)
        return rematerialised(step)(x)

    function = ranks(R).map(shard)
    gradient = jax.jit(jax.value_and_grad(lambda x: jnp.sum(function(x, *rest))))
    return gradient.trace(x).lower(lowering_platforms=("cuda",))


def annotated_ops(text):
    """Returns the handlers, by asynchronous call, of a lowered program."""
    annotated = re.findall(r'%(\w+)(:?\d*) = (?:func\.)?call @(\w+)\(.*_xla_stream_annotation = "coll', text)
    bodies = dict(re.findall(r"func\.func private @(\w+)\((.*?)\n  }", text, re.DOTALL))
    assert all(not several for _, several, _ in annotated)
    assert text.count("_xla_stream_annotation") == len(annotated)
    return sorted(re.findall(r"@jax_ep_(\w+)\(", bodies[name]) for _, _, name in annotated)


def test_what_is_apart(gpu_group):
    """Rows on their way to the experts, sums on their way back, and the gradients of the rows.

    Each is one call of one handler that brings one array: for several XLA would wait at once.
    """
    lowered = lowered_for_gpus(gpu_group, "ffi")
    # The push of the gradient brings dot products with the rows, too.
    assert count_calls(lowered.as_text("hlo")) == {"route": 1, "push": 2, "pull": 2}
    assert annotated_ops(lowered.as_text()) == [["pull"], ["pull"], ["push"]]


def weights_apart(group, w, ids, other, square):
    """Sends the weights of redundant experts beside other work."""
    plan = jax_ep.balance(ids, group=group, num_experts=E, num_redundant_experts=1)
    pending = jax_ep.replicate_start(w, plan, group=group)
    other = beside(other, square)
    return pending.done(), other


def test_weights_of_redundant_experts_are_apart(gpu_group):
    """Their way to the ranks, and that of their gradients home."""
    _, ids, _, other, _ = arrays()
    run = ranks(R).map(functools.partial(weights_apart, gpu_group))
    loss = lambda w: jnp.sum(jnp.sin(run(w, ids, other, floats((R * H, H)))[0]))
    lowered = jax.jit(jax.grad(loss)).trace(floats((E, 3))).lower(lowering_platforms=("cuda",))
    assert annotated_ops(lowered.as_text()) == [["pull"], ["push"]]


def test_few_tokens_are_not_apart(gpu_group, monkeypatch):
    """But for their sums."""
    monkeypatch.setattr(ffi, "goes_through_arena", lambda *rows: True)
    lowered = lowered_for_gpus(gpu_group, "ffi")
    assert count_calls(lowered.as_text("hlo")) == {"route": 1, "push": 1, "pull": 2}
    assert lowered.as_text().count("_xla_stream_annotation") == 2


def test_no_loop_is_apart(gpu_group):
    """A batch is a loop around ops, which XLA would not compile in one that is apart."""
    x, ids, weights, other, counts = arrays()
    twice = lambda array: np.stack([array, array[::-1]], axis=1)

    def shard(x, ids, weights, other, counts):
        one = lambda x, weights: layer("apart", gpu_group, x, ids, weights, other, counts)
        return jax.vmap(one, 1, 1)(x, weights)

    function = ranks(R).map(shard)
    traced = jax.jit(function).trace(twice(x), ids, twice(weights), other, counts)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    bodies = dict(re.findall(r"func\.func private @(\w+)\((.*?)\n  }", text, re.DOTALL))
    apart = re.findall(r'call @(\w+)\(.*_xla_stream_annotation = "coll', text)
    assert apart
    assert not any("while" in bodies[name] for name in apart)


def test_xla_starts_its_own_collectives(gpu_group):
    assert "_xla_stream_annotation" not in lowered_for_gpus(gpu_group, "xla").as_text()


def beside(other, square):
    for _ in range(4):
        with jax.named_scope("beside"):
            other = jnp.tanh(other @ square)
    return other


def work_between(program):
    """Returns, for each asynchronous call, whether XLA schedules products between its start and its done."""
    text = program.compile().as_text()
    assert "is_scheduled=true" in text
    (lines,) = [part.splitlines() for part in text.split("\n}") if re.search(r"\w-start\(", part)]
    starts = [(i, re.search(r"%(\S+) = ", line)[1]) for i, line in enumerate(lines) if "-start(" in line]
    print("\n".join(line[:160] for line in lines if re.search(r"-(?:start|done)\(|beside", line)))
    filled = []
    for begin, name in starts:
        (end,) = [i for i, line in enumerate(lines) if re.search(rf"-done\(.*%{re.escape(name)}\)", line)]
        filled.append(any("beside" in line for line in lines[begin:end]))
    return filled


@pytest.mark.parametrize("backward", [False, True])
def test_other_work_runs_between_start_and_done(backward):
    """Products that do not use the op's results lie between the two in what XLA has scheduled.

    Barriers say which: those of the first half beside the dispatch, those of the second beside the combine.
    """
    need_gpu()
    skip_or_fail("devices", 2, R)  # alone, XLA finds nothing to wait for
    assert ranks(R).group.info().implementation == "ffi"
    x, ids, weights, other, _ = arrays(tokens=136)  # more than go through the arena
    square = floats((R * H, H), seed=4)

    def shard(group, x, ids, weights, other, square):
        pending = jax_ep.dispatch_start(x, ids, weights, group=group, num_experts=E)
        shared = beside(other, square)
        sent = pending.done()
        shared, rows = jax.lax.optimization_barrier((shared, sent.x))
        pending = jax_ep.combine_start(rows * 2, sent.handle, row_weights=sent.row_weights)
        return pending.done() + beside(shared, square)

    run = mapped(shard)
    if backward:
        loss = lambda x, weights, other: jnp.sum(run(x, ids, weights, other, square) ** 2)
        program = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(x, weights, other)
    else:
        program = jax.jit(run).lower(x, ids, weights, other, square)
    # Backward the gradient of the combine brings two arrays, so it is not apart; that of the dispatch is.
    assert work_between(program) == [True, True, *[True, True] * backward]


def test_other_work_runs_while_weights_travel():
    need_gpu()
    skip_or_fail("devices", 2, R)
    _, ids, _, other, _ = arrays()
    square = floats((R * H, H), seed=4)
    assert work_between(jax.jit(mapped(weights_apart)).lower(floats((E, 64)), ids, other, square)) == [True]


@pytest.mark.parametrize("op", ["dispatch", "combine", "replicate"])
def test_start_takes_the_arguments_of_its_op(op):
    expected = inspect.signature(getattr(jax_ep, op)).parameters
    assert inspect.signature(getattr(jax_ep, f"{op}_start")).parameters == expected


def test_a_pending_op_has_no_rows():
    """Nor anything else that could be taken for a result."""
    pending = jax_ep.Pending(None)
    with pytest.raises(
        AttributeError, match=r"Pending has no 'x'; pending\.done\(\) returns the op's result"
    ):
        _ = pending.x  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(TypeError):
        jnp.sum(pending)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("start", "error", "text"),
    [
        (
            lambda group, x, ids: jax_ep.dispatch_start(x, ids, group=group, num_experts=0),
            ValueError,
            "multiple",
        ),
        (
            lambda group, x, ids: jax_ep.dispatch_start(x, ids, group=None, num_experts=E),
            TypeError,
            "group must be",
        ),
        (
            lambda group, x, ids: jax_ep.dispatch_start(x, ids, group=group, num_experts=E, ordre="rank"),
            TypeError,
            "unexpected keyword argument 'ordre'",
        ),
        (lambda group, x, ids: jax_ep.combine_start(x, ids), TypeError, "combine_start: handle must be"),
    ],
)
def test_bad_arguments_are_refused_at_the_start(annotated, start, error, text):
    with pytest.raises(error, match=text):
        jax.jit(mapped(start))(*arrays()[:2])
