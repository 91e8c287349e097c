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

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedModel

from dualsft.algorithm.projection import effective_lambda
from dualsft.algorithm.split import resolve_budget
from dualsft.algorithm.topk import TopK
from dualsft.data.examples import Example
from dualsft.engine.fused import fused_blocks
from dualsft.engine.walk import cwsd_objective, walk
from dualsft.lab import plots
from dualsft.lab.diagnostics import ranking
from dualsft.lab.diagnostics.job import DiagnosticJob, init_surrogate, warm_surrogate
from dualsft.lab.plots import COLOURS, SIDES, Figures, Result
from dualsft.memory.placement import blank
from dualsft.runs.context import pass_settings
from dualsft.runs.stages.gradients import prior_of, read_pool
from dualsft.storage.vectors import ParamVector, Vector

KINDS = ("none", "l2", "fisher", "cwsd")
NO_ANCHORS = "this run has no anchors (split.anchor=0), from which v_prior is taken"


class _Setting:
    """The run's own u and selections, which every variant is compared with.

    Examples are those of a seeded sample of the pool (`pool` of the options; 0 takes all), with b
    scaled in proportion.
    """

    def __init__(self, job: DiagnosticJob) -> None:
        self.job, self.at, pool = job, warm_surrogate(job), job.scoring.pool
        self.k, b = job.budgets
        rows = np.arange(len(pool))
        if 0 < job.options.pool < len(pool):
            rows = np.sort(job.rng("compared").permutation(len(pool))[: job.options.pool])
        self.examples = [pool[i] for i in rows]
        self.b = max(1, b * len(rows) // len(pool))
        self.terms, self.prior_grad = self.at.scored.terms, self.at.scored.prior_grad
        self.base = self.at.varied(self.terms.val_grad)
        """u without preservation."""
        self.base_dots = self.dots(self.base, "base scores")
        self.prior_dots = self.dots(
            self.stepped(self.prior_grad), "scores of the run's own v_prior"
        )
        self.scores = self.base_dots + self.terms.lam_effective * self.prior_dots
        self.mask, self.chosen = self.at.mask(self.k), self.best(self.scores)

    def stepped(self, v: Vector) -> Vector:
        """v as it enters u: unchanged, or divided by ĉ for score.step=adam."""
        return self.at.varied(v, second_order=False)

    def dots(self, direction: Vector, label: str) -> np.ndarray:
        return self.at.dots(direction, label, self.examples)

    def best(self, scores: np.ndarray) -> np.ndarray:
        return self.at.best(scores, self.b, self.examples)

    def variant(
        self,
        prior: Vector,
        dots: np.ndarray,
        lam: float | None = None,
        relative: bool | Literal["scores"] | None = None,
    ) -> tuple[float, Vector, np.ndarray]:
        """(effective λ, u, example scores) with another v_prior; λ is the run's unless given."""
        score = self.job.ctx.config.score
        lam = score.lam if lam is None else lam
        relative = score.lam_relative if relative is None else relative
        weights = self.stepped(self.at.grad_sum)
        factor = effective_lambda(lam, relative, self.terms.val_grad, prior, weights)
        return factor, self.base.plus(self.stepped(prior), factor), self.base_dots + factor * dots

    def against(
        self, projection: Vector, scores: np.ndarray, grad_sum: Vector | None = None
    ) -> dict[str, Any]:
        """Compare a variant of u (and of G, at another θ) with the run's own."""
        mask = self.at.mask(self.k, projection, grad_sum)
        return {
            "cosine_u": projection.cosine(self.at.projection),
            "jaccard_params": ranking.mask_overlap(mask.indices, self.mask.indices),
            "jaccard_examples": ranking.jaccard(self.best(scores), self.chosen),
            "spearman_examples": ranking.spearman(scores, self.scores),
        }

    def cwsd_sum(
        self, teacher: PreTrainedModel, anchors: Sequence[Example], tau: float, label: str
    ) -> ParamVector:
        """Sum of the CWSD gradients of these anchors at this temperature."""
        ctx, engine = self.job.ctx, self.at.engine
        sums = blank(engine.candidates, engine.candidates.dtype)
        objective = cwsd_objective(teacher, engine.model, tau)
        with (
            ctx.precise("directions", label, engine.model, teacher),
            fused_blocks(teacher, wide=True),
        ):
            walk(engine, anchors, objective, pass_settings(ctx), ctx.reporter, label, sums=sums)
        return sums

    def facts(self) -> dict[str, Any]:
        return {
            "k": self.k,
            "pool": len(self.job.scoring.pool),
            "examples_compared": len(self.examples),
            "b_compared": self.b,
        }


def preservation(job: DiagnosticJob) -> dict[str, Any]:
    """Compare no preservation, L2, Fisher and CWSD, each with the absolute and the relative λ."""
    own = _Setting(job)
    config, rows = job.ctx.config, []
    val_norm = own.terms.val_grad.norm()
    forms: list[bool | Literal["scores"]] = [False, True]
    if config.score.lam_relative == "scores":
        forms.append("scores")
    for kind in KINDS:
        if kind in ("fisher", "cwsd") and not job.roles["anchor"]:
            continue
        prior, dots = own.prior_grad, own.prior_dots
        if kind != config.score.preservation:
            score = replace(config.score, preservation=kind)
            other = replace(job.ctx, config=replace(config, score=score))
            anchors, passes = job.roles["anchor"], pass_settings(job.ctx)
            prior, _ = prior_of(other, own.at.engine, anchors, passes)
            dots = np.zeros(len(own.examples))
            if kind != "none" and job.ctx.warmed_up:
                dots = own.dots(own.stepped(prior), f"scores of v_prior, {kind}")
        norm = prior.norm()
        for relative in forms:
            lam, u, scores = own.variant(prior, dots, relative=relative)
            rows.append(
                {
                    "preservation": kind,
                    "lam_relative": relative,
                    "lam_effective": lam,
                    "norm": norm,
                    "share": lam * norm / val_norm if val_norm > 0 else None,
                    "cosine_val_grad": prior.cosine(own.terms.val_grad),
                    **own.against(u, scores),
                }
            )
    names = ("preservation", "lam", "lam_relative")
    settings = {name: getattr(config.score, name) for name in names}
    return {**own.facts(), "own": settings, "rows": rows}


def draw_preservation(result: Result) -> Figures:
    """Overlap with the run's own selection by kind of preservation, for both forms of λ."""
    own, words = result["own"], {False: "absolute", True: "relative", "scores": "score-relative"}
    form = words[own["lam_relative"]]
    forms = list(dict.fromkeys(r["lam_relative"] for r in result["rows"]))
    figure, axes = plots.panels(1, len(forms), width=5.0)
    for relative, one in zip(forms, axes, strict=True):
        rows = [r for r in result["rows"] if r["lam_relative"] == relative]
        names = [f"{r['preservation']}\nλ‖v_prior‖/‖v_new‖\n{r['share'] or 0:.2g}" for r in rows]
        plots.bars(one, names, plots.jaccards(rows))
        one.set_title(f"{words[relative]} λ = {own['lam']:g}", fontsize=9, pad=18)
        one.tick_params(axis="x", labelsize=7)
        one.set_ylabel(f"Jaccard with the run ({own['preservation']}, {form} λ)", fontsize=8)
        one.set_ylim(0, 1.1)
    return {"": figure}


def anchor_size(job: DiagnosticJob) -> dict[str, Any]:
    """Compare CWSD on nested subsets of the anchors with CWSD on all anchors."""
    if not job.ctx.warmed_up:
        return {"note": "without a warmup θ̄ = θ_old, and v_prior is zero for any anchors"}
    anchors = job.roles["anchor"]
    if not anchors:
        return {"note": NO_ANCHORS}
    wanted = ranking.counts(job.options.sizes, "diagnose.anchor_size.sizes")
    sizes = anchor_sizes(wanted, len(anchors))
    order = job.rng("anchors").permutation(len(anchors))
    own, teacher = _Setting(job), job.ctx.theta_old()
    total: Vector | None = None
    total_dots = np.zeros(len(own.examples))
    found: list[tuple[Vector, np.ndarray]] = []
    for first, last in pairwise([0, *sizes]):
        part, name = [anchors[i] for i in np.sort(order[first:last])], f"anchors {first} to {last}"
        more = own.cwsd_sum(teacher, part, job.ctx.config.score.tau, f"v_prior of {name}")
        total_dots = total_dots + own.dots(own.stepped(more), f"scores of {name}")
        total = more if total is None else total.plus(more).held()
        found.append((total.scaled(1.0 / last), total_dots / last))

    def selection(prior: Vector, dots: np.ndarray) -> tuple[TopK, np.ndarray]:
        _, projection, scores = own.variant(prior, dots)
        return own.at.mask(own.k, projection), own.best(scores)

    reference, reference_dots = found[-1]
    best_mask, best_rows = selection(reference, reference_dots)
    rows = []
    for size, (prior, dots) in zip(sizes, found, strict=True):
        mask, chosen = selection(prior, dots)
        rows.append(
            {
                "anchors": size,
                "norm": prior.norm(),
                "cosine": prior.cosine(reference),
                "jaccard_params": ranking.mask_overlap(mask.indices, best_mask.indices),
                "jaccard_examples": ranking.jaccard(chosen, best_rows),
            }
        )
    return {**own.facts(), "reference": sizes[-1], "rows": rows}


def anchor_sizes(wanted: list[int], available: int) -> list[int]:
    """The wanted sizes below the number of anchors, then all anchors.

    If fewer than two sizes fit: 1/16, 1/8, 1/4 and 1/2 of the anchors, then all.
    """
    fitting = [n for n in wanted if 0 < n < available]
    if len(fitting) < 2:
        fitting = sorted({available // part for part in (16, 8, 4, 2)} - {0})
    return [*fitting, available]


def draw_anchor_size(result: Result) -> Figures:
    """Cosine of v_prior and overlap of both selections, over the number of anchors."""
    figure, (axes,) = plots.panels()
    rows = result["rows"]
    sizes = [r["anchors"] for r in rows]
    series = {"cosine of v_prior": plots.column(rows, "cosine")}
    plots.lines(axes, sizes, series | plots.jaccards(rows, "Jaccard, "))
    plots.log_axis(axes, sizes, base=2)
    axes.set_xlabel("anchors")
    axes.set_ylabel(f"agreement with {result['reference']:,} anchors")
    return {"": figure}


def components(job: DiagnosticJob) -> dict[str, Any]:
    """Compare u without preservation, without the second-order term and without the warmup."""
    own = _Setting(job)
    at, terms, rows = own.at, own.terms, []

    def add(name: str, projection: Vector, dots: np.ndarray, grad_sum: Vector) -> None:
        scores = at.scores(projection, grad_sum)
        rank, ranked = ranking.vector_spearman(scores, at.scores(), job.rng("ranks"))
        rows.append(
            {"without": name, "spearman_params": rank, "ranked": ranked}
            | own.against(projection, dots, grad_sum)
        )

    add("preservation", own.base, own.base_dots, at.grad_sum)
    first = at.varied(terms.v_val, second_order=False)
    add("second order", first, own.dots(first, "first-order scores"), at.grad_sum)
    start = init_surrogate(job)
    if start is not None:
        dots = start.dots(start.projection, "scores", own.examples)
        add("warmup", start.projection, dots, start.grad_sum)
    second = terms.second_order(at.grad_sum).norm() if terms.curvature else 0.0
    return {**own.facts(), "curvature_share": second / terms.v_val.norm(), "rows": rows}


def draw_components(result: Result) -> Figures:
    """Overlap and rank correlation with the full selection, without each component."""
    figure, axes = plots.panels(1, 2, width=4.8)
    rows = result["rows"]
    names = [f"without\n{r['without']}" for r in rows]
    kinds = {"jaccard": "Jaccard with the full selection", "spearman": "Spearman with its scores"}
    for one, (key, label) in zip(axes, kinds.items(), strict=True):
        series = {title: plots.column(rows, f"{key}_{side}") for side, title in SIDES.items()}
        plots.bars(one, names, series, "{:.3f}")
        one.set_ylabel(label)
    figure.suptitle(f"second-order share of u: {result['curvature_share']:.2g}", fontsize=9)
    return {"": figure}


def sensitivity(job: DiagnosticJob) -> dict[str, Any]:
    """Selections under other budgets, λ and τ."""

    def option(name: str, low: float, high: float, rule: str) -> list[float]:
        text, field = getattr(job.options, name), f"diagnose.sensitivity.{name}"
        return sorted(set(ranking.numbers(text, field, lambda n: low < n <= high, rule)))

    data_shares = option("data_budgets", 0, 1, "shares in (0, 1]")
    param_shares = option("param_budgets", 0, 1, "shares in (0, 1]")
    taus = option("taus", 0, np.inf, "temperatures above 0")
    lambdas = ranking.numbers(job.options.lambdas, "diagnose.sensitivity.lambdas")
    own, config = _Setting(job), job.ctx.config
    rows = []
    for lam in lambdas:
        _, u, scores = own.variant(own.prior_grad, own.prior_dots, lam)
        rows.append({"lam": lam, **own.against(u, scores)})
    return {
        **own.facts(),
        "own": {
            "data_budgets": config.select.data_budget,
            "param_budgets": config.select.param_budget,
            "lambdas": config.score.lam,
            "taus": config.score.tau,
        },
        "data_budgets": _data_budgets(own, data_shares),
        "param_budgets": _param_budgets(own, param_shares),
        "lambdas": rows,
        "taus": _temperatures(own, taus) if job.ctx.warmed_up and job.roles["anchor"] else [],
    }


def _data_budgets(own: _Setting, shares: list[float]) -> list[dict[str, Any]]:
    """For each budget: cut-off, share of the total positive score, mean loss and length."""
    job, pool = own.job, own.job.scoring.pool
    values = job.known_scores()[0]
    if values is None:
        values = own.at.pool_scores() * own.at.eta_sc
    losses = read_pool(job.ctx.folder("gradients") / "pool.parquet")["loss"]
    lengths = np.array([e.num_response_tokens for e in pool])
    useful = float(values[values > 0].sum())
    rows = []
    for share in shares:
        b = min(len(pool), resolve_budget(share, job.scoring.num_full))
        chosen = own.at.best(values, b)
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
    scores = own.at.scores()
    useful = sum(float(part.clamp_min(0.0).double().sum()) for _, part in ranking.chunks(scores))
    rows = []
    for share in shares:
        mask = own.at.mask(resolve_budget(share, scores.num_entries))
        gained = ranking.sum_at(scores, mask.indices)
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


def _temperatures(own: _Setting, taus: list[float]) -> list[dict[str, Any]]:
    """Compare CWSD at other temperatures with the run's own setting."""
    teacher, anchors = own.job.ctx.theta_old(), own.job.roles["anchor"]
    rows = []
    for tau in taus:
        label = f"v_prior at temperature {tau:g}"
        prior = own.cwsd_sum(teacher, anchors, tau, label).scaled(1.0 / len(anchors))
        _, u, scores = own.variant(prior, own.dots(own.stepped(prior), f"scores of {label}"))
        facts = {"norm": prior.norm(), "cosine_prior": prior.cosine(own.prior_grad)}
        rows.append({"tau": tau, **facts, **own.against(u, scores)})
    return rows


def draw_sensitivity(result: Result) -> Figures:
    """Four panels, over b, k, λ and τ; a dotted line is the run's own setting."""
    figure, axes = plots.panels(2, 2, width=4.4, height=3.1)
    percent = {"share of positive score": "utility_share", "score ≤ 0": "nonpositive"}
    settings = (
        ("data_budgets", "share", "data budget b (% of all rows)"),
        ("param_budgets", "share", "parameter budget k (% of candidates)"),
        ("lambdas", "lam", "λ"),
        ("taus", "tau", "temperature τ"),
    )
    for one, (key, field, label) in zip(axes, settings, strict=True):
        rows, own, budget = result[key], result["own"][key], field == "share"
        factor = 100 if budget else 1
        if budget:
            series = {title: plots.column(rows, name, 100) for title, name in percent.items()}
        else:
            series = plots.jaccards(rows)
        plots.lines(one, [factor * r[field] for r in rows], series)
        one.set_xlabel(label)
        one.set_ylabel("selected (%)" if budget else "Jaccard with the run")
        if not budget:
            one.set_ylim(0, 1.05)
        if isinstance(own, float):  # a budget may also be a count
            one.axvline(factor * own, color=COLOURS[-1], linestyle=":", label="the run's")
            plots.legend_above(one)
    return {"": figure}
