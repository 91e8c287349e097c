"""`dualsft compare`: methods × models × data × budgets × seeds of one file, a run folder a cell.

A matrix file names a base (a recipe, a config file, or nothing), what varies, and the tables to
make of it. Every cell is an ordinary run folder under OUT/cells, so it can be looked at, resumed
and replayed alone. A stage that another cell has finished with the same fingerprint is taken over
by hard links, so the split, the warmup and the scores are computed once, and so are the base
model's answers to benchmarks. A cell that fails is recorded with its message and does not stop the
rest; the same command goes on with what is missing. Cells run in turn, or several at once
(`workers.py`).
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing

from dualsft.config import methods, settings
from dualsft.config.settings import Config
from dualsft.errors import ConfigError, DualsftError
from dualsft.lab.compare.matrix import Cell, Matrix, effective_rate
from dualsft.runs import pipeline
from dualsft.runs.folder import atomic_write_text
from dualsft.runs.preflight import check_consent, check_paths
from dualsft.system.paths import Place, RunPath, run_path
from dualsft.system.progress import Reporter

STATUS = "cells.json"
ANSWERS = "base_answers"


def run_matrix(
    matrix: Matrix,
    folder: Place,
    reporter: Reporter,
    only: str | None = None,
    until: str | None = None,
    strict: bool = False,
    workers: int = 1,
) -> dict[str, str]:
    """Run the cells that are missing; the message of every cell that failed, by its title.

    `workers` of them at a time, each in a process of its own when it is more than one. `strict`,
    for cells in turn, lets an unforeseen error through instead of recording it.
    """
    cells = _chosen(matrix, only)
    configs = {cell: matrix.config(cell) for cell in cells}
    for config in configs.values():
        check_consent(config, until)
    out = run_path(folder)
    out.mkdir(parents=True, exist_ok=True)
    if workers > 1:
        from dualsft.lab.compare.workers import at_once

        made = at_once(matrix, configs, out, reporter, until, workers)
    else:
        made = _in_turn(matrix, configs, out, reporter, until, strict)
    failed: dict[str, str] = {}
    ended: list[Cell] = []
    lean = matrix.keep == "results" and until is None
    with closing(made):
        for cell, why in made:
            ended.append(cell)
            if why is not None:
                failed[cell.title] = why
                reporter.warn(f"{cell.title} failed: {why}; going on with the next")
            elif lean:
                _prune(out / cell.path, "6_finetune", "5_selection/start")
            block = [other for other in cells if _block(other) == _block(cell)]
            if lean and set(block) <= set(ended):  # nobody will take over what it holds
                for other in block:
                    if other.title not in failed:
                        _prune(out / other.path, "2_warmup", "3_gradients", "4_scores")
            _write_status(out, matrix, [c for c in cells if c in ended], failed)
    return failed


def _chosen(matrix: Matrix, only: str | None) -> list[Cell]:
    cells = matrix.cells(only)
    if not cells:
        raise ConfigError(
            f"--only: no cell matches {only!r}; titles look like {matrix.cells()[0].title!r}"
        )
    return cells


Ended = Generator[tuple[Cell, str | None], None, None]
"""Cells as they end, and why one failed."""


def _in_turn(
    matrix: Matrix,
    configs: Mapping[Cell, Config],
    out: RunPath,
    reporter: Reporter,
    until: str | None,
    strict: bool,
) -> Ended:
    lenders = known_folders(matrix, out)
    for number, (cell, config) in enumerate(configs.items(), 1):
        reporter.say(f"== cell {number} of {len(configs)}: {cell.title}")
        folder = out / cell.path
        keeps = matrix.keep == "results"
        why = run_cell(config, folder, keeps, reporter, until, lenders, out / ANSWERS, strict)
        if why is None and folder not in lenders:
            lenders.insert(0, folder)
        yield cell, why


def known_folders(matrix: Matrix, out: RunPath) -> list[RunPath]:
    """The run folders that are there: what they have finished may be taken over."""
    return [out / cell.path for cell in matrix.cells() if (out / cell.path).is_dir()]


def run_cell(
    config: Config,
    folder: RunPath,
    keeps: bool,
    reporter: Reporter,
    until: str | None,
    lenders: Sequence[RunPath],
    answers: RunPath,
    strict: bool = False,
) -> str | None:
    """Make one cell, as far as it is not made; why it failed, if it did.

    `keeps` says that the results of a finished one are all that there need be of it.
    """
    try:
        check_paths(config)
        if keeps and pipeline.finished(config, folder):
            reporter.say("finished before; its results are kept")
        else:
            pipeline.run(config, folder, until, reporter, lenders, answers)
    except DualsftError as problem:
        return str(problem)
    except Exception as problem:
        if strict:
            raise
        where = traceback.extract_tb(problem.__traceback__)[-1]
        return f"unexpected {type(problem).__name__}: {problem} ({where.name}:{where.lineno})"
    return None


def _block(cell: Cell) -> tuple[str, str, int]:
    """Cells that may share a split, a warmup and scores."""
    return cell.model.name, cell.data.name, cell.seed


def _prune(folder: RunPath, *parts: str) -> None:
    """Remove the large files of finished stages; mask, delta, tables and manifests stay."""
    for part in parts:
        for file in (folder / part).tree()[0].values():
            if file.suffix == ".safetensors" and file.name != "delta.safetensors":
                file.unlink()


def _write_status(
    out: RunPath, matrix: Matrix, tried: Sequence[Cell], failed: Mapping[str, str]
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
    cells = _chosen(matrix, only)
    for cell in cells:
        config = matrix.config(cell)
        names = methods.names_of(settings.to_flat(config))
        chosen = ", ".join(f"{axis}: {name}" for axis, name in names.items())
        rate, epochs = effective_rate(config), config.finetune.epochs
        say(f"{cell.title}: {chosen}; lr {rate:g}, {epochs} epochs")
    say(f"{len(cells)} cells")
