"""FAPM: reset most of each tensor's update after training (after Algorithm 1 line 12).

For each tensor, Δ = W_ft - W_pre and S = |Δ| - mean|W_pre| · |Δ| / |W_pre|. The int(keep · size)
entries with the largest S keep their trained value; all others are reset to W_pre, bit for bit. S
is positive only where |W_pre| exceeds the tensor's mean, so mainly large weights keep their
updates. S is recomputed in chunks, in fp32 (fp64 for an fp64 model), at each read of the top-k.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dualsft.algorithm.score_reading import ScoreSource
from dualsft.algorithm.topk import topk_signed
from dualsft.lab.methods.table import FapmOptions
from dualsft.runs.method import AfterMethod, Job
from dualsft.storage.vectors import accumulation_dtype, reduction_dtype

CHUNK = 1 << 22


class Fapm(AfterMethod):
    """Keeps the updates with the largest S in every tensor."""

    options: FapmOptions

    @torch.no_grad()
    def apply(self, job: Job, before: PreTrainedModel, after: PreTrainedModel) -> dict[str, Any]:
        base = dict(before.named_parameters())  # lists a tied weight once
        total = sum(p.numel() for p in base.values())
        changed = kept = 0
        with job.measured(), job.ctx.reporter.track("FAPM", len(base), "tensors") as progress:
            for name, trained in after.named_parameters():
                found = prune(base[name].detach(), trained.detach(), self.options.keep)
                changed, kept = changed + found[0], kept + found[1]
                progress.advance(1)
        job.ctx.reporter.say(
            f"FAPM: {kept:,} of {changed:,} changed entries keep their update "
            f"({100 * kept / total:.2f} % of {total:,} parameters)"
        )
        facts = {"changed_before": changed, "kept_entries": kept, "share": kept / total}
        return {"fapm": facts | {"keep": self.options.keep}}


def prune(base: Tensor, trained: Tensor, keep: float) -> tuple[int, int]:
    """Edit `trained` in place; returns the entries that differ from the base (before, after)."""
    old, new = base.reshape(-1), trained.view(-1)
    changed = _differing(old, new)
    count = int(keep * new.numel())
    if changed == 0 or count == new.numel():
        return changed, changed
    if count == 0:
        new.copy_(old)
        return changed, 0
    index = topk_signed(fapm_scores(old, new), count).indices["S"].to(new.device)
    values = new[index]
    new.copy_(old)
    new[index] = values
    return changed, _differing(old, new)


def _differing(old: Tensor, new: Tensor) -> int:
    parts = range(0, new.numel(), CHUNK)
    return sum(int((old[i : i + CHUNK] != new[i : i + CHUNK]).sum()) for i in parts)


def fapm_scores(old: Tensor, new: Tensor) -> ScoreSource:
    """S of flat tensors, in chunks; the lowest finite value where the base weight is zero."""
    wide, sums = accumulation_dtype(old.dtype), reduction_dtype(old.device)
    lowest = torch.finfo(wide).min
    starts = range(0, old.numel(), CHUNK)
    mean = float(sum(old[i : i + CHUNK].abs().sum(dtype=sums) for i in starts)) / old.numel()

    def read() -> Iterator[tuple[str, int, Tensor]]:
        for start in starts:
            before = old[start : start + CHUNK].to(wide)
            change = (new[start : start + CHUNK].to(wide) - before).abs_()
            size = before.abs()
            score = change - change / size * mean
            # 0 / 0 is NaN, and dividing by a tiny weight can overflow
            score = torch.where(size == 0, lowest, score).nan_to_num_(lowest, neginf=lowest)
            yield "S", start, score

    return read
