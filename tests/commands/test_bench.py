"""The benchmark's routings and programs."""

import argparse
import dataclasses
import functools
import json
import os

import jax
import numpy as np
import oracle
import pytest
from cases import assert_close, count_calls, floats, ranks
from devices import make_mesh
from jax.sharding import PartitionSpec as P
from layers import R

import jax_ep
from jax_ep.bench import decode, layers, measure, plots, processes, programs, progress, report, run, skew
from jax_ep.bench.arguments import ORDERS
from jax_ep.bench.routings import ROUTINGS, bytes_received, capacity_of, domain_rows_of, route, rows_of_hops
from jax_ep.bench.shapes import MOST_PADDED_TOKENS, SHAPES, Shape

pytestmark = pytest.mark.one_jax

SHAPE = Shape(tokens=12, hidden=8, top_k=3, experts=16, inner=8)


def test_interrupted_run_keeps_its_rows(tmp_path):
    path = tmp_path / "out.json"
    record = report.Record(path)

    def measure():
        for us in (1.0, 2.0):
            yield skew.LocalOp("copy", "XLA", 8, skew.Time(None, us), None)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record.extend(record.local, measure())
    written = json.loads(path.read_text())
    assert [row["time"]["end_to_end_us"] for row in written["one device"]] == [1.0, 2.0]
    assert not written["complete"]
    record.write(is_complete=True)
    assert json.loads(path.read_text()) == written | {"complete": True}
    assert list(tmp_path.iterdir()) == [path]


