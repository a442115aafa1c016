"""The documentation: its code runs, its figures show what the ops do, and the API pages name everything.

The Python blocks of a page run one after the other, as a reader pastes them, in an empty folder, where only
installed packages can be imported. Pages below docs/howto and those in GO_ON begin where docs/start.md ends.
A block that follows a line `<!-- not run: why -->` is left out.
"""

import contextlib
import inspect
import os
import re
import runpy
import subprocess
import sys
import typing
from pathlib import Path

import balance_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ranks
from devices import flags_of_processes

import jax_ep

pytestmark = [pytest.mark.one_jax, pytest.mark.no_gpu]

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
START = DOCS / "start.md"
GO_ON = ("balance.md", "capacity.md", "export.md", "moving_from.md", "recipes.md")
FAILS = DOCS / "howto" / "failing_ranks.md"  # lets ranks fail, so it needs a process of its own
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# Runs the program of a page, then goes on from there with each page that is named on a line of stdin.
READER = """
import os, sys, traceback

def paste(page, names):
    os.chdir(os.path.dirname(page))
    with open(page) as file:
        exec(compile(file.read(), page, "exec"), names)

names = {"__name__": "__main__"}
paste(sys.argv[1], names)
print("DONE", flush=True)
for line in sys.stdin:
    try:
        paste(line.strip(), dict(names))
    except BaseException:
        traceback.print_exc(file=sys.stdout)
        print("FAILED", flush=True)
    else:
        print("DONE", flush=True)
"""


def blocks(page):
    not_run = r"<!-- not run: [^>]+ -->\n(<!-- source: [^>]+ -->\n)?\n?```python\n.*?^```$"
    text = re.sub(not_run, "", page.read_text(), flags=re.M | re.S)
    return [match[1] for match in BLOCK.finditer(text)]


def goes_on(page):
    """Returns whether a page begins with the program of start.md."""
    return page.parent.name == "howto" or page.name in GO_ON


PAGES = [
    pytest.param(page, id=str(page.relative_to(DOCS)), marks=[pytest.mark.slow] * goes_on(page))
    for page in sorted(DOCS.rglob("*.md"))
    if blocks(page)
]


@contextlib.contextmanager
def reader(program, xla_flags=""):
    """Starts a process that runs a program, and yields a function that pastes another one into it.

    The pages set up their devices themselves.
    """
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "NPROC": "32", "XLA_FLAGS": xla_flags}
    command = [sys.executable, "-I", "-W", "error", "-c", READER, str(program)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as process:

        def await_result():
            printed = []
            for line in process.stdout:
                if line == "DONE\n":
                    return
                if line == "FAILED\n":
                    break
                printed.append(line)
            pytest.fail("".join(printed))

        def paste(program):
            process.stdin.write(f"{program}\n")
            process.stdin.flush()
            await_result()

        await_result()
        yield paste


def write(page, folder):
    (folder / page.stem).mkdir()
    path = folder / page.stem / "page.py"
    path.write_text("\n".join(blocks(page)))
    return path


@pytest.fixture(scope="module")
def paste_after_start(tmp_path_factory):
    with reader(write(START, tmp_path_factory.mktemp("start")), flags_of_processes()) as paste:
        yield paste


@pytest.mark.parametrize("page", PAGES)
def test_page_runs_where_it_is_pasted(page, tmp_path, request):
    if page == FAILS:
        with reader(write(START, tmp_path), flags_of_processes()) as paste:
            paste(write(page, tmp_path))
    elif page == START:  # with XLA's own settings, as its readers run it
        with reader(write(START, tmp_path)):
            pass
    else:  # with those of the tests, which compile in a third of the time
        paste_after_start = request.getfixturevalue("paste_after_start")
        paste_after_start(write(page, tmp_path))


def test_pages_show_the_code_of_the_examples():
    updated = runpy.run_path(str(DOCS / "theme" / "sources.py"))["updated"]
    for page in DOCS.rglob("*.md"):
        assert updated(page.read_text()) == page.read_text(), "run python docs/theme/sources.py"


def test_api_pages_show_each_name_once():
    pages = {page.name: page.read_text() for page in (DOCS / "api").glob("*.md")}
    shown = [
        (page, name)
        for page, text in pages.items()
        for name in re.findall(r"^::: jax_ep\.([\w.]+)$", text, re.M)
    ]
    types = [f"types.{name}" for name in jax_ep.types.__all__]
    assert sorted(name for _, name in shown) == sorted([*jax_ep.__all__, "export.disabled_checks", *types])
    listed = re.findall(r"\[`([\w.]+)`\]\((\w+\.md)#jax_ep\.\1\)", pages["index.md"])
    assert sorted((page, name) for name, page in listed) == sorted(shown)


def test_signatures_have_every_parameter():
    """Editors show overloads, so these must have all parameters, too."""
    ops = [getattr(jax_ep, name) for name in jax_ep.__all__ if name != "save_ep_residuals"]
    for op in filter(inspect.isfunction, ops):
        parameters = inspect.signature(op).parameters
        assert all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values())
        for overload in typing.get_overloads(op):
            assert list(inspect.signature(overload).parameters) == list(parameters)


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
    counts, ranks, places = DRAW["skewed_counts"](), DRAW["SKEW_RANKS"], DRAW["SKEW_PLACES"]
    plan = balance_oracle.plan(counts, places, tolerance=20)
    before, after = counts.sum(axis=0).reshape(ranks, -1).sum(axis=1), plan.loads(ranks)
    drawn = re.findall(r">(\d\.\d\d)<", DRAW["skew"]())
    shown = [f"{rows / DRAW['SKEW_ROWS']:.2f}" for pair in zip(before, after, strict=True) for rows in pair]
    assert drawn == shown
    redundant = plan.physical_to_logical.reshape(ranks, -1)[:, -places:]
    named = [
        name for names in re.findall(r">experts? ([\d, ]+)<", DRAW["skew"]()) for name in names.split(", ")
    ]
    assert named == [str(expert) for expert in redundant.reshape(-1) if expert >= 0]
