"""The vectors that u is made of: ĉ, G, v_new and v_prior (Algorithm 1 lines 1, 3, 5 and 6).

All are taken at θ̄. ĉ = sqrt(r / (1 - beta2^t)) + eps, with the second moment r, beta2, step count t
and eps of the warmup optimizer (the training loop is `train/loop.py`). G is the sum of the
gradients of the pool. Given a direction U₀ known before the pool pass (`ProjectionTerms.estimate`),
the same pass also computes f_n = ⟨U₀, g_n⟩ and the inner sums of the bound on the error of U₀
(`scores.py`). v_new is the gradient of the mean validation loss.

v_prior is one of: `cwsd`, the paper's confidence-weighted self-distillation (Eq. cwsd), teacher
θ_old, student θ̄, on the text of the anchors; `l2`, θ̄ − θ_old; `fisher`, F ⊙ (θ̄ − θ_old) with F the
mean over the anchors of the squared per-example gradient at θ_old, true labels; `none`, zero.
Without a warmup θ̄ = θ_old and all of them are exactly zero. It is stored without the factor λ,
which `projection.py` applies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dualsft.data.examples import Example
from dualsft.distributed.world import world
from dualsft.engine.fused import fused_blocks
from dualsft.engine.ghost import GhostEngine, alone
from dualsft.engine.passes import precise
from dualsft.engine.sketch import Sketch
from dualsft.engine.walk import PassResult, PassSettings, cwsd_objective, loss_objective, walk
from dualsft.errors import ConfigError
from dualsft.memory.placement import blank
from dualsft.model.load import Candidates
from dualsft.model.sharded import weights_vector
from dualsft.storage.resume import State
from dualsft.storage.tensor_files import Form
from dualsft.storage.vectors import LazyVector, ParamVector, Seen, Vector
from dualsft.system.progress import Reporter
from dualsft.train.optimizer import SparseAdamW

PART = 1 << 24  # entries compared at a time


def adam_rms(optimizer: SparseAdamW, candidates: Candidates) -> LazyVector:
    """ĉ over the candidates, read piece by piece from the optimizer's state."""
    group = optimizer.param_groups[0]
    beta2, eps = group["betas"][1], group["eps"]

    def piece(name: str, start: int, stop: int, _: Seen) -> Tensor:
        first = world().held(candidates[name].shape)[0]
        if start == stop:
            return torch.empty(0, dtype=candidates.dtype)
        second = optimizer.second_moment(name, start - first, stop - first)
        # a parameter without updates has second moment zero: avoid dividing by zero
        unbiased = second / (1.0 - beta2 ** float(optimizer.num_updates(name) or 1))
        return unbiased.sqrt_().add_(eps).to(candidates.dtype)

    forms = {name: Form(candidates.dtype, p.shape) for name, p in candidates.items()}
    return LazyVector(forms, next(iter(candidates.values())).device, piece)


@torch.no_grad()
def rounding_norm(optimizer: SparseAdamW) -> float:
    """‖θ̄ − its fp32 master weights‖: the rounding error of θ̄."""
    total = torch.zeros((), dtype=torch.float64)
    for name in optimizer.names:
        weight = optimizer.weight(name)
        for first in range(0, weight.numel(), PART):
            last = min(first + PART, weight.numel())
            exact = optimizer.master(name, first, last)
            apart = torch.linalg.vector_norm(exact - weight[first:last].to(exact))
            total += apart.cpu().double() ** 2
    return float(world().sum_rows_(total).sqrt())


def validation_gradient(
    engine: GhostEngine,
    val: Sequence[Example],
    passes: PassSettings,
    reporter: Reporter,
    sketch: Sketch | None = None,
) -> tuple[Vector, PassResult]:
    """(v_new, losses and, given a sketch, sketches of the validation examples): Algorithm 1
    line 5."""
    sums, label = blank(engine.candidates, engine.candidates.dtype), "v_new (validation)"
    with precise(passes.precision, "directions", label, reporter.warn, engine.model) as (wide,):
        at, objective = engine.on(wide), loss_objective(wide)
        result = walk(at, val, objective, passes, reporter, label, sums=sums, sketch=sketch)
    return sums.scaled(1.0 / len(val)), result


def pool_gradient(
    engine: GhostEngine,
    pool: Sequence[Example],
    passes: PassSettings,
    reporter: Reporter,
    direction: Vector | None = None,
    sketch: Sketch | None = None,
) -> tuple[Vector, PassResult]:
    """G and the outputs per example: losses; with a direction also f_n and inner sums; with a
    sketch also the sketches. Algorithm 1 line 3."""
    grad_sum = blank(engine.candidates, engine.candidates.dtype)
    label = "pool (G)" if direction is None else "pool (G and f)"
    with precise(passes.precision, "pool", label, reporter.warn, engine.model) as (wide,):
        result = walk(
            engine.on(wide),
            pool,
            loss_objective(wide),
            passes,
            reporter,
            label,
            sums=grad_sum,
            direction=direction,
            bounds=direction is not None,
            sketch=sketch,
        )
    return grad_sum, result


def sketches_only(
    engine: GhostEngine,
    examples: Sequence[Example],
    passes: PassSettings,
    reporter: Reporter,
    role: Literal["validation", "pool"],
    sketch: Sketch,
) -> PassResult:
    """Losses and sketches of the examples, where nothing needs the sums of their gradients."""
    what, label = "pool" if role == "pool" else "directions", f"{role} (sketches)"
    with precise(passes.precision, what, label, reporter.warn, engine.model) as (wide,):
        at, objective = engine.on(wide), loss_objective(wide)
        return walk(at, examples, objective, passes, reporter, label, sketch=sketch)


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
    if world().sharded:  # other refusals come before the run; experts are known with the model
        raise ConfigError(
            "score.preservation: fisher squares full gradients of routed experts, which a sharded "
            "model does not have; use cwsd or l2, or parallel.mode=replicate"
        )
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
                batch = passes.collate([example], engine.device)
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
