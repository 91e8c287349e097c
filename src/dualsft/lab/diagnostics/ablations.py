"""Ablations of u: how preservation, anchors, components and settings change the selection.

Covers the paper's Tables `cwsd_ablation` and `anchor_size_sensitivity`, and Figures
`ablation_components` and `hyperparameter_sensitivity`, for scores and selections only: nothing is
trained, so no accuracy is measured (`dualsft compare` trains such variants). Every variant is
compared with the run's own setting: cosine of u, Jaccard of the top k and top b, Spearman of both
scores.

u is linear in v_prior, so ⟨u, g_n⟩ = ⟨base, g_n⟩ + λ ⟨v_prior, g_n⟩, and one walk over the compared
examples per v_prior covers every λ. Similarly, nested anchor sets are sums of disjoint parts, and
each anchor is walked once. The alternatives to CWSD have other scales, so they are reported with
both the absolute and the relative λ (`score.lam_relative`).
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from dualsft.algorithm.projection import effective_lambda
from dualsft.algorithm.topk import TopK
from dualsft.data.examples import Example
from dualsft.engine.fused import fused_blocks
from dualsft.engine.ghost import GhostEngine
from dualsft.engine.walk import cwsd_objective, walk
from dualsft.errors import ConfigError
from dualsft.lab.diagnostics.job import DiagnosticJob
from dualsft.lab.diagnostics.ranking import (
    counts,
    jaccard,
    mask_jaccard,
    numbers,
    spearman,
    sum_at,
    vector_spearman,
)
from dualsft.lab.diagnostics.surrogate import (
    Compared,
    Surrogate,
    best,
    budgets,
    init_surrogate,
    known_scores,
    varied,
    warm_surrogate,
)
from dualsft.memory.placement import blank
from dualsft.runs.context import pass_settings
from dualsft.runs.stages.gradients import prior_of, read_pool
from dualsft.storage.vectors import ParamVector, Vector

KINDS = ("none", "l2", "fisher", "cwsd")


class _Setting:
    """The run's own u and selections, which every variant is compared with."""

    def __init__(self, job: DiagnosticJob, pool: int) -> None:
        self.job = job
        self.at: Surrogate = warm_surrogate(job)
        self.terms = self.at.scored.terms
        self.grad_sum = self.at.scored.grad_sum
        self.compared = Compared.of(job, pool)
        self.k, _ = budgets(job)
        self.base = varied(self.terms, self.grad_sum, self.terms.val_grad)
        """u without preservation."""
        self.base_dots = self.dots(self.base, "base scores")
        self.prior = self.stepped(self.at.scored.prior_grad)
        self.prior_dots = self.dots(self.prior, "scores of the run's own v_prior")
        self.scores = self.base_dots + self.terms.lam_effective * self.prior_dots
        self.projection = self.at.projection
        self.mask = self.at.mask(self.projection, self.grad_sum, self.k)
        self.chosen = self.best(self.scores)

    def stepped(self, v: Vector) -> Vector:
        """v as it enters u: unchanged, or divided by ĉ for score.step=adam."""
        return varied(self.terms, self.grad_sum, v, second_order=False)

    def dots(self, direction: Vector, label: str) -> np.ndarray:
        return self.at.dots(direction, label, self.compared.examples)

    def best(self, scores: np.ndarray) -> np.ndarray:
        return best(scores, self.compared.examples, self.compared.b)

    def against(self, projection: Vector, scores: np.ndarray) -> dict[str, Any]:
        """Compare a variant of u at θ̄ with the run's own."""
        mask = self.at.mask(projection, self.grad_sum, self.k)
        return {
            "cosine_u": projection.cosine(self.projection),
            "jaccard_params": mask_jaccard(mask.indices, self.mask.indices),
            "jaccard_examples": jaccard(self.best(scores), self.chosen),
            "spearman_examples": spearman(scores, self.scores),
        }

    def lam(self, lam: float, relative: bool, prior_grad: Vector) -> float:
        return effective_lambda(lam, relative, self.terms.val_grad, prior_grad)

    def facts(self) -> dict[str, Any]:
        return {"k": self.k, "pool": len(self.job.scoring.pool), **self.compared.facts()}


