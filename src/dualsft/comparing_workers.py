"""Several cells of a comparison at once, each in a process of its own: `compare --workers N`.

A small model does not fill a card, and a machine may have several: workers are dealt out over the
GPUs, and those of one GPU have equal parts of its memory (`model.memory`, unless it is set). A cell
that could take over what another one is just computing (the warmup, the scores, a choice of
examples) waits for that stage, not for the whole cell. Each worker writes to OUT/logs; the parent
says what starts, how far the running ones are, and what ended. Asked to stop, it passes the signal
on and waits until all have saved their progress; workers whose parent dies stop by themselves.
It belongs to no line of Algorithm 1.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import torch
import yaml

from dualsft import config as settings
from dualsft import interrupt, methods
from dualsft.comparing import ANSWERS, Ended, known_folders, run_cell
from dualsft.comparison_matrix import Cell, Matrix
from dualsft.config import Config
from dualsft.launch import SAVING
from dualsft.manifest import MANIFEST
from dualsft.model import choose_device
from dualsft.preflight import FOLDERS
from dualsft.progress import Reporter, clock
from dualsft.rundir import atomic_write_text

LOGS = "logs"
TELL_EVERY = 60.0
"""Seconds between two words about the cells that are running."""
USABLE = 0.95
"""Part of a GPU's memory that its workers share; the rest is their CUDA contexts."""
PDEATHSIG = 1
"""Linux: prctl's name for the signal at the parent's death."""


@dataclass(frozen=True)
class Place:
    """Where a worker works."""

    environment: dict[str, str]
    memory: float | None
    """GiB of its GPU; None leaves the settings as they are."""


@dataclass
class Worker:
    """A cell that is being made."""

    cell: Cell
    process: subprocess.Popen[bytes]
    place: Place
    log: Path
    begun: float

    @property
    def last_line(self) -> str:
        """How far it is, in its own words."""
        with suppress(OSError), self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - 1000))
            lines = file.read().decode(errors="replace").replace("\r", "\n").split("\n")
            return next((line for line in reversed(lines) if line.strip()), "")[:100]
        return ""


def at_once(
    matrix: Matrix,
    configs: Mapping[Cell, Config],
    out: Path,
    reporter: Reporter,
    until: str | None,
    workers: int,
) -> Ended:
    """Make the cells, `workers` at a time; each is told as it ends."""
    free = places(next(iter(configs.values())), min(workers, len(configs)), reporter)
    shared = {cell: shared_work(cell, config) for cell, config in configs.items()}
    waiting, running = list(configs), list[Worker]()
    (out / LOGS).mkdir(exist_ok=True)
    told, ended = time.monotonic(), 0
    try:
        while waiting or running:
            for cell in [c for c in waiting if free and not _awaited(c, running, shared, out)]:
                if free and not _awaited(cell, running, shared, out):
                    waiting.remove(cell)
                    place = free.pop(0)
                    running.append(_start(matrix, cell, configs[cell], out, until, place))
                    reporter.say(f"{cell.title}: started ({running[-1].log})")
            time.sleep(0.1)
            for worker in [w for w in running if w.process.poll() is not None]:
                running.remove(worker)
                free.append(worker.place)
                ended, why = ended + 1, _outcome(worker)
                took = clock(time.monotonic() - worker.begun)
                how = "failed" if why is not None else "done"
                reporter.say(f"{worker.cell.title}: {how} in {took}, {ended} of {len(configs)}")
                yield worker.cell, why
            if time.monotonic() - told > TELL_EVERY:
                told = time.monotonic()
                for worker in running:
                    reporter.say(f"{worker.cell.title}: {worker.last_line}")
    except interrupt.Interrupted as stopped:
        stopped.saved = f"the progress of {len(running)} cells"
        _stop(running, stopped.signum)
        raise
    finally:
        _stop(running, signal.SIGTERM)


# --- who works where, and who waits -------------------------------------------------------------


