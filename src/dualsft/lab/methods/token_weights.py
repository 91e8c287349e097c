"""FLOW, STM, TALR and DFT: weights of examples or tokens in the training loss.

All train Algorithm 1 line 12 with a weighted loss, whose denominator is taken over the whole
optimizer step, so the result does not depend on micro-batches. Reported losses are unweighted.

FLOW: w_i = exp(−l_i / τ), where l_i is the mean response loss of example i under θ_old and τ the
median of the l_i. A step minimizes Σ_i w_i · (Σ token losses of i) / (response tokens of the step).

STM (selective token masking): a response token whose perplexity exp(loss) under θ_old exceeds the
threshold gets weight 0. A step minimizes the mean over the unmasked tokens. Control tokens (end of
text, end of turn) are not masked by default. If every token of a step is masked, the gradient is
zero, and the optimizer still applies its momentum.

TALR (token-adaptive loss reweighting): w_t = max(exp(−l_t / τ), floor), where l_t is the token loss
of the model being trained, without gradient, and τ the median over the optimizer step of the mean
sequence losses. A step minimizes Σ w_t l_t / (response tokens of the step), or / Σ w_t. The median
needs the losses of all micro-batches before the first backward pass: an extra forward pass, with
the same dropout noise as the pass that is differentiated. `window=past` uses the medians of earlier
steps instead. DFT is TALR with τ = 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from dualsft.data.examples import IGNORE, Batch, Example, collate, named
from dualsft.engine.losses import token_losses, weighted_objective
from dualsft.errors import RunError
from dualsft.lab.methods.table import FlowOptions, StmOptions, TalrOptions
from dualsft.runs.method import Job, WeightMethod
from dualsft.storage.vectors import accumulation_dtype
from dualsft.train.loop import Hooks


@dataclass
class FixedWeights:
    """Training with a fixed weight per response token."""

    weights: Callable[[Example], Tensor]
    """One weight per predicted response token of an example."""
    total: Callable[[Example], int]
    """What an example adds to the denominator of the step's loss."""
    denominator: float = 0.0

    def hooks(self) -> Hooks:
        return Hooks(objective=self._objective, before_step=self._before_step)

    def _before_step(self, model: PreTrainedModel, pieces: Sequence[Sequence[Example]]) -> None:
        self.denominator = sum(self.total(example) for piece in pieces for example in piece)

    def _objective(
        self, model: PreTrainedModel, batch: Batch, rows: Sequence[Example], scale: float
    ) -> tuple[Tensor, Tensor]:
        # if every token of the step is masked, the gradient is zero, not 0 / 0
        weight_M = torch.cat(list(map(self.weights, rows))) / max(self.denominator, 1.0)
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


# --- FLOW ----------------------------------------------------------------------------------------


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

        def weights_of(example: Example) -> Tensor:
            return torch.full((num_predicted(example),), by_id[example.id], dtype=torch.float64)

        return FixedWeights(weights_of, num_predicted).hooks()


def flow_weights(
    losses: np.ndarray, examples: Sequence[Example], options: FlowOptions
) -> tuple[np.ndarray, float]:
    """(weight of each example, temperature)."""
    losses = losses.astype(np.float64)
    if bad := [e for e, loss in zip(examples, losses, strict=True) if not np.isfinite(loss)]:
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


# --- STM -----------------------------------------------------------------------------------------


class Stm(WeightMethod):
    """Computes a mask over response tokens in a forward pass of θ_old."""

    options: StmOptions

    def hooks(self, job: Job, model: PreTrainedModel) -> Hooks:
        base, reporter = base_model(job, model), job.ctx.reporter
        losses = job.token_losses(base, job.examples, "STM: losses of the base model")
        ends = control_tokens(job.ctx.tokenizer, base) if self.options.keep_ends else frozenset()
        kept: Mapping[str, np.ndarray] = {
            example.id: surviving(loss, example, self.options, ends, job.rng)
            for example, loss in zip(job.examples, losses, strict=True)
        }
        counts = {example_id: int(mask.sum()) for example_id, mask in kept.items()}
        total, num_kept = sum(map(len, losses)), sum(counts[e.id] for e in job.examples)
        num_empty = sum(counts[e.id] == 0 for e in job.examples)
        self.facts = {
            "response_tokens": total,
            "surviving_tokens": num_kept,
            "share": num_kept / total,
            "empty_examples": num_empty,
        }
        reporter.say(
            f"STM: {num_kept:,} of {total:,} response tokens kept ({100 * num_kept / total:.1f} "
            f"%); {num_empty:,} of {len(losses):,} examples are fully masked"
        )
        if num_kept == 0:
            reporter.warn(
                "method.weights=stm masks every token, so nothing will be learned (raise "
                "method.stm.threshold)"
            )

        def weights_of(example: Example) -> Tensor:
            return torch.from_numpy(kept[example.id]).to(torch.float64)

        return FixedWeights(weights_of, lambda example: counts[example.id]).hooks()


