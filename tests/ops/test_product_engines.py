"""The engines for grouped products on GPUs: each one against the plain engine, and how one is chosen."""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from devices import need_gpu

from jax_ep import _extension

pytestmark = pytest.mark.one_jax

KINDS = {
    *(f"{dtype} {product}" for dtype in ("float16", "bfloat16") for product in ("rows", "gradient of rows")),
    *(f"{dtype} gradient of weights" for dtype in ("float16", "bfloat16", "FP8")),
    "FP8 rows",
}
# Forward and backward, so that every product runs.
PROGRAM = """
import jax, jax.numpy as jnp, numpy as np, jax_ep
rows = jax.random.normal(jax.random.key(0), (384, 256), jnp.bfloat16)
w = jax.random.normal(jax.random.key(1), (3, 256, 256), jnp.bfloat16)
sizes = jnp.array([100, 0, 150], jnp.int32)
loss = lambda rows, w: jnp.sum(jax_ep.grouped_dot(rows, w, sizes).astype(jnp.float32) ** 2)
for leaf in jax.tree.leaves(jax.jit(jax.value_and_grad(loss, (0, 1)))(rows, w)):
    print(float(jnp.sqrt(jnp.mean(leaf.astype(jnp.float32) ** 2))))
"""


def run_with(engine):
    """Runs the program in a process of its own, because a process reads the variable once."""
    environment = os.environ | {"JAX_EP_PRODUCTS": engine, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, "-P", "-c", PROGRAM]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)


def extension():
    need_gpu()
    module = _extension.extension()
    assert module is not None
    return module


def engines_here():
    capability = jax.local_devices()[0].compute_capability.replace(".", "")
    return {"any", _extension.product_engine(capability)}


def test_engine_equals_the_plain_one():
    """The check that an engine passes before its first use, if nobody has executed it."""
    module = extension()
    device = jax.local_devices()[0].local_hardware_id
    for engine in engines_here():
        checks = module.check_products(engine, device)
        assert set(checks) == {kind for kind in KINDS if engine != "sm120" or "FP8" in kind}
        for product, (error, tolerance, failure) in checks.items():
            assert failure == "", f"{engine}: {product}: {failure}"
            assert error <= (0 if engine == "any" else tolerance), f"{engine}: {product}: {error}"


def test_environment_variable_chooses_the_engine():
    extension()
    results = []
    for engine in ("", "any", *engines_here()):
        done = run_with(engine)
        assert done.returncode == 0, done.stderr
        assert "failed its check" not in done.stderr
        results.append([float(line) for line in done.stdout.split()])
    for result in results[1:]:
        np.testing.assert_allclose(result, results[0], rtol=1e-2)


@pytest.mark.parametrize("engine", ["fastest", "sm90", "sm100", "sm120"])
def test_environment_variable_rejects_other_engines(engine):
    extension()
    if engine in engines_here():
        pytest.skip("this GPU runs it")
    done = run_with(engine)
    assert done.returncode != 0
    is_name = engine != "fastest"
    expected = "cannot run on GPU" if is_name else "must be sm120, sm100, sm90, any or unset, got 'fastest'"
    assert "JAX_EP_PRODUCTS" in done.stderr
    assert expected in done.stderr
