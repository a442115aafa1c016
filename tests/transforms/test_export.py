"""Programs that are exported, and run by another process."""

import os
import subprocess
import sys

import jax
import pytest
from devices import need_devices
from jax import export
from layers import inputs, layer

import jax_ep
from jax_ep import _extension

PROGRAM = """
import sys
import jax
import numpy as np
from jax import export
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import layers
import jax_ep

what, path = sys.argv[1:]
mesh = Mesh(np.array(jax.devices()[:2]), ("ep",))
arrays = [jax.device_put(array, NamedSharding(mesh, P("ep"))) for array in layers.inputs(2)]
if what == "export":
    group = jax_ep.Group(mesh, "ep")
    shard = lambda *shards: layers.layer(*shards, group, implementation="ffi")
    mapped = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
    exported = export.export(mapped, disabled_checks=jax_ep.export.disabled_checks())(*arrays)
    open(path, "wb").write(exported.serialize())
else:
    exported = export.deserialize(open(path, "rb").read())
    with jax_ep.Group(mesh, "ep"):
        y = jax.jit(exported.call)(*arrays)
        np.testing.assert_allclose(y, layers.dense(*arrays), rtol=1e-5, atol=1e-5)
    print("right")
"""


def test_export_and_run_elsewhere(tmp_path):
    pytest.importorskip("flatbuffers", reason="jax.export writes files with it; the test group installs it")
    need_devices(2)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    for what in ("export", "run"):
        command = [sys.executable, "-P", "-c", PROGRAM, what, str(tmp_path / "program")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
        assert done.returncode == 0, done.stderr
    assert "right" in done.stdout


def test_all_handlers_of_ops_are_listed():
    module = _extension.extension()
    assert module is not None
    targets = {*module.cpu_targets(), *module.cuda_targets()} - {"jax_ep_gather", "jax_ep_reserve"}
    listed = {check.is_custom_call() for check in jax_ep.export.disabled_checks()}
    assert targets <= listed
    beside = [f"{op}_beside" for op in ("route", "push", "pull")]
    on_gpus = (*beside, "grouped_dot", "quantize", "quantize_gated", "rail_hop")
    assert not listed - targets - {f"jax_ep_{name}" for name in on_gpus}


def test_a_symbolic_number_of_tokens_is_refused(open_group):
    mesh = jax.sharding.Mesh(need_devices(2), ("ep",))
    group = open_group(mesh, "ep")
    (tokens,) = export.symbolic_shape("t")
    shapes = [jax.ShapeDtypeStruct((2 * tokens, a.shape[1]), a.dtype) for a in inputs(2)]
    spec = jax.sharding.PartitionSpec("ep")
    mapped = jax.shard_map(
        lambda *shards: layer(*shards, group, capacity=64, implementation="ffi"),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
    )
    with pytest.raises(ValueError, match="needs shapes that are known when a program is compiled, got"):
        export.export(jax.jit(mapped), disabled_checks=jax_ep.export.disabled_checks())(*shapes)


def test_a_symbolic_number_of_tokens_without_a_capacity(open_group):
    """The error names what is not known, and not a comparison inside of the op."""
    scope = export.SymbolicScope()
    mesh = jax.sharding.Mesh(need_devices(2), ("ep",))
    group, spec = open_group(mesh, "ep"), jax.sharding.PartitionSpec()
    shapes = [
        jax.ShapeDtypeStruct((*export.symbolic_shape("t", scope=scope), width), dtype)
        for width, dtype in ((3, "float32"), (2, "int32"), (2, "float32"))
    ]
    permute = lambda x, ids, _: jax_ep.permute(x, ids, num_local_experts=4, implementation="xla").x
    with pytest.raises(
        ValueError, match=r"permute: the worst case is 2\*t rows, .*not known .* pass a capacity"
    ):
        export.export(jax.jit(permute))(*shapes)
    # Nothing else can be exported so: JAX's collectives cannot.
    moe = lambda *args: jax_ep.moe(*args, lambda s: s.x, group=group, num_experts=4)
    moe = jax.shard_map(moe, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    with pytest.raises(ValueError, match=r"the worst case is 4\*t rows, .* for each number of tokens(\n|$)"):
        export.export(jax.jit(moe))(*shapes)


def test_the_extension_before_any_device():
    """Handlers are registered after JAX has its devices, whoever asks for the extension first."""
    code = "from jax_ep import _extension; assert _extension.extension(); import jax; print(jax.devices())"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr
