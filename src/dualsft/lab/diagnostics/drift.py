"""Score drift along fine-tuning, with the paper's bound (Eq. score_drift_bound).

The first-order data score at θ is s_n(θ) = η ⟨∇L_val(θ), ∇ℓ_n(θ)⟩. Along a restricted fine-tuning
it differs from its value at θ̄ by at most η (B_v L_g + B_g L_v) ‖θ_t − θ̄‖, with bounds B on the
norms of the two gradients and Lipschitz constants L. The true constants are unknown, so the largest
observed values are used: B over all points, and L the largest ‖∇(θ_t) − ∇(θ̄)‖ / ‖θ_t − θ̄‖. With
these the bound holds at every measured point, and the result shows how loose it is. Distances are
over all parameters (the warmup moves more than the candidates), gradients over the candidates.

The trajectory uses the mask, examples and schedule of the run, and starts from θ_old as in
Algorithm 1 line 12, or from θ̄ as in the paper's fidelity protocol. For parameters the score is
s_d = η v_d Γ_d, where Γ is the sum of the gradients of the probed examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from dualsft.data.examples import Example
from dualsft.engine.ghost import GhostEngine, alone
from dualsft.engine.walk import loss_objective, walk
from dualsft.errors import RunError
from dualsft.lab.diagnostics.agreement import mean_of, number, pair_agreement
from dualsft.lab.diagnostics.job import DiagnosticJob
from dualsft.lab.diagnostics.ranking import sampled, spearman
from dualsft.lab.diagnostics.trials import Trials, plain_training, quiet, sample
from dualsft.memory.placement import blank
from dualsft.model.load import text_parameters
from dualsft.runs.context import RunContext, pass_settings
from dualsft.runs.stages.finetune import finetune_plan, training_examples
from dualsft.runs.stages.gradients import prior_of
from dualsft.runs.stages.selection import read_mask
from dualsft.storage.vectors import ParamVector, Products, Vector

COORDINATES = 1 << 14
"""Most entries whose scores are ranked."""
PAIRED = 2048
"""Most scores that are compared in pairs, which costs quadratic time."""


def run(job: DiagnosticJob) -> dict[str, Any]:
    """Repeat the run's fine-tuning and score the probes at some points of it."""
    ctx, options = job.ctx, job.options
    plain_training(ctx)
    final = job.final
    indices = read_mask(final) if (final / "mask.safetensors").is_file() else None
    examples, plan = training_examples(ctx, final), finetune_plan(ctx)
    num_steps = plan.num_steps(len(examples))
    if num_steps == 0:
        raise RunError("drift: the run's fine-tuning has no steps (finetune.epochs is 0)")
    points = sorted({round(num_steps * i / options.points) for i in range(options.points + 1)})
    probes = _probes(job, options.probes)
    reference = _Place.of(job, job.scoring.engine, probes)
    load = ctx.theta_old if options.start == "old" else ctx.theta_bar
    # `start` is trained by the optimizer; gradients are computed in `copy`, which gets its weights
    start, copy = load(), load()
    engine = job.engine(copy)
    told: list[dict[str, Any]] = []
    label = f"score drift (from θ_{'old' if options.start == 'old' else 'bar'})"
    with job.reporter.track(label, len(points), "points") as progress:

        def look(done: int) -> None:
            if done in points:
                copy.load_state_dict(start.state_dict())
                told.append(
                    {"step": done} | _compare(job, reference, _Place.of(job, engine, probes))
                )
                progress.advance(1)

        def resume(points_done: dict[str, Any]) -> None:
            told[:] = points_done["points"]
            progress.advance(len(told) - 1)  # the start was already counted

        look(0)
        trials = Trials(quiet(ctx), start, ctx.pieces)
        memory = (lambda: {"points": told}, resume)
        trials.run(examples, indices, plan, "fine-tuning", look, memory=memory)
    constants = {side: _constants(told, side) for side in ("data", "param")}
    eta = job.scoring.scored.terms.eta_sc
    rows = [_row(point, constants, eta) for point in told]
    return {
        "start": options.start,
        "eta": eta,
        "steps": num_steps,
        "probes": len(reference.probes),
        "val_rows": len(reference.val),
        "constants": constants,
        "spread": _spread(eta, told),
        "points": rows,
    }


@dataclass
class _Place:
    """∇L_val at one θ, and the engine that computes the probes' gradients there."""

    ctx: RunContext
    engine: GhostEngine
    val: list[Example]
    probes: list[Example]
    direction: Vector

    @classmethod
    def of(cls, job: DiagnosticJob, engine: GhostEngine, probes: list[Example]) -> _Place:
        options, roles, ctx = job.options, job.roles, quiet(job.ctx)
        val = sample(job.rng("drift validation"), roles["val"], options.val_rows)
        anchors = sample(job.rng("drift anchors"), roles["anchor"], options.val_rows)
        direction: Vector = _sum(ctx, engine, val).scaled(1.0 / len(val))
        lam = job.scoring.scored.terms.lam_effective
        if lam:
            prior, _ = prior_of(ctx, engine, anchors, pass_settings(ctx))
            direction = direction.plus(prior, lam)
        return cls(ctx, engine, val, probes, direction.held())

    def gradient(self, example: Example) -> ParamVector:
        """g_n over the candidates, from plain autograd."""
        batch = pass_settings(self.ctx).collate([example], self.engine.device)
        candidates, found = self.engine.candidates, {}

        def keep(name: str, gradient: Tensor) -> None:
            found[name] = gradient.to(candidates.dtype, copy=True)

        alone(self.engine.model, candidates, batch, keep)
        return ParamVector({name: found[name] for name in candidates})


