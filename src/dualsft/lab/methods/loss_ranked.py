"""Examples ranked by losses alone: top_loss (METHODS.md B0) and DavIR (METHODS.md D1).

top_loss keeps the examples with the highest mean response loss at θ̄ (or at θ_old). DavIR keeps the
most learnable ones: with L_base the loss at θ_old and L_ref the loss after fine-tuning everything
on all of D_train,

    score = (L_base − L_ref) / max(L_base, floor)

Dividing by L_base takes away the length and difficulty that a raw difference follows; dividing by
L_ref would rank the same, since both are monotone in L_base / L_ref. One number an example and a
forward pass is all that either needs beyond the reference. `top` serves every method that ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from transformers import PreTrainedModel

from dualsft.data.examples import Example, named
from dualsft.errors import RunError
from dualsft.model.load import text_parameters
from dualsft.runs.method import DataChoice, DataMethod, Job
from dualsft.runs.stages.finetune import finetune_plan
from dualsft.train.loop import train
from dualsft.train.optimizer import SparseAdamW


def top(scores: np.ndarray, pool: Sequence[Example], b: int) -> np.ndarray:
    """Positions of the b largest scores; of equal ones those that stand first in the source."""
    if bad := [e for e, score in zip(pool, scores, strict=True) if not np.isfinite(score)]:
        raise RunError(
            f"the score of {named(bad)} is not finite; nothing was chosen (look at these rows, or "
            "use model.dtype=float32)"
        )
    order = np.lexsort((np.array([e.index for e in pool]), -scores))
    return order[:b]


class TopLoss(DataMethod):
    """The b highest mean response losses."""

    def choose(self, job: Job, pool: list[Example], b: int) -> DataChoice | None:
        at_base = self.options.at == "base"
        model = job.ctx.theta_old() if at_base else job.ctx.theta_bar()
        losses = job.losses(model, pool, "losses of the pool")
        return DataChoice(top(losses, pool, b), {"measured_at": self.options.at}, losses)


class DavIR(DataMethod):
    """The b most learnable examples: the share of its loss that a full fine-tuning takes away."""

    def choose(self, job: Job, pool: list[Example], b: int) -> DataChoice | None:
        base = job.losses(job.ctx.theta_old(), pool, "losses of θ_old")
        reference = np.empty(len(pool))
        for number, (fit, scored) in enumerate(self._folds(job, pool)):
            fold = f" {number + 1}" if self.options.cross_fit else ""
            model = _reference(job, [pool[i] for i in fit], f"davir reference{fold}")
            rows = [pool[i] for i in scored]
            reference[scored] = job.losses(model, rows, f"losses of the reference{fold}")
        scores = learnability(base, reference, self.options.floor)
        facts = {
            "mean_loss_base": float(base.mean()),
            "mean_loss_reference": float(reference.mean()),
            "num_unlearned": int((scores <= 0).sum()),
            "num_floored": int((base < self.options.floor).sum()),
        }
        return DataChoice(top(scores, pool, b), facts, scores)

    def _folds(self, job: Job, pool: list[Example]) -> list[tuple[np.ndarray, np.ndarray]]:
        """(what a reference is trained on, what it scores): everything, or each half in turn."""
        everything = np.arange(len(pool))
        if not self.options.cross_fit:
            return [(everything, everything)]
        if len(pool) < 2:
            raise RunError("method.davir.cross_fit: two halves need two examples of D_train")
        first, second = np.array_split(job.rng("davir/folds").permutation(len(pool)), 2)
        return [(np.sort(first), np.sort(second)), (np.sort(second), np.sort(first))]


def learnability(base: np.ndarray, reference: np.ndarray, floor: float) -> np.ndarray:
    """(L_base − L_ref) / L_base, an L_base below the floor counting as the floor."""
    return (base - reference) / np.maximum(base, floor)


def _reference(job: Job, examples: list[Example], label: str) -> PreTrainedModel:
    """θ_old fine-tuned, every parameter, on these examples by the run's own settings."""
    ctx = job.ctx
    model = ctx.theta_old()
    plan = replace(finetune_plan(ctx), lr=ctx.config.finetune.lr)
    with SparseAdamW(
        text_parameters(model),
        None,
        lr=plan.lr,
        weight_decay=ctx.config.finetune.weight_decay,
        moments=ctx.config.finetune.moments,
        seed=ctx.config.seed,
        free_gradients=True,
    ) as optimizer:
        train(model, examples, optimizer, plan, ctx.reporter, label, pieces=ctx.pieces)
    job.accounts.backward_examples += plan.epochs * len(examples)
    return model
