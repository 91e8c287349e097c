"""Diagnostics that repeat the run's fine-tuning (Algorithm 1 line 12): drift and reverse selection.

Drift (Eq. score_drift_bound). The first-order data score at θ is s_n(θ) = η ⟨∇L_val(θ), ∇ℓ_n(θ)⟩.
Along a restricted fine-tuning it differs from its value at θ̄ by at most
η (B_v L_g + B_g L_v) ‖θ_t − θ̄‖, with bounds B on the norms of the two gradients and Lipschitz
constants L. The true constants are unknown, so the largest observed values are used: B over all
points, and L the largest ‖∇(θ_t) − ∇(θ̄)‖ / ‖θ_t − θ̄‖. With these the bound holds at every measured
point, and the result shows how loose it is. Distances are over all parameters (the warmup moves
more than the candidates), gradients over the candidates. The trajectory uses the mask, examples and
schedule of the run, and starts from θ_old, or from θ̄ as in the paper's fidelity protocol. For
parameters the score is s_d = η v_d Γ_d, where Γ is the sum of the gradients of the probed examples.

Reverse selection (Fig. reverse_selection): are the examples and entries with the lowest scores
worse than random ones? With the run's budgets, each side is the DualSFT selection (dual), a random
draw of the same size (random), or the lowest-scored examples or entries (reverse). Every
combination is fine-tuned from θ_old for the same small number of steps with the run's schedule, and
measured as in the evaluation stage: loss on the validation split and on the evaluation files, and
KL to θ_old. Random sides are drawn several times. Intervals are over the validation rows, paired
with the matched random control. If the run's scores selected only one side, only that side is
varied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from dualsft.data.examples import Example
from dualsft.engine.ghost import GhostEngine, alone
from dualsft.errors import RunError
from dualsft.lab import plots
from dualsft.lab.diagnostics import ranking
from dualsft.lab.diagnostics.job import (
    DiagnosticJob,
    Trials,
    gradient_sum,
    plain_training,
    quiet,
    steps_plan,
)
from dualsft.lab.evaluation.stage import compare, evaluation_sets
from dualsft.lab.plots import COLOURS, MARKERS, Figures, Result
from dualsft.model.load import text_parameters
from dualsft.runs.context import pass_settings
from dualsft.runs.stages.finetune import finetune_plan, training_examples
from dualsft.runs.stages.gradients import prior_of
from dualsft.storage.vectors import ParamVector, Products, Vector
from dualsft.train.loop import Hooks

COORDINATES = 1 << 14
"""Most entries whose scores are ranked."""
PAIRED = 2048
"""Most scores that are compared in pairs, which costs quadratic time."""
ARMS = (
    ("dual", "dual"),
    ("random", "dual"),
    ("dual", "random"),
    ("random", "random"),
    ("reverse", "dual"),
    ("dual", "reverse"),
    ("reverse", "reverse"),
)
"""The paper's combinations (examples, entries) of reverse selection."""
AS_RUN = "as run"
"""A side that was not selected by DualSFT's scores: the same as in the run in all combinations."""
RESAMPLES = 2000


# --- drift ---------------------------------------------------------------------------------------


