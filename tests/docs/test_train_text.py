"""The example that trains with several kinds of experts: its runs, results, table and figure."""

import json

import jax
import pytest
import train_text

pytestmark = [pytest.mark.one_jax, pytest.mark.no_gpu]

SIZES = {
    "steps": 10,
    "chunk": 5,
    "validate-every": 5,
    "validation-batches": 2,
    "layers": 2,
    "width": 128,
    "expert-width": 128,
    "num-experts": 4,
    "heads": 2,
    "window": 16,
    "sequences": 4,
    "learning-rate": 3e-4,  # with large steps, differences of rounding grow
    "devices": 2,
    "seeds": 2,
}


@pytest.fixture
def call(tmp_path):
    """Runs the program with these sizes and the files of one folder."""
    (tmp_path / "text").write_bytes(b"the quick brown fox jumps over the lazy dog. " * 40)

    def call(*options, **sizes):
        numbers = [word for name, size in (SIZES | sizes).items() for word in (f"--{name}", str(size))]
        files = ["--text", str(tmp_path / "text"), "--json", str(tmp_path / "losses.json")]
        with jax.numpy_dtype_promotion("standard"):  # which JAX's attention needs
            train_text.main([*options, *numbers, *files])
        return json.loads((tmp_path / "losses.json").read_text())["runs"]

    return call


def test_training_on_text_follows_the_reference(call, tmp_path, capsys):
    figure = tmp_path / "losses.svg"
    runs = call("--experts", "bf16", "dense", "--redundant", "1")
    assert len(runs) == 4
    capsys.readouterr()
    all_runs = call("--experts", "fp8", "dense", "--plot", str(figure))
    printed = capsys.readouterr().out
    assert all_runs[:4] == runs
    assert printed.count(" s in all") == 2  # those of the reference are there already
    assert "| fp8 | " in printed
    assert "minus the reference" in figure.read_text()

    losses = {(run["experts"], run["redundant"], run["seed"]): run["validation"] for run in all_runs}
    assert len(losses) == len(all_runs) == 6
    for (_, _, seed), validation in losses.items():
        (_, middle), (_, last) = validation
        _, (_, reference) = losses["dense", 0, seed]
        assert last < middle - 0.1
        assert last == pytest.approx(reference, abs=0.01)
    assert losses["dense", 0, 0] != losses["dense", 0, 1]
    assert all(run["ranks"] == 2 and run["dropped"] == 0 for run in all_runs)


@pytest.mark.parametrize(
    ("sizes", "text"),
    [({"chunk": 3}, "must divide the 10 steps"), ({"sequences": 3}, "multiple of the 2 ranks")],
)
def test_rejects_sizes_that_do_not_divide(call, sizes, text):
    with pytest.raises(SystemExit, match=text):
        call(**sizes)


def test_rejects_results_of_other_settings(call, tmp_path):
    (tmp_path / "losses.json").write_text(json.dumps({"settings": {}, "runs": []}))
    with pytest.raises(SystemExit, match="other settings"):
        call()
