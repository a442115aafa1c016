"""Uses that are wrong in other ways than by shape: no arrays at all, other axes, numbers too large."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import quantize, ranks
from devices import make_mesh
from jax.sharding import PartitionSpec as P
from wrong import GROUPS, IDS, MATRICES, OBJECTS, E, H, R, T, W, X, combine, dispatch, moe, traced

import jax_ep

NO_ARRAYS = {
    "ids": (lambda x: dispatch(x, None), "dispatch: topk_idx .* got NoneType"),
    "ids in words": (lambda x: dispatch(x, "ids"), "dispatch: topk_idx .* got str"),
    "rows": (lambda x: dispatch("rows"), "dispatch: every leaf of x .* got str"),
    "objects": (lambda x: dispatch(OBJECTS), "dispatch: every leaf of x .* got ndarray of object"),
    "weights": (lambda x: dispatch(x, weights="w"), "dispatch: topk_weights .* got str"),
    "row weights": (lambda x: combine(jnp.ones((16, H)), row_weights="w"), "combine: row_weights .* got str"),
    "bias": (lambda x: combine(jnp.ones((16, H)), bias="b"), "combine: bias .* got str"),
    "moe": (
        lambda x: jax_ep.moe({"x": x}, IDS, W, None, group=ranks(R).group, num_experts=E),
        "moe: x must be .* got dict",
    ),
    "layout": (
        lambda x: jax_ep.get_dispatch_layout(None, num_experts=E, num_ranks=R),
        "get_dispatch_layout: topk_idx .* got NoneType",
    ),
    "a pytree to unpermute": (lambda x: jax_ep.unpermute({"x": x}, IDS), "unpermute: y must .* got dict"),
    "what permute returned": (
        lambda x: jax_ep.unpermute(x, jax_ep.permute(x, IDS[:T], num_local_experts=E)),
        "unpermute: row_map must be .* got Permuted",
    ),
    "pairs for a dtype": (
        lambda x: jax_ep.unpermute(x, IDS, out_dtype={"a": x}),
        "out_dtype must be floating, got {'a'",
    ),
    "no dtype": (lambda x: jax_ep.unpermute(x, IDS, out_dtype="bf"), "out_dtype must be floating, got bf"),
}


NO_ARRAYS |= {
    "rows of products": (
        lambda x: jax_ep.grouped_dot(None, MATRICES, GROUPS),
        "grouped_dot: rows .* NoneType",
    ),
    "a pytree of rows": (
        lambda x: jax_ep.grouped_dot({"x": x}, MATRICES, GROUPS),
        "grouped_dot: rows .* dict",
    ),
    "matrices": (lambda x: jax_ep.grouped_dot(x, "w", GROUPS), "grouped_dot: w .* got str"),
    "sizes of groups": (
        lambda x: jax_ep.grouped_dot(x, MATRICES, None),
        "grouped_dot: group_sizes .* NoneType",
    ),
    "ranks that take part": (lambda x: dispatch(x, active_ranks="all"), "dispatch: active_ranks .* got str"),
    "statistics' sums": (
        lambda x: dispatch(x, statistics=jax_ep.DispatchStatistics(None, GROUPS)),
        r"dispatch: statistics\.tokens_per_expert .* got NoneType",
    ),
    "an expert_fn of two arguments": (
        lambda x: moe(x, lambda sent, params: sent.x),
        r"moe: expert_fn must take \(sent\), got <lambda>\(sent, params\)",
    ),
    "what an expert_fn returns": (
        lambda x: moe(x, lambda sent: "y"),
        "moe: what expert_fn returns .* got str",
    ),
}


def started(x):
    return jax_ep.dispatch_start(x, IDS[:T], group=ranks(R).group, num_experts=E)


PENDING = {
    "a pending handle": (
        lambda x: jax_ep.combine_start(x, started(x)),
        "combine_start: handle must be the Handle that dispatch returned, got Pending\\n",
    ),
    "statistics": (
        lambda x: dispatch(x, statistics=ranks(R).group.info()),
        "dispatch: statistics must be the DispatchStatistics .* got GroupInfo",
    ),
}


@pytest.mark.parametrize("name", PENDING)
def test_rejects_results_of_other_ops(name):
    call, text = PENDING[name]
    with pytest.raises(TypeError, match=text):
        traced(call)


def test_errors_of_moe_name_moe():
    with pytest.raises(ValueError, match=r"^moe: num_experts counts the experts of all ranks"):
        traced(lambda x: moe(x, lambda sent: sent.x, num_experts=3))
    with pytest.raises(TypeError, match=r"^moe: expert_params cannot hold key<fry>; for keys pass"):
        traced(with_expert_params(jax.random.split(jax.random.key(0), E // R)))
    with pytest.raises(ValueError, match=r"^moe: every array of expert_params must be \[L, \.\.\.\]"):
        traced(with_expert_params(jnp.ones((E + 1, H))))


def with_expert_params(params):
    return lambda x: moe(x, lambda sent, w: sent.x, expert_params=params, num_redundant_experts=1)


def test_rejects_handle_of_hop_2(open_group):
    group = open_group(make_mesh((R,), ("ep",)), "ep", ranks_per_domain=1)
    sent_to = lambda x: jax_ep.dispatch(x, IDS[:T], group=group, num_experts=E)
    with pytest.raises(ValueError, match=r"^combine: handle is the handle of hop 2"):
        traced(lambda x: jax_ep.combine(sent_to(x).x, sent_to(x).handle.within))
    with pytest.raises(ValueError, match=r"^redispatch: handle is the handle of hop 2"):
        traced(lambda x: jax_ep.redispatch(x, sent_to(x).handle.within))


def test_routing_shows_its_group_briefly():
    routing = []
    traced(lambda x: routing.append(dispatch(x).handle.routing) or x)
    assert repr(routing[0]).startswith(f"Routing(ranks={ranks(R).group!r}, order='expert', ")


def test_rejects_a_combine_that_forgets_the_weights():
    def shard(x):
        sent = dispatch(x, weights=W[:T])
        jax_ep.combine(sent.x, sent.handle, row_weights=None)
        return jax_ep.combine(sent.x, sent.handle)

    with pytest.raises(ValueError, match=r"combine needs row_weights: pass row_weights=sent\.row_weights"):
        traced(shard)


@pytest.mark.parametrize(
    ("order", "alignment", "factor", "capacity"),
    [("expert", 1, 1.1, 9), ("expert", 8, 1.1, 16), ("rank", 1, 0.6, 5), ("expert_padded", 1, 0.7, 6)],
)
def test_capacity_factor(order, alignment, factor, capacity):
    """Of T = 4 tokens, top-2, on 2 ranks: 8 rows by expert and by rank, 4 of each of 4 experts."""

    def shard(x):
        options = {"order": order, "expert_alignment": alignment, "capacity_factor": factor}
        sent = dispatch(x, **options)
        assert sent.handle.routing.capacity == capacity
        return sent.num_dropped

    traced(shard)


def test_products_without_their_scales():
    rows, weights = jnp.ones((8, 128)), jnp.ones((2, 128, 128))
    q, w = quantize(rows), quantize(weights, block=(128, 128))
    with pytest.raises(TypeError, match="float8_e4m3fn need their scales; pass the QuantizedArrays"):
        jax_ep.grouped_dot(q.values, w.values, jnp.asarray([4, 4], jnp.int32))


@pytest.mark.parametrize("name", NO_ARRAYS)
def test_no_array(name):
    call, text = NO_ARRAYS[name]
    with pytest.raises(TypeError, match=text):
        traced(call)


TOO_LARGE = {
    "experts": (lambda x: dispatch(x, num_experts=2**40), "num_experts must be at most 1048576"),
    "local experts": (
        lambda x: jax_ep.permute(x, IDS[:T], num_local_experts=2**31 - 1),
        "num_local_experts must be an int between 1 and 1048576",
    ),
    "ranks": (
        lambda x: jax_ep.get_dispatch_layout(IDS, num_experts=2**31, num_ranks=2**31),
        "num_ranks must be an int between 1 and 1048576",
    ),
    "alignment": (
        lambda x: dispatch(x, expert_alignment=2**31 - 1),
        "the worst case is 4294967294 rows, .* pass a capacity, or a smaller expert_alignment",
    ),
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_too_large(name):
    call, text = TOO_LARGE[name]
    with pytest.raises(ValueError, match=text):
        traced(call)


def test_an_axis_of_vmap():
    """It has the group's name and size, but no devices along it."""
    call = lambda x: jax_ep.dispatch(x, IDS[:T], group=ranks(R).group, num_experts=E).x
    with pytest.raises(
        ValueError, match=r"must be called inside jax\.shard_map .* something else, jax\.vmap"
    ):
        jax.vmap(call, axis_name="ep")(X.reshape(R, T, H))


