"""Runs diagnostics on a run folder; what they compute from: the job, and u and G at a checkpoint.

A diagnostic reads a run folder and never modifies its stages. Its numbers are written to
RUN/diagnostics/NAME.json with a fingerprint of its inputs (the fingerprints of the stages it reads,
and its options). If nothing has changed, a second call only redraws the figure from the JSON.
Progress of long diagnostics is saved as pieces (`storage/resume.py`) and resumed after a kill.

The local surrogate (Algorithm 1 lines 3 to 8) at θ̄ ("warmup") is read from the run folder. At θ_old
("init") the gradients are computed, v_prior is zero and ĉ is that of the warmup's optimizer. Values
are in units of u / eta_sc until a result is reported.

`Trials` are repeated short trainings from the same weights: MaskedFT (line 12) as in the run itself
(`train/loop.py`, SparseAdamW), on given examples and entries, for a given number of steps.
Afterwards the trained weights are restored bit for bit, so all trials use one loaded model. Methods
that train a reference model use `masked_finetune` as well.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from dualsft.algorithm.projection import Scored, param_scores, projection_terms
from dualsft.algorithm.scores import exact_dots
from dualsft.algorithm.selection import product_source
from dualsft.algorithm.topk import TopK, top_b, topk_signed
from dualsft.config import settings
from dualsft.config.methods import load_target
from dualsft.data.examples import Example, generator
from dualsft.engine.ghost import GhostEngine
from dualsft.engine.walk import PassResult, loss_objective, walk
from dualsft.errors import RunError
from dualsft.lab.diagnostics import (
    Diagnostic,
    Wanted,
    is_sealed,
    read_seals,
    registry,
    seal,
)
from dualsft.lab.diagnostics.costs import lacks_vectors, told
from dualsft.lab.plots import save
from dualsft.memory.placement import at_hand, blank
from dualsft.model.load import text_parameters
from dualsft.runs.context import RunContext, pass_settings
from dualsft.runs.folder import RunDir, atomic_write_text
from dualsft.runs.method import Job, Scoring
from dualsft.runs.preflight import outdated, read_manifests, reading
from dualsft.runs.stages.finetune import finetune_plan
from dualsft.runs.stages.scores import read_scores
from dualsft.runs.stages.selection import (
    data_budget,
    final_folder,
    num_trained,
    param_budget,
    read_mask,
)
from dualsft.storage.resume import Pieces
from dualsft.storage.vectors import ParamVector, Vector
from dualsft.system.paths import Place, RunPath, run_path
from dualsft.system.progress import NOTE, Reporter
from dualsft.system.signals import Interrupted
from dualsft.system.usage import PeakMemory
from dualsft.train.loop import Hooks, TrainingPlan, train
from dualsft.train.optimizer import SparseAdamW

FOLDER = "diagnostics"

Indices = Mapping[str, Tensor | None]


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
        for one in _affordable(wanted, manifests):
            absent = [s for s in one.needs if s not in manifests or s in stale]
            if absent:
                raise RunError(
                    f"{one.name}: the run has no finished, up-to-date stage {absent[0]}; run "
                    f"`dualsft run {run}/config.yaml --out {run}` first"
                )
            options = one.options(**wanted.options.get(one.name, {}))
            cost = told(one, options, manifests)
            path, sealed = _ensure(ctx, one, options, _inputs(one, options, manifests), out, cost)
            made = [path, *draw(one, path)]
            if sealed:
                seal(out, made)
            files += made
    return files


def others(folder: Place, wanted: Wanted) -> Iterator[str]:
    """What `dualsft diagnose` left out, one line each, with the cost on this run."""
    manifests = read_manifests(run_path(folder))[0]
    done = _affordable(wanted, manifests)
    left = [one for one in registry().values() if one not in done]
    if left:
        yield "not run; name them, or give all:"
    width = max((len(one.name) for one in left), default=0)
    for one in left:
        yield f"  {one.name:<{width}}  {told(one, one.options(), manifests)}"


def _affordable(wanted: Wanted, manifests: Mapping[str, Any]) -> list[Diagnostic]:
    """The diagnostics to run: those named, or those that are cheap for this run."""
    every = wanted.diagnostics
    return [one for one in every if wanted.named or not lacks_vectors(one, manifests)]


def _inputs(one: Diagnostic, options: Any, manifests: Mapping[str, Any]) -> dict[str, Any]:
    """Options and stage fingerprints that the result depends on."""
    stages = {s: manifests[s]["fingerprint"]["hash"] for s in manifests if s != "evaluation"}
    order = list(stages)
    last = max(order.index(stage) for stage in one.needs)
    read = {*order[: last + 1], *one.reports}
    found = {stage: value for stage, value in stages.items() if stage in read}
    return json.loads(json.dumps({"options": asdict(options), "stages": found}))


def _ensure(
    ctx: RunContext,
    one: Diagnostic,
    options: Any,
    made_from: dict[str, Any],
    out: RunPath,
    cost: str,
) -> tuple[RunPath, bool]:
    """(JSON of a diagnostic, whether its content is known to be ours).

    It is reused if its fingerprint matches, otherwise computed. One that was changed since raises.
    """
    path = out / f"{one.name}.json"
    if path.is_file():
        try:
            stored = path.read_json()
        except (ValueError, RecursionError):
            ctx.reporter.warn(f"{path}: cannot be read; it is computed again")
            stored = None
        if isinstance(stored, dict) and stored.get("made_from") == made_from:
            ctx.reporter.say(f"[{one.name}] reused: nothing it depends on has changed")
            return path, is_sealed(path, read_seals(out))
    ctx.reporter.say(f"[{one.name}] started: {one.summary} ({cost})")
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
    return path, True


def draw(one: Diagnostic, path: RunPath) -> list[RunPath]:
    """Draw the figures of a diagnostic from its JSON; returns the files."""
    result = path.read_json()["result"]
    if "note" in result:  # says why there are no numbers
        return []
    figures = load_target(one.figure)(result)
    return [
        file
        for ending, figure in figures.items()
        for file in save(figure, path.with_name(f"{one.name}{ending}"))
    ]


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
    def selected_ids(self) -> set[str] | None:
        """Ids of D_sel as used by fine-tuning; None if the run selects no examples."""
        path = self.final / "ids.json"
        if not path.is_file():
            return None
        with reading(path):
            if not (found := set(path.read_json())):
                raise ValueError("it selects no example")
            return found

    @property
    def mask(self) -> dict[str, Tensor] | None:
        """m_θ as used by fine-tuning; None if the run trains every parameter."""
        return read_mask(self.final) if (self.final / "mask.safetensors").is_file() else None

    @property
    def final(self) -> RunPath:
        """Folder of the selection that fine-tuning uses (the last round, or 5_selection itself)."""
        return final_folder(self.ctx.folder("selection"))

    @property
    def budgets(self) -> tuple[int, int]:
        """(k, b) from the run's settings, also for a side that the run does not restrict."""
        scoring, shapes = self.scoring, self.ctx.candidate_shapes
        b = data_budget(self.ctx, scoring.num_full, len(scoring.pool))
        return param_budget(self.ctx, shapes), b

    def rng(self, purpose: str) -> np.random.Generator:
        """A random generator that depends only on the seed and the purpose."""
        return generator(self.ctx.config.seed, purpose)

    @cached_property
    def records(self) -> dict[str, Any]:
        """Results of finished parts, as JSON values, including those saved before a kill."""
        piece = self.ctx.pieces.load("records")
        return piece.facts["records"] if piece else {}

    def record(self, key: str, value: Any, where: str) -> None:
        """Store the result of a part, and save all of them if that is due."""
        self.records[key] = value
        with self.ctx.pieces.loop():
            self.ctx.pieces.tick("records", lambda: ({}, {"records": self.records}), where)

    def each(
        self, label: str, unit: str, keys: Sequence[str], make: Callable[[str], Any]
    ) -> list[Any]:
        """make(key) for every key; finished ones are saved and reused after a kill."""
        done = sum(key in self.records for key in keys)
        with self.reporter.track(label, len(keys), unit, done) as progress:
            for key in keys:
                if key not in self.records:
                    done += 1
                    self.record(key, make(key), f"{label}: {done:,} of {len(keys):,} {unit}")
                    progress.advance(1)
        return [self.records[key] for key in keys]

    def kept(self, label: str, make: Callable[[], np.ndarray]) -> tuple[np.ndarray, float]:
        """(array, seconds to compute it); saved as a piece and read from it after a kill."""
        pieces = self.ctx.pieces
        name = "kept-" + "".join(c if c.isalnum() else "-" for c in label.lower())
        piece = pieces.load(name)
        if piece is not None:
            return piece.tensors["values"].numpy(), piece.facts["seconds"]
        start = time.perf_counter()
        values = make()
        seconds = time.perf_counter() - start
        if pieces.folder is not None:
            tensor = torch.from_numpy(np.ascontiguousarray(values))
            pieces.save(name, {"values": tensor}, {"seconds": seconds})
        return values, seconds

    def known_scores(self) -> tuple[np.ndarray | None, np.ndarray]:
        """(best known ⟨u, g_n⟩ of the pool, error bound of each); None if it was not computed: for
        DualSFT-Param, and in the calibrated form, whose scores are others."""
        pool = self.scoring.pool
        found = read_scores(self.ctx.folder("scores"), pool)
        if found is None or self.ctx.config.score.form == "calibrated":
            return None, np.zeros(len(pool))
        score, bound = (values.copy() for values in found)
        rescored = self.ctx.folder("selection") / "rescored.parquet"
        if rescored.is_file():
            with reading(rescored):
                again = rescored.read_table()
                place = {e.id: i for i, e in enumerate(pool)}
                at = [place[name] for name in again["id"].to_pylist()]
                score[at], bound[at] = again["score"].to_numpy(), 0.0
        return score, bound