def _cwsd_sum(
    job: DiagnosticJob,
    engine: GhostEngine,
    teacher: PreTrainedModel,
    anchors: list[Example],
    tau: float,
    label: str,
) -> ParamVector:
    """Sum of the CWSD gradients of these anchors at this temperature."""
    ctx = job.ctx
    sums = blank(engine.candidates, engine.candidates.dtype)
    objective = cwsd_objective(teacher, engine.model, tau)
    with (
        ctx.precise("directions", label, engine.model, teacher),
        fused_blocks(teacher, wide=True),
    ):
        walk(engine, anchors, objective, pass_settings(ctx), ctx.reporter, label, sums=sums)
    return sums


def preservation(job: DiagnosticJob) -> dict[str, Any]:
    """Compare no preservation, L2, Fisher and CWSD, each with the absolute and the relative λ."""
    own = _Setting(job, job.options.pool)
    config, rows = job.ctx.config, []
    val_norm = own.terms.val_grad.norm()
    for kind in KINDS:
        if kind == config.score.preservation:
            prior, dots = own.at.scored.prior_grad, own.prior_dots
        else:
            score = replace(config.score, preservation=kind)
            other = replace(job.ctx, config=replace(config, score=score))
            anchors, settings = job.roles["anchor"], pass_settings(job.ctx)
            prior, _ = prior_of(other, own.at.engine, anchors, settings)
            if kind == "none" or not job.ctx.warmed_up:
                dots = np.zeros(len(own.base_dots))
            else:
                dots = own.dots(own.stepped(prior), f"scores of v_prior, {kind}")
        direction, norm = own.stepped(prior), prior.norm()
        for relative in (False, True):
            lam = own.lam(config.score.lam, relative, prior)
            rows.append(
                {
                    "preservation": kind,
                    "lam_relative": relative,
                    "lam_effective": lam,
                    "norm": norm,
                    "share": lam * norm / val_norm if val_norm > 0 else None,
                    "cosine_val_grad": prior.cosine(own.terms.val_grad),
                    **own.against(own.base.plus(direction, lam), own.base_dots + lam * dots),
                }
            )
    return {
        **own.facts(),
        "own": {
            "preservation": config.score.preservation,
            "lam": config.score.lam,
            "lam_relative": config.score.lam_relative,
        },
        "rows": rows,
    }


def anchor_size(job: DiagnosticJob) -> dict[str, Any]:
    """Compare CWSD on nested subsets of the anchors with CWSD on all anchors."""
    if not job.ctx.warmed_up:
        return {"note": "without a warmup θ̄ = θ_old, and v_prior is zero for any anchors"}
    anchors = list(job.roles["anchor"])
    order = job.rng("anchors").permutation(len(anchors))
    sizes = anchor_sizes(counts(job.options.sizes, "diagnose.anchor_size.sizes"), len(anchors))
    own = _Setting(job, job.options.pool)
    teacher, score = job.ctx.theta_old(), job.ctx.config.score
    total: Vector | None = None
    total_dots = np.zeros(len(own.base_dots))
    found: list[tuple[int, Vector, np.ndarray]] = []
    for first, last in zip([0, *sizes], sizes, strict=False):
        part = [anchors[i] for i in np.sort(order[first:last])]
        label = f"v_prior of anchors {first} to {last}"
        more = _cwsd_sum(job, own.at.engine, teacher, part, score.tau, label)
        total_dots = total_dots + own.dots(
            own.stepped(more), f"scores of anchors {first} to {last}"
        )
        total = more if total is None else total.plus(more).held()
        found.append((last, total.scaled(1.0 / last), total_dots / last))

    def selection(prior: Vector, dots: np.ndarray) -> tuple[TopK, np.ndarray, float]:
        lam = own.lam(score.lam, score.lam_relative, prior)
        projection = own.base.plus(own.stepped(prior), lam)
        mask = own.at.mask(projection, own.grad_sum, own.k)
        return mask, own.best(own.base_dots + lam * dots), prior.norm()

    _, reference, reference_dots = found[-1]
    best_mask, best_rows, _ = selection(reference, reference_dots)
    rows = []
    for size, prior, dots in found:
        mask, chosen, norm = selection(prior, dots)
        rows.append(
            {
                "anchors": size,
                "norm": norm,
                "cosine": prior.cosine(reference),
                "jaccard_params": mask_jaccard(mask.indices, best_mask.indices),
                "jaccard_examples": jaccard(chosen, best_rows),
            }
        )
    return {**own.facts(), "reference": sizes[-1], "rows": rows}


