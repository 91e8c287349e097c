"""The source reads files of strangers and must have no way to run what they say."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dualsft

FORBIDDEN_CALLS = {"compile", "__import__", "input"}
ALLOWED_LATER = {"allow_pickle", "trust_remote_code"}


def findings(source: str) -> list[str]:
    """Ways to run what a file says that ruff does not know."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = node.func
            if isinstance(name, ast.Name) and name.id in FORBIDDEN_CALLS:
                found.append(name.id)
            for word in node.keywords:
                flag = isinstance(word.value, ast.Constant) and word.value.value is True
                found += [f"{word.arg}=True"] * (flag and word.arg in ALLOWED_LATER)
    return found


SANDBOXED = {"lab/evaluation/sandbox_child.py": ["compile"] * 3}
"""Generated programs of HumanEval: only after --allow-code-execution, in a process of its own
that nothing of the package runs in (`lab/evaluation/sandbox.py`)."""


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
        "compile(text, 'x', 'exec')",
        "__import__(text)",
        "np.load('x', allow_pickle=True)",
        "AutoModel.from_pretrained(x, trust_remote_code=True)",
    ],
)
def test_the_lint_finds_it(line: str) -> None:
    assert findings(line)


UNSAFE = """\
import pickle
from pickle import loads
import dill, joblib, marshal, shelve, cloudpickle
import torch; torch.load('x')
from torch import load
import torch; torch.save({}, 'x')
import yaml; yaml.load(text)
import yaml; yaml.load(text, Loader=yaml.Loader)
eval(text)
exec(text)
import os; os.system(text)
import os; os.popen(text)
import subprocess; subprocess.run(text, shell=True)
import subprocess; subprocess.Popen(text, shell=True)
import numpy as np; np.load('x', allow_pickle=True)
import tarfile; tarfile.open('x').extractall()
"""


def test_make_lint_finds_each_way_to_run_what_a_file_says() -> None:
    """The rules of pyproject.toml, on a module of the package."""
    root = Path(__file__).parents[1]
    command = [sys.executable, "-m", "ruff", "check", "--output-format=json", "--no-cache"]
    name = root / "src/dualsft/storage/unsafe.py"
    done = subprocess.run(
        [*command, f"--stdin-filename={name}", "-"],
        input=UNSAFE,
        capture_output=True,
        text=True,
        cwd=root,
    )
    seen = [one for one in json.loads(done.stdout) if one["code"].startswith(("S", "TID"))]
    assert {one["location"]["row"] for one in seen} == set(range(1, 1 + UNSAFE.count("\n")))


# --- dependencies ---------------------------------------------------------------------------------


def audit(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(Path(__file__).parents[1] / ".ci/audit.py"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True)


def test_no_pinned_version_has_a_known_vulnerability() -> None:
    done = audit()
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("lock", "floor", "named"),
    [
        (
            "torch==2.5.1",
            "torch>=2.11",
            "constraints.txt: torch 2.5.1 is affected by CVE-2025-32434",
        ),
        ("PyYAML==5.3", "pyyaml>=6", "constraints.txt: pyyaml 5.3 is affected by PYSEC-"),
        (
            "Jinja2==3.1.6",
            "jinja2>=3.1",
            "pyproject.toml: jinja2 3.1 is affected by CVE-2025-27516",
        ),
        ("Jinja2==3.1.6", "jinja2", "pyproject.toml: jinja2 has no lower bound"),
    ],
)
def test_the_audit_finds_a_bad_version(lock: str, floor: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "constraints.txt").write_text(f"# pins\n{lock}\nnumpy==2.4.6\n")
    project = tmp_path / "pyproject.toml"
    project.write_text(f'[project]\ndependencies = ["{floor}"]\n[project.optional-dependencies]\n')
    done = audit(tmp_path / "constraints.txt", "--project", project)
    assert done.returncode == 1 and named in done.stdout, done.stdout


# --- one way into a run folder --------------------------------------------------------------------

OPENS_ELSEWHERE = {
    "system/paths.py": "the one way into a run folder",
    "cli.py": "the null device, for a stream that fails",
    "system/bounds.py": "tables that system/paths.py has opened; the memory of the process",
    "data/chat.py": "data.template_file, and the process's own memory",
    "model/delta.py": "new files beside the target that the user names; files of the base model",
    "system/usage.py": "the memory of the process, the machine and the container",
    "model/safety.py": "a model folder, whose links it checks first",
    "model/resolve.py": "downloads and conversions in the cache",
    "lab/evaluation/sandbox_child.py": "for Landlock and a user namespace, no files of a run",
    "data/sources.py": "the user's rows, and downloads into the cache",
    "data/tables.py": "the user's rows",
    "lab/report/hub.py": "the new folder that the user names; the user's token, to keep it out",
    "integrations/scores.py": "the new folder that the user names",
    "integrations/rows.py": "the new file or folder that the user names",
}
"""Modules that open files which are not in a run folder, and which files those are."""

OPENERS = {
    "os": {"open", "listdir", "walk", "scandir", "link", "replace", "rename", "mkdir", "unlink"},
    "shutil": {"rmtree", "copytree", "copyfile", "copy", "copy2", "move", "copyfileobj"},
    "pq": {"read_table", "ParquetFile", "write_table", "ParquetWriter", "read_schema"},
    "io": {"open"},
}
LOADERS = {"open", "safe_open", "load_file", "save_file", "fdopen"}
PATH_METHODS = {"read_text", "read_bytes", "write_text", "write_bytes", "open", "iterdir", "rglob"}


def openings(source: str) -> list[str]:
    """Calls that open a file by its path; a `RunPath` is no path to any of them.

    Methods of a `Path` are told from those of a `RunPath` by where the value comes from: a name
    that the module makes of `Path(…)`. What slips through is caught while the package runs
    (`test_hostile_runs.py`, which watches every opening).
    """
    tree = ast.parse(source)
    made = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and _is_path(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found: list[str] = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if isinstance(called, ast.Name) and called.id in LOADERS:
            found.append(called.id)
        elif isinstance(called, ast.Attribute):
            owner = called.value.id if isinstance(called.value, ast.Name) else ""
            buffer = node.args and "BufferReader" in ast.unparse(node.args[0])
            if called.attr in OPENERS.get(owner, ()) and not buffer:
                found.append(f"{owner}.{called.attr}")
            elif called.attr in PATH_METHODS and (owner in made or _is_path(called.value)):
                found.append(f".{called.attr}")
    return found


def _is_path(value: ast.expr) -> bool:
    text = ast.unparse(value)
    return bool(re.search(r"\bPath\(", text)) and not text.startswith("RunPath(")


def test_a_run_folder_is_opened_in_one_way() -> None:
    source = Path(dualsft.__file__).parent
    files = source.rglob("*.py")
    opened = {str(f.relative_to(source)) for f in files if openings(f.read_text())}
    assert opened == set(OPENS_ELSEWHERE)


@pytest.mark.parametrize(
    "line",
    [
        "open('x')",
        "import os; os.open('x', 0)",
        "import shutil; shutil.rmtree('x')",
        "import pyarrow.parquet as pq; pq.read_table('x')",
        "from safetensors import safe_open; safe_open('x', 'pt')",
        "from pathlib import Path; Path('x').read_text()",
        "from pathlib import Path; (Path(folder) / 'x').open()",
        "from pathlib import Path; x = Path(folder); x.read_text()",
    ],
)
def test_the_lint_finds_an_opening(line: str) -> None:
    assert openings(line)
