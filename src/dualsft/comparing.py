"""`dualsft compare`: methods × models × data × budgets × seeds of one file, a run folder a cell.

A matrix file names a base (a recipe, a config file, or nothing), what varies, and the tables to
make of it. Every cell is an ordinary run folder under OUT/cells, so it can be looked at, resumed
and replayed alone. A stage that another cell has finished with the same fingerprint is taken over
by hard links, so the split, the warmup and the scores are computed once, and so are the base
model's answers to benchmarks. A cell that fails is recorded with its message and does not stop the
rest; the same command goes on with what is missing.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dualsft import config as settings
from dualsft import methods, pipeline
from dualsft.comparison_matrix import Cell, Matrix, effective_rate
from dualsft.errors import ConfigError, DualsftError
from dualsft.preflight import check_paths
from dualsft.progress import Reporter
from dualsft.rundir import atomic_write_text

STATUS = "cells.json"


def run_matrix(
    matrix: Matrix,
    out: Path,
    reporter: Reporter,
    only: str | None = None,
    until: str | None = None,
    strict: bool = False,
) -> dict[str, str]:
    """Run the cells that are missing; the message of every cell that failed, by its title.

    `strict` lets an unforeseen error through instead of recording it.
    """
    cells = matrix.cells(only)
    if not cells:
        raise ConfigError(
            f"--only: no cell matches {only!r}; titles look like {matrix.cells()[0].title!r}"
        )
    configs = {cell: matrix.config(cell) for cell in cells}
    out.mkdir(parents=True, exist_ok=True)
    failed: dict[str, str] = {}
    done: list[Path] = [out / c.path for c in matrix.cells() if (out / c.path).is_dir()]
    for number, (cell, config) in enumerate(configs.items(), 1):
        reporter.say(f"== cell {number} of {len(cells)}: {cell.title}")
        folder = out / cell.path
        try:
            check_paths(config)
            if matrix.keep == "results" and pipeline.finished(config, folder):
                reporter.say("finished before; its results are kept")
                continue
            pipeline.run(config, folder, until, reporter, done, out / "base_answers")
        except DualsftError as problem:
            failed[cell.title] = str(problem)
        except Exception as problem:
            if strict:
                raise
            where = traceback.extract_tb(problem.__traceback__)[-1]
            text = f"unexpected {type(problem).__name__}: {problem} ({where.name}:{where.lineno})"
            failed[cell.title] = text
        else:
            if folder not in done:
                done.insert(0, folder)
            if matrix.keep == "results" and until is None:
                _prune(folder, "6_finetune", "5_selection/start")
        finally:
            last = number == len(cells) or _block(cells[number]) != _block(cell)
            if matrix.keep == "results" and until is None and last:
                for other in (c for c in cells[:number] if _block(c) == _block(cell)):
                    if other.title not in failed:
                        _prune(out / other.path, "2_warmup", "3_gradients", "4_scores")
            _write_status(out, matrix, cells[:number], failed)
        if cell.title in failed:
            reporter.warn(f"{cell.title} failed: {failed[cell.title]}; going on with the next")
    return failed


def _block(cell: Cell) -> tuple[str, str, int]:
    """Cells that may share a split, a warmup and scores."""
    return cell.model.name, cell.data.name, cell.seed


def _prune(folder: Path, *parts: str) -> None:
    """Remove the large files of finished stages; mask, delta, tables and manifests stay."""
    for part in parts:
        for file in (folder / part).rglob("*.safetensors"):
            if file.name != "delta.safetensors":
                file.unlink()


def _write_status(
    out: Path, matrix: Matrix, tried: Sequence[Cell], failed: Mapping[str, str]
) -> None:
    """cells.json: what was tried by the last command, and how it ended."""
    status = {
        "name": matrix.name,
        "cells": {
            cell.title: {"folder": cell.path.as_posix(), "failed": failed.get(cell.title)}
            for cell in tried
        },
    }
    atomic_write_text(out / STATUS, json.dumps(status, indent=1, ensure_ascii=False) + "\n")


Say = Callable[[str], None]


def dry_run(matrix: Matrix, say: Say, only: str | None = None) -> None:
    """What would run: every cell with its methods and budgets; nothing is computed."""
    cells = matrix.cells(only)
    for cell in cells:
        config = matrix.config(cell)
        names = methods.names_of(settings.to_flat(config))
        chosen = ", ".join(f"{axis}: {name}" for axis, name in names.items())
        rate, epochs = effective_rate(config), config.finetune.epochs
        say(f"{cell.title}: {chosen}; lr {rate:g}, {epochs} epochs")
    say(f"{len(cells)} cells")
