"""STM (selective token masking): no training on tokens with high perplexity under the base model.

A response token whose perplexity exp(loss) under θ_old exceeds the threshold gets weight 0; fixed
before training. A step minimizes the mean over the unmasked tokens of the whole optimizer step
(Algorithm 1 line 12 with a weighted loss), so each of them has a larger weight than without the
mask. Control tokens (end of text, end of turn) are not masked by default. If every token of a step
is masked, the gradient is zero, and the optimizer still applies its momentum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from dualsft.data.examples import IGNORE, Example
from dualsft.lab.methods.token_weights import TokenWeights, base_model
from dualsft.lab.methods.training_table import StmOptions
from dualsft.runs.method import Job, WeightMethod
from dualsft.train.loop import Hooks


class Stm(WeightMethod):
    """Computes a mask over response tokens in a forward pass of θ_old."""

    options: StmOptions

    def hooks(self, job: Job, model: PreTrainedModel) -> Hooks:
        base = base_model(job, model)
        losses = job.token_losses(base, job.examples, "STM: losses of the base model")
        ends = control_tokens(job.ctx.tokenizer, base) if self.options.keep_ends else frozenset()
        kept: dict[str, np.ndarray] = {}
        num_kept = num_empty = 0
        for example, loss in zip(job.examples, losses, strict=True):
            kept[example.id] = surviving(loss, example, self.options, ends, job.rng)
            num_kept += int(kept[example.id].sum())
            num_empty += not kept[example.id].any()
        total = sum(map(len, losses))
        self.facts = {
            "response_tokens": total,
            "surviving_tokens": num_kept,
            "share": num_kept / total,
            "empty_examples": num_empty,
        }
        job.ctx.reporter.say(
            f"STM: {num_kept:,} of {total:,} response tokens kept ({100 * num_kept / total:.1f} "
            f"%); {num_empty:,} of {len(losses):,} examples are fully masked"
        )
        if num_kept == 0:
            job.ctx.reporter.warn(
                "method.weights=stm masks every token, so nothing will be learned (raise "
                "method.stm.threshold)"
            )
        return _Surviving(kept).hooks()


class _Surviving(TokenWeights):
    """Weight 1 for kept tokens, 0 for masked tokens."""

    def __init__(self, kept: Mapping[str, np.ndarray]) -> None:
        self.kept = kept

    def of(self, example: Example) -> torch.Tensor:
        return torch.from_numpy(self.kept[example.id]).to(torch.float64)

    def total(self, examples: Sequence[Example]) -> float:
        return sum(int(self.kept[example.id].sum()) for example in examples)


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
