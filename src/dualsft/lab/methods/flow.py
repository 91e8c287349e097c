"""FLOW: examples that the base model finds hard count less (METHODS.md D2).

w_i = exp(-l_i / τ), l_i the mean response loss of example i under θ_old, τ the median of the l_i;
fixed before training. A step minimises Σ_i w_i · (Σ of i's token losses) / (response tokens of the
step), Algorithm 1 line 12 with another loss. The weights are not normalised unless asked: an
example at the median weighs e⁻¹.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from dualsft.data.examples import Example, named
from dualsft.errors import RunError
from dualsft.lab.methods.token_weights import TokenWeights, base_model, num_predicted
from dualsft.lab.methods.training_table import FlowOptions
from dualsft.runs.method import Job, WeightMethod
from dualsft.train.loop import Hooks


class Flow(WeightMethod):
    """Weights of whole examples from one forward pass of θ_old."""

    options: FlowOptions

    def hooks(self, job: Job, model: PreTrainedModel) -> Hooks:
        losses = job.losses(base_model(job, model), job.examples, "FLOW: losses of the base model")
        weights, tau = flow_weights(losses, job.examples, self.options)
        count = 1.0 / np.sum(weights**2) * np.sum(weights) ** 2
        self.facts = {"tau": tau, "mean_weight": float(weights.mean()), "effective": float(count)}
        job.ctx.reporter.say(
            f"FLOW: temperature {tau:.4g}; weights {weights.min():.3g} to {weights.max():.3g}, "
            f"mean {weights.mean():.3g}, as even as {count:,.0f} of {len(weights):,} examples"
        )
        by_id = {e.id: float(w) for e, w in zip(job.examples, weights, strict=True)}
        return _Examples(by_id).hooks()


class _Examples(TokenWeights):
    """Every token of an example weighs the same."""

    def __init__(self, by_id: Mapping[str, float]) -> None:
        self.by_id = by_id

    def of(self, example: Example) -> torch.Tensor:
        return torch.full((num_predicted(example),), self.by_id[example.id], dtype=torch.float64)

    def total(self, examples: Sequence[Example]) -> float:
        return sum(map(num_predicted, examples))


def flow_weights(
    losses: np.ndarray, examples: Sequence[Example], options: FlowOptions
) -> tuple[np.ndarray, float]:
    """(the weight of each example, the temperature)."""
    losses = losses.astype(np.float64)
    if not np.isfinite(losses).all():
        bad = [e for e, loss in zip(examples, losses, strict=True) if not np.isfinite(loss)]
        raise RunError(
            f"method.weights=flow: the base model's loss of {named(bad)} is not finite; look at "
            "these rows, or load the model in another model.dtype"
        )
    tau = float(np.median(losses)) if options.tau is None else options.tau
    if tau <= 0:
        raise RunError(
            "method.weights=flow: the median loss of the base model is 0, so it has nothing to "
            "learn from these examples; set method.flow.tau, or leave the method out"
        )
    weights = np.exp(-losses / tau)
    return (weights / weights.mean() if options.normalize else weights), tau