def places(config: Config, workers: int, reporter: Reporter) -> list[Place]:
    """A place for each worker: its GPU, its part of the memory, its threads."""
    threads = {"OMP_NUM_THREADS": str(max(1, _cores() // workers)), "PYTHONUNBUFFERED": "1"}
    threads = {key: os.environ.get(key, value) for key, value in threads.items()}
    if choose_device(config.model.device).type != "cuda":
        return [Place(threads, None)] * workers
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = seen.split(",") if seen else [str(i) for i in range(torch.cuda.device_count())]
    sharing = -(-workers // len(names))
    least = min(torch.cuda.get_device_properties(i).total_memory for i in range(len(names)))
    part = round(USABLE * least / 2**30 / sharing, 1) if sharing > 1 else None
    memory = part if config.model.memory is None else None
    if memory is not None:
        reporter.say(f"each of the {workers} workers may use {memory} GiB of its GPU")
    gpus = itertools.islice(itertools.cycle(names), workers)
    return [Place({**threads, "CUDA_VISIBLE_DEVICES": name}, memory) for name in gpus]


def _cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def shared_work(cell: Cell, config: Config) -> dict[tuple[str, ...], str]:
    """What another cell could take over from this one, and the stage that it is made by.

    Names, not fingerprints: where they are alike and the work is not, a cell waits in vain; where
    it is the other way round, something is computed twice. Neither changes a result.
    """
    chosen = methods.compose(settings.to_flat(config))
    block = (cell.model.name, cell.data.name, str(cell.seed))
    found: dict[tuple[str, ...], str] = {
        (need, *block): need for need in ("warmup", "scores") if need in chosen.needs
    }
    data = chosen["data"]
    if data is not None and data.lends:
        found["data", data.name, cell.budget.name, *block] = "selection"
    return found


def _awaited(
    cell: Cell,
    running: list[Worker],
    shared: Mapping[Cell, Mapping[tuple[str, ...], str]],
    out: Path,
) -> bool:
    """Whether a running cell is computing what this one can then take over."""
    for worker in running:
        for what, stage in shared[worker.cell].items():
            made = out / worker.cell.path / FOLDERS[stage] / MANIFEST
            if what in shared[cell] and not made.is_file():
                return True
    return False


# --- a worker -----------------------------------------------------------------------------------


def _start(
    matrix: Matrix, cell: Cell, config: Config, out: Path, until: str | None, place: Place
) -> Worker:
    log = out / LOGS / ("_".join(cell.path.parts[1:]) + ".log")
    _result(log).unlink(missing_ok=True)
    if place.memory is not None:
        config = replace(config, model=replace(config.model, memory=place.memory))
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "dualsft.comparing_workers"],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **place.environment},
            start_new_session=True,  # a terminal's Ctrl-C is passed on once, by the parent
        )
    task = {
        "parent": os.getpid(),
        "config": settings.to_yaml(config),
        "folder": str(out / cell.path),
        "keeps": matrix.keep == "results",
        "until": until,
        "lenders": [str(folder) for folder in known_folders(matrix, out)],
        "answers": str(out / ANSWERS),
        "failed": str(_result(log)),
    }
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as pipe:
        pipe.write(json.dumps(task).encode())
    return Worker(cell, process, place, log, time.monotonic())


def _result(log: Path) -> Path:
    return log.with_suffix(".failed")


def _outcome(worker: Worker) -> str | None:
    """Why it failed, if it did."""
    code, said = worker.process.returncode, _result(worker.log)
    if code == 0:
        return None
    if said.is_file():
        return said.read_text(encoding="utf-8")
    if code < 0:
        name = signal.Signals(-code).name
        why = " (by hand, or by the system for want of memory)" if name == "SIGKILL" else ""
        return f"its process died of {name}{why}; the same command goes on from what was saved"
    return f"its process ended with exit code {code}; its last words are in {worker.log}"


def _stop(running: list[Worker], signum: int) -> None:
    """Ask all to save and end, and wait; those that cannot are killed."""
    for worker in running:
        with suppress(ProcessLookupError):
            worker.process.send_signal(signum)
    deadline = time.monotonic() + SAVING
    for worker in running:
        try:
            worker.process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.process.kill()
            worker.process.wait()
    running.clear()


def work(given: BinaryIO) -> int:
    """Make the cell that the parent describes; the exit code of this process."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logging.getLogger("dualsft").addHandler(handler)
    logging.getLogger("dualsft").setLevel(logging.INFO)
    task = json.loads(given.read())
    config = settings.from_mapping(yaml.safe_load(task["config"]))
    lenders = [Path(folder) for folder in task["lenders"]]
    cell = (config, Path(task["folder"]), task["keeps"], Reporter(), task["until"], lenders)
    try:
        with interrupt.handled():
            _end_with(task["parent"])
            why = run_cell(*cell, Path(task["answers"]))
    except interrupt.Interrupted as stopped:
        print(f"stopped by {stopped}: {stopped.saved or 'nothing had to be saved'}")
        return stopped.exit_code
    if why is None:
        return 0
    print(f"error: {why}")
    atomic_write_text(Path(task["failed"]), why)
    return 1


def _end_with(parent: int) -> None:
    """Be asked to stop when the parent dies, where the system can do that; it may be dead now."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            signal.raise_signal(signal.SIGTERM)


if __name__ == "__main__":
    raise SystemExit(work(sys.stdin.buffer))