@pytest.mark.parametrize("axis", [np.array(["ep"]), {"ep"}, [["ep"]], None, 0])
def test_an_axis_that_is_no_name(axis):
    with pytest.raises(ValueError, match=r"axis_name must name axes of the mesh.*\('ep',\)"):
        jax_ep.Group(make_mesh((R,), ("ep",)), axis)


def test_a_mesh_without_devices():
    """As JAX shows it under jit, where the message must say what to do instead."""
    mesh = make_mesh((R,), ("ep",))

    @jax.jit
    def model(x):
        with pytest.raises(
            TypeError, match=r"AbstractMesh.*outside of jit.*Group\(jax\.sharding\.get_mesh\(\)"
        ):
            jax_ep.Group(jax.sharding.get_abstract_mesh(), "ep")
        return x

    with jax.set_mesh(mesh):
        model(1.0)
        with jax_ep.Group(jax.sharding.get_mesh(), "ep") as group:
            assert group.size == R


def test_a_mesh_that_was_never_set():
    with pytest.raises(ValueError, match=r"got an empty one, which jax\.sharding\.get_mesh\(\) returns"):
        jax_ep.Group(jax.sharding.get_mesh(), "ep")


def test_a_shard_map_over_some_of_the_group_s_axes():
    mesh = make_mesh((2, 2), ("a", "b"))
    with jax_ep.Group(mesh, ("a", "b")) as group:
        call = lambda x: dispatch(x, group=group).x
        mapped = jax.shard_map(call, mesh=mesh, in_specs=P("a"), out_specs=P("a"), axis_names={"a"})
        with pytest.raises(
            ValueError, match=r"over the axis \('a', 'b'\); this one binds 'a', but not 'b'; name"
        ):
            jax.jit(mapped).trace(X)


