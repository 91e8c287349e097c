"""Training with a fixed weight for every response token: what FLOW and STM share (METHODS.md D).

A step minimises Σ weight · token loss / total, the total taken over the whole optimizer step, so
that cutting it into micro-batches changes nothing. The losses that are reported stay unweighted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dualsft.data.examples import IGNORE, Batch, Example
from dualsft.engine.losses import weighted_objective
from dualsft.runs.method import Job
from dualsft.storage.vectors import accumulation_dtype
from dualsft.train.loop import Hooks


class TokenWeights(ABC):
    """The weight of every response token of every example, and what their sum is divided by."""

    denominator = 0.0

    @abstractmethod
    def of(self, example: Example) -> Tensor:
        """One weight a predicted response token."""

    @abstractmethod
    def total(self, examples: Sequence[Example]) -> float:
        """What the weighted losses of an optimizer step's examples are divided by."""

    def hooks(self) -> Hooks:
        return Hooks(objective=self._objective, before_step=self._before_step)

    def _before_step(self, model: PreTrainedModel, pieces: Sequence[Sequence[Example]]) -> None:
        self.denominator = self.total([example for piece in pieces for example in piece])

    def _objective(
        self, model: PreTrainedModel, batch: Batch, rows: Sequence[Example], scale: float
    ) -> tuple[Tensor, Tensor]:
        # a step in which nothing counts has a zero gradient, not 0 / 0
        weight_M = torch.cat([self.of(example) for example in rows]) / max(self.denominator, 1.0)
        wide = accumulation_dtype(next(model.parameters()).dtype)
        return weighted_objective(model, batch, weight_M.to(wide).to(batch.input_ids.device))


def num_predicted(example: Example) -> int:
    """Response tokens that something stands before (a text without BOS starts with one less)."""
    return sum(label != IGNORE for label in example.labels[1:])


def base_model(job: Job, model: PreTrainedModel) -> PreTrainedModel:
    """θ_old: the model given, unless training starts from other weights."""
    started = (job.ctx.folder("selection") / "start").is_dir()
    return job.ctx.theta_old() if started else model