def anchor_sizes(wanted: list[int], there: int) -> list[int]:
    """The wanted sizes below the number of anchors, then all anchors.

    If fewer than two sizes fit: 1/16, 1/8, 1/4 and 1/2 of the anchors, then all.
    """
    fitting = [n for n in wanted if 0 < n < there]
    if len(fitting) < 2:
        fitting = sorted({there // part for part in (16, 8, 4, 2) if there // part > 0})
    return [*fitting, there]


def components(job: DiagnosticJob) -> dict[str, Any]:
    """Compare u without preservation, without the second-order term and without the warmup."""
    own = _Setting(job, job.options.pool)
    scores = own.at.scores(own.projection, own.grad_sum)
    rows: list[dict[str, Any]] = []

    def add(name: str, projection: Vector, grad_sum: Vector, dots: np.ndarray) -> None:
        mask = own.at.mask(projection, grad_sum, own.k)
        other = own.at.scores(projection, grad_sum)
        rank, ranked = vector_spearman(other, scores, job.rng("ranks"))
        rows.append(
            {
                "without": name,
                "cosine_u": projection.cosine(own.projection),
                "jaccard_params": mask_jaccard(mask.indices, own.mask.indices),
                "spearman_params": rank,
                "ranked": ranked,
                "jaccard_examples": jaccard(own.best(dots), own.chosen),
                "spearman_examples": spearman(dots, own.scores),
            }
        )

    add("preservation", own.base, own.grad_sum, own.base_dots)
    first = varied(own.terms, own.grad_sum, own.terms.v_val, second_order=False)
    first_dots = own.dots(first, "first-order scores")
    add("second order", first, own.grad_sum, first_dots)
    start = init_surrogate(job)
    if start is not None:
        dots = start.dots(start.projection, "scores", own.compared.examples)
        add("warmup", start.projection, start.scored.grad_sum, dots)
    second = own.terms.second_order(own.grad_sum).norm() if own.terms.curvature else 0.0
    return {
        **own.facts(),
        "curvature_share": second / own.terms.v_val.norm(),
        "rows": rows,
    }


def sensitivity(job: DiagnosticJob) -> dict[str, Any]:
    """Selections under other budgets, λ and τ."""
    options, where = job.options, "diagnose.sensitivity"
    shares = [
        _shares(getattr(options, name), f"{where}.{name}")
        for name in ("data_budgets", "param_budgets")
    ]
    lambdas, taus = numbers(options.lambdas, f"{where}.lambdas"), _taus(options.taus, where)
    own = _Setting(job, options.pool)
    score = job.ctx.config.score
    rows = []
    for lam in lambdas:
        effective = own.lam(lam, score.lam_relative, own.at.scored.prior_grad)
        projection = own.base.plus(own.prior, effective)
        rows.append(
            {"lam": lam, **own.against(projection, own.base_dots + effective * own.prior_dots)}
        )
    return {
        **own.facts(),
        "own": {
            "data_budgets": job.ctx.config.select.data_budget,
            "param_budgets": job.ctx.config.select.param_budget,
            "lambdas": score.lam,
            "taus": score.tau,
        },
        "data_budgets": _data_budgets(job, own, shares[0]),
        "param_budgets": _param_budgets(own, shares[1]),
        "lambdas": rows,
        "taus": _temperatures(job, own, taus) if job.ctx.warmed_up else [],
    }


def _data_budgets(job: DiagnosticJob, own: _Setting, shares: list[float]) -> list[dict[str, Any]]:
    """For each budget: cut-off, share of the total positive score, mean loss and length."""
    known, _ = known_scores(job)
    values = own.at.pool_scores() * own.at.eta_sc if known is None else known
    pool, full = job.scoring.pool, job.scoring.num_full
    losses = read_pool(job.ctx.folder("gradients") / "pool.parquet")["loss"]
    lengths = np.array([e.num_response_tokens for e in pool])
    useful = float(values[values > 0].sum())
    rows = []
    for share in shares:
        b = min(len(pool), _part(share, full))
        chosen = best(values, pool, b)
        rows.append(
            {
                "share": share,
                "b": b,
                "cutoff": float(values[chosen].min()),
                "utility_share": float(values[chosen].sum()) / useful if useful > 0 else None,
                "nonpositive": float((values[chosen] <= 0).mean()),
                "loss": float(losses[chosen].mean()),
                "response_tokens": float(lengths[chosen].mean()),
            }
        )
    return rows


def _param_budgets(own: _Setting, shares: list[float]) -> list[dict[str, Any]]:
    scores = own.at.scores(own.projection, own.grad_sum)
    positive = scores.combine(lambda t: t.clamp_min(0.0))
    useful = sum(
        float(positive.piece(name, start, stop).double().sum())
        for name, form in positive.forms.items()
        for start, stop in form.chunks()
    )
    rows = []
    for share in shares:
        mask = own.at.mask(own.projection, own.grad_sum, _part(share, scores.num_entries))
        gained = sum_at(scores, mask.indices)
        rows.append(
            {
                "share": share,
                "k": mask.num_selected,
                "cutoff": mask.threshold,
                "utility_share": gained / useful if useful > 0 else None,
                "nonpositive": mask.num_nonpositive / mask.num_selected,
            }
        )
    return rows


def _temperatures(job: DiagnosticJob, own: _Setting, taus: list[float]) -> list[dict[str, Any]]:
    """Compare CWSD at other temperatures with the run's own setting."""
    teacher, score, anchors = job.ctx.theta_old(), job.ctx.config.score, job.roles["anchor"]
    rows = []
    for tau in taus:
        label = f"v_prior at temperature {tau:g}"
        total = _cwsd_sum(job, own.at.engine, teacher, anchors, tau, label)
        prior = total.scaled(1.0 / len(anchors))
        dots = own.dots(own.stepped(prior), f"scores of v_prior at temperature {tau:g}")
        lam = own.lam(score.lam, score.lam_relative, prior)
        projection = own.base.plus(own.stepped(prior), lam)
        rows.append(
            {
                "tau": tau,
                "norm": prior.norm(),
                "cosine_prior": prior.cosine(own.at.scored.prior_grad),
                **own.against(projection, own.base_dots + lam * dots),
            }
        )
    return rows


def _part(share: float, total: int) -> int:
    """A share of the total, rounded down but at least 1, as in the selection.

    Via `Fraction`: in floating point 0.29 * 100 would round down to 28.
    """
    return max(1, int(Fraction(str(share)) * total))


def _shares(text: str, field: str) -> list[float]:
    found = sorted(set(numbers(text, field)))
    if not all(0 < share <= 1 for share in found):
        raise ConfigError(f"{field}: {text!r} must be shares in (0, 1]")
    return found


def _taus(text: str, where: str) -> list[float]:
    found = sorted(set(numbers(text, f"{where}.taus")))
    if not all(tau > 0 for tau in found):
        raise ConfigError(f"{where}.taus: {text!r} must be temperatures above 0")
    return found
