"""Selection of examples by their losses: top_loss and DavIR (docs/methods.md).

top_loss keeps the examples with the highest mean response loss at θ̄ (or at θ_old). DavIR keeps the
most learnable ones. With L_base the loss at θ_old and L_ref the loss after fine-tuning all
parameters on all of D_train,

    score = (L_base − L_ref) / max(L_base, floor)

Dividing by L_base removes the dependence of the raw difference on length and difficulty. Dividing
by L_ref would give the same ranking, since both are monotone in L_base / L_ref. Apart from the
reference, both methods need one forward pass and one number per example. `top` is shared by all
methods that rank examples by a score.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from transformers import PreTrainedModel

from dualsft.data.examples import Example, named
from dualsft.errors import RunError
from dualsft.lab.diagnostics.trials import masked_finetune
from dualsft.runs.method import DataChoice, DataMethod, Job
from dualsft.runs.stages.finetune import finetune_plan


def top(scores: np.ndarray, pool: Sequence[Example], b: int) -> np.ndarray:
    """Positions of the b largest scores, in descending order; ties by source row."""
    if bad := [e for e, score in zip(pool, scores, strict=True) if not np.isfinite(score)]:
        raise RunError(
            f"the score of {named(bad)} is not finite; nothing was selected (check these rows, or "
            "set model.dtype=float32)"
        )
    order = np.lexsort((np.array([e.index for e in pool]), -scores))
    return order[:b]


class TopLoss(DataMethod):
    """Selects the b examples with the highest mean response loss."""

    def choose(self, job: Job, pool: list[Example], b: int) -> DataChoice | None:
        at_base = self.options.at == "base"
        model = job.ctx.theta_old() if at_base else job.ctx.theta_bar()
        losses = job.losses(model, pool, "losses of the pool")
        return DataChoice(top(losses, pool, b), {"measured_at": self.options.at}, losses)


class DavIR(DataMethod):
    """Selects the b examples whose loss falls by the largest share in a full fine-tuning."""

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
        """(positions the reference trains on, positions it scores) of each reference."""
        everything = np.arange(len(pool))
        if not self.options.cross_fit:
            return [(everything, everything)]
        if len(pool) < 2:
            raise RunError(
                "method.davir.cross_fit: needs at least two examples in D_train, one per half"
            )
        first, second = np.array_split(job.rng("davir/folds").permutation(len(pool)), 2)
        return [(np.sort(first), np.sort(second)), (np.sort(second), np.sort(first))]


def learnability(base: np.ndarray, reference: np.ndarray, floor: float) -> np.ndarray:
    """(L_base − L_ref) / max(L_base, floor)."""
    return (base - reference) / np.maximum(base, floor)


def _reference(job: Job, examples: list[Example], label: str) -> PreTrainedModel:
    """θ_old with all parameters fine-tuned on these examples, with the run's settings."""
    ctx = job.ctx
    model = ctx.theta_old()
    # the reference is plain fine-tuning, so the learning-rate ratio of method.params does not apply
    plan = replace(finetune_plan(ctx), lr=ctx.config.finetune.lr)
    masked_finetune(ctx, model, examples, None, plan, label, ctx.pieces)
    job.accounts.backward_examples += plan.epochs * len(examples)
    return model
