"""Everything, and chance: the two ends that every method is measured against (METHODS.md B0)."""

from __future__ import annotations

import torch
from torch import Tensor

from dualsft.data import Example
from dualsft.method import DataChoice, DataMethod, Job, ParamChoice, ParamMethod


class AllData(DataMethod):
    """All of D_train."""

    def choose(self, job: Job, pool: list[Example], b: int) -> DataChoice | None:
        return None


class RandomData(DataMethod):
    """b examples, uniformly, without replacement."""

    def choose(self, job: Job, pool: list[Example], b: int) -> DataChoice | None:
        return DataChoice(job.rng("examples").choice(len(pool), b, replace=False))


class AllParams(ParamMethod):
    """Every parameter."""

    def choose(self, job: Job, k: int) -> ParamChoice | None:
        return None


class RandomParams(ParamMethod):
    """k candidate entries, uniformly, without replacement.

    Sizes of the tensors' shares first (a multivariate hypergeometric draw), then entries of each:
    nothing of the candidates' size exists but one tensor's order.
    """

    def choose(self, job: Job, k: int) -> ParamChoice | None:
        shapes = job.shapes()
        rng = job.rng("entries")
        sizes = [shape.numel() for shape in shapes.values()]
        left, total = k, sum(sizes)
        indices: dict[str, Tensor] = {}
        for name, size in zip(shapes, sizes, strict=True):
            others = total - size
            count = left if others == 0 else int(rng.hypergeometric(size, others, left))
            total, left = others, left - count
            chosen = rng.choice(size, count, replace=False, shuffle=False)
            indices[name] = torch.from_numpy(chosen).sort().values
        return ParamChoice(indices)
