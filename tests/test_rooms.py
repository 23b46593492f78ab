"""The house rules that a reader relies on: who may import whom, who may send, who may read the environment, what is documented."""

import ast
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "minimind_tron"
# Data flows down this list; a module imports only from rows above its own.
ROOMS = [
    {"errors"},
    {"place"},
    {"config"},
    {"topology"},
    {"new_files", "cut_config"},
    {"run_config"},
    {"view_config"},
    {"config_files"},
    {"mesh"},
    {"layout"},
    {"ledger"},
    {"collectives"},
    {"parallel"},
    {"dropout", "layers"},
    {"model"},
    {"interop"},
    {"tokenizer"},
    {"tokens"},
    {"optim"},
    {"panels"},
    {"gantt_page"},
    {"figures", "gantt"},
    {"trace"},
    {"step"},
    {"judge", "oracle", "sampling"},
    {"holdings"},
    {"sharing"},
    {"mesh_page", "mesh_text"},
    {"trainer"},
    {"commands"},
    {"cli"},
    {"__main__"},
]
# runtime knows the machine, not the model: it asks errors and place, which nobody else asks, and only these may ask it.
WITH_RUNTIME = {"cli", "trainer", "commands"}
# Files of parallel/ that others of parallel/ may import, and who may.
SHARED = {
    "linear": None,
    "attention": None,
    "segments": None,
    "context": {"ring"},
    "schedules": {"messages", "pipeline"},
    "messages": {"pipeline"},
    "data": {"zero"},
    "zero": {"pipeline"},
}
SENDS = {
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "irecv",
    "isend",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
}


@lru_cache
def modules() -> dict[str, ast.Module]:
    """The package's files by their dotted names inside the package."""
    names = {path: ".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in sorted(PACKAGE.rglob("*.py"))}
    return {name: ast.parse(path.read_text()) for path, name in names.items()}


def imports(tree: ast.AST, known: set[str]) -> set[str]:
    """The modules of the package that a file imports anywhere, by their dotted names inside the package."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    inside = {name.removeprefix("minimind_tron.") for name in found if name.startswith("minimind_tron.")}
    return {name if name in known else name.rpartition(".")[0] for name in inside} - {""}


def misplaced(trees: dict[str, ast.Module]) -> Iterator[str]:
    """Every import that goes against the rows."""
    rows = {room: row for row, rooms in enumerate(ROOMS) for room in rooms}
    for name, tree in trees.items():
        if name.endswith("__init__"):
            continue
        room, _, file = name.partition(".")
        for other in imports(tree, trees.keys()):
            other_room, _, other_file = other.partition(".")
            if "runtime" in (room, other_room):
                allowed = other_room in ("errors", "place") or room in WITH_RUNTIME
            elif other_room == "place":
                allowed = False
            elif room == other_room:
                allowed = room == "parallel" and other_file in SHARED and (SHARED[other_file] is None or file in SHARED[other_file])
            else:
                allowed = rows[other_room] < rows[room]
            if not allowed:
                yield f"{name} imports {other}"


def test_every_file_has_a_room() -> None:
    rooms = set.union(*ROOMS) | {"runtime", "__init__"}
    assert {name.partition(".")[0] for name in modules()} <= rooms


def test_imports_go_down_the_rows() -> None:
    assert list(misplaced(modules())) == []


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("mesh", "from minimind_tron.layout import Cut"),
        ("parallel.sequence", "from minimind_tron.parallel import tensor"),
        ("parallel.linear", "from minimind_tron.parallel.vocab import wide"),
        ("commands.train", "from minimind_tron.commands.validate import run"),
        ("model", "from minimind_tron.runtime import say"),
        ("runtime", "from minimind_tron.config import Device"),
        ("cli", "from minimind_tron.place import find_place"),
        ("place", "from minimind_tron import config"),
        ("config", "def f():\n    import minimind_tron.mesh"),
        ("sampling", "from minimind_tron import judge"),
    ],
)
def test_a_wrong_import_is_seen(name: str, line: str) -> None:
    assert len(list(misplaced(modules() | {name: ast.parse(line)}))) == 1


# Who sends


def imported_names(tree: ast.AST) -> dict[str, str]:
    """What each name of a file that was imported stands for, dotted."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {
                alias.asname or alias.name.partition(".")[0]: alias.name if alias.asname else alias.name.partition(".")[0]
                for alias in node.names
            }
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def dotted(node: ast.AST, names: dict[str, str]) -> str:
    """What an attribute chain stands for, or an empty string."""
    if isinstance(node, ast.Name):
        return names.get(node.id, "")
    if isinstance(node, ast.Attribute):
        base = dotted(node.value, names)
        return f"{base}.{node.attr}" if base else ""
    return ""


