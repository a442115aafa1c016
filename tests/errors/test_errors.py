"""Bad input: a clear error at trace time that says what must hold and what came."""

import copy
import dataclasses
import pickle
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ranks
from devices import make_mesh, need_devices
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep import _extension
from jax_ep._group.group import ranks_of

R, T, K, E, H = 2, 4, 2, 4, 3
X = np.ones((R * T, H), np.float32)
IDS = np.zeros((R * T, K), np.int32)
W = np.ones((R * T, K), np.float32)


def traced(function, *arrays, specs=None):
    """Traces function of the shards; nothing runs."""
    on = ranks(R)
    mapped = jax.shard_map(function, mesh=on.mesh, in_specs=specs or P("ep"), out_specs=P("ep"))
    return jax.jit(mapped).trace(*arrays)


def dispatched(**options):
    on = ranks(R)
    return jax_ep.dispatch(jnp.ones((T, H)), IDS[:T], group=on.group, num_experts=E, **options)


DISPATCH = {
    "other T": ({"x": X[: T + 2]}, ValueError, r"x must be \[T, \.\.\.\] with T = 4 .*got float32\[3, 3\]"),
    "a leaf of another T": (
        {"x": {"a": X, "b": X[: T + 2]}},
        ValueError,
        r"every array of x must be .*got float32\[3, 3\]",
    ),
    "keys": ({}, TypeError, "jax.random.key_data"),
    "1-D ids": (
        {"topk_idx": IDS[:, 0]},
        ValueError,
        r"topk_idx must be int32 or int64 \[T, K\], got int32\[4\]",
    ),
    "float ids": ({"topk_idx": W}, ValueError, r"topk_idx must be int32 or int64 .* got float32\[4, 2\]"),
    "int16 ids": ({"topk_idx": IDS.astype(np.int16)}, ValueError, "topk_idx must be int32 or int64"),
    "no choice": ({"topk_idx": IDS[:, :0]}, ValueError, "at least one choice per token"),
    "a routing map": (
        {"topk_idx": IDS > 0},
        ValueError,
        r"got a routing map bool\[4, 2\]; make ids of a map",
    ),
    "experts over ranks": (
        {"num_experts": 5},
        ValueError,
        "the experts of all ranks, so it must be a positive multiple of the 2 ranks, got 5",
    ),
    "no experts": ({"num_experts": 0}, ValueError, "positive multiple of the 2 ranks, got 0"),
    "two capacities": (
        {"capacity": 8, "capacity_factor": 1.0},
        ValueError,
        "pass either capacity or capacity_factor, got 8 and 1.0",
    ),
    "a negative factor": ({"capacity_factor": -1.0}, ValueError, "must be positive and finite, got -1.0"),
    "fractional experts": ({"num_experts": 4.0}, ValueError, "num_experts must be an int"),
    "weights' shape": (
        {"topk_weights": W[:, :1]},
        ValueError,
        r"topk_weights must be floating \[T, K\] = \[4, 2\], got float32\[4, 1\]",
    ),
    "integer weights": ({"topk_weights": IDS}, ValueError, r"topk_weights must be floating .* got int32"),
    "capacity": ({"capacity": 0}, ValueError, "capacity must be an int between 1 and .*, got 0"),
    "a factor as capacity": ({"capacity": 1.25}, ValueError, "capacity counts rows, so it must be an int"),
    "a capacity below a block": (
        {"capacity": 100, "expert_alignment": 128},
        ValueError,
        "100 rows cannot hold even one expert's block, which is a multiple of expert_alignment = 128",
    ),
    "sequences": (
        {"topk_idx": IDS[:, None]},
        ValueError,
        r"with the tokens of all sequences in one axis, got int32\[4, 1, 2\]; reshape it to \[4, 2\]",
    ),
    "no group": ({"group": None}, TypeError, "group must be a jax_ep.Group, .* got NoneType"),
    "alignment": ({"expert_alignment": 0}, ValueError, "expert_alignment must be an int between 1 .*, got 0"),
    "alignment by rank": ({"order": "rank", "expert_alignment": 8}, ValueError, "needs order='expert'"),
    "order": ({"order": "token"}, ValueError, "must be 'rank', 'expert' or 'expert_padded', got 'token'"),
    "orders": ({"order": np.ones(2)}, ValueError, r"order must be 'rank', .* got array\(\[1., 1.\]\)"),
    "implementation": ({"implementation": "cuda"}, ValueError, "must be None, 'ffi' or 'xla', got 'cuda'"),
    "implementations": ({"implementation": np.ones(2)}, ValueError, r"'ffi' or 'xla', got array\("),
}


