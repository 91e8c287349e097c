"""The layers of the package: what import-linter sees, and what it does not.

`make lint` runs import-linter over the import statements. Here names in strings count as imports
too ("module:Class", `importlib.import_module`), so that no knot hides in them; and no public name
has two homes.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import dualsft

ROOT = Path(__file__).parents[1]
SOURCE = Path(dualsft.__file__).parent
TOP = {"dualsft.cli", "dualsft.api", "dualsft.__main__"}
TARGET = re.compile(r"(dualsft(?:\.\w+)+)(?::\w+)?")


@cache
def modules() -> dict[str, Path]:
    """Every module by its dotted name."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = ("dualsft", *path.relative_to(SOURCE).with_suffix("").parts)
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


def module_of(name: str) -> str | None:
    """The module that a dotted name lies in."""
    while name and name not in modules():
        name = name.rpartition(".")[0]
    return name or None


def imported(source: str) -> Iterator[str]:
    """Dotted names that a source imports, in statements anywhere and in strings."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            match = TARGET.fullmatch(node.value)
            if match is not None:
                yield match[1]


@cache
def layers() -> dict[str, int]:
    """The rank of each room, the top first, from import-linter's own contract."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (contract,) = config["tool"]["importlinter"]["contracts"]
    return {
        name.strip(): rank
        for rank, names in enumerate(contract["layers"])
        for name in re.split("[|:]", names)
    }


def room_of(module: str) -> str:
    return ".".join(module.split(".")[:2])


def violations(name: str, source: str) -> list[str]:
    """Imports of a module that lead to a layer above its own, or to a room beside it."""
    own, ranks, wrong = room_of(name), layers(), []
    for target in imported(source):
        module = module_of(target) if target.startswith("dualsft.") else None
        if module in (None, "dualsft", name) or room_of(module) == own:
            continue
        if ranks[room_of(module)] <= ranks[own] and not {own, room_of(module)} <= TOP:
            wrong.append(f"{name} -> {module}")
    return wrong


def test_every_room_has_a_layer() -> None:
    assert {room_of(name) for name in modules()} - {"dualsft"} == set(layers())


def test_no_module_reaches_up() -> None:
    """The top of the package itself (`dualsft/__init__.py`) is above all layers."""
    found = [
        one
        for name, path in modules().items()
        if name != "dualsft"
        for one in violations(name, path.read_text(encoding="utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "from dualsft.lab.methods import less",
        "def f():\n    import dualsft.runs.pipeline",
        "TARGET = 'dualsft.lab.methods.less:Less'",
        "from dualsft.engine import walk",
    ],
)
def test_the_check_finds_it(line: str) -> None:
    assert violations("dualsft.memory.plans", line)


def test_a_public_name_has_one_home() -> None:
    """Classes and functions; a method's `run`, a page's `table` or a stage's words may repeat."""
    homes: dict[str, list[str]] = defaultdict(list)
    for name, path in modules().items():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(name)
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}