@dataclass(frozen=True)
class Surrogate:
    """u and G at one checkpoint, and the engine that computes gradients there."""

    job: DiagnosticJob
    name: str
    engine: GhostEngine
    scored: Scored

    @property
    def eta_sc(self) -> float:
        return self.scored.terms.eta_sc

    @property
    def grad_sum(self) -> Vector:
        return self.scored.grad_sum

    @property
    def projection(self) -> Vector:
        return self.scored.projection

    def scores(self, projection: Vector | None = None, grad_sum: Vector | None = None) -> Vector:
        """s_θ = u ⊙ G, evaluated lazily; with another u or G if given."""
        return param_scores(self.eta_sc, projection or self.projection, grad_sum or self.grad_sum)

    def mask(
        self, k: int, projection: Vector | None = None, grad_sum: Vector | None = None
    ) -> TopK:
        """The top k entries of u ⊙ G; with another u or G if given."""
        vectors = projection or self.projection, grad_sum or self.grad_sum
        return topk_signed(product_source(*vectors, self.eta_sc), k)

    def varied(self, v_val: Vector, second_order: bool = True) -> Vector:
        """u / eta_sc with another v_val, with or without the second-order term."""
        terms = self.scored.terms
        curvature = terms.curvature if second_order else None
        return replace(terms, v_val=v_val, curvature=curvature).projection(self.grad_sum)

    def dots(
        self, direction: Vector, label: str, examples: Sequence[Example] | None = None
    ) -> np.ndarray:
        """⟨direction, g_n⟩ of the pool (or `examples`), from a separate walk; saved as a piece."""
        return self.timed_dots(direction, label, examples)[0]

    def timed_dots(
        self, direction: Vector, label: str, examples: Sequence[Example] | None = None
    ) -> tuple[np.ndarray, float]:
        """(products, seconds of the walk)."""
        rows = list(self.job.scoring.pool if examples is None else examples)
        label, ctx = f"{label} ({self.name})", self.job.ctx
        passes = pass_settings(ctx)
        return self.job.kept(
            label, lambda: exact_dots(self.engine, rows, direction, passes, ctx.reporter, label)
        )

    def pool_scores(self) -> np.ndarray:
        """Exact ⟨u, g_n⟩ of the whole pool, without eta_sc; read from the run if stored exactly."""
        if self.name == "warmup":
            stored, bound = self.job.known_scores()
            if stored is not None and not bound.any():
                return stored / self.eta_sc
        return self.dots(self.projection, "one-shot scores")

    def subset_sum(self, positions: np.ndarray, label: str) -> ParamVector:
        """G_S, the sum of the gradients of these pool examples."""
        examples = [self.job.scoring.pool[i] for i in positions]
        return gradient_sum(self.job.ctx, self.engine, examples, f"{label} ({self.name})")

    def best(
        self, scores: np.ndarray, b: int, examples: Sequence[Example] | None = None
    ) -> np.ndarray:
        """Positions of the top b of the pool (or `examples`), ascending; ties by source row."""
        rows = self.job.scoring.pool if examples is None else examples
        return np.sort(top_b(scores, np.array([e.index for e in rows]), b))


