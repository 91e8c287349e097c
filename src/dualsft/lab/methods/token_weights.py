"""Training with a fixed weight per response token, shared by FLOW and STM.

A step minimizes Σ weight · token loss / total (Algorithm 1 line 12 with a weighted loss). The total
is taken over the whole optimizer step, so the result does not depend on micro-batches. Reported
losses are unweighted.
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
    """Weights of the response tokens of each example, and the denominator of the weighted loss."""

    denominator = 0.0

    @abstractmethod
    def of(self, example: Example) -> Tensor:
        """One weight per predicted response token."""

    @abstractmethod
    def total(self, examples: Sequence[Example]) -> float:
        """Denominator of the weighted loss of an optimizer step with these examples."""

    def hooks(self) -> Hooks:
        return Hooks(objective=self._objective, before_step=self._before_step)

    def _before_step(self, model: PreTrainedModel, pieces: Sequence[Sequence[Example]]) -> None:
        self.denominator = self.total([example for piece in pieces for example in piece])

    def _objective(
        self, model: PreTrainedModel, batch: Batch, rows: Sequence[Example], scale: float
    ) -> tuple[Tensor, Tensor]:
        # if every token of the step is masked, the gradient is zero, not 0 / 0
        weight_M = torch.cat([self.of(example) for example in rows]) / max(self.denominator, 1.0)
        wide = accumulation_dtype(next(model.parameters()).dtype)
        return weighted_objective(model, batch, weight_M.to(wide).to(batch.input_ids.device))


def num_predicted(example: Example) -> int:
    """Number of response tokens that are predicted: the first token of a sequence is not, so a
    response that starts a text without BOS has one fewer."""
    return sum(label != IGNORE for label in example.labels[1:])


def base_model(job: Job, model: PreTrainedModel) -> PreTrainedModel:
    """θ_old: the given model, unless the method starts training from other weights (`start/`)."""
    started = (job.ctx.folder("selection") / "start").is_dir()
    return job.ctx.theta_old() if started else model
