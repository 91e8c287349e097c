"""`dualsft compare`: run the cells of a matrix, one run folder per cell.

Every cell is an ordinary run folder under OUT/cells that can be inspected, resumed and replayed
like any other. A stage that another cell has finished with the same fingerprint is reused through
hard links, so the split, the warmup and the scores are computed once. The base model's benchmark
answers are cached in OUT/base_answers. A cell that fails is recorded in cells.json with its message
and does not stop the others; running the same command again continues with the unfinished cells.
Each cell runs all of Algorithm 1.

Cells run one after another or, with `--workers N`, N at a time: a thread pool runs one process per
cell, because a small model does not fill a GPU and a machine may have several. (A process pool
would reuse a process for cells of other GPUs, and break when one is killed.) Each worker gets the
GPU with the fewest workers, and the workers of one GPU get equal shares of its memory
(`model.memory`, unless a cell sets it). If another cell is computing something that a cell can
reuse, it waits until the manifest of that stage is in the run folder of the other cell. Workers
write their logs to OUT/logs, for people only. On a signal, the parent forwards it and waits until
all workers have saved their state. On Linux, workers stop when the parent dies.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from dualsft.config import methods, settings
from dualsft.config.settings import Config
from dualsft.distributed.launch import SAVING, threads_each
from dualsft.errors import ConfigError, DualsftError
from dualsft.lab.compare.matrix import Cell, Matrix, effective_rate
from dualsft.model.load import choose_device
from dualsft.runs import pipeline
from dualsft.runs.folder import RunDir, atomic_write_text
from dualsft.runs.preflight import check_consent, check_paths, shown_files
from dualsft.system import signals as interrupt
from dualsft.system.paths import Place, RunPath, files_read, run_path, wrong_kind
from dualsft.system.progress import Reporter, clock

ANSWERS = "base_answers"
REPORT_EVERY = 60.0
"""Seconds between two progress reports of the running cells."""
LOOK_EVERY = 0.5
"""Seconds between two looks at the stages that cells wait for."""
USABLE = 0.95
"""Share of a GPU's memory that its workers divide; the rest is for their CUDA contexts."""
START = (
    "import sys; sys.path[:] = sys.argv[1:]; from dualsft.lab.compare import cells; cells.work()"
)
"""Program of a worker. It uses the import path of its parent, without the current directory, where
a file could shadow a module."""

Ended = Generator[tuple[Cell, str | None], None, None]
"""Finished cells, each with the reason if it failed."""


def run_matrix(
    matrix: Matrix,
    folder: Place,
    reporter: Reporter,
    only: str | None = None,
    until: str | None = None,
    workers: int = 1,
) -> dict[str, str]:
    """Run the unfinished cells. Returns the messages of failed cells, by title.

    With `workers` > 1, that many cells run at a time, each in its own process.
    """
    cells = _chosen(matrix, only)
    configs = {cell: matrix.config(cell) for cell in cells}
    for config in configs.values():
        check_consent(config, until)
    out = run_path(folder)
    out.mkdir(parents=True, exist_ok=True)
    with RunDir(out).lock():
        return _run_cells(matrix, configs, out, reporter, until, workers)


def _run_cells(
    matrix: Matrix,
    configs: dict[Cell, Config],
    out: RunPath,
    reporter: Reporter,
    until: str | None,
    workers: int,
) -> dict[str, str]:
    cells = list(configs)
    if workers > 1:
        made = _at_once(matrix, configs, out, reporter, until, workers)
    else:
        made = _in_turn(matrix, configs, out, reporter, until)
    failed: dict[str, str] = {}
    ended: set[Cell] = set()
    lean = matrix.keep == "results" and until is None
    with closing(made):
        for cell, why in made:
            ended.add(cell)
            if why is not None:
                failed[cell.title] = why
                reporter.warn(f"{cell.title} failed: {why}; continuing with the next cell")
            elif lean:
                _prune(out / cell.path, "6_finetune", "5_selection/start")
            block = [other for other in cells if _block(other) == _block(cell)]
            if lean and ended.issuperset(block):  # no other cell can reuse these stages
                for other in block:
                    if other.title not in failed:
                        _prune(out / other.path, "2_warmup", "3_gradients", "4_scores")
            status = {
                c.title: {"folder": c.path.as_posix(), "failed": failed.get(c.title)}
                for c in cells
                if c in ended
            }
            content = json.dumps(
                {"name": matrix.name, "cells": status}, indent=1, ensure_ascii=False
            )
            atomic_write_text(out / "cells.json", content + "\n")
    return failed