def _sum(ctx: RunContext, engine: GhostEngine, rows: list[Example]) -> ParamVector:
    sums = blank(engine.candidates, engine.candidates.dtype)
    objective, settings = loss_objective(engine.model), pass_settings(ctx)
    with ctx.precise("directions", "score drift", engine.model):
        walk(engine, rows, objective, settings, ctx.reporter, "drift", sums=sums)
    return sums


def _probes(job: DiagnosticJob, count: int) -> list[Example]:
    """`count` pool examples in source order, half of them selected if there are enough."""
    pool = job.roles["pool"]
    inside: list[Example] = []
    if (job.final / "ids.json").is_file():
        inside = [e for e in pool if e.id in job.selected_ids]
    taken = {e.id for e in inside}
    outside = [e for e in pool if e.id not in taken]
    first = sample(job.rng("drift inside"), inside, count // 2)
    rest = sample(job.rng("drift outside"), outside, count - len(first))
    return sorted([*first, *rest], key=lambda e: e.index)


def _compare(job: DiagnosticJob, old: _Place, new: _Place) -> dict[str, Any]:
    """Compare one point with θ̄: all values that the bound and the ranks need, without η."""
    total_old, total_new = (ParamVector.zeros(old.engine.candidates) for _ in range(2))
    scores, norms, moved = [], [], []
    models = old.engine.model, new.engine.model
    with old.ctx.precise("directions", "score drift", *models):
        for example in old.probes:
            before, after = old.gradient(example), new.gradient(example)
            vectors = {"v0": old.direction, "v1": new.direction, "g0": before, "g1": after}
            vectors["moved"] = after.plus(before, -1.0)
            pairs = [("g0", "g0"), ("g1", "g1"), ("moved", "moved"), ("v0", "g0"), ("v1", "g1")]
            products = Products(vectors, pairs)
            scores.append((products.dot("v0", "g0"), products.dot("v1", "g1")))
            norms.append(max(products.norm("g0"), products.norm("g1")))
            moved.append(products.norm("moved"))
            for total, one in ((total_old, before), (total_new, after)):
                for name, block in total.items():
                    block.add_(one[name].to(block.device))
    turned = new.direction.plus(old.direction, -1.0).norm()
    coordinates = _coordinates(job, old, new, total_old, total_new)
    return {
        "distance": _distance(old.engine.model, new.engine.model),
        "scores": scores,
        "coordinates": coordinates,
        "turned": turned,
        "direction_norms": max(old.direction.norm(), new.direction.norm()),
        "data": {"norm": max(norms), "moved": max(moved)},
        "param": {
            "norm": max(total_old.norm(), total_new.norm()),
            "moved": total_new.plus(total_old, -1.0).norm(),
        },
    }


def _coordinates(
    job: DiagnosticJob, old: _Place, new: _Place, total_old: Vector, total_new: Vector
) -> list[list[float]]:
    """v_d Γ_d at θ̄ and at θ_t, for the same sample of entries."""
    vectors = [
        old.direction.combine(torch.mul, total_old),
        new.direction.combine(torch.mul, total_new),
    ]
    found, _ = sampled(vectors, COORDINATES, job.rng("drift coordinates"))
    return [values.tolist() for values in found]


@torch.no_grad()
def _distance(one: PreTrainedModel, other: PreTrainedModel) -> float:
    """‖θ_t − θ̄‖ over all parameters."""
    left, right = dict(text_parameters(one)), dict(text_parameters(other))
    parts = [float((right[n].double() - left[n].double()).square().sum()) for n in left]
    return sum(parts) ** 0.5


def _constants(told: Sequence[dict[str, Any]], side: str) -> dict[str, float]:
    """The largest observed values of B_v, L_v, B_g, L_g."""
    apart = [p for p in told if p["distance"] > 0]

    def steepest(values: Sequence[tuple[float, float]]) -> float:
        return max((change / distance for change, distance in values), default=0.0)

    return {
        "B_v": max(p["direction_norms"] for p in told),
        "B_g": max(p[side]["norm"] for p in told),
        "L_v": steepest([(p["turned"], p["distance"]) for p in apart]),
        "L_g": steepest([(p[side]["moved"], p["distance"]) for p in apart]),
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
            "rho": spearman(before, after),
            "pair": pair_agreement(before[few], after[few]),
        }
    return row


def _spread(eta: float, told: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Spread of the scores at θ̄, as a reference for the size of the drift."""
    at = np.array(told[0]["scores"])[:, 0] * eta
    gaps = np.abs(at[:, None] - at[None, :])[np.triu_indices(len(at), 1)]
    return {
        "median_gap": number(float(np.median(gaps))) if len(gaps) else None,
        "mean_score": mean_of(at.tolist()),
        "scores": at.tolist(),
    }
