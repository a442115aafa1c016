"""The layer in MaxText and tunix: models train as they do with the MoE layers of these packages.

`make test-frameworks` installs the packages. Each run is a process of its own, because the examples replace
methods of the packages.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from devices import flags_of_processes

pytestmark = [pytest.mark.slow, pytest.mark.one_jax, pytest.mark.no_gpu]

ROOT = Path(__file__).parents[2]
GROUPS = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
VERSIONS = dict(requirement.split("==") for requirement in GROUPS["frameworks"] if "==" in requirement)


def needs(package):
    """Returns a mark that skips a test unless the examples' version of a package is installed."""
    try:
        installed = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        installed = "no version"
    wanted = VERSIONS[package]
    reason = f"needs {package} {wanted}, {installed} is installed: `make test-frameworks` installs it"
    return pytest.mark.skipif(installed != wanted, reason=reason)


def run(folder, *command):
    """Runs Python in an empty folder, with eight CPU devices."""
    folder.mkdir(exist_ok=True)
    flags = flags_of_processes(xla_force_host_platform_device_count=8)
    paths = os.pathsep.join(str(ROOT / path) for path in ("examples", "tests/support"))
    environment = {"XLA_FLAGS": flags, "PYTHONPATH": paths, "DECOUPLE_GCLOUD": "TRUE"}
    options = {"env": os.environ | environment, "cwd": folder, "capture_output": True, "text": True}
    return subprocess.run([sys.executable, *map(str, command)], **options)


def output(done):
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


TINY = {
    "run_name": "tiny",
    "hardware": "cpu",
    "dataset_type": "synthetic",
    "skip_jax_distributed_system": True,
    "enable_checkpointing": False,
    "enable_tensorboard": False,
    "enable_goodput_recording": False,
    "log_config": False,
    "steps": 3,
    "learning_rate": 0.1,
    "warmup_steps_fraction": 0.0,
    "per_device_batch_size": 1,
    "max_target_length": 16,
    "vocab_size": 128,
    "base_num_decoder_layers": 2,
    "base_emb_dim": 32,
    "base_mlp_dim": 64,
    "base_moe_mlp_dim": 64,
    "base_num_query_heads": 2,
    "base_num_kv_heads": 2,
    "head_dim": 16,
    "attention": "dot_product",
    "dtype": "float32",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "ici_fsdp_parallelism": 2,
}
ON_4 = {"ici_expert_parallelism": 4}
ON_2_SPLIT = {"ici_expert_parallelism": 2, "ici_tensor_parallelism": 2}
STAGES = {"ici_pipeline_parallelism": 2, "num_layers_per_pipeline_stage": 1, "ici_expert_parallelism": 2}
QWEN = {"decoder_block": "qwen3_moe", "norm_topk_prob": True, "load_balance_loss_weight": 0.1}
DEEPSEEK = {
    "model_name": "deepseek3-tiny",
    "override_model_config": True,
    "first_num_dense_layers": 1,
    "routed_bias_update_rate": 0.1,
}
# Steps in which a full buffer drops rows are repeated with buffers that drop none.
REPEATED = {
    "moe_dropless_fallback": "step",
    "ragged_buffer_factor": 1.0,
    "use_ring_of_experts": True,
    "use_ragged_sort": True,
}
# (options of both runs, options of the run with jax_ep)
CASES = {
    "loss_and_tensor_parallelism": (ON_2_SPLIT | QWEN, {}),
    "pipeline": (QWEN | STAGES, {}),
    "bias_updates": (ON_4 | DEEPSEEK, {}),
    "full_buffers": (ON_4 | {"decoder_block": "mixtral"}, REPEATED),
}


def as_arguments(options):
    return [f"{name}={value}" for name, value in options.items()]


@needs("maxtext")
@pytest.mark.parametrize("case", CASES)
def test_maxtext_trains_as_before(case, tmp_path):
    def train(folder, program, options):
        options = {"metrics_file": folder / "metrics.txt", "base_output_directory": folder} | options
        output(run(folder, *program, *as_arguments(options)))
        steps = [json.loads(line) for line in (folder / "metrics.txt").read_text().splitlines()]
        names = ("loss", "moe_lb_loss", "grad_norm", "param_norm")
        return np.array([[step[f"learning/{name}"] for name in names] for step in steps])

    both, with_jax_ep = CASES[case]
    both = TINY | both
    # XLA has no ragged_all_to_all on the CPU, so MaxText's own layer is the one of dense products.
    own = train(tmp_path / "own", ["-m", "maxtext.trainers.pre_train.train"], both | {"sparse_matmul": False})
    adapted = train(tmp_path / "jax_ep", [ROOT / "examples/moe_maxtext.py"], both | with_jax_ep)
    assert own.shape == (3, 4)
    assert own[2, 0] < own[0, 0] - 1
    np.testing.assert_allclose(adapted, own, rtol=2e-5)


@needs("maxtext")
def test_maxtext_rejects_unsupported_options(tmp_path):
    options = TINY | ON_4 | {"decoder_block": "mixtral", "mlp_bias": True, "base_output_directory": tmp_path}
    done = run(tmp_path, ROOT / "examples/moe_maxtext.py", *as_arguments(options))
    assert done.returncode != 0
    assert "ValueError: moe_maxtext.py: one of quantization, mlp_bias" in done.stderr


@needs("maxtext")
@pytest.mark.parametrize("mesh", [["--devices", "2"], ["--devices", "4", "--fsdp", "2"]])
def test_maxtext_s_layer_trains_the_bench_s_model(mesh, tmp_path):
    """The buffers drop rows by 1.02, and so few that the losses agree."""
    options = ["--parts", "model", "--shapes", "tiny", "--repeats", "1", "--capacity", "1.02", *mesh]
    ways = ["--ways", "jax_ep", "maxtext", "--json", "out.json"]
    output(run(tmp_path, "-m", "jax_ep", "bench", *options, *ways))
    jax_ep, maxtext = json.loads((tmp_path / "out.json").read_text())["models"]
    assert maxtext["by"] == "maxtext"
    assert maxtext["losses"][-1] < 0.9 * maxtext["losses"][0]
    np.testing.assert_allclose(maxtext["losses"], jax_ep["losses"], rtol=0.01)


@needs("google-tunix")
def test_tunix_trains_as_before(tmp_path):
    worker = ROOT / "tests/support/tunix_worker.py"
    runs = [output(run(tmp_path, worker, *arguments)) for arguments in ([], ["jax_ep"])]
    own, adapted = (json.loads(printed.splitlines()[-1]) for printed in runs)
    assert own[2] < own[0] - 0.1
    np.testing.assert_allclose(adapted, own, rtol=1e-5)
