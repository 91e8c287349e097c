"""TALR (token-adaptive loss reweighting), and DFT, which is TALR with τ = 1.

w_t = max(exp(-l_t / τ), floor), where l_t is the token loss of the model being trained, without
gradient, and τ the median over the optimizer step of the mean sequence losses. A step minimizes
Σ w_t l_t / (response tokens of the step), or / Σ w_t (Algorithm 1 line 12 with a weighted loss).
The median needs the losses of all micro-batches before the first backward pass. This takes an extra
forward pass, which uses the same dropout noise as the pass that is differentiated. `window=past`
uses the medians of earlier steps instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from dualsft.data.examples import Batch, Example, collate
from dualsft.engine.losses import token_losses, weighted_objective
from dualsft.lab.methods.token_weights import num_predicted
from dualsft.lab.methods.training_table import TalrOptions
from dualsft.runs.method import Job, WeightMethod
from dualsft.storage.vectors import accumulation_dtype
from dualsft.train.loop import Hooks


class Talr(WeightMethod):
    """Weights tokens by their loss under the current model."""

    options: TalrOptions

    def hooks(self, job: Job, model: PreTrainedModel) -> Hooks:
        step = _Step(job, self.settings())
        return Hooks(
            objective=step.objective,
            before_step=step.before,
            after_step=step.after,
            state=step.state,
            load_state=step.load_state,
        )

    def settings(self) -> TalrOptions:
        return self.options


class Dft(Talr):
    """Weights each token by its probability."""

    def settings(self) -> TalrOptions:
        return TalrOptions(tau=1.0, floor=0.0)


class _Step:
    """Temperature and denominator of the current optimizer step."""

    def __init__(self, job: Job, options: TalrOptions) -> None:
        self.job, self.options = job, options
        self.past: float | None = None
        """Moving average of the medians of the completed steps; None before the first."""
        self.tau, self.denominator = 1.0, 1.0
        self.seen: list[Tensor] = []

    def before(self, model: PreTrainedModel, pieces: Sequence[Sequence[Example]]) -> None:
        """Compute τ and the denominator of the step, with a forward pass if they require one."""
        options, self.seen = self.options, []
        # None if the median of this step is needed: window=step, or the first step of window=past
        known = options.tau if options.window == "step" else options.tau or self.past
        self.denominator = float(sum(num_predicted(e) for piece in pieces for e in piece))
        losses: list[Tensor] = []
        if known is None or options.normalize == "batch_sum":
            losses = self._forward(model, pieces)
        if known is None:
            known = _median([loss.mean() for loss in losses])
        self.tau = max(known, options.least_tau)
        if options.normalize == "batch_sum":
            weigh = self.weigh()
            total = torch.stack([weigh(loss).sum() for loss in losses]).sum()
            self.denominator = float(total)

    def objective(
        self, model: PreTrainedModel, batch: Batch, rows: Sequence[Example], scale: float
    ) -> tuple[Tensor, Tensor]:
        count = sum(map(num_predicted, rows))
        wide = accumulation_dtype(next(model.parameters()).dtype)
        # if all weights underflow to zero, the gradient is zero, not 0 / 0
        share = 1.0 / self.denominator if self.denominator > 0 else 0.0
        weight_M = torch.full((count,), share, dtype=wide, device=batch.input_ids.device)
        objective, losses = weighted_objective(model, batch, weight_M, self.weigh())
        self.seen.append(losses.detach())
        return objective, losses

    def after(self, done: int) -> None:
        """Update the moving average with the median of the step."""
        if self.options.window == "past" and self.options.tau is None:
            now, keep = _median(list(torch.cat(self.seen))), self.options.momentum
            self.past = now if self.past is None else keep * self.past + (1.0 - keep) * now
        self.seen = []

    def state(self) -> dict[str, Any]:
        """State to save for resuming."""
        return {"past": self.past}

    def load_state(self, state: dict[str, Any]) -> None:
        self.past = state["past"]

    def weigh(self) -> Callable[[Tensor], Tensor]:
        """The function from token losses to weights at the step's temperature."""
        tau, floor = self.tau, self.options.floor
        return lambda loss: torch.exp(loss / -tau).clamp_(min=floor)

    @torch.no_grad()
    def _forward(self, model: PreTrainedModel, pieces: Sequence[Sequence[Example]]) -> list[Tensor]:
        """Token losses of every sequence in the step, equal to those of the differentiated pass.

        `fork_rng` restores the random state, so that the second pass draws the same dropout noise.
        """
        ctx, device, found = self.job.ctx, next(model.parameters()).device, []
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            for piece in pieces:
                batch = collate(piece, ctx.pad_id, ctx.config.data.padding_side, device)
                found += token_losses(model, batch)
                self.job.accounts.forward_examples += len(piece)
        return found


def _median(losses: Sequence[Tensor]) -> float:
    """Median; for an even count, the mean of the two middle values."""
    return float(np.median(torch.stack(list(losses)).double().cpu().numpy()))
