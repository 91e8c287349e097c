"""End-to-end scoring in memory, and the agreement of two scorings.

Algorithm 1 lines 3 to 10 without files: v_new, v_prior and G at one model, the example scores, and
the entries of the mask. Two scorings are compared by Spearman correlation and Jaccard index.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.roles import Roles
from dualsft.algorithm.projection import effective_lambda
from dualsft.algorithm.scores import NUM_ALONE_HALF, dot_alone, judge, rounding_ratio
from dualsft.algorithm.selection import product_source
from dualsft.algorithm.topk import top_b, topk_signed
from dualsft.data.examples import Example
from dualsft.engine.fused import HALF_DTYPES, fused_blocks
from dualsft.engine.ghost import GhostEngine
from dualsft.engine.passes import widened
from dualsft.engine.walk import PassResult, cwsd_objective, loss_objective, walk
from dualsft.model.load import find_candidates
from dualsft.storage.vectors import ParamVector, Vector
from dualsft.system.progress import Reporter

DATA_BUDGET, PARAM_BUDGET, LAM, TAU = 0.1, 0.05, 0.8, 1.0


@dataclass(frozen=True)
class Scores:
    """s_D per pool example and the selected entries, for one direction."""

    examples: np.ndarray
    """Scores of the pool pass."""
    settled: np.ndarray
    """Scores after re-scoring near the boundary, as in a half-precision run."""
    entries: dict[str, Tensor]

    def chosen(self) -> set[int]:
        b = max(1, int(DATA_BUDGET * len(self.settled)))
        return {int(i) for i in top_b(self.settled, np.arange(len(self.settled)), b)}


def score(
    model: PreTrainedModel,
    roles: Roles,
    teacher: PreTrainedModel | None = None,
    preconditioner: Vector | None = None,
    precision: str = "mixed",
) -> Scores:
    """s_D and the mask at this model, from v_new and, with a teacher, λ v_prior.

    `preconditioner` is ĉ under score.step=adam; `precision` is score.precision, mixed or half.
    """
    engine = GhostEngine(model, find_candidates(model, "block_linear"))
    quiet = Reporter(lambda _: None)

    def gradient(rows: list[Example], objective: Any) -> ParamVector:
        sums = ParamVector.zeros(engine.candidates)
        models = [model, *([teacher] if teacher and rows is roles.anchor else [])]
        with ExitStack() as stack:
            if precision != "half":
                stack.enter_context(widened(*models, tensor_cores=True))
            if len(models) > 1:
                stack.enter_context(fused_blocks(models[1], wide=True))
            walk(engine, rows, objective, roles.settings, quiet, "gradient", sums=sums)
        return sums

    v_new = gradient(roles.val, loss_objective(model)).scaled(1.0 / len(roles.val)).held()
    direction: Vector = v_new
    if teacher is not None:
        summed = gradient(roles.anchor, cwsd_objective(teacher, model, TAU))
        v_prior = summed.scaled(1.0 / len(roles.anchor)).held()
        direction = v_new.plus(v_prior, effective_lambda(LAM, True, v_new, v_prior))
    if preconditioner is not None:
        direction = direction.combine(torch.div, preconditioner)
    direction = direction.held()
    grad_sum = ParamVector.zeros(engine.candidates)
    found = walk(
        engine,
        roles.pool,
        loss_objective(model),
        roles.settings,
        quiet,
        "pool",
        sums=grad_sum,
        direction=direction,
        bounds=True,
    )
    k = max(1, int(PARAM_BUDGET * grad_sum.num_entries))
    mask = topk_signed(product_source(direction, grad_sum, 1.0), k)
    settled = found.dots.copy()
    if next(model.parameters()).dtype in HALF_DTYPES:
        near = _near_ties(engine, roles, direction, found)
        rows = [roles.pool[i] for i in near]
        with widened(engine.model, tensor_cores=True):
            objective = loss_objective(model)
            again = walk(
                engine, rows, objective, roles.settings, quiet, "again", direction=direction
            )
        settled[near] = again.dots
    return Scores(found.dots, settled, mask.indices)


def _near_ties(
    engine: GhostEngine, roles: Roles, direction: Vector, found: PassResult
) -> np.ndarray:
    """Examples that the selection of a half-precision run re-scores (stages/selection.py)."""
    dots, scales = found.dots, np.sqrt((found.inner_sums.astype(np.float64) ** 2).sum(1))
    probes = np.random.default_rng(0).choice(
        len(dots), min(NUM_ALONE_HALF, len(dots)), replace=False
    )
    with widened(engine.model):
        exact = [dot_alone(engine, roles.pool[i], direction, roles.settings)[0] for i in probes]
    ratio = rounding_ratio(np.abs(dots[probes] - exact), scales[probes])
    b = max(1, int(DATA_BUDGET * len(dots)))
    return np.flatnonzero(judge(dots, ratio * scales, b).open)


def agreement(scores: Scores, reference: Scores) -> dict[str, float]:
    """Agreement of two scorings, on both sides."""
    error = np.abs(scores.examples - reference.examples).max()
    return {
        "Spearman of examples": spearman(scores.examples, reference.examples),
        "Jaccard of examples": _jaccard(scores.chosen(), reference.chosen()),
        "Jaccard of entries": _entries_jaccard(scores.entries, reference.entries),
        "largest error of a score": float(error / np.abs(reference.examples).max()),
        "scored again": float((scores.examples != scores.settled).mean()),
    }


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Correlation of the ranks; ties, which are rare, are ignored."""
    return float(np.corrcoef(a.argsort().argsort(), b.argsort().argsort())[0, 1])


def _jaccard(a: set[int], b: set[int]) -> float:
    return len(a & b) / len(a | b)


def _entries_jaccard(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    both = sum(int(torch.isin(a[n], b[n], assume_unique=True).sum()) for n in a)
    either = sum(a[n].numel() + b[n].numel() for n in a) - both
    return both / either
