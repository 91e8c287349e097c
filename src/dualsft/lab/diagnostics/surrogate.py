"""The local surrogate u, G (Algorithm 1 lines 3 to 8) at a checkpoint, for the score diagnostics.

At θ̄ ("warmup") u and G are read from the run folder. At θ_old ("init") the gradients are computed,
v_prior is zero and ĉ is that of the warmup's optimizer. Example scores come from a separate walk
over the examples (`engine/walk.py`) and are saved as pieces, so a kill does not lose finished
walks. Values are in units of u / eta_sc until a result is reported.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualsft.algorithm.projection import ProjectionTerms, Scored, param_scores, projection_terms
from dualsft.algorithm.scores import exact_dots
from dualsft.algorithm.selection import product_source
from dualsft.algorithm.topk import TopK, top_b, topk_signed
from dualsft.data.examples import Example
from dualsft.engine.ghost import GhostEngine
from dualsft.engine.walk import loss_objective, walk
from dualsft.lab.diagnostics.job import DiagnosticJob
from dualsft.memory.placement import blank
from dualsft.runs.context import pass_settings
from dualsft.runs.stages.selection import data_budget, param_budget
from dualsft.storage.vectors import ParamVector, Vector


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
    def projection(self) -> Vector:
        return self.scored.projection

    def scores(self, projection: Vector, grad_sum: Vector) -> Vector:
        """s_θ = u ⊙ G for any u and G, evaluated lazily."""
        return param_scores(self.eta_sc, projection, grad_sum)

    def mask(self, projection: Vector, grad_sum: Vector, k: int) -> TopK:
        """The top k entries of u ⊙ G."""
        return topk_signed(product_source(projection, grad_sum, self.eta_sc), k)

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
        return kept(
            self.job,
            label,
            lambda: exact_dots(self.engine, rows, direction, passes, ctx.reporter, label),
        )

    def pool_scores(self) -> np.ndarray:
        """Exact ⟨u, g_n⟩ of the whole pool, without eta_sc; read from the run if stored exactly."""
        stored = exact_stored_scores(self.job) if self.name == "warmup" else None
        if stored is not None:
            return stored / self.eta_sc
        return self.dots(self.projection, "one-shot scores")

    def subset_sum(self, examples: Sequence[Example], label: str) -> Vector:
        """G_S, the sum of the gradients of these examples."""
        return gradient_sum(self.job, self.engine, examples, f"{label} ({self.name})")

    def best(self, scores: np.ndarray, b: int) -> np.ndarray:
        """Positions of the top b examples of the pool, ascending."""
        return best(scores, self.job.scoring.pool, b)


def best(scores: np.ndarray, examples: Sequence[Example], b: int) -> np.ndarray:
    """Positions of the top b, ascending; ties by source row, as in the selection."""
    return np.sort(top_b(scores, np.array([e.index for e in examples]), b))


def gradient_sum(
    job: DiagnosticJob, engine: GhostEngine, examples: Sequence[Example], label: str
) -> ParamVector:
    """Sum of the example gradients, from a walk that resumes after a kill."""
    sums, ctx = blank(engine.candidates, engine.candidates.dtype), job.ctx
    settings, objective = pass_settings(ctx), loss_objective(engine.model)
    with ctx.precise("pool", label, engine.model):
        walk(engine, examples, objective, settings, ctx.reporter, label, sums=sums)
    return sums


def kept(
    job: DiagnosticJob, label: str, make: Callable[[], np.ndarray]
) -> tuple[np.ndarray, float]:
    """(array, seconds to compute it); saved as a piece and read from it after a kill."""
    pieces = job.ctx.pieces
    name = "kept-" + "".join(c if c.isalnum() else "-" for c in label.lower())
    piece = pieces.load(name)
    if piece is not None:
        return piece.tensors["values"].numpy(), piece.facts["seconds"]
    start = time.perf_counter()
    values = make()
    seconds = time.perf_counter() - start
    if pieces.folder is not None:
        tensors: dict[str, Tensor] = {"values": torch.from_numpy(np.ascontiguousarray(values))}
        pieces.save(name, tensors, {"seconds": seconds})
    return values, seconds


def warm_surrogate(job: DiagnosticJob) -> Surrogate:
    """The surrogate of the run, at θ̄."""
    return Surrogate(job, "warmup", job.scoring.engine, job.scoring.scored)


def init_surrogate(job: DiagnosticJob) -> Surrogate | None:
    """u at θ_old with v_prior = 0 and the warmup's ĉ; None without a warmup, where θ_old = θ̄."""
    ctx = job.ctx
    if not ctx.warmed_up:
        return None
    model = ctx.theta_old()
    engine = job.engine(model)
    roles = job.roles
    with ctx.precise("directions", "v_new (init)", model):
        sums = gradient_sum(job, engine, roles["val"], "v_new (init)")
    val_grad = sums.scaled(1.0 / len(roles["val"]))
    grad_sum = gradient_sum(job, engine, roles["pool"], "pool (G, init)")
    nothing = val_grad.combine(torch.zeros_like)
    curvature = ctx.curvature(engine.candidates)
    score, lr = ctx.config.score, ctx.config.finetune.lr
    terms = projection_terms(score, lr, len(roles["pool"]), val_grad, nothing, curvature)
    return Surrogate(
        job, "init", engine, Scored(terms, grad_sum, nothing, terms.projection(grad_sum))
    )


