"""Which parts of the package and of the extension may use which others, read from their sources."""

import ast
import pathlib
import re

import pytest

pytestmark = pytest.mark.no_jax

FFI = pathlib.Path(__file__).parents[2] / "ffi"
PACKAGE = FFI.parent / "jax_ep"

EVERYWHERE = ("core", "host", "handlers", "kernels", "runtime")

# (folders, what must not stand there, why)
RULES = [
    (("core", "host", "kernels", "runtime"), r"xla/ffi|nanobind|Python\.h", "they know no framework"),
    (("core",), r'#include "(?!core/)', "it stands on nothing else of the extension"),
    (("kernels",), r'#include "(host|handlers|runtime)/', "kernels stand on core alone"),
    (("core", "host"), r"cuda\w*\.h|__global__", "they build where there is no CUDA"),
    (("handlers", "runtime", "host", "core"), r"<<<|cudaLaunch", "kernels/launch/launch.h launches kernels"),
    (("kernels",), r"<<<|cudaPeekAtLastError", "kernels are launched by launch.h, which tells its own error"),
    (EVERYWHERE, r"\b(abort|assert|terminate|_?[eE]xit|quick_exit)\(", "an error is returned"),
    (EVERYWHERE, r"\btrap;", "nothing traps"),
]
# A GPU that a stuck peer may still write to is stopped, and its process ended (docs/sharp_bits.md).
EXCEPTIONS = {"runtime/gpu/peers.cc", "kernels/ptx/memory.cuh"}


def code_of(path):
    return re.sub(r"//[^\n]*", "", path.read_text())


@pytest.mark.parametrize(("folders", "pattern", "why"), RULES, ids=[rule[1] for rule in RULES])
def test_rule(folders, pattern, why):
    sources = [path for folder in folders for path in (FFI / folder).rglob("*.*")]
    assert len(sources) > len(folders)
    found = {str(path.relative_to(FFI)) for path in sources if re.search(pattern, code_of(path))}
    found -= EXCEPTIONS if folders == EVERYWHERE else set()
    assert not found, f"{pattern!r} stands in {found}: {why}"


# The rooms of the package form a stair: each imports only from rooms on floors below its own.
FLOORS = (
    ("_checks", "_installation", "checkpoint_names", "export"),
    ("_extension",),
    ("_jax",),
    ("_group",),
    ("_rows",),
    ("_transport", "_experts"),
    ("_placement",),
    ("_ops",),
    ("types",),
    ("command", "bench", "demo"),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
# Ops that are made of other ops.
COMPOSED = {
    "moe": {"balance", "replicate", "dispatch", "dispatched", "combine", "gated_experts"},
    "gated_experts": {"beside", "dispatched", "expert_layer", "gated_mlp"},
    "expert_layer": {"beside"},
    "overlap": {"dispatch", "dispatched", "combine", "replicate", "statistics"},
    "dispatch": {"dispatched", "statistics"},
    "dispatched": {"statistics"},
}


def modules_of(room):
    paths = [PACKAGE / f"{room}.py", *(PACKAGE / room).rglob("*.py")]
    return [path for path in paths if path.exists()]


def imports_of(path):
    """Returns what a module imports from the package, as ("_ops", "dispatch", "DispatchedByExpert")."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    nodes = [node for node in nodes if node.module is not None and node.module.split(".")[0] == "jax_ep"]
    return [(*node.module.split(".")[1:], alias.name) for node in nodes for alias in node.names]


def test_every_module_has_a_room():
    names = {path.stem for path in PACKAGE.iterdir() if path.suffix in ("", ".py")}
    assert names - {"__init__", "__main__", "__pycache__"} == set(FLOOR_OF)


@pytest.mark.parametrize("room", FLOOR_OF)
def test_room_imports_only_from_floors_below(room):
    for path in modules_of(room):
        others = {found[0] for found in imports_of(path)} & set(FLOOR_OF) - {room}
        above = {other for other in others if FLOOR_OF[other] >= FLOOR_OF[room]}
        assert not above or room in FLOORS[-1], f"{path.relative_to(PACKAGE)} imports {above}"


def test_ops_do_not_import_each_other():
    for path in modules_of("_ops"):
        others = {found[1] for found in imports_of(path) if found[0] == "_ops"}
        others -= {"arguments", *COMPOSED.get(path.stem, ())}
        assert not others, f"{path.name} imports {others}"


def test_other_rooms_use_no_private_attribute_of_a_group():
    for room in set(FLOOR_OF) - {"_group"}:
        for path in modules_of(room):
            used = re.findall(r"\bgroup\._\w+", path.read_text())
            assert not used, f"{path.relative_to(PACKAGE)} uses {used}"


def test_only_groups_have_state():
    """Elsewhere state makes a program depend on what the process did before."""
    for room in FLOOR_OF:
        for path in modules_of(room):
            assert "ContextVar" not in path.read_text()
            values = [
                ast.unparse(getattr(node, "value", None) or node) for node in ast.parse(path.read_text()).body
            ]
            state = [value for value in values if value in ("{}", "[]", "set()")]
            assert not state or room == "_group", f"{path.relative_to(PACKAGE)} has state"
