"""The resumable loop of LESS, SPICE and FisherSFT: computes one row of numbers per example.

A batch that does not fit in memory is split in half. Progress is saved by `storage/resume.py`. Not
part of Algorithm 1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dualsft.data.examples import Batch, Example, named
from dualsft.errors import RunError
from dualsft.runs.method import Job
from dualsft.storage.vectors import accumulation_dtype
from dualsft.system.usage import Smaller, give_back, is_out_of_memory


def per_example(
    job: Job,
    model: PreTrainedModel,
    examples: Sequence[Example],
    label: str,
    width: int,
    compute: Callable[[Batch], Tensor],
    *,
    backward: bool,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Apply `compute`, which maps a batch to [B, width], to all examples: [N, width] on the CPU.

    Splits batches that do not fit in memory. Progress is saved under `label`, which must be unique
    in the stage.
    """
    pieces, slug = job.ctx.pieces, re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")
    dtype = dtype or accumulation_dtype(next(model.parameters()).dtype)
    values = torch.zeros(len(examples), width, dtype=dtype)
    done = torch.zeros(len(examples), dtype=torch.bool)
    piece = pieces.load(slug)
    if piece is not None:
        values, done = piece.tensors["values"], piece.tensors["done"].bool()
        if backward:
            job.accounts.backward_examples += int(done.sum())
        else:
            job.accounts.forward_examples += int(done.sum())
    # batches are sorted by length, so these are the last batches of the uninterrupted loop
    left = torch.nonzero(~done).flatten().tolist()
    remaining, cutter = [examples[i] for i in left], _Cutter(job, compute)
    with pieces.loop():
        for rows, batch in job.batches(model, remaining, label, backward):
            found = cutter.of(batch)
            at = torch.tensor([left[i] for i in rows])
            if not bool(torch.isfinite(found).all()):
                bad = [remaining[i] for i, row in zip(rows, found, strict=True) if _bad(row)]
                raise RunError(
                    f"{label}: the result for {named(bad)} is not finite; nothing was written "
                    "(check these rows, or set model.dtype=float32)"
                )
            values[at] = found.to("cpu", dtype)
            done[at] = True
            where = f"{label}: {int(done.sum()):,} of {len(examples):,} examples"
            state = ({"values": values, "done": done.to(torch.uint8)}, {})
            pieces.tick(slug, lambda state=state: state, where)
    return values


def _bad(row: Tensor) -> bool:
    return not bool(torch.isfinite(row).all())


@dataclass
class _Cutter:
    """Computes batches and splits them when memory runs out; does not retry a size that failed."""

    job: Job
    compute: Callable[[Batch], Tensor]
    most: int | None = None
    """Padded tokens per batch; None until a batch has run out of memory."""

    def of(self, batch: Batch) -> Tensor:
        rows, tokens = batch.input_ids.shape
        if rows > 1 and self.most is not None and rows * tokens > self.most:
            return self._halves(batch)
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
        return self._halves(batch)

    def _halves(self, batch: Batch) -> Tensor:
        half = len(batch.input_ids) // 2
        return torch.cat([self.of(_rows(batch, s)) for s in (slice(0, half), slice(half, None))])


def _rows(batch: Batch, rows: slice) -> Batch:
    """A slice of the examples of a batch."""
    names = ("input_ids", "attention_mask", "position_ids", "labels")
    return replace(batch, **{name: getattr(batch, name)[rows] for name in names})