def test_progress_bar_shows_the_last_row(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes the captured stderr for a terminal
    monkeypatch.setenv("COLUMNS", "200")
    rows = [skew.LocalOp("copy", "XLA", 8, skew.Time(None, us), None) for us in (1.5, 2.5)]
    assert list(progress.track("skew", iter(rows), 3, quiet=False)) == rows
    printed = capsys.readouterr()
    assert not printed.out
    for text in ("skew", "2/3", "2.5 us, copy, XLA"):
        assert text in printed.err


def test_labels_of_a_plot():
    sms = [4, 8, 12, 16, 24, 26, 32, 48, 64, 78]
    assert plots._labels(sms) == ["4", "8", "12", "16", "24", "", "32", "48", "64", "78"]
    assert plots._labels([4]) == ["4"]
    tokens = [2**i for i in range(15)]
    assert plots._labels(tokens) == [str(number) for number in tokens]


@pytest.mark.parametrize(
    ("chosen", "gpus"),
    [
        (None, ["0", "1", "2", "3"]),
        ("3,1", ["3", "1"]),
        ("2, GPU-8932f937", ["2", "GPU-8932f937"]),
        ("0,9,1", ["0"]),
        ("-1", []),
        ("", []),
    ],
)
def test_only_gpus_that_the_user_lets_it_see(chosen, gpus, tmp_path, monkeypatch):
    """As CUDA does, which ends at the first name that it does not know."""
    lister = tmp_path / "nvidia-smi"
    lister.write_text("#!/bin/sh\nprintf 'GPU 0: A\\n  MIG 1g.18gb\\nGPU 1: A\\nGPU 2: A\\nGPU 3: A\\n'\n")
    lister.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    if chosen is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert processes.visible_gpus.__wrapped__() == gpus


@pytest.mark.parametrize("kind", ROUTINGS)
def test_choices_of_a_token_differ(kind):
    ids = route(kind, SHAPE, 4)
    assert ids.shape == (48, 3)
    for token in ids:
        used = token[token >= 0]
        assert len(set(used)) == len(used)
    if kind == "one rank":
        assert ids.max() < 4
        assert (ids >= 0).all()  # four experts for three choices
        assert (route(kind, SHAPE, 8) >= 0).sum() == 2 * 96  # but two only there
    counts = np.bincount(route(kind, Shape(2000, 8, 3, 16, 8), 1).ravel(), minlength=16)
    if kind == "uniform":
        assert counts.max() < 1.3 * counts.min()
    if kind == "zipf":
        assert counts[0] > 4 * counts[15]
    if kind.startswith("lognormal"):
        spread = np.log(counts).std() / float(kind.split()[1])
        assert 0.5 < spread < 1.5
    if kind == "one expert":
        assert abs(counts[0] - 0.6 * 2000) < 0.05 * 2000
        assert counts[1:].max() < 1.3 * counts[1:].min()


@pytest.mark.parametrize("order", ORDERS)
def test_bytes_are_those_of_the_busiest_receiver(order):
    ids = route("zipf", SHAPE, 4)
    received = oracle.dispatch(
        np.zeros((4, 12, 1)), ids.reshape(4, 12, 3), None, 16, "rank" if order == "rank" else "expert"
    )
    rows = [[s for s in one.sources if s is not None] for one in received]
    total = max(map(len, rows))
    wire = max(len({s[:2] for s in own if s[0] != rank}) for rank, own in enumerate(rows))
    assert bytes_received(ids, SHAPE, 4, order) == (total * 16, wire * 16)


CALLS = {
    "dispatch": {"route": 3},
    "dispatch FP8": {"route": 3},
    "combine": {"route": 1, "pull": 3},
    "combine FP8": {"route": 1, "pull": 3},
    "layout": {"layout": 3},
    "permute": {"permute": 3},
    "unpermute": {"unpermute": 3},
    "round trip": {"route": 3, "pull": 3},
    "chained pair": {"route": 3, "pull": 3},
    "forward + backward": {"route": 3, "push": 3, "pull": 6},
}


def test_each_step_makes_fp8_of_its_rows():
    """Outside of the dispatch, too: by a kernel, or by XLA with one quotient for each block."""
    shape = dataclasses.replace(SHAPE, hidden=128)
    with jax_ep.Group(make_mesh((R,), ("ep",)), "ep") as group:
        prepare = programs.of_ours("dispatch FP8", "rank", group, shape, "xla")
        repeated = programs.repeated(make_mesh((R,), ("ep",)), prepare, 3)
        arguments = floats((R * 12, 128)), route("uniform", SHAPE, R), np.ones((R * 12, 3), np.float32)
        text = repeated.lower(*arguments).compile().as_text()
        assert count_calls(text).get("quantize", text.count(" divide(")) == 3


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("op", programs.OPS)
def test_no_step_is_merged_or_dropped(op, order):
    with jax_ep.Group(make_mesh((R,), ("ep",)), "ep") as group:
        shape = dataclasses.replace(SHAPE, hidden=128)
        prepare = programs.of_ours(op, order, group, shape, "ffi")
        repeated = programs.repeated(make_mesh((R,), ("ep",)), prepare, 3)
        arguments = floats((R * 12, 128)), route("uniform", SHAPE, R), np.ones((R * 12, 3), np.float32)
        assert count_calls(repeated.lower(*arguments).compile().as_text()) == CALLS[op]
        assert np.isfinite(np.asarray(jax.device_get(repeated(*arguments)), np.float32)).all()


@pytest.mark.usefixtures("two_devices")
@pytest.mark.parametrize(
    ("op", "order", "steps"),
    [
        ("dispatch", "expert", {"route": 3}),
        ("dispatch FP8", "rank", {"route": 3, "push": 3}),  # choices to the ranks of a domain, and rows
        ("combine", "rank", {"route": 1, "push": 1, "pull": 3}),
        ("round trip", "expert", {"route": 3, "pull": 3}),
    ],
)
def test_no_step_of_two_hops_is_merged_or_dropped(op, order, steps):
    with jax_ep.Group(make_mesh((R,), ("ep",)), "ep", ranks_per_domain=R // 2) as group:
        shape = dataclasses.replace(SHAPE, hidden=128)
        prepare = programs.of_ours(op, order, group, shape, "ffi")
        repeated = programs.repeated(make_mesh((R,), ("ep",)), prepare, 3)
        arguments = floats((R * 12, 128)), route("uniform", SHAPE, R), np.ones((R * 12, 3), np.float32)
        calls = count_calls(repeated.lower(*arguments).compile().as_text())
        assert {name: calls[name] for name in ("route", "push", "pull") if name in calls} == steps


@pytest.mark.parametrize("per_domain", [1, 2])
def test_rows_of_hops_are_those_of_the_busiest_receivers(per_domain):
    ids = route("zipf", SHAPE, 4)
    owners = ids.reshape(4, 12, 3) // 4  # of four experts each
    between, within = np.zeros(4, int), np.zeros(4, int)
    for source, tokens in enumerate(owners):
        for token in tokens:
            for domain in {owner // per_domain for owner in token}:
                through = domain * per_domain + source % per_domain
                between[through] += domain != source // per_domain
                for owner in {owner for owner in token if owner // per_domain == domain}:
                    within[owner] += owner != through
    assert rows_of_hops(ids, SHAPE, 4, per_domain) == (between.max(), within.max())


def test_a_domain_capacity_of_one_is_what_a_uniform_routing_needs():
    shape = Shape(tokens=2000, hidden=8, top_k=3, experts=16, inner=8)
    between, _ = rows_of_hops(route("uniform", shape, 4), shape, 4, 1)
    assert abs(3 * domain_rows_of(1.0, shape, 4) - between) < 0.04 * between
    assert domain_rows_of(None, shape, 4) == domain_rows_of(50.0, shape, 4) == 2000


@pytest.mark.parametrize("order", ["rank", "expert"])
def test_a_capacity_of_one_is_what_a_uniform_routing_needs(order):
    shape = Shape(tokens=2000, hidden=8, top_k=3, experts=16, inner=8)
    ids = route("uniform", shape, 4).reshape(4, 2000, 3)
    received = oracle.dispatch(np.zeros((4, 2000, 1)), ids, None, 16, order)
    mean = np.mean([one.num_tokens[0] for one in received])
    assert abs(capacity_of(1.0, shape, 4, order) - mean) < 0.02 * mean
    assert capacity_of(None, shape, 4, order) is None


def test_padded_experts_have_room_for_all():
    assert capacity_of(1.5, SHAPE, 4, "expert_padded") is None


def test_a_chained_pair_is_weighted_by_expert():
    """Of experts that do nothing: each token times the sum of its weights, once a layer."""
    on = ranks(R)
    x, ids = floats((R * 12, 8)), route("uniform", SHAPE, R)
    weights = np.random.default_rng(2).random(ids.shape, np.float32)
    for order in ("expert", "expert_padded"):
        prepare = programs.of_ours("chained pair", order, on.group, SHAPE, "ffi")
        (got,) = on.run(
            lambda *a, prepare=prepare: (prepare(*a)[1](a[0]),), *(a[None] for a in (x, ids, weights))
        )
        assert_close(got.reshape(x.shape), x * weights.sum(axis=1, keepdims=True), terms=3)


def test_plans_of_one_device_have_the_counts_that_they_name(monkeypatch):
    monkeypatch.setattr(skew, "PLANNED_TOKENS", 2048)
    counts = {program.op: np.asarray(program.arguments[0]) for program in skew.plan_programs("xla")}
    assert [array.shape for array in counts.values()] == [(8, 256), (8, 256), (64, 256), (64, 256)]
    for op, array in counts.items():
        assert (array.sum(axis=1) == 2048 * 8 // len(array)).all()
        assert (array.min() == array.max()) == op.endswith("equal counts")


def test_replicate_on_one_device_returns_the_weights():
    mesh = make_mesh((1,), ("ep",))
    with jax_ep.Group(mesh, "ep") as group:
        copy, *replicated = skew.copy_programs(mesh, group, SHAPES["tiny"], "xla")
        assert [program.op for program in replicated] == ["replicate", "gradient of replicate"]
        for program in replicated:
            weights = program.arguments[0]
            results = jax.tree.leaves(program.function(*program.arguments))
            for weight, result in zip(weights, results, strict=True):
                assert (np.asarray(weight) == np.asarray(result)).all()
            assert program.compared_with == ((copy.op, copy.by),)


def test_the_decode_shapes_are_one_model():
    shapes = {
        name: shape
        for name, shape in SHAPES.items()
        if name.startswith("deepseek_v3") and "_experts" not in name
    }
    assert [shape.tokens for shape in shapes.values()] == [4096, 128, 16, 1]
    assert len({dataclasses.replace(shape, tokens=1) for shape in shapes.values()}) == 1


@pytest.mark.parametrize(("tokens", "padded"), [(MOST_PADDED_TOKENS, True), (MOST_PADDED_TOKENS + 1, False)])
def test_padded_experts_are_for_few_tokens(tokens, padded):
    options = argparse.Namespace(orders=ORDERS)
    shape = dataclasses.replace(SHAPE, tokens=tokens)
    for op in programs.OPS:
        found = run.orders_of(options, op, shape)
        if op in programs.ORDERLESS:
            assert found == [""]
        elif op in programs.IN_FP8:  # their rows are too short to have scales
            assert shape.hidden < 128
            assert not found
        else:
            assert found[:2] == ["rank", "expert"]
            assert ("expert_padded" in found) == (padded and op != "forward + backward")


def test_kernels_us_counts_named_kernels_by_their_medians(monkeypatch):
    kernels = [("a", 1000, 3000), ("b", 2000, 4000), ("b", 2500, 2600), ("a", 9000, 10000)]
    monkeypatch.setattr(measure, "kernels", lambda *_: [kernels, [("a", 0, 1000)]])
    assert measure.kernels_us(print, (), 2, ("a",)) == 1.5  # twice the median of 2 and 1
    assert measure.kernels_us(print, (), 1, ("a", "b")) == 3 + 2 * 1.05
    monkeypatch.setattr(measure, "kernels", lambda *_: [])
    assert measure.kernels_us(print, (), 2, ()) is None


def test_kinds_us_leaves_out_the_wait_for_late_devices(monkeypatch):
    communication = [("PushKernel", 0, 90_000), ("PushKernel", 100_000, 103_000), ("PushKernel", 0, 3_000)]
    products = [("GroupedDot", 0, 8_000), ("GroupedDot", 0, 2_000), ("GroupedDot", 0, 2_000)]
    monkeypatch.setattr(measure, "kernels", lambda *_: [[*communication, *products], [("PullKernel", 0, 9)]])
    assert measure.kinds_us(print, (), 3) == {"communication": 3.0, "products of experts": 4.0}
    monkeypatch.setattr(measure, "kernels", lambda *_: [])
    assert measure.kinds_us(print, (), 2) is None


@pytest.mark.parametrize("dtype", [layers.BFLOAT16, layers.FP8])
def test_decode_steps_with_and_without_expert_parallelism_are_the_same_model(dtype):
    mesh, shape = make_mesh((R,), ("ep",)), dataclasses.replace(SHAPES["tiny"], tokens=4)
    weights = decode.weights_of(shape, mesh)
    if dtype == layers.FP8:
        weights = decode.quantized(weights, mesh)
    tokens = np.random.default_rng(0).integers(decode.VOCABULARY, size=4 * R, dtype=np.int32)
    with jax_ep.Group(mesh, "ep") as group:
        rows = []
        for maker in decode.MAKERS.values():
            moe = maker(group, "fp8" if dtype == layers.FP8 else None)
            run = functools.partial(decode.hidden_rows, moe=moe, top_k=shape.top_k)
            specs = {"in_specs": (decode.SPECS, P("ep")), "out_specs": P("ep"), "check_vma": False}
            mapped = jax.shard_map(lambda w, t, run=run: run(w, tokens=t), mesh=mesh, **specs)
            rows.append(np.asarray(jax.jit(mapped)(weights, tokens), np.float32))
    error = np.linalg.norm(rows[0] - rows[1], axis=1) / np.linalg.norm(rows[1], axis=1)
    assert np.median(error) < 0.02  # rounding may change the experts of a few tokens