def drift(job: DiagnosticJob) -> dict[str, Any]:
    """Repeat the run's fine-tuning and score the probes at some points of it."""
    ctx, options = job.ctx, job.options
    plain_training(ctx)
    examples = training_examples(ctx, job.final)
    plan = finetune_plan(ctx, len(examples))
    num_steps = plan.num_steps(len(examples))
    if num_steps == 0:
        raise RunError("drift: the run's fine-tuning has no steps (finetune.epochs is 0)")
    steps = sorted({round(num_steps * i / options.points) for i in range(options.points + 1)})
    probes = choose_probes(job)
    reference = _Place(job, job.scoring.engine)
    # `start` is trained by the optimizer; gradients are computed in `copy`, which gets its weights
    load = ctx.theta_old if options.start == "old" else ctx.theta_bar
    start, copy = load(), load()
    engine = GhostEngine(copy, ctx.candidates(copy))
    points: list[dict[str, Any]] = []
    label = f"score drift (from θ_{'old' if options.start == 'old' else 'bar'})"
    with job.reporter.track(label, len(steps), "points") as progress:

        def look(done: int) -> None:
            if done in steps:
                copy.load_state_dict(start.state_dict())
                found = _compare(job, probes, reference, _Place(job, engine))
                points.append({"step": done} | found)
                progress.advance(1)

        def resume(state: dict[str, Any]) -> None:
            points[:] = state["points"]
            progress.advance(len(points) - 1)  # the start was already counted

        look(0)
        trials = Trials(quiet(ctx), start, ctx.pieces)
        hooks = Hooks(state=lambda: {"points": points}, load_state=resume)
        trials.run(examples, job.mask, plan, "fine-tuning", look, hooks=hooks)
    constants = {side: _constants(points, side) for side in ("data", "param")}
    eta = job.scoring.scored.terms.eta_sc
    return {
        "start": options.start,
        "eta": eta,
        "steps": num_steps,
        "probes": len(probes),
        "val_rows": reference.val_rows,
        "constants": constants,
        "spread": _spread(eta, points),
        "points": [_row(point, constants, eta) for point in points],
    }


class _Place:
    """∇L_val at one θ, and the engine that computes the probes' gradients there."""

    def __init__(self, job: DiagnosticJob, engine: GhostEngine) -> None:
        self.ctx, self.engine = quiet(job.ctx), engine
        count, lam = job.options.val_rows, job.scoring.scored.terms.lam_effective
        val = ranking.sample(job.rng("drift validation"), job.roles["val"], count)
        self.val_rows = len(val)
        total = gradient_sum(self.ctx, engine, val, "score drift", "directions")
        direction: Vector = total.scaled(1.0 / len(val))
        if lam:
            anchors = ranking.sample(job.rng("drift anchors"), job.roles["anchor"], count)
            prior, _ = prior_of(self.ctx, engine, anchors, pass_settings(self.ctx))
            direction = direction.plus(prior, lam)
        self.direction = direction.held()

    def gradient(self, example: Example) -> ParamVector:
        """g_n over the candidates, from plain autograd."""
        candidates, found = self.engine.candidates, {}

        def keep(name: str, gradient: Tensor) -> None:
            found[name] = gradient.to(candidates.dtype, copy=True)

        alone(self.engine.model, candidates, self.ctx.collate([example]), keep)
        return ParamVector({name: found[name] for name in candidates})