def dry_run(matrix: Matrix, say: Callable[[str], None], only: str | None = None) -> None:
    """Print every cell with its methods, learning rate and epochs. Computes nothing."""
    cells = _chosen(matrix, only)
    for cell in cells:
        config = matrix.config(cell)
        names = methods.names_of(settings.to_flat(config))
        chosen = ", ".join(f"{axis}: {name}" for axis, name in names.items())
        rate, epochs = effective_rate(config), config.finetune.epochs
        shown = rate if isinstance(rate, str) else f"{rate:g}"
        say(f"{cell.title}: {chosen}; lr {shown}, {epochs} epochs")
    say(f"{len(cells)} cells")


def _chosen(matrix: Matrix, only: str | None) -> list[Cell]:
    cells = matrix.cells(only)
    if not cells:
        raise ConfigError(
            f"--only: no cell matches {only!r}; titles look like {matrix.cells()[0].title!r}"
        )
    return cells


def _block(cell: Cell) -> tuple[str, str, str]:
    """Key of the cells that can share a split, a warmup and scores."""
    return cell.model.name, cell.data.name, str(cell.seed)


def _prune(folder: RunPath, *parts: str) -> None:
    """Remove the large tensor files of the stages `parts`. Masks, deltas and tables stay."""
    for part in parts:
        for file in (folder / part).tree()[0].values():
            if file.suffix == ".safetensors" and file.name != "delta.safetensors":
                file.unlink()


def _cached_runs(matrix: Matrix, out: RunPath) -> list[RunPath]:
    """Existing run folders of the matrix, whose finished stages can be reused."""
    return [out / cell.path for cell in matrix.cells() if (out / cell.path).is_dir()]


def _in_turn(
    matrix: Matrix,
    configs: Mapping[Cell, Config],
    out: RunPath,
    reporter: Reporter,
    until: str | None,
) -> Ended:
    cached = _cached_runs(matrix, out)
    for number, (cell, config) in enumerate(configs.items(), 1):
        reporter.say(f"== cell {number} of {len(configs)}: {cell.title}")
        folder, keeps = out / cell.path, matrix.keep == "results"
        why = _run_cell(config, folder, keeps, reporter, until, cached, out / ANSWERS)
        if why is None and folder not in cached:
            cached.insert(0, folder)
        yield cell, why


def _run_cell(
    config: Config,
    folder: RunPath,
    keeps: bool,
    reporter: Reporter,
    until: str | None,
    cached: Sequence[RunPath],
    answers: RunPath,
) -> str | None:
    """Run the unfinished stages of one cell. Returns the reason if it failed, otherwise None.

    With `keeps` (`keep: results`), a finished cell is left alone although its large files are gone.
    """
    try:
        check_paths(config)
        if keeps and pipeline.finished(config, folder):
            reporter.say("already finished; keeping its results")
        else:
            pipeline.run(config, folder, until, reporter, cached, answers)
    except DualsftError as problem:
        return str(problem)
    except (IsADirectoryError, NotADirectoryError) as problem:
        return wrong_kind(problem)
    except Exception as problem:
        where = traceback.extract_tb(problem.__traceback__)[-1]
        read = [path for path in files_read() if path.parts[: len(folder.parts)] == folder.parts]
        cause = f"; it read {shown_files(read)}: if one is damaged, remove it" if read else ""
        return (
            f"unexpected {type(problem).__name__}: {problem} ({where.name}:{where.lineno}){cause}"
        )
    return None


# --- several cells at once ----------------------------------------------------------------------


