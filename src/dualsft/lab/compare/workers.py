"""Run several cells of a comparison at once, each in its own process: `compare --workers N`.

A small model does not fill a GPU, and a machine may have several. Each worker gets the GPU with the
fewest workers, and the workers of one GPU get equal shares of its memory (`model.memory`, unless a
cell sets it). If another cell is computing something that a cell can reuse (the split, the warmup,
the scores, a selection of examples, or an identical cell), it waits for that stage, not for the
whole cell: until the manifest of the stage is in the run folder of the other cell. Workers write
their logs to OUT/logs, for people only. On a signal, the parent forwards it and waits until all
workers have saved their state. On Linux, workers stop when the parent dies. A pool of
`concurrent.futures` would pickle tasks, reuse a process for cells of other GPUs, break when one is
killed, and still need the loop that waits for stages. Not part of Algorithm 1.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import yaml

from dualsft.config import methods, settings
from dualsft.config.settings import Config
from dualsft.distributed.launch import SAVING, threads_each
from dualsft.errors import DualsftError
from dualsft.lab.compare.cells import ANSWERS, Ended, known_folders, run_cell
from dualsft.lab.compare.matrix import Cell, Matrix
from dualsft.model.load import choose_device
from dualsft.runs.folder import atomic_write_text
from dualsft.runs.pipeline import Finished
from dualsft.system import signals as interrupt
from dualsft.system.paths import RunPath
from dualsft.system.progress import Reporter, clock

LOGS = "logs"
TELL_EVERY = 60.0
"""Seconds between two progress reports of the running cells."""
USABLE = 0.95
"""Share of a GPU's memory that its workers divide; the rest is for their CUDA contexts."""
PDEATHSIG = 1
"""PR_SET_PDEATHSIG of Linux's prctl: the signal to get when the parent dies."""
LOOK_EVERY = 0.5
"""Seconds between two looks at the workers and at the stages that cells wait for."""
START = (
    "import sys; sys.path[:] = sys.argv[1:]; "
    "from dualsft.lab.compare import workers; workers.main()"
)
"""Program of a worker. It uses the import path of its parent, without the current directory, where
a file could shadow a module."""

Shared = Mapping[Cell, Mapping[tuple[str, ...], str]]
"""Per cell: the results that other cells can reuse, by name, and the stage that computes each."""