def surviving(
    loss_T: np.ndarray,
    example: Example,
    options: StmOptions,
    ends: frozenset[int],
    rng: Callable[[str], np.random.Generator],
) -> np.ndarray:
    """Boolean mask of the kept response tokens of an example. Ties go to the earlier token."""
    tokens = [label for label in example.labels[1:] if label != IGNORE]
    free = np.array([token not in ends for token in tokens])
    masked = free & (loss_T > math.log(options.threshold))
    if options.mode == "highest":
        return ~masked
    # the controls mask as many tokens of the example as mode=highest does
    where, count = np.flatnonzero(free), int(masked.sum())
    if options.mode == "lowest":
        chosen = where[np.argsort(loss_T[where], kind="stable")[:count]]
    else:
        chosen = rng(f"tokens/{example.id}").choice(where, count, replace=False)
    kept = np.ones(len(tokens), bool)
    kept[chosen] = False
    return kept


def control_tokens(tokenizer: Any, model: PreTrainedModel) -> frozenset[int]:
    """Ids of all special tokens of the tokenizer and of the model's end-of-text tokens."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    found = {number for number, token in added.items() if token.special}
    found |= set(tokenizer.all_special_ids)
    for settings in (model.config.get_text_config(), model.generation_config):
        given = getattr(settings, "eos_token_id", None)
        found |= set(given if isinstance(given, list | tuple) else [given])
    return frozenset(number for number in found if number is not None)


# --- TALR and DFT --------------------------------------------------------------------------------


class Talr(WeightMethod):
    """Weights tokens by their loss under the current model."""

    options: TalrOptions

    def hooks(self, job: Job, model: PreTrainedModel) -> Hooks:
        return _talr_hooks(job, self.options)


class Dft(WeightMethod):
    """Weights each token by its probability."""

    def hooks(self, job: Job, model: PreTrainedModel) -> Hooks:
        return _talr_hooks(job, TalrOptions(tau=1.0, floor=0.0))


def _talr_hooks(job: Job, options: TalrOptions) -> Hooks:
    step = _Step(job, options)
    return Hooks(
        objective=step.objective,
        before_step=step.before,
        after_step=step.after,
        state=lambda: {"past": step.past},
        load_state=step.load_state,
    )


class _Step:
    """Temperature and denominator of the current optimizer step."""

    def __init__(self, job: Job, options: TalrOptions) -> None:
        self.job, self.options = job, options
        self.past: float | None = None
        """Moving average of the medians of the completed steps; None before the first."""
        self.tau, self.denominator = 1.0, 1.0
        self.seen: list[Tensor] = []

    def load_state(self, state: dict[str, Any]) -> None:
        self.past = state["past"]

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
            self.denominator = float(torch.stack([self.weigh(x).sum() for x in losses]).sum())

    def objective(
        self, model: PreTrainedModel, batch: Batch, rows: Sequence[Example], scale: float
    ) -> tuple[Tensor, Tensor]:
        count = sum(map(num_predicted, rows))
        wide = accumulation_dtype(next(model.parameters()).dtype)
        # if all weights underflow to zero, the gradient is zero, not 0 / 0
        share = 1.0 / self.denominator if self.denominator > 0 else 0.0
        weight_M = torch.full((count,), share, dtype=wide, device=batch.input_ids.device)
        objective, losses = weighted_objective(model, batch, weight_M, self.weigh)
        self.seen.append(losses.detach())
        return objective, losses

    def after(self, done: int) -> None:
        """Update the moving average with the median of the step."""
        if self.options.window == "past" and self.options.tau is None:
            now, keep = _median(list(torch.cat(self.seen))), self.options.momentum
            self.past = now if self.past is None else keep * self.past + (1.0 - keep) * now
        self.seen = []

    def weigh(self, loss: Tensor) -> Tensor:
        """Weights of tokens with these losses."""
        return torch.exp(loss / -self.tau).clamp_(min=self.options.floor)

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
