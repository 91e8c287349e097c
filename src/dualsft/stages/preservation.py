"""v_prior, the preservation direction: Algorithm 1 line 6.

`cwsd` is the paper's confidence-weighted self-distillation (Eq. cwsd): teacher θ_old, student θ̄,
on the anchors' own text. `l2` is θ̄ − θ_old; `fisher` is F ⊙ (θ̄ − θ_old) with F the mean over
the anchors of the squared gradient of one example at θ_old, true labels; `none` is zero. Without
a warmup θ̄ = θ_old and all of them are exactly zero. Stored unscaled: λ comes later.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dualsft.context import RunContext
from dualsft.data import Example, collate
from dualsft.fused import fused_blocks
from dualsft.ghost import GhostEngine, alone
from dualsft.passes import PassSettings, cwsd_objective, walk
from dualsft.placement import blank
from dualsft.precision import precise
from dualsft.vectors import ParamVector, Vector


def prior_gradient(
    ctx: RunContext, engine: GhostEngine, anchors: list[Example], settings: PassSettings
) -> tuple[Vector, float]:
    """(v_prior over the candidates, the preservation loss itself)."""
    kind = ctx.config.score.preservation
    if kind == "none" or not ctx.warmed_up:
        if kind != "none":
            ctx.reporter.say(f"no warmup, so θ̄ = θ_old and v_prior ({kind}) is exactly zero")
        return _weights(engine, engine.model).combine(torch.zeros_like), 0.0
    theta_old = ctx.theta_old()
    if kind == "cwsd":
        objective = cwsd_objective(theta_old, engine.model, ctx.config.score.tau)
        label = "v_prior (CWSD on the anchors)"
        sums = blank(engine.candidates, engine.candidates.dtype)
        with (
            precise(ctx, "directions", label, engine.model, theta_old),
            fused_blocks(theta_old, wide=True),  # the teacher computes as the student does
        ):
            result = walk(engine, anchors, objective, settings, ctx.reporter, label, sums=sums)
        return sums.scaled(1.0 / len(anchors)), float(result.values.mean())
    moved = _weights(engine, engine.model).plus(_weights(engine, theta_old), -1.0)  # θ̄ − θ_old
    if kind == "l2":
        return moved, 0.5 * moved.norm() ** 2
    fisher = _fisher(ctx, theta_old, anchors, settings)
    weighted = moved.combine(torch.mul, fisher)
    return weighted, 0.5 * weighted.dot(moved)


def _weights(engine: GhostEngine, model: PreTrainedModel) -> Vector:
    """A model's own weights over the candidates, in G's dtype when they are asked for."""
    parameters = dict(model.named_parameters())
    weights = ParamVector({name: parameters[name].detach() for name in engine.candidates})
    return weights.to(engine.device, engine.candidates.dtype)


def _fisher(
    ctx: RunContext, theta_old: PreTrainedModel, anchors: list[Example], settings: PassSettings
) -> Vector:
    """Mean over the anchors of the squared gradient of one example: one example at a time."""
    candidates = ctx.candidates(theta_old)
    total = ParamVector.zeros(candidates)

    def add_square(name: str, gradient: Tensor) -> None:
        wide = gradient.to(total[name].dtype)
        total[name].addcmul_(wide, wide)

    piece, done = settings.pieces.load("fisher"), 0
    if piece is not None:
        done = piece.facts["done"]
        for name, block in total.items():
            block.copy_(piece.tensors[name])
    label = "v_prior (Fisher on the anchors)"
    with (
        ctx.reporter.track(label, len(anchors), "examples", done) as progress,
        settings.pieces.loop(),
    ):
        for number, example in enumerate(anchors[done:], done + 1):
            batch = collate([example], settings.pad_id, settings.padding_side, ctx.device)
            alone(theta_old, candidates, batch, add_square)
            progress.advance(1, tokens=example.num_tokens)
            where = f"{label}: {number:,} of {len(anchors):,} examples"
            settings.pieces.tick("fisher", lambda n=number: (total, {"done": n}), where)
    return total.scaled(1.0 / len(anchors))