@dataclass(frozen=True)
class Gpus:
    """The GPUs that workers are assigned to. Empty if cells run on the CPU."""

    names: tuple[str, ...]
    memory: float | None
    """GiB per worker. None: all memory of its GPU."""

    @classmethod
    def here(cls, workers: int) -> Gpus:
        count = torch.cuda.device_count()
        if not count:
            return cls((), None)
        shown = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
        # CUDA ignores CUDA_VISIBLE_DEVICES from the first invalid entry on.
        names = tuple(name.strip() for name in shown.split(","))[:count]
        sharing = -(-workers // len(names))
        least = min(torch.cuda.get_device_properties(i).total_memory for i in range(len(names)))
        part = round(USABLE * least / 2**30 / sharing, 1) if sharing > 1 else None
        return cls(names, part)

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
    finished: Finished
    begun: float = field(default_factory=time.monotonic)

    def is_past(self, stage: str) -> bool:
        """Whether this stage is complete, computed or reused."""
        with suppress(Exception):  # the cell meets the same error and reports it
            return self.finished.up_to(stage, whole=True)
        return False

    def progress(self) -> str:
        """The stage that it is in, how far that is, and the time since the cell started."""
        spent, found = time.monotonic() - self.begun, {}
        with suppress(Exception):  # a damaged folder is the worker's to report
            found = self.finished.rundir.under_way(time.time() - spent)
        far = f", {found['work']} {found['percentage']} %" if "percentage" in found else ""
        return f"{found.get('stage', 'between two stages')}{far}, {clock(spent)} spent"


def at_once(
    matrix: Matrix,
    configs: Mapping[Cell, Config],
    out: RunPath,
    reporter: Reporter,
    until: str | None,
    workers: int,
) -> Ended:
    """Run the cells, `workers` at a time, and yield each as it ends."""
    workers = min(workers, len(configs))
    gpus = Gpus.here(workers) if any(map(_on_gpu, configs.values())) else Gpus((), None)
    if gpus.memory is not None:
        reporter.say(f"each of the {workers} workers may use {gpus.memory} GiB of its GPU")
    shared = {cell: shared_work(cell, config) for cell, config in configs.items()}
    waiting, running = list(configs), list[Worker]()
    told, ended = time.monotonic(), 0
    try:
        while waiting or running:
            for cell in list(waiting):
                if len(running) < workers and not _awaits(cell, running, shared):
                    gpu, config = gpus.place(configs[cell], [w.gpu for w in running])
                    waiting.remove(cell)
                    running.append(_start(matrix, cell, config, out, until, gpu, workers))
                    reporter.say(f"{cell.title}: started ({running[-1].log})")
            time.sleep(LOOK_EVERY)
            for worker in [w for w in running if w.process.poll() is not None]:
                running.remove(worker)
                ended, why = ended + 1, _outcome(worker)
                took = clock(time.monotonic() - worker.begun)
                how = "failed" if why is not None else "done"
                reporter.say(f"{worker.cell.title}: {how} in {took}, {ended} of {len(configs)}")
                yield worker.cell, why
            if time.monotonic() - told > TELL_EVERY:
                told = time.monotonic()
                for worker in running:
                    reporter.say(f"{worker.cell.title}: {worker.progress()}")
    except interrupt.Interrupted as stopped:
        asked = list(running)
        _stop(running, stopped.signum)
        saved = sum(worker.process.returncode == stopped.exit_code for worker in asked)
        stopped.saved = f"the progress of {saved} cells" if saved else ""
        raise
    finally:
        _stop(running, signal.SIGTERM)


# --- shared work --------------------------------------------------------------------------------


def shared_work(cell: Cell, config: Config) -> dict[tuple[str, ...], str]:
    """Results that other cells can reuse from this one, by name, and the stage that computes each.

    These are names, not fingerprints. If equal names stand for different work, a cell waits for
    nothing; if different names stand for equal work, it is computed twice. Neither changes a
    result.
    """
    chosen = methods.compose(settings.to_flat(config))
    block = (cell.model.name, cell.data.name, str(cell.seed))
    shared = ("split", *(need for need in ("warmup", "scores") if need in chosen.needs))
    found: dict[tuple[str, ...], str] = {(stage, *block): stage for stage in shared}
    data = chosen["data"]
    if data is not None and data.lends:
        found["data", data.name, cell.budget.name, *block] = "selection"
    select = config.select
    told = (
        "" if chosen.name("data") == "all" else str(select.data_budget),
        "" if chosen.name("params") == "all" else str(select.param_budget),
    )
    return found | {("cell", cell.method.name, *told, *block): "evaluation"}


def _awaits(cell: Cell, running: list[Worker], shared: Shared) -> bool:
    """Whether a running cell is computing something that this one can reuse."""
    return any(
        what in shared[cell] and not worker.is_past(stage)
        for worker in running
        for what, stage in shared[worker.cell].items()
    )


# --- a worker -----------------------------------------------------------------------------------


def _start(
    matrix: Matrix,
    cell: Cell,
    config: Config,
    out: RunPath,
    until: str | None,
    gpu: str | None,
    workers: int,
) -> Worker:
    log = out.joinpath(LOGS, *cell.path.parts[1:-1], f"{cell.path.name}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    _words(log).unlink(missing_ok=True)
    own = {"OMP_NUM_THREADS": str(threads_each(workers)), "PYTHONUNBUFFERED": "1"}
    fixed = {"PYTHONIOENCODING": "utf-8:replace"}
    fixed |= {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", START, *_import_path()],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**own, **os.environ, **fixed},
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
        "lenders": ["/".join(folder.parts) for folder in known_folders(matrix, out)],
        "failed": "/".join(_words(log).parts),
    }
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as pipe:
        pipe.write(json.dumps(task).encode())
    return Worker(cell, process, gpu, log, Finished(config, out / cell.path))


def _import_path() -> list[str]:
    root, here = str(Path(__file__).resolve().parents[3]), Path.cwd()
    kept = [place for place in sys.path if place and Path(place) != here]
    return kept if root in kept else [root, *kept]


def _words(log: RunPath) -> RunPath:
    """File in which a worker reports why it failed."""
    return log.with_suffix(".failed")


def _outcome(worker: Worker) -> str | None:
    """Reason of the failure, or None if the cell succeeded."""
    code, words = worker.process.returncode, _words(worker.log)
    if code == 0:
        return None
    if words.is_file():
        why = words.read_text()
        words.unlink()
        return why
    if code < 0:
        name = next((s.name for s in signal.Signals if s == -code), f"signal {-code}")
        why = " (by hand, or by the system when out of memory)" if name == "SIGKILL" else ""
        return f"its process was killed by {name}{why}; run the same command again to resume it"
    return f"its process exited with code {code}; see the end of {worker.log}"


def _stop(running: list[Worker], signum: int) -> None:
    """Signal all workers to save and exit, and wait.

    Process groups that do not exit within `SAVING` seconds are killed.
    """
    for worker in running:
        with suppress(ProcessLookupError):
            worker.process.send_signal(signum)
    deadline = time.monotonic() + SAVING
    for worker in running:
        try:
            worker.process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(worker.process.pid, signal.SIGKILL)
            worker.process.wait()
    running.clear()


def work(given: str) -> int:
    """Run the cell described by the parent (JSON). Returns the exit code of this process."""
    task = json.loads(given)
    config = settings.from_mapping(yaml.safe_load(task["config"]), task["consent"])
    out = RunPath(task["out"])
    lenders = [out / folder for folder in task["lenders"]]
    cell = (config, out / task["folder"], task["keeps"], Reporter(), task["until"], lenders)
    try:
        with interrupt.handled():
            _end_with(task["parent"])
            why = run_cell(*cell, out / ANSWERS)
    except interrupt.Interrupted as stopped:
        print(f"stopped by {stopped}: {stopped.saved or 'nothing had to be saved'}")
        return stopped.exit_code
    if why is None:
        return 0
    atomic_write_text(out / task["failed"], why)
    print(f"error: {why}")
    return 1


def _end_with(parent: int) -> None:
    """On Linux, receive SIGTERM when the parent dies; at once if it is dead already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            signal.raise_signal(signal.SIGTERM)


def main() -> None:
    """Entry point of a worker. Reads its task as JSON from stdin."""
    logging.basicConfig(stream=sys.stdout, format="%(message)s", force=True)
    logging.getLogger("dualsft").setLevel(logging.INFO)
    raise SystemExit(work(sys.stdin.buffer.read().decode()))
