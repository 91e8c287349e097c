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
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from dualsft.algorithm.projection import ProjectionTerms, effective_lambda
from dualsft.data.examples import Example
from dualsft.engine.ghost import GhostEngine
from dualsft.engine.walk import loss_objective, walk
from dualsft.errors import ConfigError
from dualsft.lab.diagnostics.agreement import Bootstrap, interval, mean_of, number, pair_agreement
from dualsft.lab.diagnostics.job import DiagnosticJob
from dualsft.lab.diagnostics.ranking import counts, numbers, spearman
from dualsft.lab.diagnostics.surrogate import Surrogate, init_surrogate, warm_surrogate
from dualsft.lab.diagnostics.trials import (
    Trials,
    new_losses,
    prior_losses,
    quiet,
    sample,
    steps_plan,
    stratified_mask,
)
from dualsft.memory.placement import at_hand, blank
from dualsft.runs.context import RunContext, pass_settings
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
PIECE = "fidelity"


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
        options, pool = job.options, len(job.roles["pool"])
        preset = PRESETS[options.protocol]
        chosen = {key: getattr(options, key) or value for key, value in preset.items()}
        size = min(options.subset_size, max(1, pool // 2))
        if size < options.subset_size:
            job.reporter.warn(
                f"subsets of {size:,} examples instead of {options.subset_size:,}: the pool has "
                f"{pool:,}, and subsets of more than half of it are nearly the same"
            )
        horizons = counts(chosen["horizons"], "diagnose.fidelity.horizons")
        if not horizons or horizons[0] == 0:
            raise ConfigError("diagnose.fidelity.horizons: give steps of at least 1, as in 10,50")
        return cls(
            subsets=chosen["subsets"],
            masks=chosen["masks"],
            subset_size=size,
            horizons=horizons,
            val_rows=chosen["val_rows"],
            batch_size=options.batch_size,
            lr=options.lr,
            strata=options.strata,
            shares=numbers(options.shares, "diagnose.fidelity.shares") if options.shares else [],
            bootstrap=options.bootstrap,
        )


def run(job: DiagnosticJob) -> dict[str, Any]:
    """Predict, train and measure all sets; finished sets are saved and reused after a kill."""
    protocol = Protocol.of(job)
    wanted = job.options.checkpoints.split(",")
    piece = job.ctx.pieces.load(PIECE)
    records: dict[str, Any] = piece.facts["records"] if piece else {}
    result: dict[str, Any] = {"protocol": asdict(protocol), "rows": [], "lds": [], "sets": {}}
    result["preservation"] = job.ctx.config.score.preservation
    for name in ("init", "warmup"):
        if name not in wanted:
            continue
        surrogate = init_surrogate(job) if name == "init" else warm_surrogate(job)
        if surrogate is None:
            job.reporter.say("no warmup, so θ̄ = θ_old: init and warmup are the same checkpoint")
            continue
        found = _Checkpoint(job, surrogate, protocol, records).run()
        for key, value in found.items():
            result[key] = result[key] | value if isinstance(value, dict) else result[key] + value
    if not result["rows"]:
        raise ConfigError(
            f"diagnose.fidelity.checkpoints: {job.options.checkpoints!r} leaves no checkpoint in a "
            "run without a warmup; add warmup"
        )
    return result


class _Checkpoint:
    """All trials and measurements from one checkpoint."""

    def __init__(
        self,
        job: DiagnosticJob,
        surrogate: Surrogate,
        protocol: Protocol,
        records: dict[str, Any],
    ) -> None:
        self.job, self.protocol, self.records = job, protocol, records
        self.name, self.engine = surrogate.name, surrogate.engine
        self.quiet = quiet(job.ctx)
        self.pool, roles = job.roles["pool"], job.roles
        self.val = sample(job.rng("fidelity validation"), roles["val"], protocol.val_rows)
        self.anchors = sample(job.rng("fidelity anchors"), roles["anchor"], protocol.val_rows)
        scored = surrogate.scored
        self.grad_sum = at_hand(scored.grad_sum)
        curvature = job.ctx.curvature(self.engine.candidates)
        self.curvature = None if curvature is None else at_hand(curvature)
        self.forms, self.lams = forms_of_u(
            at_hand(scored.terms.val_grad),
            at_hand(scored.prior_grad) if self.name == "warmup" else None,
            self.curvature,
            self.grad_sum,
            job.ctx,
            len(self.pool),
            protocol.shares,
            job.scoring.scored.terms.lam_effective,
        )
        cwsd = job.ctx.config.score.preservation == "cwsd" and job.ctx.warmed_up
        self.teacher = job.ctx.theta_old() if cwsd else None

    @property
    def model(self) -> PreTrainedModel:
        return self.engine.model

    def run(self) -> dict[str, Any]:
        sets = [("data", i) for i in range(self.protocol.subsets)]
        sets += [("param", i) for i in range(self.protocol.masks)]
        waiting = [one for one in sets if self._key(*one) not in self.records]
        trials = Trials(self.quiet, self.model)
        base = self._measure()
        label, pieces = f"score fidelity ({self.name})", self.job.ctx.pieces
        done = len(sets) - len(waiting)
        with self.job.reporter.track(label, len(sets), "sets", done) as progress, pieces.loop():
            for side, number_ in waiting:
                self.records[self._key(side, number_)] = self._one(trials, side, number_, base)
                progress.advance(1)
                done += 1
                where = f"{label}: {done:,} of {len(sets):,} sets"
                pieces.tick(PIECE, lambda: ({}, {"records": self.records}), where)
        return self._summary(base)

    def _key(self, side: str, number_: int) -> str:
        return f"{self.name}/{side}/{number_}"

    def _one(self, trials: Trials, side: str, number_: int, base: Measured) -> dict[str, Any]:
        """Predict the utility of one set, train on it and measure the gains."""
        record: dict[str, Any] = {}
        rng = self.job.rng(f"fidelity {side} {number_}")
        if side == "data":
            size = self.protocol.subset_size
            rows = [self.pool[i] for i in rng.choice(len(self.pool), size, replace=False)]
            indices: Mapping[str, Tensor | None] = dict.fromkeys(self.engine.candidates.names)
            gradient = self._gradient(rows)
            record["queries"] = self._queries(gradient)
        else:
            rows, shapes = self.pool, self.job.ctx.candidate_shapes
            k = param_budget(self.job.ctx, shapes)
            varied = self.protocol.strata == "varied"
            mask = stratified_mask(rng, {n: s.numel() for n, s in shapes.items()}, k, varied)
            indices = {name: index for name, index in mask.items() if index.numel()}
            gradient = self.grad_sum.restricted(mask)
        record["predicted"] = predicted(self.forms, gradient)
        del gradient
        horizons = self.protocol.horizons
        found: dict[int, Measured] = {}

        def measure(done: int) -> None:
            if done in horizons:
                found[done] = self._measure()

        plan = steps_plan(self.quiet, horizons[-1], self.protocol.lr, self.protocol.batch_size)
        trials.run(rows, indices, plan, "trial", measure, constant=True)
        trials.reset()
        record["new"] = [float((base.new - found[k].new).mean()) for k in horizons]
        record["prior"] = [float(np.mean(base.prior - found[k].prior)) for k in horizons]
        if side == "data":
            record["query_gains"] = [(base.new - found[k].new).tolist() for k in horizons]
        return record

    def _measure(self) -> Measured:
        new = new_losses(self.quiet, self.model, self.val)
        if self.teacher is None:
            return Measured(new, np.zeros(1))
        return Measured(new, prior_losses(self.quiet, self.teacher, self.model, self.anchors))

    def _gradient(self, rows: Sequence[Example]) -> Vector:
        """Σ_{n∈S} g_n over the candidates."""
        sums = blank(self.engine.candidates, self.engine.candidates.dtype)
        _walk(self.quiet, self.engine, rows, sums=sums)
        return sums

    def _queries(self, gradient: Vector) -> dict[str, list[float]]:
        """⟨∇ℓ_z, step of the subset⟩ of each validation row z, for the sgd and adam steps."""
        steps: dict[str, Vector] = {"sgd": gradient}
        if self.curvature is not None:
            steps["adam"] = gradient.combine(torch.div, self.curvature)
        return {
            step: _walk(self.quiet, self.engine, self.val, direction=vector).tolist()
            for step, vector in steps.items()
        }

    # --- summary -------------------------------------------------------------------------------

    def _summary(self, base: Measured) -> dict[str, Any]:
        rows: list[dict[str, Any]] = []
        sets: dict[str, Any] = {}
        sides = {"data": self.protocol.subsets, "param": self.protocol.masks}
        for side, count in sides.items():
            records = [self.records[self._key(side, i)] for i in range(count)]
            draws = Bootstrap.of(count, self.protocol.bootstrap, self.job.rng("bootstrap"))
            new, prior = (np.array([r[key] for r in records]) for key in ("new", "prior"))
            sets[f"{self.name}/{side}"] = self._raw(records, new, prior)
            self._warn_of_large_steps(side, float(new[:, 0].mean()))
            for form in self.forms:
                guess = np.array([r["predicted"][form.key] for r in records])
                lam = self.lams[form.lam]
                goals = {"new": new}
                if self.teacher is not None:
                    goals["own"] = new + lam * prior
                for objective, gains in goals.items():
                    facts = self._facts(form, side, objective, lam)
                    rows += _agreement(facts, guess, gains, self.protocol.horizons, draws)
        losses = {"new": float(base.new.mean()), "prior": float(base.prior.mean())}
        return {"rows": rows, "lds": self._lds(), "sets": sets | {f"{self.name}/start": losses}}

    def _warn_of_large_steps(self, side: str, gain: float) -> None:
        """Warn if the first horizon raises the loss: scores predict the effect of small steps."""
        if gain < 0:
            sets, first = {"data": "subsets", "param": "masks"}[side], self.protocol.horizons[0]
            self.job.reporter.warn(
                f"fidelity ({self.name}, {sets}): {first} steps raise the validation loss by "
                f"{-gain:.3g} on average, so they are not the small steps that scores are about; "
                "ask again with diagnose.fidelity.lr lower"
            )

    def _facts(self, form: ScoreForm, side: str, objective: str, lam: float) -> dict[str, Any]:
        # only these forms correspond to a row of the paper's table
        plain = form.lam == self._own_lam and form.step == "sgd"
        paper = PAPER_ROWS.get((self.name, form.order)) if plain else None
        return {
            "checkpoint": self.name,
            **asdict(form),
            "lam_effective": lam,
            "paper_row": paper,
            "side": side,
            "objective": objective,
        }

    @property
    def _own_lam(self) -> str:
        """The form of λ in the run's own scores."""
        relative = self.job.ctx.config.score.lam_relative and "relative" in self.lams
        wanted = "relative" if relative else "absolute"
        return wanted if wanted in self.lams else "none"

    def _raw(self, records: list[Any], new: np.ndarray, prior: np.ndarray) -> dict[str, Any]:
        keys = [f.key for f in self.forms if f.step == "sgd" and f.lam == self._own_lam]
        return {
            "predicted": {key: [r["predicted"][key] for r in records] for key in keys},
            "gain_new": new.T.tolist(),
            "gain_prior": prior.T.tolist(),
        }

    def _lds(self) -> list[dict[str, Any]]:
        """Mean over validation rows of their rank correlations, with a bootstrap over subsets."""
        records = [self.records[self._key("data", i)] for i in range(self.protocol.subsets)]
        draws = Bootstrap.of(len(records), self.protocol.bootstrap, self.job.rng("bootstrap lds"))
        told = []
        for step in records[0]["queries"]:
            guess = np.array([r["queries"][step] for r in records])
            for at, horizon in enumerate(self.protocol.horizons):
                gains = np.array([r["query_gains"][at] for r in records])
                each = [spearman(guess[:, z], gains[:, z]) for z in range(guess.shape[1])]
                known = [z for z, rho in enumerate(each) if rho is not None]
                total, said = np.zeros(len(draws.weights)), np.zeros(len(draws.weights))
                for z in known:
                    rho = draws.spearman(guess[:, z], gains[:, z])
                    total += np.nan_to_num(rho)
                    said += np.isfinite(rho)
                resampled = np.where(said > 0, total / np.maximum(said, 1), np.nan)
                low, high = interval(resampled)
                told.append(
                    {"checkpoint": self.name, "step": step, "K": horizon, "lds": mean_of(each)}
                    | {"low": low, "high": high, "queries": len(known)}
                )
        return told


@dataclass(frozen=True)
class Measured:
    """Losses of the validation rows, and CWSD losses of the anchors."""

    new: np.ndarray
    prior: np.ndarray


def _agreement(
    facts: dict[str, Any],
    guess: np.ndarray,
    gains: np.ndarray,
    horizons: list[int],
    draws: Bootstrap,
) -> list[dict[str, Any]]:
    """Rows with ρ and pairwise agreement at each horizon, and one with the means over horizons."""
    told: list[dict[str, Any]] = []
    rhos, pairs = [], []
    for at, horizon in enumerate(horizons):
        real = gains[:, at]
        rhos.append(draws.spearman(guess, real))
        pairs.append(draws.pairs(guess, real))
        rho, pair = spearman(guess, real), pair_agreement(guess, real)
        told.append(facts | {"K": horizon, "rho": rho, "pair": pair})
        told[-1] |= {"rho_interval": interval(rhos[-1]), "pair_interval": interval(pairs[-1])}
    mean = facts | {"K": "mean", "rho": mean_of([r["rho"] for r in told])}
    mean["pair"] = mean_of([r["pair"] for r in told])
    mean["rho_interval"] = interval(np.mean(rhos, 0))
    mean["pair_interval"] = interval(np.mean(pairs, 0))
    return [*told, mean]


def forms_of_u(
    val_grad: Vector,
    prior_grad: Vector | None,
    curvature: Vector | None,
    grad_sum: Vector,
    ctx: RunContext,
    n_sc: int,
    shares: Sequence[float],
    own_lam: float,
) -> tuple[dict[ScoreForm, Vector], dict[str, float]]:
    """(u / eta_sc in every form, effective value of each λ). `prior_grad` None means zero.

    At θ_old v_prior is zero and the effective value of a relative λ is undefined. The run's value
    (`own_lam`) is used, so that both checkpoints have the same objective.
    """
    score = ctx.config.score
    lams = {"none": 0.0, "absolute": score.lam}
    if prior_grad is not None:
        lams["relative"] = effective_lambda(score.lam, True, val_grad, prior_grad)
    elif score.lam_relative:
        lams["relative"] = own_lam
    forms: dict[ScoreForm, Vector] = {}
    for lam, factor in lams.items():
        v_val = val_grad if prior_grad is None else val_grad.plus(prior_grad, factor)
        plain = ProjectionTerms(
            val_grad=val_grad,
            v_val=v_val,
            curvature=curvature,
            preconditioner=None,
            curvature_scale=1.0,
            eta_ft=ctx.config.finetune.lr,
            n_sc=n_sc,
            lam_effective=factor,
        )
        scales = {"first": 0.0}
        if curvature is not None:
            scales["diagonal"] = 1.0
            if score.curvature_scale != 1.0:
                scales[f"diagonal times {score.curvature_scale:g}"] = score.curvature_scale
            second = plain.second_order(grad_sum).norm()
            first = v_val.norm()
            # scale of ĉ at which the second-order term has norm s · ‖v_val‖
            scales |= {f"diagonal {s:g}": s * first / second for s in shares if second > 0}
        for order, scale in scales.items():
            for step in ("sgd", "adam") if curvature is not None else ("sgd",):
                terms = replace(
                    plain,
                    curvature=curvature if scale else None,
                    curvature_scale=scale,
                    preconditioner=curvature if step == "adam" else None,
                )
                forms[ScoreForm(order, lam, step)] = terms.projection(grad_sum)
    return forms, lams


def predicted(forms: Mapping[ScoreForm, Vector], gradient: Vector) -> dict[str, float | None]:
    """Û / eta_sc = ⟨u / eta_sc, gradient of the set⟩ for every form, in one read of the vectors."""
    vectors = {form.key: u for form, u in forms.items()} | {"set": gradient}
    products = Products(vectors, [(form.key, "set") for form in forms])
    return {form.key: number(products.dot(form.key, "set")) for form in forms}


def _walk(ctx: RunContext, engine: GhostEngine, rows: Sequence[Example], **what: Any) -> np.ndarray:
    """A short walk without log lines or saved progress; returns the dot products."""
    objective, settings = loss_objective(engine.model), pass_settings(ctx)
    with ctx.precise("directions", "score fidelity", engine.model):
        return walk(engine, rows, objective, settings, ctx.reporter, "set", **what).dots