@pytest.mark.parametrize("name", DISPATCH)
def test_dispatch(name):
    changed, error, text = DISPATCH[name]
    arguments = {"x": X, "topk_idx": IDS, "topk_weights": None, "num_experts": E, **changed}
    arguments = {"group": ranks(R).group, **arguments}
    if name == "keys":
        arguments["x"] = jax.random.split(jax.random.key(0), R * T)
    arrays = {name: arguments.pop(name) for name in ("x", "topk_idx", "topk_weights")}

    def shard(arrays):
        return jax_ep.dispatch(**arrays, **arguments).num_tokens

    with pytest.raises(error, match=text) as raised:
        traced(shard, arrays)
    assert "dispatch" in str(raised.value) or "implementation" in str(raised.value)


def test_redispatch_of_another_shape():
    def shard(x):
        return jax_ep.redispatch(x[:-1], dispatched().handle)

    with pytest.raises(ValueError, match=r"T = 4 \(of the handle\), got float32\[3, 3\]"):
        traced(shard, X)


def test_redispatch_of_weights_of_another_shape():
    def shard(x, w):
        return jax_ep.redispatch(x, dispatched().handle, topk_weights=w[:, :1])

    with pytest.raises(ValueError, match=r"redispatch: topk_weights must be .* = \[4, 2\], got .*4, 1"):
        traced(shard, X, W)


@pytest.mark.parametrize("op", ["redispatch", "combine"])
def test_a_handle_outside_of_its_group_s_axes(op):
    """The handle's group has the axis 'ep'; this shard_map has another."""
    on = ranks(R)
    mapped = on.map(lambda x: dispatched().handle)
    handle = jax.jit(mapped)(X)
    call = {
        "redispatch": lambda handle: jax_ep.redispatch(jnp.ones((T, H)), handle),
        "combine": lambda handle: jax_ep.combine(jnp.ones((handle.routing.capacity, H)), handle),
    }[op]
    mesh = make_mesh((R,), ("other",))
    mapped = jax.shard_map(call, mesh=mesh, in_specs=P("other"), out_specs=P("other"), check_vma=False)
    with pytest.raises(ValueError, match=rf"{op} communicates.*over the axis 'ep'; this one binds 'other'"):
        jax.jit(mapped).trace(handle)


@pytest.mark.parametrize("op", ["redispatch", "combine"])
def test_something_that_is_no_handle(op):
    def shard(x):
        if op == "redispatch":
            return jax_ep.redispatch(x, (1, 2))
        return jax_ep.combine(x, (1, 2))

    with pytest.raises(TypeError, match="handle must be the Handle that dispatch returned, got tuple"):
        traced(shard, X)


def test_a_handle_with_arrays_of_another_shape():
    def shard(x):
        handle = jax.tree.map(lambda a: a[:1], dispatched().handle)
        return jax_ep.redispatch(x, handle)

    with pytest.raises(
        ValueError, match=r"handle\.topk_idx must be int32 \[4, 2\] on each rank, got int32\[1, 2\]"
    ):
        traced(shard, X)


