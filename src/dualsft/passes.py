"""One walk over examples with the ghost engine: the pool pass, v_new, v_prior, re-scoring.

Algorithm 1 lines 3, 5, 6 and 8 are this walk with different objectives and different things
collected. Batches are bucketed by length under a token budget; a batch is reduced by the sum over
its examples, in eval mode, so no result depends on the batch size, the padding side or the order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from dualsft.data import Batch, Example, collate, make_batches
from dualsft.errors import ConfigError, RunError
from dualsft.ghost import GhostEngine, alone
from dualsft.losses import (
    HeadObserver,
    distillation_objective,
    example_objective,
    plain_example_loss,
)
from dualsft.progress import Reporter
from dualsft.vectors import ParamVector

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-3, torch.float16: 5e-3}
"""What the self-checks allow, by dtype (bf16: measured at most 4e-4 on a real model)."""

# (batch, observer of the head) → (objective to differentiate, value per example)
Objective = Callable[[Batch, HeadObserver | None], tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class PassSettings:
    """How examples become batches."""

    batch_tokens: int
    pad_id: int
    padding_side: str


@dataclass(frozen=True)
class PassResult:
    """Per example, in the order given: the objective's value, ⟨U, g_n⟩ and the bounds' sums."""

    values: np.ndarray
    dots: np.ndarray
    inner_sums: np.ndarray


def loss_objective(model: PreTrainedModel) -> Objective:
    """The example loss, summed over the batch."""
    return lambda batch, observer: example_objective(model, batch, observer=observer)


def cwsd_objective(teacher: PreTrainedModel, student: PreTrainedModel, tau: float) -> Objective:
    """ω τ² KL(teacher ‖ student), summed over the batch."""

    def objective(batch: Batch, observer: HeadObserver | None) -> tuple[Tensor, Tensor]:
        total, divergence, omega = distillation_objective(
            teacher, student, batch, tau, observer=observer
        )
        return total, divergence * omega

    return objective


def walk(
    engine: GhostEngine,
    examples: Sequence[Example],
    objective: Objective,
    settings: PassSettings,
    reporter: Reporter,
    label: str,
    *,
    sums: ParamVector | None = None,
    direction: ParamVector | None = None,
    bounds: bool = False,
) -> PassResult:
    """Differentiate `objective` over the examples, collecting what is asked for."""
    count = len(examples)
    width = len(engine.columns) if bounds else 0
    result = PassResult(np.zeros(count), np.zeros(count), np.zeros((count, width), np.float32))
    if engine.candidates.dtype == torch.float64:
        result = PassResult(result.values, result.dots, result.inner_sums.astype(np.float64))
    with (
        engine.tapped(sums=sums, direction=direction, bounds=bounds) as taps,
        reporter.track(label, count, "examples") as progress,
    ):
        observer = engine.head_observer(taps)
        for rows in make_batches(examples, settings.batch_tokens):
            batch = _collate([examples[i] for i in rows], settings, engine.device)
            taps.begin(len(rows))
            total, values = objective(batch, observer)
            total.backward()
            result.values[rows] = values.cpu().numpy()
            result.dots[rows] = taps.dots.cpu().numpy()
            result.inner_sums[rows] = taps.inner_sums.cpu().numpy()
            _refuse_nonfinite(label, rows, examples, result)
            progress.advance(len(rows), tokens=sum(examples[i].num_tokens for i in rows))
    if sums is not None and (name := sums.first_nonfinite()) is not None:
        raise RunError(f"{label}: the summed gradient of {name} is not finite; nothing was written")
    return result


def _collate(examples: Sequence[Example], settings: PassSettings, device: torch.device) -> Batch:
    return collate(examples, settings.pad_id, settings.padding_side, device)


def _refuse_nonfinite(
    label: str, rows: Sequence[int], examples: Sequence[Example], result: PassResult
) -> None:
    finite = np.isfinite(result.values[rows]) & np.isfinite(result.dots[rows])
    if not finite.all():
        bad = [examples[i].id for i, ok in zip(rows, finite, strict=True) if not ok]
        raise RunError(
            f"{label}: the loss or gradient of {', '.join(bad[:5])} is not finite; nothing was "
            "written (look at these rows, or use model.dtype=float32)"
        )


def check_fused_loss(
    model: PreTrainedModel, example: Example, settings: PassSettings, tolerance: float
) -> None:
    """Our chunked head and loss against the model's own, on one example; refused by name.

    A model that does more to its logits than a linear head (soft-capping, scaling) would be
    trained, scored and evaluated on something else than what it computes.
    """
    device = next(model.parameters()).device
    batch = _collate([example], settings, device)
    with torch.no_grad():
        ours = float(example_objective(model, batch)[1])
        own = float(plain_example_loss(model, batch))
    if not abs(ours - own) <= tolerance * max(1.0, abs(own)):
        raise ConfigError(
            f"{type(model).__name__}: its own loss of example {example.id} is {own:.6g}, through "
            f"the linear head alone it is {ours:.6g}; the model changes its logits (soft-capping "
            "or scaling?) and cannot be scored yet"
        )


def dot_alone(
    engine: GhostEngine, example: Example, direction: ParamVector, settings: PassSettings
) -> tuple[float, float]:
    """(⟨U, g_n⟩, ‖g_n‖) of one example by plain autograd: no batch, no rule, no fused loss."""
    batch = _collate([example], settings, engine.device)
    totals = [0.0, 0.0]

    def visit(name: str, gradient: Tensor) -> None:
        block = ParamVector({name: gradient})
        totals[0] += block.dot(direction)
        totals[1] += block.norm() ** 2

    alone(engine.model, engine.candidates, batch, visit)
    return totals[0], totals[1] ** 0.5
