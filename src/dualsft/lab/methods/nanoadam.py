"""NanoAdam: selects the smallest weights, and updates the mask during training (arXiv 2506.21374).

Replaces the parameter selection of Algorithm 1 (line 9). Uses no gradients and no data: it takes
the entries with the smallest |θ_t| in every chunk of a flattened parameter, with one quota per
chunk. The mask is computed at step 0 and again every `interval` steps from the current weights; a
run with fewer steps keeps its first mask. Weights that have grown leave the mask and keep their
value, so the final model differs from θ_old on the union of all masks.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dualsft.lab.methods.matrices import shares
from dualsft.runs.method import Job, ParamChoice, ParamMethod


class NanoAdam(ParamMethod):
    """Selects the entries with the smallest |θ| in each chunk."""

    @property
    def carry(self) -> bool:
        return self.options.moments == "carry"

    def choose(self, job: Job, k: int) -> ParamChoice | None:
        return ParamChoice(self.refresh(job, job.ctx.theta_old(), k, 0))

    def refresh_every(self, job: Job) -> int | None:
        return self.options.interval

    @torch.no_grad()
    def refresh(self, job: Job, model: PreTrainedModel, k: int, step: int) -> Mapping[str, Tensor]:
        size = self.options.chunk
        parameters = dict(model.named_parameters())
        weights = {name: parameters[name].detach().view(-1) for name in self.eligible(job)}
        chunks = [
            (name, start, min(size, flat.numel() - start))
            for name, flat in weights.items()
            for start in range(0, flat.numel(), size)
        ]
        quotas = shares([length for _, _, length in chunks], k)
        found: dict[str, list[Tensor]] = {name: [] for name in weights}
        with job.ctx.reporter.track("smallest weights", len(chunks), "chunks") as progress:
            for (name, start, length), quota in zip(chunks, quotas, strict=True):
                chosen = smallest(weights[name][start : start + length].abs(), quota)
                found[name].append((chosen + start).cpu())
                progress.advance(1)
        return {name: torch.cat(parts) for name, parts in found.items()}


def smallest(values: Tensor, count: int) -> Tensor:
    """Sorted positions of the `count` smallest values; ties (common in bf16) by position."""
    if count == 0:
        return torch.empty(0, dtype=torch.int64, device=values.device)
    # topk does not define which of several equal values it returns; ties are resolved below
    border = values.topk(count, largest=False, sorted=False).values.max()
    below = values < border
    ties = (values == border).nonzero().view(-1)[: count - int(below.sum())]
    below[ties] = True
    return below.nonzero().view(-1)