def loss_walk(
    ctx: RunContext,
    engine: GhostEngine,
    examples: Sequence[Example],
    label: str,
    precision: Literal["directions", "pool"] = "pool",
    **collected: Any,
) -> PassResult:
    """A walk over the examples' losses (`engine/walk.py`) in the precision of such a walk."""
    objective, passes = loss_objective(engine.model), pass_settings(ctx)
    with ctx.precise(precision, label, engine.model):
        return walk(engine, examples, objective, passes, ctx.reporter, label, **collected)


def gradient_sum(
    ctx: RunContext,
    engine: GhostEngine,
    examples: Sequence[Example],
    label: str,
    precision: Literal["directions", "pool"] = "pool",
) -> ParamVector:
    """Sum of the example gradients, from a walk that resumes after a kill."""
    sums = blank(engine.candidates, engine.candidates.dtype)
    loss_walk(ctx, engine, examples, label, precision, sums=sums)
    return sums


def warm_surrogate(job: DiagnosticJob) -> Surrogate:
    """The surrogate of the run, at θ̄."""
    return Surrogate(job, "warmup", job.scoring.engine, job.scoring.scored)


def init_surrogate(job: DiagnosticJob) -> Surrogate | None:
    """u at θ_old with v_prior = 0 and the warmup's ĉ; None, with a log line, without a warmup."""
    ctx, val, pool = job.ctx, job.roles["val"], job.roles["pool"]
    if not ctx.warmed_up:
        job.reporter.say("no warmup, so θ̄ = θ_old: init and warmup are the same checkpoint")
        return None
    model = ctx.theta_old()
    engine = GhostEngine(model, ctx.candidates(model))
    val_sum = gradient_sum(ctx, engine, val, "v_new (init)", "directions")
    val_grad = val_sum.scaled(1.0 / len(val))
    grad_sum = gradient_sum(ctx, engine, pool, "pool (G, init)")
    nothing = val_grad.combine(torch.zeros_like)
    curvature = ctx.curvature(engine.candidates)
    score, lr = ctx.config.score, ctx.base_lr()
    terms = projection_terms(score, lr, len(pool), val_grad, nothing, curvature, grad_sum)
    return Surrogate(job, "init", engine, Scored.of(terms, grad_sum, nothing))


