"""The benchmark of expert products. Nothing here asserts a speed."""

import argparse
import dataclasses
import itertools
import types

import jax.numpy as jnp
import numpy as np
import pytest

from jax_ep.bench import deep_gemm, measure, products, report
from jax_ep.bench.products import DIRECTIONS, FORWARD, OF_ROWS, ExpertProduct, Operands
from jax_ep.bench.shapes import SHAPES, Shape

pytestmark = [pytest.mark.one_jax, pytest.mark.no_gpu]

SIZES = np.array([3, 0, 130], np.int32)
BFLOAT16 = ExpertProduct(
    name="tiny",
    shape=SHAPES["tiny"],
    ranks=1,
    routing="uniform",
    matrices="up",
    height=128,
    width=256,
    direction=FORWARD,
    by="grouped_dot",
    dtype="bfloat16",
    rows=133,
    groups=2,
    smallest_group=3,
    largest_group=130,
    us=4.0,
    dense_us=3.0,
    memory_us=1.0,
)
FP8 = dataclasses.replace(BFLOAT16, dtype="FP8", direction=OF_ROWS, us=2.0)


def test_bursts_take_turns_and_the_fastest_counts(monkeypatch):
    seconds, calls, pauses = [0.0], [], []
    duration = itertools.chain([1.0] * 4, [0.04] * 100)

    def run(name, call_s):
        calls.append(name)
        seconds[0] += call_s()

    monkeypatch.setattr(measure.time, "perf_counter", lambda: seconds[0])
    monkeypatch.setattr(measure.time, "sleep", pauses.append)
    runs = [lambda: run("slow", lambda: 0.05), lambda: run("warms up", lambda: next(duration))]
    us = measure.bursts_us(runs, lambda result: None, 2, pause_s=0.3)
    np.testing.assert_allclose(us, [50e3, 40e3])
    assert pauses == [0.3] * 4
    # One call to compile each, three to count the calls of a burst, and then bursts in turn.
    bursts = [name for name, _ in itertools.groupby(calls[2:])]
    assert bursts == ["slow", "warms up"] * 3


def test_shares_compare_with_dense_products_or_with_memory():
    assert BFLOAT16.share == 0.75
    assert dataclasses.replace(BFLOAT16, dense_us=None).share == 0.25
    assert BFLOAT16.tflops == pytest.approx(2 * 133 * 128 * 256 / 4.0e-6 / 1e12)


