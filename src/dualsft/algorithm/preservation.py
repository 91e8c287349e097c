"""v_prior, the preservation direction: Algorithm 1 line 6.

`cwsd` is the paper's confidence-weighted self-distillation (Eq. cwsd): teacher θ_old, student θ̄,
on the text of the anchors. `l2` is θ̄ − θ_old; `fisher` is F ⊙ (θ̄ − θ_old) with F the mean over
the anchors of the squared per-example gradient at θ_old, true labels; `none` is zero. Without
a warmup θ̄ = θ_old and all of them are exactly zero. v_prior is stored without the factor λ, which
`projection.py` applies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dualsft.data.examples import Example, collate
from dualsft.distributed.world import world
from dualsft.engine.fused import fused_blocks
from dualsft.engine.ghost import GhostEngine, alone
from dualsft.engine.precision import precise
from dualsft.engine.walk import PassSettings, cwsd_objective, loss_objective, walk
from dualsft.memory.placement import blank
from dualsft.model.sharded import weights_vector
from dualsft.storage.resume import State
from dualsft.storage.vectors import ParamVector, Vector
from dualsft.system.progress import Reporter


def prior_gradient(
    kind: Literal["cwsd", "l2", "fisher", "none"],
    engine: GhostEngine,
    load_theta_old: Callable[[], PreTrainedModel] | None,
    anchors: Sequence[Example],
    tau: float,
    passes: PassSettings,
    reporter: Reporter,
) -> tuple[Vector, float]:
    """(v_prior over the candidates, preservation loss).

    `load_theta_old` is None without a warmup, where θ̄ = θ_old.
    """
    if kind == "none" or load_theta_old is None:
        if kind != "none":
            reporter.say(f"no warmup, so θ̄ = θ_old and v_prior ({kind}) is exactly zero")
        return _weights(engine, engine.model).combine(torch.zeros_like), 0.0
    theta_old = load_theta_old()
    if kind == "cwsd":
        label = "v_prior (CWSD on the anchors)"
        sums = blank(engine.candidates, engine.candidates.dtype)
        with (
            precise(
                passes.precision, "directions", label, reporter.warn, engine.model, theta_old
            ) as (student, teacher),
            fused_blocks(teacher, wide=True),  # same numerics as the student
        ):
            objective, at = cwsd_objective(teacher, student, tau), engine.on(student)
            result = walk(at, anchors, objective, passes, reporter, label, sums=sums)
        return sums.scaled(1.0 / len(anchors)), float(result.values.mean())
    moved = _weights(engine, engine.model).plus(_weights(engine, theta_old), -1.0)  # θ̄ − θ_old
    if kind == "l2":
        return moved, 0.5 * moved.norm() ** 2
    fisher = _fisher(engine.on(theta_old), anchors, passes, reporter)
    weighted = moved.combine(torch.mul, fisher)
    return weighted, 0.5 * weighted.dot(moved)


def _weights(engine: GhostEngine, model: PreTrainedModel) -> Vector:
    """A model's weights over the candidates, converted to the dtype of G on access."""
    return weights_vector(model, engine.candidates).to(engine.device, engine.candidates.dtype)


def _fisher(
    engine: GhostEngine, anchors: Sequence[Example], passes: PassSettings, reporter: Reporter
) -> Vector:
    """Mean over the anchors of the squared per-example gradient.

    Computed in batches, or one example at a time if a weight is used more than once.
    """
    candidates, label = engine.candidates, "v_prior (Fisher on the anchors)"
    if engine.separable:
        squares = blank(candidates, candidates.dtype)
        objective = loss_objective(engine.model)
        walk(engine, anchors, objective, passes, reporter, label, sums=squares, squared=True)
        return squares.scaled(1.0 / len(anchors))
    total = ParamVector.zeros(candidates)

    def add_square(name: str, gradient: Tensor) -> None:
        wide = gradient.to(total[name].dtype)
        total[name].addcmul_(wide, wide)

    piece, done = passes.pieces.load("fisher"), 0
    if piece is not None:
        done = piece.facts["done"]
        for name, block in total.items():
            block.copy_(piece.tensors[f"squares.{name}"])
    with (
        reporter.track(label, len(anchors), "examples", done) as progress,
        passes.pieces.loop(),
    ):
        for turn in world().turns(anchors[done:]):
            if (example := world().mine(turn)) is not None:
                batch = collate([example], passes.pad_id, passes.padding_side, engine.device)
                alone(engine.model, candidates, batch, add_square)
            done += len(turn)
            progress.advance(len(turn), tokens=sum(e.num_tokens for e in turn))
            where = f"{label}: {done:,} of {len(anchors):,} examples"
            passes.pieces.tick("fisher", partial(_squares, total, done), where)
    for block in total.values():
        world().sum_(block)
    return total.scaled(1.0 / len(anchors))


def _squares(total: ParamVector, done: int) -> State:
    """State to save: each process holds the squares of its own examples."""
    tensors = {f"squares.{name}": block for name, block in total.items()}
    return tensors, {"done": done, "layout": {"squares": "terms"}}