# --- trials --------------------------------------------------------------------------------------


class Quiet(Reporter):
    """Suppresses log lines and progress, and forwards warnings."""

    def __init__(self, outer: Reporter) -> None:
        super().__init__(lambda _: None)
        self.outer = outer

    def warn(self, message: str, code: str = NOTE) -> None:
        self.outer.warn(message, code)


def quiet(ctx: RunContext) -> RunContext:
    """A context for many small tasks: without log lines and without saved progress."""
    return replace(ctx, reporter=Quiet(ctx.reporter), pieces=Pieces(), plans={})


def steps_plan(
    ctx: RunContext, steps: int, lr: float | None = None, batch_size: int | None = None
) -> TrainingPlan:
    """The fine-tuning plan of the run, with exactly this many steps."""
    plan = finetune_plan(ctx, num_trained(ctx))
    lr, batch_size = lr or plan.lr, batch_size or plan.batch_size
    return replace(plan, lr=lr, batch_size=batch_size, epochs=1, min_steps=steps, max_steps=steps)


def masked_finetune(
    ctx: RunContext,
    model: PreTrainedModel,
    examples: Sequence[Example],
    indices: Indices | None,
    plan: TrainingPlan,
    label: str,
    pieces: Pieces | None = None,
    hooks: Hooks = Hooks(),  # noqa: B008
    log_step: Callable[..., None] = lambda **_: None,
    offload: bool = False,
) -> None:
    """Train these entries (None: all) on these examples, with the run's optimizer settings."""
    with SparseAdamW(
        text_parameters(model),
        indices,
        lr=plan.lr,
        weight_decay=ctx.config.finetune.weight_decay,
        moments=ctx.config.finetune.moments,
        offload=offload,
        seed=ctx.config.seed,
        free_gradients=True,
    ) as optimizer:
        train(model, examples, optimizer, plan, ctx.reporter, label, log_step, pieces, hooks)