COMBINE = {
    "rows": (lambda d: (d.x[:-1], {}), "rank", ValueError, r"C = 8 \(the capacity of the handle\)"),
    "integers": (lambda d: (d.topk_idx, {}), "rank", TypeError, r"y is summed.*floating; got int32"),
    "weights by rank": (
        lambda d: (d.x, {"row_weights": jnp.ones(8)}),
        "rank",
        ValueError,
        "needs a handle of order 'expert'",
    ),
    "weights' shape": (
        lambda d: (d.x, {"row_weights": jnp.ones((16, 1))}),
        "expert",
        ValueError,
        r"row_weights must be floating \[C\] = \[16\], got float32\[16, 1\]",
    ),
    "integer weights": (
        lambda d: (d.x, {"row_weights": jnp.ones(16, jnp.int32)}),
        "expert",
        ValueError,
        "row_weights must be floating",
    ),
    "no array": (lambda d: ((), {}), "rank", ValueError, "y holds no array"),
    "bias' shape": (
        lambda d: (d.x, {"bias": jnp.ones(H)}),
        "rank",
        ValueError,
        r"bias must have the shape of the result \[4, 3\], got float32\[3\]",
    ),
    "integer bias": (lambda d: (d.x, {"bias": jnp.ones((T, H), int)}), "rank", TypeError, "bias is summed"),
    "bias of another structure": (
        lambda d: ((d.x, d.x), {"bias": jnp.ones((T, H))}),
        "rank",
        ValueError,
        "bias must be a pytree of the same structure as y",
    ),
    "FP8 gradient of narrow rows": (
        lambda d: (d.x, {"quantize_gradient": "fp8"}),
        "rank",
        ValueError,
        "quantize_gradient needs rows whose last dimension is a multiple of 128",
    ),
}


@pytest.mark.parametrize("name", COMBINE)
def test_combine(name):
    make, order, error, text = COMBINE[name]

    def shard(x):
        d = dispatched(order=order)
        y, options = make(d)
        return jax_ep.combine(y, d.handle, **options)

    with pytest.raises(error, match="combine: .*" + text):
        traced(shard, X)


@pytest.mark.parametrize("implementation", [None, "ffi", "xla"])
def test_outside_shard_map(implementation):
    group = ranks(R).group
    with pytest.raises(
        ValueError, match=r"dispatch communicates, so .* inside jax\.shard_map over the axis 'ep'"
    ):
        jax_ep.dispatch(X, IDS, group=group, num_experts=E, implementation=implementation)


def test_a_shard_map_of_another_size():
    mesh = make_mesh((4,), ("ep",))

    def shard(x):
        return jax_ep.dispatch(x, IDS[:2], group=ranks(R).group, num_experts=E).x

    with pytest.raises(ValueError, match="this shard_map has size 4, but the group has 2 ranks"):
        jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))).trace(X)


@pytest.mark.parametrize("axis", ["tp", ("ep", "tp"), ("ep", "ep"), ()])
def test_group_axes(axis):
    with pytest.raises(ValueError, match=r"axis_name must name axes of the mesh.*\('ep',\)"):
        jax_ep.Group(make_mesh((R,), ("ep",)), axis)


def test_integers_of_numpy():
    def shard(x, ids):
        sent = jax_ep.dispatch(
            x,
            ids,
            group=ranks(R).group,
            num_experts=np.int64(E),
            capacity=np.int32(8),
            expert_alignment=np.int8(2),
        )
        assert sent.handle.routing.capacity == 8
        return sent.x

    traced(shard, X, IDS)