def uses(tree: ast.AST) -> set[str]:
    """The dotted names of everything imported that a file mentions, getattr with a literal included."""
    names = imported_names(tree)
    found = set(names.values())
    for node in ast.walk(tree):
        found.add(dotted(node, names))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            found |= {f"{dotted(node.args[0], names)}.{arg.value}" for arg in node.args[1:2] if isinstance(arg, ast.Constant)}
    return found


def sends(tree: ast.AST) -> set[str]:
    return {name for name in uses(tree) if name.startswith("torch.distributed") and name.rpartition(".")[2] in SENDS}


def reads_environment(tree: ast.AST) -> set[str]:
    return {name for name in uses(tree) if name in ("os.environ", "os.getenv", "os.putenv", "os.environb")}


def test_only_collectives_sends() -> None:
    assert [name for name, tree in modules().items() if sends(tree)] == ["collectives"]


def test_only_runtime_reads_the_environment() -> None:
    assert [name for name, tree in modules().items() if reads_environment(tree)] == ["runtime"]


def test_only_mesh_makes_groups() -> None:
    assert [name for name, tree in modules().items() if "torch.distributed.new_group" in uses(tree)] == ["mesh"]


@pytest.mark.parametrize(
    "text",
    [
        "import torch.distributed as dist\ndist.all_reduce(x)",
        "import torch\ntorch.distributed.isend(x, 1)",
        "from torch import distributed\nrun = distributed.broadcast",
        "from torch.distributed import all_to_all_single",
        "import torch.distributed as dist\nf = getattr(dist, 'all_gather_single', None)",
    ],
)
def test_a_collective_is_seen(text: str) -> None:
    assert sends(ast.parse(text))


@pytest.mark.parametrize("text", ["import os\nos.environ['A']", "from os import getenv", "import os as o\no.environ.get('A')"])
def test_a_look_into_the_environment_is_seen(text: str) -> None:
    assert reads_environment(ast.parse(text))


# What is documented


def undocumented(name: str, tree: ast.Module) -> Iterator[str]:
    """Public functions, classes and their public methods without a docstring; forward and backward are said by their class."""
    if ast.get_docstring(tree) is None and tree.body:
        yield name
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        if ast.get_docstring(node) is None:
            yield f"{name}.{node.name}"
        for method in node.body if isinstance(node, ast.ClassDef) else []:
            quiet = isinstance(method, ast.FunctionDef) and (method.name.startswith("_") or method.name in ("forward", "backward"))
            if isinstance(method, ast.FunctionDef) and not quiet and ast.get_docstring(method) is None:
                yield f"{name}.{node.name}.{method.name}"


def test_public_names_have_docstrings() -> None:
    assert [missing for name, tree in modules().items() for missing in undocumented(name, tree)] == []


def test_a_missing_docstring_is_seen() -> None:
    tree = ast.parse(
        '"""M."""\ndef f(): ...\nclass C:\n    """C."""\n    def forward(self): ...\n    def run(self): ...\n    def _o(self): ...'
    )
    assert list(undocumented("m", tree)) == ["m.f", "m.C.run"]