@dataclass(frozen=True)
class Gpus:
    """The GPUs that workers are assigned to. Empty if cells run on the CPU."""

    names: tuple[str, ...] = ()
    memory: float | None = None
    """GiB per worker. None: all memory of its GPU."""

    @classmethod
    def here(cls, workers: int) -> Gpus:
        count = torch.cuda.device_count()
        if not count:
            return cls()
        shown = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
        # CUDA ignores CUDA_VISIBLE_DEVICES from the first invalid entry on.
        names = tuple(name.strip() for name in shown.split(","))[:count]
        sharing = -(-workers // len(names))
        least = min(torch.cuda.get_device_properties(i).total_memory for i in range(len(names)))
        return cls(names, round(USABLE * least / 2**30 / sharing, 1) if sharing > 1 else None)

    def place(self, config: Config, taken: list[str | None]) -> tuple[str | None, Config]:
        """(GPU with the fewest workers, settings of the cell on it). None: runs on the CPU."""
        if not self.names or not _on_gpu(config):
            return None, config
        if self.memory is not None and config.model.memory is None:
            config = replace(config, model=replace(config.model, memory=self.memory))
        return min(self.names, key=taken.count), config


def _on_gpu(config: Config) -> bool:
    with suppress(DualsftError):  # a missing device is reported by the cell
        return choose_device(config.model.device).type == "cuda"
    return False


@dataclass
class Worker:
    """A running cell."""

    cell: Cell
    process: subprocess.Popen[bytes]
    gpu: str | None
    log: RunPath
    finished: pipeline.Finished
    begun: float = field(default_factory=time.monotonic)

    def is_past(self, stage: str) -> bool:
        """Whether this stage is complete, computed or reused, by the manifests of the cell."""
        with suppress(Exception):  # the cell gets the same error and reports it
            return self.finished.up_to(stage, whole=True)
        return False

    def progress(self) -> str:
        """The stage that it is in, how far that is, and the time since the cell started."""
        spent, found = time.monotonic() - self.begun, {}
        with suppress(Exception):  # a damaged folder is the worker's to report
            found = self.finished.rundir.under_way(time.time() - spent)
        far = f", {found['work']} {found['percentage']} %" if "percentage" in found else ""
        return f"{found.get('stage', 'between two stages')}{far}, {clock(spent)} spent"

    def outcome(self) -> str | None:
        """Reason of the failure, or None if the cell succeeded."""
        code, reason = self.process.returncode, _reason_file(self.log)
        if code == 0:
            return None
        if reason.is_file():
            why = reason.read_text()
            reason.unlink()
            return why
        if code < 0:
            name = next((s.name for s in signal.Signals if s == -code), f"signal {-code}")
            why = " (by hand, or by the system when out of memory)" if name == "SIGKILL" else ""
            return f"its process was killed by {name}{why}; run the same command again to resume it"
        return f"its process exited with code {code}; see the end of {self.log}"


Running = dict[Future[int], Worker]


def _at_once(
    matrix: Matrix,
    configs: Mapping[Cell, Config],
    out: RunPath,
    reporter: Reporter,
    until: str | None,
    workers: int,
) -> Ended:
    """Run the cells, `workers` at a time, and yield each as it ends."""
    workers = min(workers, len(configs))
    gpus = Gpus.here(workers) if any(map(_on_gpu, configs.values())) else Gpus()
    if gpus.memory is not None:
        reporter.say(f"each of the {workers} workers may use {gpus.memory} GiB of its GPU")
    shared = {cell: shared_work(cell, config) for cell, config in configs.items()}
    waiting, running = list(configs), Running()
    reported, ended = time.monotonic(), 0
    pool = ThreadPoolExecutor(workers)
    try:
        while waiting or running:
            for cell in list(waiting):
                if len(running) < workers and not _awaits(cell, running.values(), shared):
                    gpu, config = gpus.place(configs[cell], [w.gpu for w in running.values()])
                    waiting.remove(cell)
                    worker = _start(matrix, cell, config, out, until, gpu, workers)
                    running[pool.submit(worker.process.wait)] = worker
                    reporter.say(f"{cell.title}: started ({worker.log})")
            for future in wait(running, LOOK_EVERY, FIRST_COMPLETED).done:
                worker = running.pop(future)
                ended, why = ended + 1, worker.outcome()
                took = clock(time.monotonic() - worker.begun)
                how = "failed" if why is not None else "done"
                reporter.say(f"{worker.cell.title}: {how} in {took}, {ended} of {len(configs)}")
                yield worker.cell, why
            if time.monotonic() - reported > REPORT_EVERY:
                reported = time.monotonic()
                for worker in running.values():
                    reporter.say(f"{worker.cell.title}: {worker.progress()}")
    except interrupt.Interrupted as stopped:
        asked = list(running.values())
        _stop(running, stopped.signum)
        saved = sum(worker.process.returncode == stopped.exit_code for worker in asked)
        stopped.saved = f"the progress of {saved} cells" if saved else ""
        raise
    finally:
        _stop(running, signal.SIGTERM)
        pool.shutdown()


def shared_work(cell: Cell, config: Config) -> dict[tuple[str, ...], str]:
    """Results that other cells can reuse from this one, by name, and the stage that computes each.

    These are names, not fingerprints. If equal names stand for different work, a cell waits for
    nothing; if different names stand for equal work, it is computed twice. Neither changes a
    result.
    """
    chosen, block = methods.compose(settings.to_flat(config)), _block(cell)
    stages = ("split", *(need for need in ("warmup", "scores") if need in chosen.needs))
    found: dict[tuple[str, ...], str] = {(stage, *block): stage for stage in stages}
    data = chosen["data"]
    if data is not None and data.lends:
        found["data", data.name, cell.budget.name, *block] = "selection"
    budgets = (
        "" if chosen.name("data") == "all" else str(config.select.data_budget),
        "" if chosen.name("params") == "all" else str(config.select.param_budget),
    )
    whole = ("cell", cell.method.name, cell.value.name, *budgets, *block)
    return found | {whole: "evaluation"}


def _awaits(
    cell: Cell,
    running: Iterable[Worker],
    shared: Mapping[Cell, Mapping[tuple[str, ...], str]],
) -> bool:
    """Whether a running cell is computing something that this one can reuse."""
    return any(
        what in shared[cell] and not worker.is_past(stage)
        for worker in running
        for what, stage in shared[worker.cell].items()
    )


def _start(
    matrix: Matrix,
    cell: Cell,
    config: Config,
    out: RunPath,
    until: str | None,
    gpu: str | None,
    workers: int,
) -> Worker:
    """Start the process of a cell. It reads its task as JSON from stdin."""
    log = out.joinpath("logs", *cell.path.parts[1:-1], f"{cell.path.name}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    _reason_file(log).unlink(missing_ok=True)
    env = {"OMP_NUM_THREADS": str(threads_each(workers)), "PYTHONUNBUFFERED": "1", **os.environ}
    env |= {"PYTHONIOENCODING": "utf-8:replace"}
    env |= {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
    root, here = str(Path(__file__).resolve().parents[3]), Path.cwd()
    path = [place for place in sys.path if place and Path(place) != here]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", START, *([] if root in path else [root]), *path],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,  # a terminal's Ctrl-C reaches only the parent
        )
    task = {
        "parent": os.getpid(),
        "config": settings.to_yaml(config),
        "consent": settings.consent_of(config),
        "out": str(out.root),
        "folder": cell.path.as_posix(),
        "keeps": matrix.keep == "results",
        "until": until,
        "cached": ["/".join(folder.parts) for folder in _cached_runs(matrix, out)],
        "reason": "/".join(_reason_file(log).parts),
    }
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as pipe:
        pipe.write(json.dumps(task).encode())
    return Worker(cell, process, gpu, log, pipeline.Finished(config, out / cell.path))


def _reason_file(log: RunPath) -> RunPath:
    """File in which a worker reports why it failed."""
    return log.with_suffix(".failed")


def _stop(running: Running, signum: int) -> None:
    """Signal all workers to save and exit, and wait.

    Process groups that do not exit within `SAVING` seconds are killed.
    """
    for worker in running.values():
        with suppress(ProcessLookupError):
            worker.process.send_signal(signum)
    for future in wait(running, SAVING).not_done:
        with suppress(ProcessLookupError):
            os.killpg(running[future].process.pid, signal.SIGKILL)
    wait(running)
    running.clear()


# --- in the process of a worker -----------------------------------------------------------------


def work() -> None:
    """Entry point of a worker. Reads its task as JSON from stdin."""
    logging.basicConfig(stream=sys.stdout, format="%(message)s", force=True)
    logging.getLogger("dualsft").setLevel(logging.INFO)
    raise SystemExit(_work(json.load(sys.stdin)))


def _work(task: Mapping[str, Any]) -> int:
    """Run the cell of the task. Returns the exit code of this process."""
    config = settings.from_mapping(yaml.safe_load(task["config"]), task["consent"])
    out = RunPath(task["out"])
    cached = [out / folder for folder in task["cached"]]
    cell = (config, out / task["folder"], task["keeps"], Reporter(), task["until"], cached)
    try:
        with interrupt.handled():
            interrupt.end_with_parent()
            if os.getppid() != task["parent"]:  # it died before
                signal.raise_signal(signal.SIGTERM)
            why = _run_cell(*cell, out / ANSWERS)
    except interrupt.Interrupted as stopped:
        print(f"stopped by {stopped}: {stopped.saved or 'nothing had to be saved'}")
        return stopped.exit_code
    if why is None:
        return 0
    atomic_write_text(out / task["reason"], why)
    print(f"error: {why}")
    return 1