def checkpoints(job: DiagnosticJob) -> list[Surrogate]:
    """The surrogates at init and warmup; only the latter, with a log line, without a warmup."""
    first = init_surrogate(job)
    if first is None:
        job.reporter.say("no warmup, so θ̄ = θ_old: init and warmup are the same checkpoint")
    return [s for s in (first, warm_surrogate(job)) if s is not None]


def budgets(job: DiagnosticJob) -> tuple[int, int]:
    """(k, b) from the run's settings, also for a side that the run does not restrict."""
    ctx, scoring = job.ctx, job.scoring
    b = data_budget(ctx, scoring.num_full, len(scoring.pool))
    return param_budget(ctx, ctx.candidate_shapes), b


def known_scores(job: DiagnosticJob) -> tuple[np.ndarray | None, np.ndarray]:
    """(best known s_D of the pool, error bound of each); None if examples were not scored."""
    table = (job.ctx.folder("scores") / "examples.parquet").read_table()
    if table["score"].null_count:
        return None, np.zeros(len(table))
    score, bound = table["score"].to_numpy().copy(), table["bound"].to_numpy().copy()
    rescored = job.ctx.folder("selection") / "rescored.parquet"
    if rescored.is_file():
        again = rescored.read_table()
        place = {e.id: i for i, e in enumerate(job.scoring.pool)}
        for name, value in zip(again["id"].to_pylist(), again["score"].to_pylist(), strict=True):
            score[place[name]], bound[place[name]] = value, 0.0
    return score, bound


def exact_stored_scores(job: DiagnosticJob) -> np.ndarray | None:
    """s_D as stored by the run if all of them are exact, otherwise None."""
    score, bound = known_scores(job)
    return None if score is None or bound.any() else score


@dataclass(frozen=True)
class Compared:
    """The pool examples whose scores an ablation compares, and their share of the budget."""

    positions: np.ndarray
    examples: list[Example]
    b: int

    @classmethod
    def of(cls, job: DiagnosticJob, limit: int) -> Compared:
        """A seeded sample of `limit` pool examples, with b scaled in proportion; 0 takes all."""
        pool = job.scoring.pool
        _, b = budgets(job)
        chosen = np.arange(len(pool))
        if 0 < limit < len(pool):
            chosen = np.sort(job.rng("compared").permutation(len(pool))[:limit])
        share = max(1, b * len(chosen) // len(pool))
        return cls(chosen, [pool[i] for i in chosen], share)

    def facts(self) -> dict[str, Any]:
        return {"examples_compared": len(self.examples), "b_compared": self.b}


def varied(
    terms: ProjectionTerms, grad_sum: Vector, v_val: Vector, second_order: bool = True
) -> Vector:
    """u / eta_sc with another v_val, with or without the second-order term."""
    curvature = terms.curvature if second_order else None
    return replace(terms, v_val=v_val, curvature=curvature).projection(grad_sum)
