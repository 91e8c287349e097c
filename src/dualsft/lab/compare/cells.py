"""`dualsft compare`: run the cells of a matrix, one run folder per cell.

Every cell is an ordinary run folder under OUT/cells that can be inspected, resumed and replayed
like any other. A stage that another cell has finished with the same fingerprint is reused through
hard links, so the split, the warmup and the scores are computed once. The base model's benchmark
answers are cached in OUT/base_answers. A cell that fails is recorded in cells.json with its message
and does not stop the others; running the same command again continues with the unfinished cells.
Cells run one after another, or several at once (`workers.py`). Each cell runs all of Algorithm 1.
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
    """Run the unfinished cells. Returns the messages of failed cells, by title.

    With `workers` > 1, that many cells run at a time, each in its own process. With one worker,
    `strict` raises unexpected errors instead of recording them.
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
                reporter.warn(f"{cell.title} failed: {why}; continuing with the next cell")
            elif lean:
                _prune(out / cell.path, "6_finetune", "5_selection/start")
            block = [other for other in cells if _block(other) == _block(cell)]
            if lean and set(block) <= set(ended):  # no other cell can reuse these stages
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
"""Finished cells, each with the reason if it failed."""


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
    """Existing run folders of the matrix, whose finished stages can be reused."""
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
    """Run the unfinished stages of one cell. Returns the reason if it failed, otherwise None.

    With `keeps` (`keep: results`), a finished cell is left alone although its large files are gone.
    `lenders` are the run folders whose stages can be reused.
    """
    try:
        check_paths(config)
        if keeps and pipeline.finished(config, folder):
            reporter.say("already finished; keeping its results")
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
    """Key of the cells that can share a split, a warmup and scores."""
    return cell.model.name, cell.data.name, cell.seed


def _prune(folder: RunPath, *parts: str) -> None:
    """Remove the large tensor files of the stages `parts`. Masks, deltas and tables stay."""
    for part in parts:
        for file in (folder / part).tree()[0].values():
            if file.suffix == ".safetensors" and file.name != "delta.safetensors":
                file.unlink()


def _write_status(
    out: RunPath, matrix: Matrix, tried: Sequence[Cell], failed: Mapping[str, str]
) -> None:
    """Write cells.json: the cells of the last command and how each ended."""
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
    """Print every cell with its methods, learning rate and epochs. Computes nothing."""
    cells = _chosen(matrix, only)
    for cell in cells:
        config = matrix.config(cell)
        names = methods.names_of(settings.to_flat(config))
        chosen = ", ".join(f"{axis}: {name}" for axis, name in names.items())
        rate, epochs = effective_rate(config), config.finetune.epochs
        say(f"{cell.title}: {chosen}; lr {rate:g}, {epochs} epochs")
    say(f"{len(cells)} cells")
