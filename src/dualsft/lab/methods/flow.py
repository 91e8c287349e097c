"""FLOW: lower weights for examples with a high loss under the base model.

w_i = exp(-l_i / τ), where l_i is the mean response loss of example i under θ_old and τ the median
of the l_i; fixed before training. A step minimizes Σ_i w_i · (Σ token losses of i) / (response
tokens of the step): Algorithm 1 line 12 with a weighted loss. The weights are not normalized by
default, so an example at the median has weight e⁻¹.
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
    """Computes one weight per example in a forward pass of θ_old."""

    options: FlowOptions

    def hooks(self, job: Job, model: PreTrainedModel) -> Hooks:
        losses = job.losses(base_model(job, model), job.examples, "FLOW: losses of the base model")
        weights, tau = flow_weights(losses, job.examples, self.options)
        # effective sample size: the number of equally weighted examples with the same variance
        count = 1.0 / np.sum(weights**2) * np.sum(weights) ** 2
        self.facts = {"tau": tau, "mean_weight": float(weights.mean()), "effective": float(count)}
        job.ctx.reporter.say(
            f"FLOW: temperature {tau:.4g}; weights {weights.min():.3g} to {weights.max():.3g}, "
            f"mean {weights.mean():.3g}, effective sample size {count:,.0f} of {len(weights):,}"
        )
        by_id = {e.id: float(w) for e, w in zip(job.examples, weights, strict=True)}
        return _Examples(by_id).hooks()


class _Examples(TokenWeights):
    """Gives every token of an example the weight of the example."""

    def __init__(self, by_id: Mapping[str, float]) -> None:
        self.by_id = by_id

    def of(self, example: Example) -> torch.Tensor:
        return torch.full((num_predicted(example),), self.by_id[example.id], dtype=torch.float64)

    def total(self, examples: Sequence[Example]) -> float:
        return sum(map(num_predicted, examples))


def flow_weights(
    losses: np.ndarray, examples: Sequence[Example], options: FlowOptions
) -> tuple[np.ndarray, float]:
    """(weight of each example, temperature)."""
    losses = losses.astype(np.float64)
    if not np.isfinite(losses).all():
        bad = [e for e, loss in zip(examples, losses, strict=True) if not np.isfinite(loss)]
        raise RunError(
            f"method.weights=flow: the base model's loss of {named(bad)} is not finite; check "
            "these rows, or load the model in another model.dtype"
        )
    tau = float(np.median(losses)) if options.tau is None else options.tau
    if tau <= 0:
        raise RunError(
            "method.weights=flow: the median loss of the base model is 0, so it has nothing to "
            "learn from these examples; set method.flow.tau, or do not set method.weights"
        )
    weights = np.exp(-losses / tau)
    return (weights / weights.mean() if options.normalize else weights), tau
