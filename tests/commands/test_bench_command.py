"""`python -m jax_ep bench`, on virtual devices. Nothing here asserts a speed."""

import argparse
import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

import jax_ep
from jax_ep.bench import decode, layers, maxtext, model, products, programs
from jax_ep.bench.shapes import MODELS

pytestmark = [pytest.mark.one_jax, pytest.mark.no_gpu]


def in_own_process(folder, *arguments):
    """As a user calls it: the command sets up its devices itself."""
    command = [sys.executable, "-m", "jax_ep", *arguments]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=folder, env=environment)


TINY = ("bench", "--shapes", "tiny", "--repeats", "1")


@pytest.fixture
def bench(run_command):
    """Runs the benchmark of the tiny shape in this process: exit status and output."""
    return lambda *arguments: run_command(*TINY, *arguments)


def test_a_short_run(tmp_path):
    done = in_own_process(
        tmp_path, *TINY, "--peers", "--orders", "rank", "--devices", "2", "--json", "out.json"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "32 tokens x 128, top-2 of 16, 2 ranks" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "capacity: 1.25 times" in done.stdout
    assert "SMs" not in done.stdout  # columns that would be empty
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["environment"]["versions"]["jax"] == jax.__version__
    timed = {(r["op"], r["by"]) for r in report["results"]}
    assert timed == {(op, "ffi") for op in programs.OPS} | {
        ("round trip", by) for by in ("xla", "all_gather")
    }
    assert all(r["end_to_end_us"] > 0 for r in report["results"])
    assert report["complete"]
    rows = [line.split(",")[0] for line in done.stderr.splitlines() if line.startswith("communication ")]
    count = len(report["results"])
    assert rows == [f"communication {number}/{count}" for number in range(1, count + 1)]


@pytest.mark.slow
def test_two_hops_beside_one(tmp_path, bench):
    domains = ["--devices", "4", "--ranks-per-domain", "2", "--capacity", "0"]
    options = ["--orders", "rank", *domains, "--json", "out.json"]
    status, output = bench(*options)
    assert status == 0, output
    assert "two hops, MB of the rank that receives most" in output
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    timed = {(r["op"], r["per_domain"]): r for r in results}
    assert timed["dispatch", None]["hops"] is None
    hops = timed["dispatch", 2]["hops"]
    assert hops["carried_bytes"] == 32 * 128 * 2  # every token to the other domain
    assert 0 < hops["between_bytes"] <= hops["carried_bytes"]
    assert hops["within_bytes"] > 0
    assert timed["round trip", 2]["hops"]["between_bytes"] == 2 * hops["between_bytes"]


def test_padded_experts(tmp_path, bench):
    status, output = bench(
        "--orders", "expert_padded", "--devices", "2", "--capacity", "2", "--json", "out.json"
    )
    assert status == 0, output
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    timed = {r["op"]: r for r in results if r["order"] == "expert_padded"}
    assert set(timed) == {"dispatch", "dispatch FP8", "combine", "combine FP8", "round trip", "chained pair"}
    assert {r["capacity"] for r in timed.values()} == {None}
    assert timed["chained pair"]["wire_bytes"] == 2 * timed["dispatch"]["wire_bytes"]


def test_a_sweep_of_tokens_begins_with_one(tmp_path, bench):
    """And leaves out padded experts where there are too many."""
    status, output = bench(
        "--sweep", "tokens", "--orders", "expert_padded", "--devices", "2", "--json", "out.json"
    )
    assert status == 0, output
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [r["shape"]["tokens"] for r in results] == [1, 4, 16, 64]


@pytest.mark.slow
def test_layers(tmp_path, bench, monkeypatch):
    """Both directions in both dtypes, with a shared expert in one direction of each."""
    assert len(set(layers.CASES)) == 8
    left_out = [(layers.BFLOAT16, layers.FORWARD, True), (layers.FP8, layers.BOTH, True)]
    cases = [case for case in layers.CASES if case not in left_out]
    monkeypatch.setattr(layers, "CASES", cases)
    status, output = bench("--parts", "layer", "--devices", "2", "--peers", "--json", "out.json")
    assert status == 0, output
    assert "32 tokens a rank, 16 experts 128 wide, 2 ranks, capacity 80" in output
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["results"] == []
    timed = [(r["dtype"], r["direction"], r["has_shared"]) for r in report["layers"]]
    assert timed == cases
    for r in report["layers"]:
        assert all(r[f"{way}us"] > 0 for way in ("communication_", "sequence_", "", "alternative_"))


@pytest.mark.slow
def test_products_beside_those_of_deep_gemm(tmp_path, bench, deep_gemm_calls):
    files = ["--json", "out.json", "--plot", "out.svg"]
    status, output = bench("--parts", "products", "--devices", "2", "--peers", *files)
    assert status == 0, output
    assert "DeepGEMM" in output
    assert "was not timed" not in output
    report = json.loads((tmp_path / "out.json").read_text())
    timed = {(r["matrices"], r["direction"], r["by"], r["dtype"]): r for r in report["products"]}
    directions = {"grouped_dot": products.DIRECTIONS, "DeepGEMM": products.DIRECTIONS[:2]}
    assert set(timed) == {
        (matrices, direction, by, dtype)
        for matrices in ("up", "down")
        for by in directions
        for direction in directions[by]
        for dtype in ("bfloat16", "FP8")
    }
    for r in timed.values():
        assert r["us"] > 0
        assert r["dense_us"] is None  # because experts have 8 rows on average
        assert r["memory_us"] > 0
    assert {call["rows"] for call in deep_gemm_calls()} == {8 * 128}  # one tile for each of the experts
    drawn = (tmp_path / "out.svg").read_text()
    for text in ("few rows: share of the memory's rate", "up, 128 x 256", "gradient of weights", "DeepGEMM"):
        assert text in drawn


def test_a_sweep_is_drawn(tmp_path, bench):
    status, output = bench("--sweep", "ranks", "--orders", "rank", "--devices", "4", "--plot", "out.svg")
    assert status == 0, output
    assert output.count("tiny: ") == 2  # 2 and 4 ranks: 3 do not divide the experts
    drawn = (tmp_path / "out.svg").read_text()
    for text in ("microseconds a round trip", "32 tokens a rank, 128 wide, top-2 of 16, bfloat16, uniform"):
        assert text in drawn


@pytest.mark.slow
def test_skew_compares_layers_with_and_without_redundant_experts(tmp_path, bench):
    skews, files = ["lognormal 1.5", "one rank"], ["--json", "out.json", "--plot", "out.svg"]
    status, output = bench(
        "--parts", "skew", "--devices", "4", "--skews", *skews, "--redundant-experts", "2", "5", *files
    )
    assert status == 0, output
    assert "rows under skew" in output
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["results"] == report["layers"] == report["one device"] == []
    timed = {(r["routing"], r["num_redundant_experts"], r["capacity"]): r for r in report["skew"]}
    worst, dropping, balanced = (0, 256), (0, 80), (2, 68)  # of 64 rows; a rank has no 5 experts to replicate
    assert set(timed) == {(skew, *variant) for skew in skews for variant in (worst, dropping, balanced)}
    for (_, num_places, capacity), r in timed.items():
        excess = sum(max(rows - capacity, 0) for rows in r["rows_after"])
        assert r["dropped_rows"] == excess
        assert sum(r["rows_after"]) == sum(r["rows_before"]) == 4 * 64
        assert (r["replicas"] > 0) == (r["moved_rows"] > 0) == (num_places > 0)
        ops = ["plan", "replicate"] if num_places else []
        assert list(r["times"]) == [*ops, "round trip", "layer forward", "layer forward + backward"]
        assert all(time["end_to_end_us"] > 0 for time in r["times"].values())
        assert r["temp_bytes"] > 0
    for variant in (worst, balanced):
        assert timed["lognormal 1.5", *variant]["dropped_rows"] == 0
    assert timed["lognormal 1.5", *dropping]["dropped_rows"] > 0
    assert timed["one rank", *worst]["rows_before"] == [256, 0, 0, 0]
    drawn = (tmp_path / "out.svg").read_text()
    for text in (*skews, "S = 2, buffers 1.06 x", "milliseconds, layer forward + backward"):
        assert text in drawn


def test_a_plot_needs_a_sweep(bench):
    status, output = bench("--plot", "out.svg")
    assert status != 0
    assert "choose the quantity to vary with --sweep" in output


def test_sms_need_gpus(bench):
    status, output = bench("--sweep", "sms")
    assert status != 0
    assert "--sweep sms needs GPUs" in output


@pytest.mark.parametrize(("factor", "capacity"), [("1.5", 96), ("0", None)])
def test_a_capacity(factor, capacity, tmp_path, bench):
    """The report says how many rows the buffers had: 1.5 * 32 tokens * top-2, or room for the worst case."""
    status, output = bench("--capacity", factor, "--orders", "expert", "--devices", "2", "--json", "out.json")
    assert status == 0, output
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert {r["capacity"] for r in results if r["order"]} == {capacity}
    assert {r["sms"] for r in results} == {None}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--sweep", "ranks", "--plot", "out.xyz"], "must end in .png or .svg or .pdf, got out.xyz"),
        (
            ["--parts", "products", "skew", "--plot", "out.svg"],
            "one of the parts layer, products, skew, model and decode",
        ),
        (["--from-json", "out.json"], "--from-json needs the file to draw to; pass --plot"),
        (
            ["--from-json", "nowhere.json", "--plot", "out.svg"],
            "steps of models or decode steps, of this version of the benchmark, got nowhere.json",
        ),
        (["--json", "nowhere/out.json"], "in an existing folder, but nowhere does not exist"),
        (["--json", "folder.json"], "must be a file, but folder.json is a folder"),
    ],
)
def test_options_are_checked_before_anything_is_timed(tmp_path, bench, options, text):
    (tmp_path / "folder.json").mkdir()
    status, output = bench(*options)
    assert status != 0
    assert text in output