class Trials:
    """Trainings of one model that all start from its current weights."""

    def __init__(
        self, ctx: RunContext, model: PreTrainedModel, pieces: Pieces | None = None
    ) -> None:
        """`pieces` saves progress inside a trial; without it, an interrupted trial starts over."""
        self.ctx, self.model, self.pieces = ctx, model, pieces
        self._start: dict[str, Tensor] = {}

    def run(
        self,
        examples: Sequence[Example],
        indices: Indices | None,
        plan: TrainingPlan,
        label: str,
        observe: Callable[[int], None] | None = None,
        constant: bool = False,
        hooks: Hooks = Hooks(),  # noqa: B008
    ) -> None:
        """Train the model; call `reset` to restore the weights.

        `observe` is called after every step, with the model in eval mode. `constant` keeps the
        learning rate at its peak, so that the first K steps do not depend on the total number of
        steps. `hooks` may save and restore the state of `observe` together with the weights.
        """

        def after_step(done: int) -> None:
            if observe is not None:
                self.model.eval()
                observe(done)
                self.model.train()

        def hold(optimizer: SparseAdamW) -> None:
            for group in optimizer.param_groups:
                group["lr"] = plan.lr

        own = replace(hooks, after_step=after_step, before_update=hold if constant else None)
        for name, weight in text_parameters(self.model):
            if (indices is None or name in indices) and name not in self._start:
                self._start[name] = weight.detach().to("cpu", copy=True)
        masked_finetune(self.ctx, self.model, examples, indices, plan, label, self.pieces, own)

    @torch.no_grad()
    def reset(self) -> None:
        """Restore the initial weights, bit for bit."""
        own = dict(text_parameters(self.model))
        for name, weight in self._start.items():
            own[name].copy_(weight)


def plain_training(ctx: RunContext) -> None:
    """Refuse a run whose fine-tuning is more than a fixed mask on fixed examples."""
    params = ctx.methods.load("params")
    moving = params.refresh_every(Job(ctx, "params", ctx.rundir.path)) is not None
    retained = ctx.config.finetune.retention > 0
    if params.adapter or moving or retained or ctx.methods["weights"] or ctx.methods["after"]:
        names = [e.name for e in ctx.methods.entries.values() if e is not None]
        names += ["finetune.retention"] if retained else []
        raise RunError(
            f"the run's fine-tuning ({', '.join(names)}) is more than a fixed mask on fixed "
            "examples, which is all that this diagnostic can train; use it on a run of dualsft"
        )
