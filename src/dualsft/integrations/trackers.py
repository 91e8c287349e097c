"""Trackers: the records of metrics.jsonl, sent to TensorBoard, W&B, MLflow and trackio.

With `log.report_to`, each training step (loss, lr, grad_norm, retention), the numbers of each
finished stage's summary, and the settings go to the trackers that it names. metrics.jsonl and the
summaries stay the record of the run; a tracker holds a copy. Names are `finetune/loss`,
`summary/scores/eta_sc`, `summary/evaluation/files/validation/after/loss`.

Sending happens in a thread, so that no tracker delays a step. One that fails is given up with a
warning (`tracker_failed`), and the run goes on. RUN/trackers/sent.jsonl notes what was sent: a run
that is resumed continues in the same tracker run, and a step that is computed again is not sent
again. A stage that is computed again from other inputs begins a new tracker run.

Nothing needs a network: TensorBoard, MLflow and W&B (offline) write to RUN/trackers, trackio to its
local database, unless MLFLOW_TRACKING_URI, WANDB_MODE or WANDB_DIR say otherwise.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread, get_ident
from typing import TYPE_CHECKING, Any, Protocol

from dualsft.config.fields import TRACKERS
from dualsft.config.settings import CONSENTS, to_flat
from dualsft.errors import DualsftError
from dualsft.runs.preflight import FOLDERS, SUMMARIES, load_summaries
from dualsft.system.paths import RunPath
from dualsft.system.signals import Interrupted

if TYPE_CHECKING:
    from dualsft.runs.context import RunContext

logger = logging.getLogger(__name__)

PACKAGES = {"mlflow": "mlflow-skinny"}
"""Package to install, where it is not named like the tracker."""
PATIENCE = 120.0
"""Seconds that a tracker may take to start, and to take the last records."""
MOST_ITEMS = 40
"""Longest table of a summary that is sent, such as the numbers of each source."""
MOST_STEPS = 1 << 53
DEFAULTS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_MODE": "offline",
}
"""Environment of the trackers, where the user's says nothing: local files, no telemetry."""


# --- which trackers ------------------------------------------------------------------------------


def tracker_problems(values: Mapping[str, Any]) -> list[str]:
    """Problems with the trackers of `log.report_to`, before anything runs."""
    wanted = _wanted(values.get("log.report_to"))
    missing = [name for name in wanted if not _installed(name)]
    if not missing:
        return []
    packages = " ".join(PACKAGES.get(name, name) for name in missing)
    return [
        f"log.report_to: {', '.join(missing)} cannot be imported; install with `pip install "
        f"{packages}` (all trackers: pip install 'dualsft[trackers]'), or leave it out"
    ]


def _wanted(given: str | None) -> list[str]:
    """The trackers that `log.report_to` names."""
    names = (given or "none").split(",")
    return [one for one in TRACKERS if one in names or ("all" in names and _installed(one))]


def _installed(name: str) -> bool:
    """Whether the package is there; a folder of its name, as wandb makes, is not the package."""
    spec = find_spec(name)
    return spec is not None and spec.origin is not None


# --- one class per tracker -----------------------------------------------------------------------


@dataclass(frozen=True)
class TrackerRun:
    """What a tracker is told about a run."""

    id: str
    """Random, the same each time the run is resumed."""
    name: str
    project: str | None
    settings: Mapping[str, bool | int | float | str]
    folder: RunPath
    """RUN/trackers."""

    def own(self, name: str) -> str:
        """A folder below RUN/trackers, which may hold no links, soft or hard."""
        place = self.folder / name
        place.mkdir(parents=True, exist_ok=True)
        return str(place.checked(for_writing=True).absolute())

    def project_in(self, variable: str) -> str:
        return self.project or os.environ.get(variable) or "dualsft"