@pytest.mark.parametrize("tokens", [64, 4])
def test_products_of_few_rows_compare_with_memory(tokens, monkeypatch):
    """And not with dense products, whose padding would be most of the work."""

    def bursts_us(runs, *_, **__):
        return [10.0 + index for index in range(len(runs))]

    untimed = types.SimpleNamespace(dense=print, grouped=print, grouped_fp8=print)
    monkeypatch.setattr(products, "Operands", lambda *_: untimed)
    monkeypatch.setattr(measure, "bursts_us", bursts_us)
    shape = Shape(tokens=tokens, hidden=128, top_k=4, experts=4, inner=64)
    options = argparse.Namespace(routing="uniform", repeats=1)
    rows = list(products.results("small", shape, 2, options, memory_gbs=100.0))
    is_few = tokens == 4
    keys = [("grouped_dot", "bfloat16"), ("grouped_dot", "FP8")]
    if not is_few:
        keys.insert(0, ("dense", "bfloat16"))
    assert [(r.direction, r.by, r.dtype) for r in rows if r.matrices == "up"] == [
        (direction, *key) for direction in DIRECTIONS for key in keys
    ]
    assert {r.dtype for r in rows if r.matrices == "down"} == {"bfloat16"}  # 64 wide, too narrow for FP8
    for r in rows:
        assert (r.groups, r.rows) == (2, 8 * tokens // 2)
        assert r.dense_us == (None if is_few else 10.0)
        element_bytes = 1 if r.dtype == "FP8" and r.direction != "gradient of weights" else 2
        assert r.memory_us == 2 * r.height * r.width * element_bytes / 100e3


@pytest.mark.slow
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_programs_compute_what_they_are_named_after(direction):
    operands = Operands(SIZES, 128, 256)
    rows, w, d = (np.asarray(array, np.float32) for array in operands._arrays)
    starts = [*np.cumsum(SIZES) - SIZES, SIZES.sum()]
    groups = [slice(start, end) for start, end in itertools.pairwise(starts)]
    expected = {
        "forward": lambda: np.concatenate([rows[g] @ w[i] for i, g in enumerate(groups)]),
        "gradient of rows": lambda: np.concatenate([d[g] @ w[i].T for i, g in enumerate(groups)]),
        "gradient of weights": lambda: np.stack([rows[g].T @ d[g] for g in groups]),
    }[direction]()
    for run, tolerance in ((operands.grouped(direction), 0.01), (operands.grouped_fp8(direction), 0.06)):
        error = np.abs(np.asarray(run(), np.float32) - expected).max()
        assert error < tolerance * np.abs(expected).max()
    dense = operands.dense(direction)()
    assert dense.dtype == jnp.bfloat16
    padded = 128 + 256
    assert dense.shape == {"forward": (padded, 256), "gradient of rows": (padded, 128)}.get(
        direction, (128, 256)
    )


def test_deep_gemm_gets_padded_groups(deep_gemm_calls):
    rows, reason = products.of_deep_gemm([BFLOAT16, FP8], SIZES, repeats=1)
    assert reason is None
    assert [(r.by, r.dtype, r.direction) for r in rows] == [
        ("DeepGEMM", "bfloat16", FORWARD),
        ("DeepGEMM", "FP8", OF_ROWS),
    ]
    assert all(r.us > 0 for r in rows)
    calls = {call["dtype"]: call for call in deep_gemm_calls()}
    for dtype, (depth, width) in {"bfloat16": (128, 256), "FP8": (256, 128)}.items():
        assert calls[dtype] == {"dtype": dtype, "rows": 384, "depth": depth, "width": width, "exist": 133}


def test_failure_of_deep_gemm_keeps_earlier_times(deep_gemm_calls, monkeypatch):
    monkeypatch.setenv("FAKE_FAILURE", "FP8")
    rows, reason = products.of_deep_gemm([BFLOAT16, FP8], SIZES, repeats=1)
    assert [r.dtype for r in rows] == ["bfloat16"]
    assert reason == (
        "DeepGEMM has no times from up gradient of rows, grouped_dot, FP8, tiny on: RuntimeError: no kernel"
    )


def test_end_of_deep_gemms_process_is_reported(deep_gemm_calls, monkeypatch):
    monkeypatch.setenv("FAKE_FAILURE", "exit")
    rows, reason = products.of_deep_gemm([BFLOAT16], SIZES, repeats=1)
    assert rows == []
    assert reason is not None
    assert reason.endswith("its process ended with status 3: out of order")


def test_missing_packages_are_named(deep_gemm_calls, monkeypatch):
    assert deep_gemm.missing() is None
    monkeypatch.setattr(deep_gemm, "PACKAGES", ("torch", "deep_gemm_of_nobody"))
    assert deep_gemm.missing() == "deep_gemm_of_nobody"


def test_products_of_a_file_are_drawn(tmp_path, run_command):
    record = report.Record(tmp_path / "out.json")
    few = dataclasses.replace(BFLOAT16, name="few", dense_us=None)
    dense = dataclasses.replace(BFLOAT16, by="dense")
    peer = dataclasses.replace(BFLOAT16, by="DeepGEMM")
    record.extend(record.products, [dense, BFLOAT16, FP8, peer, few])
    assert report.read(tmp_path / "out.json") == (record.products, [], [])
    status, output = run_command("bench", "--from-json", "out.json", "--plot", "out.svg")
    assert (status, output) == (0, "")
    drawn = (tmp_path / "out.svg").read_text()
    for text in ("share of the dense bfloat16 product", "few rows: share of the memory's rate", "DeepGEMM"):
        assert text in drawn
    for text in ("tiny", "few", "up, 128 x 256", "66 rows a group", *DIRECTIONS):
        assert text in drawn
