"""The documentation: its code runs, its figures show what the ops do, and the API page names everything.

The Python blocks of a page run one after the other, as a reader pastes them. Pages below docs/howto and those
in GO_ON begin where docs/start.md ends. A block that follows a line `<!-- not run: why -->` is left out.
"""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import balance_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ranks

import jax_ep

pytestmark = [pytest.mark.one_jax, pytest.mark.no_gpu]

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GO_ON = ("balance.md", "capacity.md", "export.md", "moving_from.md")
# start.md, which all others begin with, sets up its own devices, and failing_ranks.md lets ranks fail.
OWN_PROCESS = ("start.md", "failing_ranks.md")
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page):
    text = re.sub(r"<!-- not run: [^>]+ -->\n\n?```python\n.*?^```$", "", page.read_text(), flags=re.M | re.S)
    return [match[1] for match in BLOCK.finditer(text)]


def goes_on(page):
    """Returns whether a page begins with the program of start.md."""
    return page.parent.name == "howto" or page.name in GO_ON


PAGES = [
    pytest.param(page, id=str(page.relative_to(DOCS)), marks=[pytest.mark.slow] * goes_on(page))
    for page in sorted(DOCS.rglob("*.md"))
    if blocks(page)
]


@pytest.mark.parametrize("page", PAGES)
def test_code(page, tmp_path, monkeypatch):
    code = "\n".join((blocks(DOCS / "start.md") if goes_on(page) else []) + blocks(page))
    if page.name in OWN_PROCESS:
        run_in_own_process(code, tmp_path)
        return
    monkeypatch.chdir(tmp_path)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        exec(compile(code, page.name, "exec"), {"__name__": "__main__"})


def run_in_own_process(code, folder):
    (folder / "page.py").write_text(code)
    path = os.pathsep.join([str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path, "NPROC": "32"}
    environment.pop("XLA_FLAGS", None)  # the pages set up their devices themselves
    ran = subprocess.run(
        [sys.executable, "-W", "error", "page.py"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_api_page_names_everything():
    shown = re.findall(r"^::: jax_ep\.(\w+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    assert sorted(shown) == sorted(jax_ep.__all__)


DRAW = runpy.run_path(str(DOCS / "figures" / "draw.py"))


@pytest.mark.parametrize("name", DRAW["FIGURES"])
def test_figures_are_up_to_date(name):
    assert (DOCS / "figures" / f"{name}.svg").read_text() == DRAW["FIGURES"][name](), (
        "run python docs/figures/draw.py"
    )


def dispatched(order, capacity=None):
    """The figures' example: each rank's rows [2, C], 10 * rank + token, and what was dropped."""
    ids = np.array([DRAW["CHOICES"][token] for token in DRAW["TOKENS"]], np.int32)
    rows = np.array([[ord(token[0]) * 10 + int(token[1])] for token in DRAW["TOKENS"]], np.int32)
    on = ranks(2)

    def shard(rows, ids):
        options = {"group": on.group, "num_experts": 4, "order": order, "capacity": capacity}
        sent = jax_ep.dispatch(rows, ids, **options)
        return sent.x[:, 0], sent.num_dropped

    mapped = on.map(shard)
    arrived, num_dropped = jax.jit(mapped)(jnp.asarray(rows), jnp.asarray(ids))
    names = [[f"{chr(n // 10)}{n % 10}" for n in rank if n] for rank in np.asarray(arrived).reshape(2, -1)]
    return names, list(np.asarray(num_dropped))


def test_figures_show_what_is_sent():
    for rank in range(2):
        assert dispatched("expert")[0][rank] == [token for _, token in DRAW["rows_by_expert"](rank)]
        assert dispatched("rank")[0][rank] == [token for _, token in DRAW["rows_by_rank"](rank)]


def test_figure_of_full_buffers():
    for order, rows, lost in (("expert", "rows_by_expert", 2), ("rank", "rows_by_rank", 1)):
        kept, num_dropped = dispatched(order, capacity=4)
        assert kept[0] == [token for _, token in DRAW[rows](0)][:4]
        assert num_dropped[0] == lost


def test_figure_of_skew():
    counts, ranks, slots = DRAW["skewed_counts"](), DRAW["SKEW_RANKS"], DRAW["SKEW_SLOTS"]
    plan = balance_oracle.plan(counts, slots, tolerance=20)
    before, after = counts.sum(axis=0).reshape(ranks, -1).sum(axis=1), plan.loads(ranks)
    drawn = re.findall(r">(\d\.\d\d)<", DRAW["skew"]())
    shown = [f"{rows / DRAW['SKEW_ROWS']:.2f}" for pair in zip(before, after, strict=True) for rows in pair]
    assert drawn == shown
    redundant = plan.physical_to_logical.reshape(ranks, -1)[:, -slots:]
    named = [
        name for names in re.findall(r">experts? ([\d, ]+)<", DRAW["skew"]()) for name in names.split(", ")
    ]
    assert named == [str(expert) for expert in redundant.reshape(-1) if expert >= 0]
