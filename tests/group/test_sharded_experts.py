"""gated_mlp of matrices sharded over further axes: tensor parallelism, and parameters gathered per step."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import floats, routing
from devices import make_mesh, most_ranks
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep

TOKENS, K, NAMES = 16, 2, ("up", "b_up", "down")


@dataclasses.dataclass(frozen=True)
class Case:
    """Axes of the mesh besides "ep", and the dimension that each shards: "F" or "H"."""

    tp: bool = False
    fsdp: str | None = None
    kind: AxisType = AxisType.Auto
    check_vma: bool = True
    quantize: str | None = None
    width: int = 8
    inner: int = 12

    def mesh(self):
        axes = ["tp"] * self.tp + ["fsdp"] * (self.fsdp is not None)
        num_ep = max(most_ranks() // 2 ** len(axes), 1)
        return make_mesh((num_ep, *[2] * len(axes)), ("ep", *axes), self.kind)

    def specs(self):
        """Returns the PartitionSpecs of w_up [E, H, 2, F], b_up [E, 2, F] and w_down [E, F, H]."""
        of_h = "fsdp" if self.fsdp == "H" else None
        of_f = tuple(["tp"] * self.tp + ["fsdp"] * (self.fsdp == "F")) or None
        return {"up": P("ep", of_h, None, of_f), "b_up": P("ep", None, of_f), "down": P("ep", of_f, of_h)}


FP8 = {"quantize": "fp8", "width": 128, "inner": 256}
CASES = {
    "tp": Case(tp=True),
    "fsdp over F": Case(fsdp="F", kind=AxisType.Explicit, check_vma=False),
    "tp, fsdp over H": Case(tp=True, fsdp="H", kind=AxisType.Explicit),
    "fp8, tp": Case(tp=True, **FP8),
}
SLOW = {
    "tp, unchecked": Case(tp=True, check_vma=False),
    "tp, fsdp over F": Case(tp=True, fsdp="F"),
    "fp8, tp, fsdp over F": Case(tp=True, fsdp="F", kind=AxisType.Explicit, **FP8),
    "fp8, fsdp over H": Case(fsdp="H", check_vma=False, **{**FP8, "width": 256}),
}


def gathered(parameters, specs):
    """Gathers each shard along the axis "fsdp"."""

    def gather(shard, spec):
        for dimension, entry in enumerate(spec):
            if "fsdp" in (entry if isinstance(entry, tuple) else (entry,)):
                shard = jax.lax.all_gather(shard, "fsdp", axis=dimension, tiled=True)
        return shard

    return {name: gather(parameters[name], specs[name]) for name in parameters}


def dense(parameters, x, ids, weights):
    z = jnp.einsum("th,ehif->eitf", x, parameters["up"]) + parameters["b_up"][:, :, None]
    y = jnp.einsum("etf,efh->eth", jax.nn.silu(z[:, 0]) * z[:, 1], parameters["down"])
    return jnp.einsum("tke,eth->th", jax.nn.one_hot(ids, len(y)) * weights[..., None], y)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[] if case.kind is AxisType.Explicit else pytest.mark.one_jax)
        for name, case in CASES.items()
    ]
    + [pytest.param(case, id=name, marks=pytest.mark.slow) for name, case in SLOW.items()],
)
def test_gated_mlp_with_sharded_matrices(case, open_group):
    """Values and gradients are those of whole experts, without ranks."""
    mesh, specs = case.mesh(), case.specs()
    group = open_group(mesh, "ep")
    # Tokens are replicated along "tp", and sharded over all other axes.
    of_tokens = P(tuple(axis for axis in mesh.axis_names if axis != "tp"))
    num_shards = mesh.size // (2 if case.tp else 1)
    num_experts, width, inner = 2 * group.size, case.width, case.inner
    parameters = {
        "up": floats((num_experts, width, 2, inner), seed=1) / width**0.5,
        "b_up": floats((num_experts, 2, inner), seed=2) / 4,
        "down": floats((num_experts, inner, width), seed=3) / inner**0.5,
    }
    ids = routing("random", num_shards, TOKENS, K, num_experts).reshape(-1, K)
    x, weights = floats((len(ids), width), seed=4), floats((len(ids), K), seed=5)
    cotangent = floats(x.shape, seed=6)

    def layer(parameters, x, ids, weights):
        up, b_up, down = map(gathered(parameters, specs).get, NAMES)

        def experts(sent):
            return jax_ep.gated_mlp(sent.x, up, down, sent.group_sizes, b_up=b_up, quantize=case.quantize)

        y = jax_ep.moe(x, ids, weights, experts, group=group, num_experts=num_experts)
        return jax.lax.psum(y, "tp") if case.tp else y

    def value_and_gradients(layer):
        def loss(parameters, x, weights, ids, cotangent):
            y = layer(parameters, x, ids, weights)
            return jnp.sum(y * cotangent), y

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))

    mapped = jax.shard_map(
        layer,
        mesh=mesh,
        in_specs=(specs, of_tokens, of_tokens, of_tokens),
        out_specs=of_tokens,
        check_vma=case.check_vma,
    )
    with jax.default_matmul_precision("highest"):
        want = value_and_gradients(dense)(parameters, x, weights, ids, cotangent)
        with jax.set_mesh(mesh):
            put = lambda array, spec: jax.device_put(array, NamedSharding(mesh, spec))
            placed = {name: put(parameters[name], specs[name]) for name in parameters}
            tokens = [put(array, of_tokens) for array in (x, weights, ids, cotangent)]
            got = value_and_gradients(mapped)(placed, *tokens)
    tolerance = 1e-5 if case.quantize is None else 0.08
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        one, other = np.asarray(one), np.asarray(other)
        assert np.linalg.norm(one - other) <= tolerance * np.linalg.norm(other)


@pytest.mark.one_jax
def test_gradients_in_fp8_under_explicit_axes():
    mesh = make_mesh((2,), ("x",), AxisType.Explicit)
    given = floats((256, 128)), floats((3, 128, 2, 256), seed=2), floats((3, 256, 128), seed=3)
    sizes = np.array([100, 0, 156], np.int32)
    run = lambda *operands: jnp.sum(jax_ep.gated_mlp(*operands, sizes, quantize="fp8_all") ** 2)
    gradient = jax.jit(jax.grad(run, argnums=(0, 1, 2)))
    specs = P(None, None), P(None, None, None, "x"), P(None, "x", None)
    with jax.set_mesh(mesh):
        got = gradient(*(jax.device_put(a, spec) for a, spec in zip(given, specs, strict=True)))
    for one, other, spec in zip(got, gradient(*given), specs, strict=True):
        assert one.sharding.spec == spec
        # The sum over a sharded F has another order, so some numbers are rounded to another one in FP8.
        error = np.linalg.norm(np.asarray(one) - np.asarray(other)) / np.linalg.norm(np.asarray(other))
        assert error < 0.01