def choose_probes(job: DiagnosticJob) -> list[Example]:
    """Pool examples in source order, half of them selected if there are enough."""
    pool, count, selected = job.roles["pool"], job.options.probes, job.selected_ids or set()
    inside = [e for e in pool if e.id in selected]
    outside = [e for e in pool if e.id not in selected]
    first = ranking.sample(job.rng("drift inside"), inside, count // 2)
    rest = ranking.sample(job.rng("drift outside"), outside, count - len(first))
    return sorted([*first, *rest], key=lambda e: e.index)


def _compare(job: DiagnosticJob, probes: list[Example], old: _Place, new: _Place) -> dict[str, Any]:
    """Compare one point with θ̄: all values that the bound and the ranks need, without η."""
    total_old, total_new = (ParamVector.zeros(old.engine.candidates) for _ in range(2))
    scores, norms, moved = [], [], []
    models = old.engine.model, new.engine.model
    with old.ctx.precise("directions", "score drift", *models):
        for example in probes:
            before, after = old.gradient(example), new.gradient(example)
            vectors: dict[str, Vector] = {"v0": old.direction, "v1": new.direction}
            vectors |= {"g0": before, "g1": after, "moved": after.plus(before, -1.0)}
            pairs = [("g0", "g0"), ("g1", "g1"), ("moved", "moved"), ("v0", "g0"), ("v1", "g1")]
            products = Products(vectors, pairs)
            scores.append((products.dot("v0", "g0"), products.dot("v1", "g1")))
            norms.append(max(products.norm("g0"), products.norm("g1")))
            moved.append(products.norm("moved"))
            for total, one in ((total_old, before), (total_new, after)):
                for name, block in total.items():
                    block.add_(one[name].to(block.device))
    both = (old.direction, total_old), (new.direction, total_new)
    entries, _ = ranking.sampled(
        [v.combine(torch.mul, total) for v, total in both],
        COORDINATES,
        job.rng("drift coordinates"),
    )
    return {
        "distance": _distance(*models),
        "scores": scores,
        "coordinates": [values.tolist() for values in entries],
        "turned": new.direction.plus(old.direction, -1.0).norm(),
        "direction_norms": max(old.direction.norm(), new.direction.norm()),
        "data": {"norm": max(norms), "moved": max(moved)},
        "param": {
            "norm": max(total_old.norm(), total_new.norm()),
            "moved": total_new.plus(total_old, -1.0).norm(),
        },
    }


@torch.no_grad()
def _distance(one: PreTrainedModel, other: PreTrainedModel) -> float:
    """‖θ_t − θ̄‖ over all parameters."""
    left, right = dict(text_parameters(one)), dict(text_parameters(other))
    parts = [float((right[n].double() - left[n].double()).square().sum()) for n in left]
    return sum(parts) ** 0.5


def _constants(points: Sequence[dict[str, Any]], side: str) -> dict[str, float]:
    """The largest observed values of B_v, L_v, B_g, L_g."""
    apart = [p for p in points if p["distance"] > 0]
    return {
        "B_v": max(p["direction_norms"] for p in points),
        "B_g": max(p[side]["norm"] for p in points),
        "L_v": max((p["turned"] / p["distance"] for p in apart), default=0.0),
        "L_g": max((p[side]["moved"] / p["distance"] for p in apart), default=0.0),
    }


def _row(
    point: dict[str, Any], constants: dict[str, dict[str, float]], eta: float
) -> dict[str, Any]:
    """One point of the trajectory in the result."""
    pairs = np.array(point["scores"])
    values = {"data": (pairs[:, 0], pairs[:, 1]), "param": np.array(point["coordinates"])}
    row: dict[str, Any] = {"step": point["step"], "distance": point["distance"]}
    for side, (before, after) in values.items():
        c = constants[side]
        drift = eta * np.abs(after - before)
        few = slice(None, None, -(-len(before) // PAIRED))
        row[side] = {
            "max_drift": float(drift.max()),
            "median_drift": float(np.median(drift)),
            "bound": eta * (c["B_v"] * c["L_g"] + c["B_g"] * c["L_v"]) * point["distance"],
            "rho": ranking.spearman(before, after),
            "pair": ranking.pair_agreement(before[few], after[few]),
        }
    return row


def _spread(eta: float, points: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Spread of the scores at θ̄, as a reference for the size of the drift."""
    at = np.array(points[0]["scores"])[:, 0] * eta
    gaps = np.abs(at[:, None] - at[None, :])[np.triu_indices(len(at), 1)]
    return {
        "median_gap": float(np.median(gaps)) if len(gaps) else None,
        "mean_score": ranking.mean_of(at.tolist()),
        "scores": at.tolist(),
    }


def draw_drift(result: Result) -> Figures:
    """Measured drift and its bound along the trajectory; rank correlation with scores at θ̄."""
    figure, (left, right) = plots.panels(1, 2, 4.6, 3.9)
    points = result["points"]
    steps, examples, entries = ([p[key] for p in points] for key in ("step", "data", "param"))
    titles = {"max_drift": "largest drift", "median_drift": "median drift", "bound": "bound"}
    plots.lines(left, steps, {title: plots.column(examples, key) for key, title in titles.items()})
    gap = result["spread"]["median_gap"]
    if gap:
        left.axhline(gap, color=COLOURS[3], linewidth=1, label="median gap between two scores")
    if any(point["bound"] > 0 or point["median_drift"] > 0 for point in examples):
        left.set_yscale("log")
    left.set_ylabel("|change of an example's score| (loss)")
    plots.legend_above(left, 2)
    plots.lines(
        right,
        steps,
        {"examples": plots.column(examples, "rho"), "entries": plots.column(entries, "rho")},
    )
    right.set_ylabel("Spearman ρ with the scores at θ̄")
    where = "θ_old" if result["start"] == "old" else "θ̄"
    for axes in (left, right):
        axes.set_xlabel(f"optimizer step of fine-tuning from {where}")
    return {"": figure}


# --- reverse selection ---------------------------------------------------------------------------


def reverse(job: DiagnosticJob) -> dict[str, Any]:
    """Train and measure every combination; finished ones are saved and reused after a kill."""
    ctx, options = job.ctx, job.options
    plain_training(ctx)
    sides = Sides(job)
    steps = options.steps or finetune_plan(ctx, len(sides.dual)).num_steps(len(sides.dual))
    plan, sets = steps_plan(ctx, steps), evaluation_sets(ctx)
    before, model = ctx.theta_old(), ctx.theta_old()
    trials = Trials(quiet(ctx), model)

    def trained(key: str) -> dict[str, Any]:
        data, params, draw = key.split("/")
        trials.run(sides.examples(data, draw), sides.entries(params, draw), plan, key)
        found = {}
        for name, rows in sets.items():
            facts, each = compare(quiet(ctx), before, model, rows, name)
            found[name] = {
                "before": facts["before"]["loss"],
                "loss": facts["after"]["loss"],
                "kl": facts["after"]["kl_to_base"],
                "each": each[:, 1].tolist(),
            }
        trials.reset()
        return found

    draws = {
        arm: [f"{'/'.join(arm)}/{n}" for n in range(options.draws if "random" in arm else 1)]
        for arm in sides.arms
    }
    keys = [key for mine in draws.values() for key in mine]
    job.each("reverse selection", "trainings", keys, trained)
    records = {arm: [job.records[key] for key in mine] for arm, mine in draws.items()}
    return {
        "steps": steps,
        "draws": options.draws,
        "b": sides.b,
        "k": sides.k,
        "arms": [_arm(*arm, mine) for arm, mine in records.items()],
        "contrasts": _contrasts(job, records),
    }


class Sides:
    """The examples and entries of each kind (dual, random, reverse)."""

    def __init__(self, job: DiagnosticJob) -> None:
        self.job, self.mask, self.dual = job, job.mask, training_examples(job.ctx, job.final)
        chosen = {axis: entry.name for axis, entry in job.ctx.methods.entries.items() if entry}
        self.b = self.k = None
        if chosen.get("data") == "dualsft" and job.selected_ids is not None:
            self.b = len(self.dual)
        if chosen.get("params") == "dualsft" and self.mask is not None:
            self.k = sum(index.numel() for index in self.mask.values())
        if self.b is None and self.k is None:
            raise RunError(
                "reverse: the run selects neither the highest-scored examples nor entries; use it "
                "on a run of dualsft"
            )
        pairs = [(d if self.b else AS_RUN, p if self.k else AS_RUN) for d, p in ARMS]
        self.arms = list(dict.fromkeys(pairs))
        """Combinations (examples, entries) of this run."""

    @cached_property
    def _lowest_examples(self) -> np.ndarray:
        assert self.b is not None
        return self.job.scoring.choose_examples(self.b, reverse=True).positions

    @cached_property
    def _lowest_entries(self) -> Mapping[str, Tensor]:
        assert self.k is not None
        indices = self.job.scoring.choose_entries(self.k, reverse=True).indices
        return {name: index for name, index in indices.items() if index.numel()}

    def examples(self, kind: str, draw: str) -> Sequence[Example]:
        if kind in ("dual", AS_RUN):
            return self.dual
        pool = self.job.roles["pool"]
        if kind == "random":
            chosen = self.job.rng(f"reverse examples {draw}").choice(len(pool), self.b, False)
        else:
            chosen = self._lowest_examples
        return [pool[i] for i in np.sort(chosen)]

    def entries(self, kind: str, draw: str) -> Mapping[str, Tensor] | None:
        if kind in ("dual", AS_RUN):
            return self.mask
        if kind == "reverse":
            return self._lowest_entries
        assert self.k is not None
        sizes = {name: shape.numel() for name, shape in self.job.ctx.candidate_shapes.items()}
        return ranking.stratified_mask(self.job.rng(f"reverse entries {draw}"), sizes, self.k)


def _arm(data: str, params: str, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One combination: each measure averaged over its draws, and the loss of each draw."""
    files = {}
    for name in records[0]:
        losses = [record[name]["loss"] for record in records]
        files[name] = {
            "before": records[0][name]["before"],
            "loss": ranking.mean_of(losses),
            "losses": losses,
            "kl": ranking.mean_of([record[name]["kl"] for record in records]),
        }
    return {"data": data, "params": params, "files": files}


def _contrasts(
    job: DiagnosticJob, records: Mapping[tuple[str, ...], list[Any]]
) -> list[dict[str, Any]]:
    """Compare each reverse or dual combination with its matched control, paired by validation row.

    The control has a random draw in place of the side under test. A positive difference means a
    higher loss than the random control. The interval resamples the validation rows, not the
    trainings.
    """
    rng, rows = job.rng("reverse bootstrap"), []
    losses = {
        arm: np.mean([record["validation"]["each"] for record in mine], axis=0)
        for arm, mine in records.items()
    }
    for arm in records:
        controls: list[tuple[str, ...]] = []
        if "reverse" in arm:
            controls = [tuple("random" if side == "reverse" else side for side in arm)]
        elif "random" not in arm:  # one control per random side, and one with both random
            controls = [c for c in records if c != arm and {*c} <= {*arm, "random"}]
        for control in controls:
            difference = losses[arm] - losses[control]
            picks = rng.integers(len(difference), size=(RESAMPLES, len(difference)))
            low, high = ranking.interval(difference[picks].mean(1))
            rows.append(
                {
                    "arm": "/".join(arm),
                    "control": "/".join(control),
                    "difference": float(difference.mean()),
                    "low": low,
                    "high": high,
                }
            )
    return rows


def draw_reverse(result: Result) -> Figures:
    """Loss of every combination after training, one panel per file, and KL to θ_old."""
    arms = result["arms"]
    files = list(arms[0]["files"])
    figure, columns = plots.panels(1, len(files) + 1, 3.4, 1.2 + 0.42 * len(arms))
    order = {"dual": 0, "as run": 0, "random": 1, "reverse": 2}
    measures = [(name, "loss", f"loss on {name}") for name in files]
    measures.append(("validation", "kl", "KL to θ_old on validation (nats)"))
    for axes, (name, key, title) in zip(columns, measures, strict=True):
        for i, arm in enumerate(arms):
            facts, rank = arm["files"][name], max(order[arm["data"]], order[arm["params"]])
            axes.plot(facts[key], i, MARKERS[rank], color=COLOURS[rank], markersize=7)
            if key == "loss":
                draws = facts["losses"]
                axes.hlines(i, min(draws), max(draws), COLOURS[rank], linewidth=1)
        if key == "loss":
            before = arms[0]["files"][name]["before"]
            plots.guide(axes, x=before)
            axes.annotate("θ_old", (before, -0.45), fontsize=7, color="#555555")
        axes.set_xlabel(title, fontsize=8)
    plots.rows_axis(columns, [f"D {arm['data']}, P {arm['params']}" for arm in arms])
    steps = result["steps"]
    figure.suptitle(f"Reverse selection after {steps} steps (lower is better)", fontsize=10)
    return {"": figure}