def test_numbers_of_a_group():
    mesh = make_mesh((R,), ("ep",))
    with pytest.raises(ValueError, match=r"num_sms must be between 2 and 65536 \(or None\), got 11805916"):
        jax_ep.Group(mesh, "ep", num_sms=2**70)
    with jax_ep.Group(mesh, "ep", timeout_s=10**400) as group:  # as infinity, ten years
        group.check()


def balance(x, **options):
    options = {"group": ranks(R).group, "num_experts": E, **options}
    return jax_ep.balance(IDS[:T], **options).topk_idx


IGNORED = {
    "instances with a plan": (
        lambda x: balance(x, num_redundant_experts=1, instances="local"),
        "balance: instances .* needs placement",
    ),
    "min_rows": (
        lambda x: balance(x, num_redundant_experts=1, min_rows=0),
        "balance: min_rows must be an int of at least 1, got 0",
    ),
    "slack": (
        lambda x: jax_ep.Placement.from_map(np.arange(E), num_logical_experts=E, num_ranks=R).capacity(
            slack=-1
        ),
        "Placement.capacity: slack must be .* got -1",
    ),
    "negative counts": (
        lambda x: jax_ep.plan_redundant_experts(np.full((R, E), -1, np.int32), num_redundant_experts=1),
        "plan_redundant_experts: the counts must be numbers of rows, at least 0, got -1",
    ),
    "expert_params of all experts": (
        lambda x: moe(x, lambda sent, w: sent.x, expert_params=np.ones((E, H, H), np.float32)),
        r"moe: every array of expert_params must be \[L, \.\.\.\] with L = 2",
    ),
}


@pytest.mark.parametrize("name", IGNORED)
def test_rejects_options_without_an_effect(name):
    call, text = IGNORED[name]
    with pytest.raises(ValueError, match=text):
        traced(call)
