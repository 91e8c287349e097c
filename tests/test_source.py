"""The source reads files of strangers and must have no way to run what they say."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import dualsft

FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "input"}
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
FORBIDDEN_ATTRIBUTES = {
    ("torch", "load"),
    ("torch", "save"),
    ("yaml", "load"),
    ("yaml", "unsafe_load"),
    ("yaml", "full_load"),
    ("os", "system"),
    ("os", "popen"),
    ("numpy", "load"),
    ("np", "load"),
}


def findings(source: str) -> list[str]:
    """Ways to run what a file says, by the syntax tree."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.split(".")[0] in FORBIDDEN_MODULES]
        elif isinstance(node, ast.ImportFrom) and node.module:
            base = node.module.split(".")[0]
            pairs = {(base, a.name) for a in node.names} & FORBIDDEN_ATTRIBUTES
            found += [node.module] * (base in FORBIDDEN_MODULES) + [f"{a}.{b}" for a, b in pairs]
        elif isinstance(node, ast.Call):
            name = node.func
            if isinstance(name, ast.Name) and name.id in FORBIDDEN_CALLS:
                found.append(name.id)
            if isinstance(name, ast.Attribute) and isinstance(name.value, ast.Name):
                pair = (name.value.id, name.attr)
                found += [".".join(pair)] * (pair in FORBIDDEN_ATTRIBUTES and not _safe(node))
            for word in node.keywords:
                flag = isinstance(word.value, ast.Constant) and word.value.value is True
                risky = ("shell", "allow_pickle", "trust_remote_code")
                found += [f"{word.arg}=True"] * (flag and word.arg in risky)
    return found


def _safe(node: ast.Call) -> bool:
    """yaml.load with a loader class of our own, derived from SafeLoader, is safe."""
    loaders = [word.value for word in node.keywords if word.arg == "Loader"]
    return any(isinstance(one, ast.Name) and one.id.startswith("_") for one in loaders)


SANDBOXED = {"sandbox_child.py": ["compile", "exec", "compile"]}
"""Generated programs of HumanEval: only after --allow-code-execution, in a process of its own
that nothing of the package runs in (`code_sandbox.py`)."""


def test_the_source_runs_nothing_it_reads() -> None:
    source = Path(dualsft.__file__).parent
    files = sorted(source.rglob("*.py"))
    assert len(files) > 30
    assert {
        str(f.relative_to(source)): found for f in files if (found := findings(f.read_text()))
    } == SANDBOXED


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "import torch; torch.load('x')",
        "from torch import load",
        "import yaml; yaml.load(text)",
        "import yaml; yaml.load(text, Loader=yaml.Loader)",
        "eval(text)",
        "exec(text)",
        "import os; os.system(text)",
        "import subprocess; subprocess.run(text, shell=True)",
        "import numpy as np; np.load('x', allow_pickle=True)",
        "AutoModel.from_pretrained(x, trust_remote_code=True)",
    ],
)
def test_the_lint_finds_it(line: str) -> None:
    assert findings(line)