def test_version(run_command):
    status, output = run_command("--version")
    assert status == 0
    assert output.strip() == f"jax_ep {jax_ep.__version__}"


@pytest.mark.slow
def test_a_model_s_step(tmp_path, bench):
    """All ways of making the layer of experts train the same model."""
    options = ["--parts", "model", "--peers", "--devices", "2", "--json", "out.json", "--plot", "model.svg"]
    status, output = bench(*options)
    assert status == 0, output
    steps = json.loads((tmp_path / "out.json").read_text())["models"]
    assert [step["by"] for step in steps] == [
        "jax_ep",
        "jax_ep, FP8",
        "jax_ep, redundant experts",
        "all_gather",
    ]
    for step in steps:
        assert len(step["losses"]) == model.STEPS
        assert step["losses"][-1] < 0.9 * step["losses"][0]
        np.testing.assert_allclose(step["losses"], steps[0]["losses"], rtol=0.02)
    status, output = bench("--from-json", "out.json", "--plot", "again.svg")
    assert status == 0, output
    for figure in ("model.svg", "again.svg"):
        assert "redundant experts" in (tmp_path / figure).read_text()


@pytest.mark.slow
def test_a_model_whose_parameters_are_divided(tmp_path, bench):
    """Devices that share parameters train the model of devices that have all of them, in every way."""
    options = ["--parts", "model", "--devices", "4", "--repeats", "1", "--json", "out.json"]
    losses = {}
    for more in (["--ways", "jax_ep"], ["--peers", "--fsdp", "2"]):
        status, output = bench(*options, *more)
        assert status == 0, output
        assert ("fsdp 2 x ep 2" in " ".join(output.split())) == ("--fsdp" in more)
        steps = json.loads((tmp_path / "out.json").read_text())["models"]
        losses |= {(step["by"], step["fsdp"]): step["losses"] for step in steps}
    assert len(losses) == 5
    for found in losses.values():
        np.testing.assert_allclose(found, losses["jax_ep", 1], rtol=0.02)


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("qwen3_30b_a3b", {1: 6, 2: 6, 4: 6, 8: 6}),
        ("qwen3_moe_235b", {1: 2, 2: 3, 4: 3, 8: 3}),
        ("deepseek_v3", {1: 1, 2: 1, 4: 1, 8: 1}),
    ],
)
def test_a_model_s_depth_depends_on_the_devices(name, layers):
    cut = {count: model.on_devices(model.DECODERS[name], MODELS[name], count) for count in layers}
    assert {count: decoder.layers for count, decoder in cut.items()} == layers


