"""LIFT, NanoAdam and FAPM: entries chosen by the magnitudes of weights and of their updates.

LIFT and NanoAdam replace the parameter selection of Algorithm 1 (line 9), use no data, and
recompute the mask from the current weights every `interval` steps; a run with fewer steps keeps its
first mask. Weights that leave the mask keep their value, so the final model differs from θ_old on
the union of all masks.

**LIFT** (Liu et al., ICML 2025) trains the entries with the largest absolute value in the rank-r
reconstruction U_r S_r V_rᵀ of each matrix. Every matrix has its own quota. Entries that stay in the
mask keep their Adam moments. Only the factors and one tile of the reconstruction are in memory at a
time; the top k is exact (`algorithm/topk.py`).

**NanoAdam** (arXiv 2506.21374) trains the entries with the smallest |θ_t| in every chunk of a
flattened parameter, with one quota per chunk.

**FAPM** resets most of each tensor's update after training (after line 12). For each tensor,
Δ = W_ft - W_pre and S = |Δ| - mean|W_pre| · |Δ| / |W_pre|. The int(keep · size) entries with the
largest S keep their trained value; all others are reset to W_pre, bit for bit. S is positive only
where |W_pre| exceeds the tensor's mean, so mainly large weights keep their updates. S is recomputed
in chunks, in fp32 (fp64 for an fp64 model), at each read of the top-k.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dualsft.algorithm.topk import topk_signed
from dualsft.algorithm.topk_reading import ScoreSource
from dualsft.data.examples import digest
from dualsft.errors import ConfigError
from dualsft.lab.methods.matrices import WeightMatrix, matrices, shares
from dualsft.lab.methods.table import FapmOptions
from dualsft.runs.method import AfterMethod, Job, ParamChoice, ParamMethod
from dualsft.storage.vectors import accumulation_dtype, reduction_dtype

OVERSAMPLING = 8  # extra directions in the randomized SVD
ITERATIONS = 2  # subspace iterations of the randomized SVD
TILE = 1 << 22  # entries of the reconstruction in memory at a time
CHUNK = 1 << 22  # entries of an update scored at a time


class LIFT(ParamMethod):
    """Selects the entries with the largest |rank-r reconstruction| in each matrix."""

    def members(self, job: Job) -> list[WeightMatrix]:
        """The matrices that are not frozen."""
        frozen = set((self.options.freeze or "").split(",")) - {""}
        chosen: list[WeightMatrix] = []
        for m in matrices(job):
            held = [part for part in m.parts if part in frozen]
            if held and len(held) < len(m.parts):
                raise ConfigError(
                    f"method.lift.freeze: {m.name} holds {', '.join(m.parts)} in one matrix; "
                    f"freeze all of them or none, not only {', '.join(held)}"
                )
            if not held:
                chosen.append(m)
        if not chosen:
            raise ConfigError(
                f"method.lift.freeze: {self.options.freeze!r} leaves no matrix of the candidates; "
                "freeze fewer projections, or extend score.candidates"
            )
        return chosen

    def eligible(self, job: Job) -> dict[str, torch.Size]:
        return {m.name: m.shape for m in self.members(job)}

    def quotas(self, job: Job, k: int) -> list[int]:
        """Entries to select per matrix: as many as LoRA of rank `lora_rank` has, or a share of k in
        proportion to the matrix's size."""
        members, rank = self.members(job), self.options.lora_rank
        if rank is None:
            return shares([m.shape.numel() for m in members], k)
        return [min(sum(m.shape) * rank, m.shape.numel()) for m in members]

    def choose(self, job: Job, k: int) -> ParamChoice | None:
        rank = self.options.lora_rank
        facts = {} if rank is None else {"budget": f"literal: lora_rank {rank}"}
        indices = self.refresh(job, job.ctx.theta_old(), k, 0)
        return ParamChoice(indices, facts, literal=rank is not None)

    def refresh_every(self, job: Job) -> int | None:
        return self.options.interval

    @torch.no_grad()
    def refresh(self, job: Job, model: PreTrainedModel, k: int, step: int) -> Mapping[str, Tensor]:
        members, parameters = self.members(job), dict(model.named_parameters())
        found: dict[str, Tensor] = {}
        with job.ctx.reporter.track("principal weights", len(members), "matrices") as progress:
            for m, quota in zip(members, self.quotas(job, k), strict=True):
                if quota:
                    factors = self.factors(job, m.name, parameters[m.name].detach())
                    source = reconstruction(m.name, *factors)
                    found[m.name] = topk_signed(source, quota).indices[m.name]
                progress.advance(1)
        return found

    def factors(self, job: Job, name: str, weight: Tensor) -> tuple[Tensor, Tensor]:
        """(U_r S_r, V_r): the best rank-r approximation is their product, exactly or approximately
        (`svd`)."""
        wide = weight.to(accumulation_dtype(weight.dtype))
        rank, least = self.options.rank, min(weight.shape)
        if self.options.svd == "exact" or rank + OVERSAMPLING >= least:
            u, s, vh = torch.linalg.svd(wide, full_matrices=False)
            return u[:, :rank] * s[:rank], vh[:rank].T
        devices = [weight.device] if weight.device.type == "cuda" else []
        # seeded per matrix, so the result does not depend on the order of the matrices
        seed = int.from_bytes(digest(job.ctx.config.seed, f"lift/{name}")[:7], "little")
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            u, s, v = torch.svd_lowrank(wide, q=rank + OVERSAMPLING, niter=ITERATIONS)
        return u[:, :rank] * s[:rank], v[:, :rank]


def reconstruction(name: str, left: Tensor, right: Tensor) -> ScoreSource:
    """|left rightᵀ| in tiles of whole rows, recomputed at every read."""
    columns = right.shape[0]
    rows = max(1, TILE // columns)
    across = right.T.contiguous()

    def read() -> Iterator[tuple[str, int, Tensor]]:
        for start in range(0, left.shape[0], rows):
            tile = (left[start : start + rows] @ across).abs_()
            yield name, start * columns, tile.view(-1)

    return read


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
        parameters = dict(model.named_parameters())
        chunks = [
            (name, number * self.options.chunk, chunk)
            for name in self.eligible(job)
            for number, chunk in enumerate(
                parameters[name].detach().view(-1).split(self.options.chunk)
            )
        ]
        quotas = shares([chunk.numel() for _, _, chunk in chunks], k)
        found: dict[str, list[Tensor]] = {name: [] for name, _, _ in chunks}
        with job.ctx.reporter.track("smallest weights", len(chunks), "chunks") as progress:
            for (name, start, chunk), quota in zip(chunks, quotas, strict=True):
                found[name].append((smallest(chunk.abs(), quota) + start).cpu())
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


# --- FAPM -----------------------------------------------------------------------------------------


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
