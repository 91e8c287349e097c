"""Runs diagnostics on a run folder and stores their results.

A diagnostic reads a run folder and never modifies its stages. Its numbers are written to
RUN/diagnostics/NAME.json with a fingerprint of its inputs (the fingerprints of the stages it reads,
and its options). If nothing has changed, a second call only redraws the figure from the JSON.
Progress of long diagnostics is saved as pieces (`storage/resume.py`) and resumed after a kill. Not
part of Algorithm 1.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from dualsft.algorithm.projection import at_hand
from dualsft.config import settings
from dualsft.config.parts import load_target
from dualsft.data.examples import Example, digest
from dualsft.engine.ghost import GhostEngine
from dualsft.errors import RunError
from dualsft.lab.diagnostics import Diagnostic, Wanted
from dualsft.runs.context import RunContext
from dualsft.runs.folder import RunDir, atomic_write_text
from dualsft.runs.method import Job
from dualsft.runs.stages.selection import Scoring
from dualsft.runs.summaries import outdated, read_manifests
from dualsft.storage.resume import Pieces
from dualsft.system.paths import Place, RunPath, run_path
from dualsft.system.progress import Reporter
from dualsft.system.signals import Interrupted
from dualsft.system.usage import PeakMemory

FOLDER = "diagnostics"


@dataclass
class DiagnosticJob:
    """Input of a diagnostic: the run and the options. Properties are loaded on first use."""

    ctx: RunContext
    options: Any

    @property
    def reporter(self) -> Reporter:
        return self.ctx.reporter

    @cached_property
    def roles(self) -> dict[str, list[Example]]:
        """The examples of val, anchor, warm and pool."""
        return self.ctx.roles()

    @cached_property
    def scoring(self) -> Scoring:
        """u, G, the engine at θ̄ and the pool, as in the selection stage."""
        return Scoring.of(self.ctx, at_hand)

    @cached_property
    def selected_ids(self) -> set[str]:
        """Ids of D_sel as used by fine-tuning."""
        return set((self.final / "ids.json").read_json())

    @property
    def final(self) -> RunPath:
        """Folder of the selection that fine-tuning uses (the last round, or 5_selection itself)."""
        selection = self.ctx.folder("selection")
        return selection / (selection / "summary.json").read_json()["final"]

    def engine(self, model: PreTrainedModel) -> GhostEngine:
        return GhostEngine(model, self.ctx.candidates(model))

    def rng(self, purpose: str) -> np.random.Generator:
        """A random generator that depends only on the seed and the purpose."""
        words = np.frombuffer(digest(self.ctx.config.seed, purpose), np.uint32)
        return np.random.default_rng(words.tolist())

    def losses(self, model: PreTrainedModel, examples: Sequence[Example], label: str) -> np.ndarray:
        """Loss of each example (one forward pass)."""
        return Job(self.ctx, "data", self.ctx.rundir.path).losses(model, examples, label)


def diagnose(
    folder: Place, wanted: Wanted, reporter: Reporter, consent: Sequence[str] = ()
) -> list[RunPath]:
    """Compute missing or outdated results and draw all figures; returns the files.

    Results of diagnostics that are not in `wanted` are left unchanged.
    """
    run = run_path(folder)
    config = settings.load(run / "config.yaml", consent)
    ctx = RunContext(config, RunDir(run), reporter)
    manifests, problems = read_manifests(run)
    if problems:
        raise RunError("\n".join([*problems, "run the same `dualsft run` again"]))
    stale = outdated(manifests)
    out = run / FOLDER
    files: list[RunPath] = []
    with ctx.rundir.lock():
        out.mkdir(exist_ok=True)
        for one in wanted.diagnostics:
            absent = [s for s in one.needs if s not in manifests or s in stale]
            if absent:
                raise RunError(
                    f"{one.name}: the run has no finished, up-to-date stage {absent[0]}; run "
                    f"`dualsft run {run}/config.yaml --out {run}` first"
                )
            options = one.options(**wanted.options.get(one.name, {}))
            made_from = _fingerprint(one, options, manifests)
            files.append(_ensure(ctx, one, options, made_from, out))
            files += draw(one, files[-1])
    return files


def _fingerprint(one: Diagnostic, options: Any, manifests: Mapping[str, Any]) -> dict[str, Any]:
    """Options and stage fingerprints that the result depends on."""
    stages = {s: manifests[s]["fingerprint"]["hash"] for s in manifests if s != "evaluation"}
    read = _before(one, stages) | {*one.needs, *one.tells}
    read = {stage: value for stage, value in stages.items() if stage in read}
    return {"options": asdict(options), "stages": read}


def _before(one: Diagnostic, stages: Mapping[str, str]) -> set[str]:
    """Stages up to and including the last one it needs."""
    order = list(stages)
    last = max((order.index(s) for s in one.needs if s in order), default=-1)
    return set(order[: last + 1])


def _ensure(
    ctx: RunContext, one: Diagnostic, options: Any, made_from: dict[str, Any], out: RunPath
) -> RunPath:
    """The JSON of a diagnostic: reused if its fingerprint matches, otherwise computed."""
    path = out / f"{one.name}.json"
    if path.is_file():
        try:
            stored = path.read_json()
        except (ValueError, RecursionError):
            ctx.reporter.warn(f"{path}: cannot be read; it is computed again")
            stored = None
        wanted = json.loads(json.dumps(made_from))  # compare as JSON: tuples become lists
        if isinstance(stored, dict) and stored.get("made_from") == wanted:
            ctx.reporter.say(f"[{one.name}] reused: nothing it depends on has changed")
            return path
    ctx.reporter.say(f"[{one.name}] started: {one.summary}")
    key = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()
    work = out / f"{one.name}.work"
    ctx.pieces = Pieces(work, key, ctx.config.resume.every, ctx.reporter.say)
    try:
        start = time.perf_counter()
        with PeakMemory() as memory:
            result = load_target(one.target)(DiagnosticJob(ctx, options))
    except Interrupted as stopped:
        stopped.saved = stopped.saved or ctx.pieces.rescue()
        raise
    finally:
        ctx.pieces = Pieces()
    content = {
        "name": one.name,
        "paper": one.paper,
        "made_from": made_from,
        "seconds": round(time.perf_counter() - start, 3),
        "peak_memory": memory.as_dict(),
        "result": result,
    }
    atomic_write_text(path, json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False))
    with suppress(OSError):
        work.remove()
    ctx.reporter.say(f"[{one.name}] done")
    return path


def draw(one: Diagnostic, path: RunPath) -> list[RunPath]:
    """Draw the figures of a diagnostic from its JSON; returns the files."""
    if one.figure is None:
        return []
    result = path.read_json()["result"]
    return load_target(one.figure)(result, path.with_suffix(""))