def test_all_experts_matrices():
    sizes = jnp.ones((E // R,), jnp.int32)
    with pytest.raises(ValueError, match="a matrix for each of the 2 experts of this rank, got 4; check"):
        jax_ep.grouped_dot(X, jnp.ones((E, H, H)), sizes)


def test_a_policy_that_is_called():
    with pytest.raises(TypeError, match=r"save_ep_residuals is a policy.*pass it as it is"):
        jax_ep.save_ep_residuals()


def test_a_group_is_not_pickled_but_shared():
    group = ranks(R).group
    with pytest.raises(
        TypeError, match=r"Group\(.* cannot be pickled, because it refers to devices of this process"
    ):
        pickle.dumps(group)
    assert copy.deepcopy({"group": group})["group"] is group
    assert copy.copy(group) is group


def test_group_arguments():
    mesh = make_mesh((R,), ("ep",))
    with pytest.raises(TypeError, match="timeout_s must be a number of seconds, got '30'"):
        jax_ep.Group(mesh, "ep", timeout_s="30")
    with pytest.raises(TypeError, match=r"num_sms must be an int of at least 2 \(or None\), got 2.5"):
        jax_ep.Group(mesh, "ep", num_sms=2.5)
    with pytest.raises(TypeError, match=r"must be a jax\.sharding\.Mesh, with devices; got list"):
        jax_ep.Group(list(mesh.devices), "ep")
    with pytest.raises(ValueError, match="timeout_s must be positive, got 0"):
        jax_ep.Group(mesh, "ep", timeout_s=0)


@pytest.fixture
def foreign_group(open_group, monkeypatch):
    """Makes a group as it would be on devices that are not here."""

    def make(platform="cpu", spans_processes=False):
        group = open_group(make_mesh((R,), ("ep",)), "ep")
        elsewhere = {"platform": platform, "spans_processes": spans_processes}
        monkeypatch.setattr(group, "_ranks", dataclasses.replace(ranks_of(group), **elsewhere))
        return group

    return make


def test_a_platform_without_handlers(foreign_group):
    group = foreign_group("tpu")
    assert group._resolve(None) == "xla"
    with pytest.raises(ValueError, match=r"implementation='ffi' cannot run .*no handlers for platform 'tpu'"):
        group._resolve("ffi")


def test_a_group_across_processes_on_the_cpu(foreign_group):
    group = foreign_group(spans_processes=True)
    with pytest.raises(ValueError, match="ranks of a domain must live in one process"):
        group._resolve("ffi")
    assert group._resolve("xla") == "xla"


def test_without_the_extension(monkeypatch):
    monkeypatch.setattr(_extension, "_load", lambda: (None, "the extension cannot be imported (test)"))
    need_devices(R)
    _extension.warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="'xla', which is slow, because the extension cannot be imp"):
        group = jax_ep.Group(make_mesh((R,), ("ep",)), "ep")
    with group:
        assert group._resolve(None) == "xla"  # and warns once
        group.check()
        with pytest.raises(ValueError, match="cannot be imported"):
            group._resolve("ffi")
        with pytest.raises(ValueError, match="cannot be imported"):
            jax_ep.get_dispatch_layout(IDS, num_experts=E, num_ranks=R, implementation="ffi")


def test_gpus_without_the_cuda_part(foreign_group, monkeypatch):
    group = foreign_group("gpu")
    built = types.SimpleNamespace(build_info=lambda: {"ffi_api_version": (0, 3)})
    with monkeypatch.context() as patched:  # the group closes with the extension that it was made with
        patched.setattr(_extension, "_load", lambda: (built, ""))
        _extension.warn_once.cache_clear()
        with pytest.warns(
            RuntimeWarning, match="which is slow, because .* without its CUDA part; build it with"
        ):
            assert group._resolve(None) == "xla"
        with pytest.raises(ValueError, match=r"'ffi' cannot run Group.* build it with JAX_EP_CUDA=ON"):
            group._resolve("ffi")


@pytest.mark.parametrize("order", ["rank", "expert"])
def test_a_changed_handle_does_no_harm(order):
    """Entries that are no rows, or no experts, are skipped by the handlers."""

    def shard(x):
        d = dispatched(order=order)
        wild = jax.tree.map(lambda a: jnp.where(a % 2 == 0, 2**30, -(2**30)), d.handle)
        again = jax_ep.redispatch(x, wild)
        return jax_ep.combine(again, wild)

    on = ranks(R)
    mapped = on.map(shard)
    np.testing.assert_array_equal(jax.jit(mapped)(X), np.zeros_like(X))
