"""Small comparisons for the tests of `dualsft compare`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import yaml
from conftest import corpus_rows, small_run, write_jsonl

from dualsft.lab.compare.cells import run_matrix
from dualsft.lab.compare.matrix import Matrix, load_matrix
from dualsft.system.progress import Reporter

GREEDY = {"name": "greedy", "data": "random", "settings": {"select.data_budget": 5000}}
"""A method whose cell fails: there are not that many rows."""


def evaluated_run(model_folder: Callable[[str], Path], corpus: Path, folder: Path) -> list[str]:
    """Settings of a short run with one evaluation file."""
    extra = write_jsonl(folder / "extra.jsonl", corpus_rows(15, seed=9))
    return [*small_run(model_folder("llama"), corpus), f"evaluation.files=extra:{extra}"]


def write_matrix(folder: Path, **content: object) -> Path:
    path = folder / "matrix.yaml"
    path.write_text(yaml.safe_dump({"name": "test", "seeds": [42], **content}))
    return path


def matrix_of(folder: Path, words: list[str], **content: object) -> Matrix:
    return load_matrix(write_matrix(folder, **content), words)


def quiet(said: list[str] | None = None) -> Reporter:
    return Reporter([].append if said is None else said.append)


def run_all(
    matrix: Matrix,
    out: Path,
    said: list[str] | None = None,
    only: str | None = None,
    workers: int = 1,
) -> None:
    """Run the cells, none of which may fail."""
    assert run_matrix(matrix, out, quiet(said), only, workers=workers) == {}