def test_rejects_unknown_ways(bench):
    status, _ = bench("--parts", "model", "--devices", "2", "--ways", "jax_ep", "by_mail")
    assert "--ways has 'jax_ep', 'jax_ep, FP8'" in str(status)
    assert "got by_mail" in str(status)


def test_model_without_maxtext_reports_the_missing_row(monkeypatch):
    monkeypatch.setattr(maxtext, "missing", lambda: "maxtext is not installed")
    notes = []
    options = argparse.Namespace(ways=None, peers=True)
    assert model.ways_of(options, False, notes) == [
        "jax_ep",
        "jax_ep, FP8",
        "jax_ep, redundant experts",
        "all_gather",
    ]
    assert notes == ["MaxText's layer was not timed: maxtext is not installed; see docs/howto/maxtext.md"]
    options.peers = False
    assert "all_gather" not in model.ways_of(options, False, notes)


@pytest.mark.slow
def test_a_decode_step(tmp_path, bench, monkeypatch):
    """One step and several in a program, with percentiles, in both dtypes, and by JAX's own collectives."""
    monkeypatch.setattr(decode, "LAYERS", 2)
    monkeypatch.setattr(decode, "TOKENS", (1,))
    options = ["--parts", "decode", "--peers", "--devices", "2", "--json", "out.json", "--plot", "out.svg"]
    status, output = bench(*options)
    assert status == 0, output
    words = " ".join(output.split())
    for text in ("us a layer", "us a step"):
        assert f"tiny: decode step of 2 layers, top-2 of 16, 2 ranks; {text}" in words
    assert "all layers have the same routed experts, 0.7864 MB a rank in bfloat16" in words
    steps = json.loads((tmp_path / "out.json").read_text())["decode"]
    assert [(step["shape"]["tokens"], step["by"], step["dtype"]) for step in steps] == [
        (tokens, by, dtype)
        for dtype in ("bfloat16", "FP8")
        for tokens in (1, 32)
        for by in ("jax_ep", "all_gather")
    ]
    for step in steps:
        assert (step["several"]["steps"], step["single"]["steps"]) == (4, 1)
        assert (step["several"]["calls"], step["single"]["calls"]) == (3, 4)  # of --repeats 1
        for program in ("several", "single"):
            times = list(step[program]["percentiles_us"].values())
            assert 0 < times[0] <= times[-1]
            assert times == sorted(times)
        assert step["kernels_us"] is step["communication_us"] is None  # profiles of CPUs have no kernels
    status, output = bench("--from-json", "out.json", "--plot", "again.svg")
    assert status == 0, output
    drawn = (tmp_path / "again.svg").read_text()
    for text in ("tiny, 2 layers, 2 ranks, FP8", "32 tokens a rank, 4 steps a program, all_gather"):
        assert text in drawn