class Tracker(Protocol):
    """A run in one tracker, which may have been begun by an earlier process."""

    where: str
    """How to look at it."""

    def log(self, stage: str, values: Mapping[str, float], step: int, count: int) -> None:
        """Send the values of a step of a stage; `count` grows over all steps of the run."""
        ...

    def summarize(self, values: Mapping[str, float]) -> None:
        """Send numbers of finished stages."""
        ...

    def close(self, outcome: str) -> None:
        """End with FINISHED, KILLED or FAILED."""
        ...


class TensorBoard:
    def __init__(self, run: TrackerRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = run.folder / "tensorboard" / re.sub(r"[^\w.-]+", "_", f"{run.name}-{run.id}")
        new = not folder.exists()
        self._writer = SummaryWriter(run.own("/".join(folder.parts[-2:])))
        self.where = f"tensorboard --logdir {run.folder / 'tensorboard'}"
        if new:
            self._writer.add_hparams(dict(run.settings), {}, run_name=".")

    def log(self, stage: str, values: Mapping[str, float], step: int, count: int) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def summarize(self, values: Mapping[str, float]) -> None:
        self.log("", values, 0, 0)

    def close(self, outcome: str) -> None:
        self._writer.close()


class MLflow:
    def __init__(self, run: TrackerRun) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        self.where = f"the MLflow server {uri}"
        if not uri:
            uri = f"file://{run.own('mlflow')}"
            self.where = f"MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri {uri}"
        self._client = MlflowClient(uri)
        project = run.project_in("MLFLOW_EXPERIMENT_NAME")
        found = self._client.get_experiment_by_name(project)
        experiment = found.experiment_id if found else self._client.create_experiment(project)
        mine = self._client.search_runs([experiment], f"tags.dualsft_id = '{run.id}'")
        if mine:
            self._id = mine[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        tags = {"dualsft_id": run.id}
        self._id = self._client.create_run(experiment, tags=tags, run_name=run.name).info.run_id
        settings = [Param(key, str(value)[:500]) for key, value in run.settings.items()]
        for start in range(0, len(settings), 100):  # the most of one call
            self._client.log_batch(self._id, params=settings[start : start + 100])

    def log(self, stage: str, values: Mapping[str, float], step: int, count: int) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(key, value, now, step) for key, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def summarize(self, values: Mapping[str, float]) -> None:
        self.log("", values, 0, 0)

    def close(self, outcome: str) -> None:
        self._client.set_terminated(self._id, outcome)


class WandB:
    def __init__(self, run: TrackerRun) -> None:
        import wandb

        folder = os.environ.get("WANDB_DIR")
        self.where = f"W&B, {os.environ['WANDB_MODE']}"
        if folder is None:
            mine = run.folder / "wandb"
            logs = [one / "logs" / "debug-core.log" for one in mine.glob("*run-*")]
            for link in [mine / "latest-run", *mine.glob("debug*.log"), *logs]:
                link.unlink(missing_ok=True)  # W&B's own, of earlier processes; it makes new ones
            folder = str(Path(run.own("wandb")).parent)
        if os.environ["WANDB_MODE"] == "offline":
            self.where = f"wandb sync {folder}/wandb/offline-run-*-{run.id}"
        self._run = wandb.init(
            project=run.project_in("WANDB_PROJECT"),
            name=run.name,
            id=run.id,
            resume="allow",
            dir=folder,
            config=dict(run.settings),
            allow_val_change=True,
            settings=wandb.Settings(silent=True, console="off", disable_git=True),
        )
        self._stages = set[str]()

    def log(self, stage: str, values: Mapping[str, float], step: int, count: int) -> None:
        if stage not in self._stages:
            self._stages.add(stage)
            self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")
        self._run.log({**values, f"{stage}/step": step}, step=count)

    def summarize(self, values: Mapping[str, float]) -> None:
        self._run.summary.update(dict(values))

    def close(self, outcome: str) -> None:
        self._run.finish(exit_code=0 if outcome == "FINISHED" else 1)


class Trackio:
    def __init__(self, run: TrackerRun) -> None:
        import trackio  # pyright: ignore[reportMissingImports]

        project = run.project_in("TRACKIO_PROJECT")
        self.where = f"trackio show --project {project}"
        self._run = trackio.init(
            project,
            name=f"{run.name}-{run.id}",  # its only identity
            resume="allow",
            config=dict(run.settings),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, stage: str, values: Mapping[str, float], step: int, count: int) -> None:
        self._run.log(dict(values), step=step)

    def summarize(self, values: Mapping[str, float]) -> None:
        self.log("", values, 0, 0)

    def close(self, outcome: str) -> None:
        self._run.finish()


CLASSES: dict[str, Callable[[TrackerRun], Tracker]] = dict(
    zip(TRACKERS, (TensorBoard, WandB, MLflow, Trackio), strict=True)
)


# --- what was sent -------------------------------------------------------------------------------


@dataclass
class Sent:
    """What the trackers have of a run, from RUN/trackers/sent.jsonl: one JSON object per line."""

    path: RunPath
    id: str = ""
    """Of the tracker run; empty before the first."""
    runs: int = 0
    count: int = 0
    """Steps of all stages."""
    made_from: dict[str, str] = field(default_factory=dict)
    """Fingerprint of the latest attempt at each stage."""
    steps: dict[str, int] = field(default_factory=dict)
    """The last step of each stage."""
    summaries: dict[str, str] = field(default_factory=dict)
    """Fingerprint of each stage whose summary was sent."""

    @classmethod
    def read(cls, path: RunPath) -> Sent:
        sent = cls(path)
        for line in path.read_bytes().splitlines() if path.is_file() else ():
            # cut off by a crash, or not ours
            with suppress(ValueError, TypeError, KeyError, RecursionError):
                sent._take(json.loads(line))
        return sent

    def note(self, **facts: str | int) -> None:
        with self.path.open("ab+") as file:
            file.write(b"\n" if self._is_cut(file) else b"")
            file.write(json.dumps(facts).encode("ascii") + b"\n")
        self._take(facts)

    def begin(self) -> None:
        """Begin a new tracker run."""
        self.note(run=uuid.uuid4().hex[:8])

    def _take(self, facts: Mapping[str, Any]) -> None:
        if "run" in facts:
            if not re.fullmatch(r"[0-9a-f]{8}", facts["run"]):
                raise ValueError("not an id")
            self.id, self.runs, self.count = facts["run"], self.runs + 1, 0
            for table in (self.made_from, self.steps, self.summaries):
                table.clear()
        elif "step" in facts:
            if type(facts["step"]) is not int or not 0 <= facts["step"] <= MOST_STEPS:
                raise ValueError("not a step")
            self.steps[str(facts["stage"])] = facts["step"]
            self.count += 1
        elif "summary" in facts:
            self.summaries[str(facts["stage"])] = str(facts["summary"])
        else:
            self.made_from[str(facts["stage"])] = str(facts["fingerprint"])

    @staticmethod
    def _is_cut(file: Any) -> bool:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


# --- forwarding ----------------------------------------------------------------------------------


@contextmanager
def tracked(ctx: RunContext) -> Iterator[None]:
    """Send the records of a run to the trackers of `log.report_to`, while the stages run."""
    names = _wanted(ctx.config.log.report_to)
    if not names:
        yield
        return
    forwarder, outcome = Forwarder(ctx, names), "FAILED"
    ctx.rundir.followers.append(forwarder.take)
    try:
        yield
        outcome = "FINISHED"
    except Interrupted:
        outcome = "KILLED"
        raise
    finally:
        ctx.rundir.followers.remove(forwarder.take)
        forwarder.close(outcome)


class Forwarder:
    """Passes records to the trackers, in a thread of its own.

    The trackers are started with the first record that they lack; a run that computes nothing and
    has nothing new to send starts none.
    """

    def __init__(self, ctx: RunContext, names: list[str]) -> None:
        self._ctx = ctx
        self._names = names
        self._folder = ctx.rundir.path / "trackers"
        self._folder.mkdir(exist_ok=True)
        self._sent = Sent.read(self._folder / "sent.jsonl")
        self._trackers: dict[str, Tracker] = {}
        self._started = ""
        """Id of the run for which the trackers were started."""
        self._shown = set[str]()
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = Thread(target=self._work, name="trackers", daemon=True)
        self._thread.start()

    # --- in the thread of the run -------------------------------------------------------------

    def take(self, record: Mapping[str, Any]) -> None:
        """Queue a record: a step, or the beginning or the end of a stage."""
        if not self._names:
            return
        if "step" in record:
            self._tasks.put(partial(self._step, dict(record)))
        elif "resumed_at" in record:
            self._tasks.put(partial(self._catch_up, record["stage"], record["resumed_at"]))
        elif "fingerprint" in record:
            self._wait(partial(self._begin, record["stage"], record["fingerprint"]))
        elif "seconds" in record:
            self._tasks.put(self._summarize)

    def close(self, outcome: str) -> None:
        """Send what is left and end the trackers; one that hangs is left behind."""
        if self._names:
            self._tasks.put(self._summarize)
            self._wait(partial(self._end, outcome))
        self._tasks.put(None)

    def _wait(self, task: Callable[[], None]) -> None:
        """Run a task in the thread and wait for it, because it prints to stdout."""
        done = Event()

        def run() -> None:
            try:
                with redirect_stdout(StringIO()):
                    task()
            finally:
                done.set()

        self._tasks.put(run)
        if not done.wait(PATIENCE):
            for name in [*self._names]:
                self._give_up(name, TimeoutError(f"no answer within {PATIENCE:.0f} s"))
        for name, tracker in self._trackers.items():
            if name not in self._shown:
                self._shown.add(name)
                self._ctx.reporter.say(f"{name}: {tracker.where}")

    # --- in the thread of the trackers --------------------------------------------------------

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception as problem:  # of sent.jsonl
                for name in [*self._names]:
                    self._give_up(name, problem)

    def _begin(self, stage: str, fingerprint: str) -> None:
        """A stage begins, from nothing or from saved progress."""
        known = self._sent.made_from.get(stage, fingerprint)
        if not self._sent.id or (known != fingerprint and stage != "evaluation"):
            self._end("FINISHED")
            self._sent.begin()
        if self._sent.made_from.get(stage) != fingerprint:
            self._sent.note(stage=stage, fingerprint=fingerprint)
        self._start()

    def _catch_up(self, stage: str, done: int) -> None:
        """Send the steps before a resume that a killed process did not send."""
        steps: dict[int, dict[str, Any]] = {}
        same = True
        for record in self._ctx.rundir.read_metrics():
            if record["stage"] == stage and "fingerprint" in record:
                same = record["fingerprint"] == self._sent.made_from.get(stage)
            elif record["stage"] == stage and same and isinstance(record.get("step"), int):
                steps[record["step"]] = record
        for step in sorted(step for step in steps if step <= done):
            self._step(steps[step])

    def _start(self) -> None:
        """Start the trackers, unless they are."""
        if not self._sent.id:
            self._sent.begin()
        if self._started == self._sent.id:
            return
        self._started = self._sent.id
        for key, value in DEFAULTS.items():
            os.environ.setdefault(key, value)
        log, path = self._ctx.config.log, self._ctx.rundir.path
        name = log.run_name or path.location.absolute().name
        run = TrackerRun(
            id=self._sent.id,
            name=name if self._sent.runs == 1 else f"{name}-{self._sent.runs}",
            project=log.project,
            settings=_hyperparameters(self._ctx),
            folder=self._folder,
        )
        for name in list(self._names):
            try:
                with _captured(name):
                    self._trackers[name] = CLASSES[name](run)
            except Exception as problem:
                self._give_up(name, problem)

    def _step(self, record: dict[str, Any]) -> None:
        stage, step = record["stage"], record["step"]
        if step <= self._sent.steps.get(stage, 0):
            return
        values = {f"{stage}/{key}": value for key, value in record.items() if key not in _OWN}
        numbers = {key: float(value) for key, value in values.items() if _is_number(value)}
        self._each(lambda one: one.log(stage, numbers, step, self._sent.count + 1))
        self._sent.note(stage=stage, step=step)

    def _summarize(self) -> None:
        """Send the summaries of the finished stages, where they were not sent."""
        try:
            facts = load_summaries(self._ctx.rundir.path)
        except (DualsftError, OSError):  # the run is replacing a stage: next time
            return
        for stage in FOLDERS:
            if stage not in facts["manifests"]:
                continue
            manifest = facts["manifests"][stage]
            made = manifest["fingerprint"]["hash"]
            if self._sent.summaries.get(stage) == made:
                continue
            found = facts[stage] if stage in SUMMARIES else manifest["facts"]
            memory = manifest["peak_memory"]
            peaks = [size for size in memory.values() if _is_number(size)]
            values = {**found, "seconds": manifest["seconds"], "peak_bytes": max(peaks, default=0)}
            self._start()
            numbers = dict(_numbers(f"summary/{stage}", values))
            self._each(lambda one, numbers=numbers: one.summarize(numbers))
            self._sent.note(stage=stage, summary=made)

    def _end(self, outcome: str) -> None:
        self._each(lambda one: one.close(outcome))
        self._trackers.clear()

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                with _captured(name):
                    act(tracker)
            except Exception as problem:
                self._give_up(name, problem)

    def _give_up(self, name: str, problem: Exception) -> None:
        """Warn once, and send this tracker nothing more."""
        self._trackers.pop(name, None)
        if name not in self._names:
            return
        self._names.remove(name)
        why = " ".join(f"{type(problem).__name__}: {problem}".split())[:300]
        self._ctx.reporter.warn(
            f"log.report_to: {name} failed and gets nothing more ({why}); the run goes on, and "
            "metrics.jsonl has every record",
            code="tracker_failed",
        )


class _Capture(logging.Handler):
    """Passes what this thread logs to ours, and records of other threads to their handlers."""

    def __init__(self, name: str, others: list[logging.Handler]) -> None:
        super().__init__()
        self._name, self._others, self._mine = name, others, get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        if record.thread == self._mine:
            logger.debug("%s: %s", self._name, record.getMessage())
            return
        for handler in self._others:
            if record.levelno >= handler.level:
                handler.handle(record)


@contextmanager
def _captured(name: str) -> Iterator[None]:
    """What a tracker logs while it works is shown with --verbose only, by our handler.

    `logging.warning` would add a handler to a root logger that has none.
    """
    import_module(name)  # it may add a handler to its logger
    own, root, last = logging.getLogger(name), logging.getLogger(), logging.lastResort
    kept, above = own.handlers, _Capture(name, [last] if last else [])
    own.handlers = [_Capture(name, kept)] if kept else []
    if not root.handlers:
        root.addHandler(above)
    try:
        yield
    finally:
        own.handlers = kept
        root.removeHandler(above)


_OWN = ("time", "stage", "step")


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        return False
    return math.isfinite(value)


def _numbers(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a nested summary by path, in names that every tracker accepts."""
    for key, value in values.items():
        name = f"{prefix}/{re.sub(r'[^a-zA-Z0-9_. -]', '_', str(key))}"
        if isinstance(value, Mapping):
            yield from _numbers(name, value) if len(value) <= MOST_ITEMS else ()
        elif _is_number(value):
            yield name, float(value)


def _hyperparameters(ctx: RunContext) -> dict[str, bool | int | float | str]:
    """The settings of the run by full key, as simple values."""
    flat = to_flat(ctx.config)
    options: dict[str, Any] = flat.pop("method.options")
    flat |= {f"method.{key}": value for key, value in options.items()}
    return {
        key: value if isinstance(value, bool | int | float) else _text(value)
        for key, value in flat.items()
        if key not in CONSENTS
    }


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
