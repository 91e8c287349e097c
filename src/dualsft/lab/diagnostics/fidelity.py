"""Score fidelity: does training on sets with higher scores lower the validation loss more?

Reproduces the paper's Tables score_consistency_main, score_fidelity_long_horizon and
score_fidelity_domain (appendix score_fidelity). From a checkpoint (init: θ_old; warmup: θ̄), K
restricted AdamW steps are run on each of many random subsets of the pool (training all candidates),
and with each of many random masks of k entries, stratified by parameter (training on the pool).
Predicted utility: Û(S) = Σ s over the set. Realized utility: Δ_K(S) = L_val(start) − L_val(θ_K(S)).

By linearity Û is ⟨u, Σ_{n∈S} g_n⟩ for a subset and ⟨u, m ⊙ G⟩ for a mask, so one gradient per set
is enough for every form of u: order (first; diagonal; diagonal with ĉ scaled to a given share of u)
× λ (none, absolute, relative) × step (sgd, adam). At init v_prior = 0 and ĉ is that of the warmup.
The same trainings give a linear datamodeling score: for each validation row z, the rank correlation
over subsets of ⟨∇ℓ_z, Σ g_n⟩ with the decrease of z's loss, averaged over z.

The learning rate is constant, so θ_10, θ_50 … lie on one trajectory and each set is trained once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualsft.algorithm.projection import ProjectionTerms, effective_lambda
from dualsft.config.settings import ScoreConfig
from dualsft.data.examples import make_batches
from dualsft.engine.losses import distillation_objective
from dualsft.errors import ConfigError
from dualsft.lab import plots
from dualsft.lab.diagnostics import ranking
from dualsft.lab.diagnostics.job import (
    DiagnosticJob,
    Surrogate,
    Trials,
    gradient_sum,
    init_surrogate,
    loss_walk,
    quiet,
    steps_plan,
    warm_surrogate,
)
from dualsft.lab.plots import COLOURS, MARKERS, Figures, Result
from dualsft.memory.placement import at_hand
from dualsft.runs.method import Job
from dualsft.runs.stages.selection import param_budget
from dualsft.storage.vectors import Products, Vector

PRESETS: dict[str, dict[str, Any]] = {
    "small": {"subsets": 24, "masks": 24, "horizons": "10,50,200", "val_rows": 256},
    "paper": {"subsets": 64, "masks": 64, "horizons": "10,50,200,500,1000", "val_rows": 1024},
}
PAPER_ROWS = {
    ("init", "first"): "Init + First-Order",
    ("init", "diagonal"): "Init + Diag-Second-Order",
    ("warmup", "first"): "Warmup + First-Order",
    ("warmup", "diagonal"): "Warmup + Diag-Second-Order",
}
SETS = {"data": "subsets of examples", "param": "masks of entries"}


@dataclass(frozen=True)
class ScoreForm:
    """A variant of u."""

    order: str
    """first, diagonal, or diagonal with the second-order term scaled to a share of the first."""
    lam: str
    """none, absolute or relative."""
    step: str
    """sgd or adam."""

    @property
    def key(self) -> str:
        return f"{self.order}/{self.lam}/{self.step}"


@dataclass(frozen=True)
class Protocol:
    """The settings of the experiment, with all defaults resolved."""

    subsets: int
    masks: int
    subset_size: int
    horizons: list[int]
    val_rows: int
    batch_size: int | None
    lr: float | None
    strata: str
    shares: list[float]
    bootstrap: int

    @classmethod
    def of(cls, job: DiagnosticJob) -> Protocol:
        options, pool, field = job.options, len(job.roles["pool"]), "diagnose.fidelity"
        given = {key: value for key, value in asdict(options).items() if value is not None}
        chosen = asdict(options) | PRESETS[options.protocol] | given
        size = min(options.subset_size, max(1, pool // 2))
        if size < options.subset_size:
            job.reporter.warn(
                f"subsets of {size:,} examples instead of {options.subset_size:,}: the pool has "
                f"{pool:,}, and subsets of more than half of it are nearly the same"
            )
        horizons = ranking.counts(chosen["horizons"], f"{field}.horizons")
        if horizons[0] == 0:
            raise ConfigError(f"{field}.horizons: give steps of at least 1, as in 10,50")
        shares = ranking.numbers(options.shares, f"{field}.shares") if options.shares else []
        chosen |= {"subset_size": size, "horizons": horizons, "shares": shares}
        return cls(**{one.name: chosen[one.name] for one in fields(cls)})


def fidelity(job: DiagnosticJob) -> dict[str, Any]:
    """Predict, train and measure all sets; finished sets are saved and reused after a kill."""
    protocol = Protocol.of(job)
    wanted = job.options.checkpoints.split(",")
    result: dict[str, Any] = {"protocol": asdict(protocol), "rows": [], "lds": [], "sets": {}}
    result["preservation"] = job.ctx.config.score.preservation
    for name, surrogate in (("init", init_surrogate), ("warmup", warm_surrogate)):
        at = surrogate(job) if name in wanted else None
        if at is not None:
            rows, lds, sets = _Checkpoint(job, at, protocol).run()
            result["rows"] += rows
            result["lds"] += lds
            result["sets"] |= sets
    if not result["rows"]:
        raise ConfigError(
            f"diagnose.fidelity.checkpoints: {job.options.checkpoints!r} leaves no checkpoint in a "
            "run without a warmup; add warmup"
        )
    return result


class _Checkpoint:
    """All trials and measurements from one checkpoint."""

    def __init__(self, job: DiagnosticJob, at: Surrogate, protocol: Protocol) -> None:
        self.job, self.protocol, self.name, self.engine = job, protocol, at.name, at.engine
        self.model, self.quiet, self.pool = at.engine.model, quiet(job.ctx), job.roles["pool"]
        self.trials = Trials(self.quiet, self.model)
        rows = protocol.val_rows
        self.val = ranking.sample(job.rng("fidelity validation"), job.roles["val"], rows)
        self.anchors = ranking.sample(job.rng("fidelity anchors"), job.roles["anchor"], rows)
        curvature, score = job.ctx.curvature(self.engine.candidates), job.ctx.config.score
        self.grad_sum, self.curvature = at.grad_sum, curvature and at_hand(curvature)
        prior = at.scored.prior_grad if self.name == "warmup" else None
        lam = job.scoring.scored.terms.lam_effective
        self.forms, self.lams = forms_of_u(
            at.scored.terms, prior, self.curvature, self.grad_sum, score, protocol.shares, lam
        )
        cwsd = score.preservation == "cwsd" and job.ctx.warmed_up
        self.teacher = job.ctx.theta_old() if cwsd else None
        own = {True: "relative", "scores": "scores"}.get(score.lam_relative, "absolute")
        self.own_lam = own if own in self.lams else "absolute"
        """The form of λ in the run's own scores."""
        self.new, self.prior = self._measure()

    def run(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
        """(rows of the table, rows of the LDS, numbers of the sets)."""
        subsets, masks = self.protocol.subsets, self.protocol.masks
        names = [f"{self.name}/data/{i}" for i in range(subsets)]
        names += [f"{self.name}/param/{i}" for i in range(masks)]
        records = self.job.each(f"score fidelity ({self.name})", "sets", names, self._trial)
        parts = {"data": records[:subsets], "param": records[subsets:]}
        rows: list[dict[str, Any]] = []
        sets: dict[str, Any] = {}
        keys = [f.key for f in self.forms if f.step == "sgd" and f.lam == self.own_lam]
        for side, mine in parts.items():
            new, prior = (np.array([r[key] for r in mine]) for key in ("new", "prior"))
            sets[f"{self.name}/{side}"] = {
                "predicted": {key: [r["predicted"][key] for r in mine] for key in keys},
                "gain_new": new.T.tolist(),
                "gain_prior": prior.T.tolist(),
            }
            rows += self._rows(side, mine, new, prior)
            loss = -float(new[:, 0].mean())
            if loss > 0:  # scores predict the effect of small steps
                self.job.reporter.warn(
                    f"fidelity ({self.name}, {SETS[side]}): {self.protocol.horizons[0]} steps "
                    f"raise the validation loss by {loss:.3g} on average, so they are not the "
                    "small steps that scores are about; ask again with diagnose.fidelity.lr lower"
                )
        losses = {"new": float(self.new.mean()), "prior": float(self.prior.mean())}
        return rows, self._lds(parts["data"]), sets | {f"{self.name}/start": losses}

    def _trial(self, key: str) -> dict[str, Any]:
        """Predict the utility of one set, train on it and measure the gains."""
        _, side, number = key.split("/")
        record: dict[str, Any] = {}
        rng, rows = self.job.rng(f"fidelity {side} {number}"), self.pool
        indices: Mapping[str, Tensor | None] = dict.fromkeys(self.engine.candidates.names)
        if side == "data":
            chosen = rng.choice(len(self.pool), self.protocol.subset_size, replace=False)
            rows = [self.pool[i] for i in chosen]
            gradient: Vector = gradient_sum(self.quiet, self.engine, rows, "set", "directions")
            record["queries"] = self._queries(gradient)
        else:
            shapes = self.job.ctx.candidate_shapes
            sizes = {name: shape.numel() for name, shape in shapes.items()}
            k, varied = param_budget(self.job.ctx, shapes), self.protocol.strata == "varied"
            indices = mask = ranking.stratified_mask(rng, sizes, k, varied)
            gradient = self.grad_sum.restricted(mask)
        record["predicted"] = predicted(self.forms, gradient)
        del gradient
        horizons = self.protocol.horizons
        gains: list[tuple[np.ndarray, np.ndarray]] = []

        def measure(done: int) -> None:
            if done in horizons:
                new, prior = self._measure()
                gains.append((self.new - new, self.prior - prior))

        plan = steps_plan(self.quiet, horizons[-1], self.protocol.lr, self.protocol.batch_size)
        self.trials.run(rows, indices, plan, "trial", measure, constant=True)
        self.trials.reset()
        record["new"] = [float(new.mean()) for new, _ in gains]
        record["prior"] = [float(prior.mean()) for _, prior in gains]
        if side == "data":
            record["query_gains"] = [new.tolist() for new, _ in gains]
        return record

    @torch.no_grad()
    def _measure(self) -> tuple[np.ndarray, np.ndarray]:
        """ℓ of each validation row, and ω τ² KL(θ_old ‖ model) of each anchor (CWSD).

        L_new and L_prior are their means.
        """
        ctx, anchors = self.quiet, self.anchors
        new = Job(ctx, "data", ctx.rundir.path).losses(self.model, self.val, "validation")
        if self.teacher is None:
            return new, np.zeros(1)
        prior, tau = np.empty(len(anchors)), ctx.config.score.tau
        for rows in make_batches(anchors, ctx.batch_tokens):
            batch = ctx.collate([anchors[i] for i in rows])
            _, divergence, omega = distillation_objective(self.teacher, self.model, batch, tau)
            prior[rows] = (divergence * omega).cpu().numpy()
        return new, prior

    def _queries(self, gradient: Vector) -> dict[str, list[float]]:
        """⟨∇ℓ_z, step of the subset⟩ of each validation row z, for the sgd and adam steps."""
        steps: dict[str, Vector] = {"sgd": gradient}
        if self.curvature is not None:
            steps["adam"] = gradient.combine(torch.div, self.curvature)
        ctx, engine = self.quiet, self.engine
        return {
            step: loss_walk(ctx, engine, self.val, "set", "directions", direction=v).dots.tolist()
            for step, v in steps.items()
        }

    def _rows(
        self, side: str, records: list[Any], new: np.ndarray, prior: np.ndarray
    ) -> list[dict[str, Any]]:
        """Agreement of every form of u with the gains, at each horizon and on average."""
        draws = ranking.Bootstrap.of(
            len(records), self.protocol.bootstrap, self.job.rng("bootstrap")
        )
        rows: list[dict[str, Any]] = []
        for form in self.forms:
            guess = np.array([r["predicted"][form.key] for r in records])
            lam = self.lams[form.lam]
            goals = {"new": new}
            if self.teacher is not None:
                goals["own"] = new + lam * prior
            # only these forms correspond to a row of the paper's table
            plain = form.lam == self.own_lam and form.step == "sgd"
            facts = {
                "checkpoint": self.name,
                **asdict(form),
                "lam_effective": lam,
                "paper_row": PAPER_ROWS.get((self.name, form.order)) if plain else None,
                "side": side,
            }
            for objective, gains in goals.items():
                own = facts | {"objective": objective}
                rows += _agreement(own, guess, gains, self.protocol.horizons, draws)
        return rows

    def _lds(self, records: list[Any]) -> list[dict[str, Any]]:
        """Mean over validation rows of their rank correlations, with a bootstrap over subsets."""
        draws = ranking.Bootstrap.of(
            len(records), self.protocol.bootstrap, self.job.rng("bootstrap lds")
        )
        rows = []
        for step in records[0]["queries"]:
            guess = np.array([r["queries"][step] for r in records])
            for at, horizon in enumerate(self.protocol.horizons):
                gains = np.array([r["query_gains"][at] for r in records])
                each = [ranking.spearman(guess[:, z], gains[:, z]) for z in range(guess.shape[1])]
                known = [z for z, rho in enumerate(each) if rho is not None]
                total, defined = np.zeros(len(draws.weights)), np.zeros(len(draws.weights))
                for z in known:
                    rho = draws.spearman(guess[:, z], gains[:, z])
                    total += np.nan_to_num(rho)
                    defined += np.isfinite(rho)
                resampled = np.where(defined > 0, total / np.maximum(defined, 1), np.nan)
                low, high = ranking.interval(resampled)
                rows.append(
                    {
                        "checkpoint": self.name,
                        "step": step,
                        "K": horizon,
                        "lds": ranking.mean_of(each),
                    }
                    | {"low": low, "high": high, "queries": len(known)}
                )
        return rows


def _agreement(
    facts: dict[str, Any],
    guess: np.ndarray,
    gains: np.ndarray,
    horizons: list[int],
    draws: ranking.Bootstrap,
) -> list[dict[str, Any]]:
    """Rows with ρ and pairwise agreement at each horizon, and one with the means over horizons."""
    rhos = [draws.spearman(guess, real) for real in gains.T]
    pairs = [draws.pairs(guess, real) for real in gains.T]
    rows: list[dict[str, Any]] = [
        facts
        | {
            "K": horizon,
            "rho": ranking.spearman(guess, real),
            "pair": ranking.pair_agreement(guess, real),
        }
        | {"rho_interval": ranking.interval(rho), "pair_interval": ranking.interval(pair)}
        for horizon, real, rho, pair in zip(horizons, gains.T, rhos, pairs, strict=True)
    ]
    means = {key: ranking.mean_of([row[key] for row in rows]) for key in ("rho", "pair")}
    intervals = ranking.interval(np.mean(rhos, 0)), ranking.interval(np.mean(pairs, 0))
    mean = {"K": "mean", **means, "rho_interval": intervals[0], "pair_interval": intervals[1]}
    return [*rows, facts | mean]


def forms_of_u(
    terms: ProjectionTerms,
    prior_grad: Vector | None,
    curvature: Vector | None,
    grad_sum: Vector,
    score: ScoreConfig,
    shares: Sequence[float],
    own_lam: float,
) -> tuple[dict[ScoreForm, Vector], dict[str, float]]:
    """(u / eta_sc in every form, effective value of each λ). `prior_grad` None means zero.

    At θ_old v_prior is zero and the effective value of a relative λ is undefined. The run's value
    (`own_lam`) is used, so that both checkpoints have the same objective.
    """
    val_grad = terms.val_grad
    lams = {"none": 0.0, "absolute": score.lam}
    if prior_grad is not None:
        lams["relative"] = effective_lambda(score.lam, True, val_grad, prior_grad)
    elif score.lam_relative is True:
        lams["relative"] = own_lam
    if score.lam_relative == "scores":
        lams["scores"] = own_lam
    forms: dict[ScoreForm, Vector] = {}
    for lam, factor in lams.items():
        v_val = val_grad if prior_grad is None else val_grad.plus(prior_grad, factor)
        scales = {"first": 0.0}
        if curvature is not None:
            scales["diagonal"] = 1.0
            if score.curvature_scale != 1.0:
                scales[f"diagonal times {score.curvature_scale:g}"] = score.curvature_scale
            plain = replace(terms, v_val=v_val, curvature=curvature, curvature_scale=1.0)
            first, second = v_val.norm(), plain.second_order(grad_sum).norm()
            # scale of ĉ at which the second-order term has norm s · ‖v_val‖
            scales |= {f"diagonal {s:g}": s * first / second for s in shares if second > 0}
        for order, scale in scales.items():
            for step in ("sgd", "adam") if curvature is not None else ("sgd",):
                forms[ScoreForm(order, lam, step)] = replace(
                    terms,
                    v_val=v_val,
                    curvature=curvature if scale else None,
                    curvature_scale=scale,
                    preconditioner=curvature if step == "adam" else None,
                ).projection(grad_sum)
    return forms, lams


def predicted(forms: Mapping[ScoreForm, Vector], gradient: Vector) -> dict[str, float]:
    """Û / eta_sc = ⟨u / eta_sc, gradient of the set⟩ for every form, in one read of the vectors."""
    vectors = {form.key: u for form, u in forms.items()} | {"set": gradient}
    products = Products(vectors, [(form.key, "set") for form in forms])
    return {form.key: products.dot(form.key, "set") for form in forms}


def draw_fidelity(result: Result) -> Figures:
    """ρ and pairwise agreement over K with 95 % intervals; every form of u; the LDS over K."""
    own = any(r["objective"] == "own" for r in result["rows"])
    rows = [r for r in result["rows"] if r["objective"] == ("own" if own else "new")]
    figure, places = plots.panels(2, 2, 4.8, 3.4)
    measures = (("rho", "Spearman ρ", 0.0), ("pair", "pairwise agreement (%)", 50.0))
    for across, (side, title) in enumerate(SETS.items()):
        mine = [r for r in rows if r["side"] == side and r["paper_row"] and r["K"] != "mean"]
        for down, (key, name, chance) in enumerate(measures):
            axes = places[2 * down + across]
            _curves(axes, [r | {"curve": r["paper_row"]} for r in mine], key, name, chance)
        places[across].set_title(title)
    figure.legend(*places[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    what = "L_val = L_new + λ L_prior" if own else "L_new"
    figure.suptitle(f"Score fidelity: predicted against realised gain in {what}", fontsize=10)
    figures = {"": figure}
    if means := [r for r in rows if r["K"] == "mean" and r["rho"] is not None]:
        figures["_forms"] = _forms(means)
    if any(r["lds"] is not None for r in result["lds"]):
        figures["_lds"], (axes,) = plots.panels(1, 1, 5.6, 3.8)
        scores = [
            {"K": r["K"], "curve": f"{r['checkpoint']}, {r['step']} step", "lds": r["lds"]}
            | {"lds_interval": (r["low"], r["high"])}
            for r in result["lds"]
        ]
        _curves(axes, scores, "lds", "linear datamodeling score (mean ρ)", 0.0)
        plots.legend_above(axes, 4)
    return figures


def _ends(rows: Sequence[Result], key: str) -> tuple[list[float], list[float]]:
    """Lower and upper ends of the intervals; the value itself where there is no interval."""
    values = [(r[key], *r[f"{key}_interval"]) for r in rows]
    low = [v if a is None else a for v, a, _ in values]
    return low, [v if b is None else b for v, _, b in values]


def _curves(axes: Any, rows: Sequence[Result], key: str, label: str, chance: float) -> None:
    """Curves over K with intervals; the rows of one curve have the same "curve"."""
    names = list(dict.fromkeys(r["curve"] for r in rows))
    for number, name in enumerate(names):
        mine = [r for r in rows if r["curve"] == name and r[key] is not None]
        shift = 1.0 + 0.04 * (number - (len(names) - 1) / 2)  # keeps error bars from overlapping
        values, (low, high) = np.array([r[key] for r in mine]), _ends(mine, key)
        axes.errorbar(
            [r["K"] * shift for r in mine],
            values,
            yerr=[np.maximum(0.0, values - low), np.maximum(0.0, high - values)],
            color=COLOURS[number],
            marker=MARKERS[number],
            markersize=5,
            linewidth=1.2,
            capsize=2,
            elinewidth=0.8,
            label=name,
        )
    plots.guide(axes, y=chance)
    plots.log_axis(axes, sorted({r["K"] for r in rows}))
    axes.set_xlabel("AdamW steps K from the checkpoint")
    axes.set_ylabel(label)


def _forms(means: Sequence[Result]) -> Any:
    """ρ averaged over K for every form of u: the effect of curvature, λ and step."""

    def form(row: Result) -> str:
        return f"{row['checkpoint']} · {row['order']} · λ {row['lam']} · {row['step']}"

    labels = list(dict.fromkeys(form(r) for r in means))
    figure, (axes,) = plots.panels(1, 1, 7.2, 1.2 + 0.22 * len(labels))
    for number, (side, name) in enumerate(SETS.items()):
        mine = [r for r in means if r["side"] == side]
        y = [labels.index(form(r)) + 0.14 * (2 * number - 1) for r in mine]
        axes.hlines(y, *_ends(mine, "rho"), COLOURS[number], linewidth=0.9)
        points = [r["rho"] for r in mine]
        axes.plot(points, y, MARKERS[number], color=COLOURS[number], markersize=4, label=name)
    plots.guide(axes, x=0.0)
    plots.rows_axis([axes], labels)
    axes.set_xlabel("Spearman ρ, mean over K (95 % interval)")
    plots.legend_above(axes)
    return figure
