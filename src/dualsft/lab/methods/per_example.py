"""Scores per example: top_loss and DavIR, and the loop that LESS, SPICE and FisherSFT share.

top_loss keeps the examples with the highest mean response loss at θ̄ (or at θ_old). DavIR keeps the
most learnable ones. With L_base the loss at θ_old and L_ref the loss after fine-tuning all
parameters on all of D_train,

    score = (L_base − L_ref) / max(L_base, floor)

Dividing by L_base removes the dependence of the raw difference on length and difficulty. Both
replace the data selection of Algorithm 1 (lines 10, 11). `per_example` computes any row of numbers
per example: it is resumable, and splits a batch that does not fit in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from dualsft.data.examples import Batch, Example, named
from dualsft.errors import RunError
from dualsft.lab.diagnostics.job import masked_finetune
from dualsft.runs.method import DataChoice, DataMethod, Job
from dualsft.runs.stages.finetune import finetune_plan
from dualsft.storage.resume import slug
from dualsft.storage.vectors import accumulation_dtype
from dualsft.system.usage import Smaller, give_back, is_out_of_memory


def top(scores: np.ndarray, pool: Sequence[Example], b: int) -> np.ndarray:
    """Positions of the b largest scores, in descending order; ties by source row."""
    if bad := [e for e, score in zip(pool, scores, strict=True) if not np.isfinite(score)]:
        raise RunError(
            f"the score of {named(bad)} is not finite; nothing was selected (check these rows, or "
            "set model.dtype=float32)"
        )
    return np.lexsort((np.array([e.index for e in pool]), -scores))[:b]


class TopLoss(DataMethod):
    """Selects the b examples with the highest mean response loss."""

    def choose(self, job: Job, pool: list[Example], b: int) -> DataChoice | None:
        model = job.ctx.theta_old() if self.options.at == "base" else job.ctx.theta_bar()
        losses = job.losses(model, pool, "losses of the pool")
        return DataChoice(top(losses, pool, b), {"measured_at": self.options.at}, losses)


class DavIR(DataMethod):
    """Selects the b examples whose loss falls by the largest share in a full fine-tuning."""

    def choose(self, job: Job, pool: list[Example], b: int) -> DataChoice | None:
        base = job.losses(job.ctx.theta_old(), pool, "losses of θ_old")
        reference = np.empty(len(pool))
        for number, (fit, scored) in enumerate(self._folds(job, pool)):
            fold = f" {number + 1}" if self.options.cross_fit else ""
            model = self._reference(job, [pool[i] for i in fit], f"davir reference{fold}")
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

    def _reference(self, job: Job, examples: list[Example], label: str) -> PreTrainedModel:
        """θ_old with all parameters fine-tuned on these examples, with the run's settings."""
        ctx = job.ctx
        model = ctx.theta_old()
        # plain fine-tuning: the learning-rate ratio of method.params does not apply
        plan = replace(finetune_plan(ctx, len(examples)), lr=ctx.base_lr())
        masked_finetune(ctx, model, examples, None, plan, label, ctx.pieces)
        job.accounts.backward_examples += plan.epochs * len(examples)
        return model


def learnability(base: np.ndarray, reference: np.ndarray, floor: float) -> np.ndarray:
    """(L_base − L_ref) / max(L_base, floor)."""
    return (base - reference) / np.maximum(base, floor)


# --- other quantities per example ----------------------------------------------------------------


def per_example(
    job: Job,
    model: PreTrainedModel,
    examples: Sequence[Example],
    label: str,
    width: int,
    compute: Callable[[Batch], Tensor],
    *,
    backward: bool,
) -> Tensor:
    """Apply `compute`, which maps a batch to [B, width], to all examples: [N, width] on the CPU.

    Progress is saved under `label`, which must be unique in the stage.
    """
    pieces, name = job.ctx.pieces, slug(label)
    dtype = accumulation_dtype(next(model.parameters()).dtype)
    values = torch.zeros(len(examples), width, dtype=dtype)
    done = torch.zeros(len(examples), dtype=torch.bool)
    if (piece := pieces.load(name)) is not None:
        values, done = piece.tensors["values"], piece.tensors["done"].bool()
        if backward:
            job.accounts.backward_examples += int(done.sum())
        else:
            job.accounts.forward_examples += int(done.sum())
    # batches are sorted by length, so these are the last batches of the uninterrupted loop
    left = torch.nonzero(~done).flatten().tolist()
    remaining, splitter = [examples[i] for i in left], _Splitter(job, compute)
    with pieces.loop():
        for rows, batch in job.batches(model, remaining, label, backward):
            found = splitter.run(batch)
            finite = torch.isfinite(found).all(dim=1).tolist()
            if bad := [remaining[i] for i, ok in zip(rows, finite, strict=True) if not ok]:
                raise RunError(
                    f"{label}: the result for {named(bad)} is not finite; nothing was written "
                    "(check these rows, or set model.dtype=float32)"
                )
            at = torch.tensor([left[i] for i in rows])
            values[at] = found.to("cpu", dtype)
            done[at] = True
            where = f"{label}: {int(done.sum()):,} of {len(examples):,} examples"
            state = ({"values": values, "done": done.to(torch.uint8)}, {})
            pieces.tick(name, lambda state=state: state, where)
    return values


@dataclass
class _Splitter:
    """Computes batches and halves those that do not fit in memory; does not retry a size that
    failed."""

    job: Job
    compute: Callable[[Batch], Tensor]
    most: int | None = None
    """Padded tokens per batch; None until a batch has run out of memory."""

    def run(self, batch: Batch) -> Tensor:
        rows, tokens = batch.input_ids.shape
        if rows == 1 or self.most is None or rows * tokens <= self.most:
            try:
                return self.compute(batch)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                problem = str(error)  # keep only the text: the traceback holds the failed batch
            give_back(batch.input_ids.device)
            smaller = Smaller.than((rows, tokens), RuntimeError(problem), "score.batch_tokens")
            self.job.ctx.reporter.warn(str(smaller), code="out_of_memory")
            self.most = smaller.batch_tokens
        halves = (slice(0, rows // 2), slice(rows // 2, None))
        return torch.cat([self.run(_rows(batch, half)) for half in halves])


def _rows(batch: Batch, rows: slice) -> Batch:
    """A slice of the examples of a batch."""
    names = ("input_ids", "attention_mask", "position_ids", "labels")
    return replace(batch, **{name: getattr(batch, name)[rows] for name in names})
