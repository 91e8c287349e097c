"""A row of numbers for every example: the resumable loop of LESS, SPICE and FisherSFT.

A batch that does not fit into memory is cut in halves; progress is saved as in every long loop
(`storage/resume.py`). It belongs to no line of Algorithm 1.
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
    """`compute(batch)`, [B, width], of every example, in the host's memory: [N, width].

    A batch that does not fit is cut in halves. The walk is resumable by its label, which is unique
    in its stage.
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
    left = torch.nonzero(~done).flatten().tolist()  # its batches are the tail of all batches
    remaining, cutter = [examples[i] for i in left], _Cutter(job, compute)
    with pieces.loop():
        for rows, batch in job.batches(model, remaining, label, backward):
            found = cutter.of(batch)
            at = torch.tensor([left[i] for i in rows])
            if not bool(torch.isfinite(found).all()):
                bad = [remaining[i] for i, row in zip(rows, found, strict=True) if _bad(row)]
                raise RunError(
                    f"{label}: what was computed of {named(bad)} is not finite; nothing was "
                    "written (look at these rows, or use model.dtype=float32)"
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
    """Computes batches, in halves when memory runs out; a size that did not fit is left alone."""

    job: Job
    compute: Callable[[Batch], Tensor]
    most: int | None = None
    """Padded tokens of a batch."""

    def of(self, batch: Batch) -> Tensor:
        rows, tokens = batch.input_ids.shape
        if rows > 1 and self.most is not None and rows * tokens > self.most:
            return self._halves(batch)
        try:
            return self.compute(batch)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            problem = str(error)  # its words alone: its frames hold what did not fit
        give_back(batch.input_ids.device)
        smaller = Smaller.than((rows, tokens), RuntimeError(problem), "score.batch_tokens")
        self.job.ctx.reporter.warn(str(smaller), code="out_of_memory")
        self.most = smaller.batch_tokens
        return self._halves(batch)

    def _halves(self, batch: Batch) -> Tensor:
        half = len(batch.input_ids) // 2
        return torch.cat([self.of(_rows(batch, s)) for s in (slice(0, half), slice(half, None))])


def _rows(batch: Batch, rows: slice) -> Batch:
    """Some examples of a batch."""
    names = ("input_ids", "attention_mask", "position_ids", "labels")
    return replace(batch, **{name: getattr(batch, name)[rows] for name in names})
