"""Everything, and chance: the two ends that every method is measured against (METHODS.md B0)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dualsft.data.examples import Example
from dualsft.runs.method import DataChoice, DataMethod, Job, ParamChoice, ParamMethod


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
    """k candidate entries, uniformly, without replacement."""

    def choose(self, job: Job, k: int) -> ParamChoice | None:
        shapes = job.shapes()
        sizes = np.array([shape.numel() for shape in shapes.values()])
        ends = np.cumsum(sizes)
        flat = distinct(job.rng("entries"), int(ends[-1]), k)
        cuts = np.searchsorted(flat, [0, *ends])
        indices: dict[str, Tensor] = {}
        for i, name in enumerate(shapes):
            own = flat[cuts[i] : cuts[i + 1]] - (ends[i] - sizes[i])
            indices[name] = torch.from_numpy(own)
        return ParamChoice(indices)


def distinct(rng: np.random.Generator, total: int, count: int) -> np.ndarray:
    """`count` different numbers below `total`, sorted: every such set is as likely.

    Drawn with replacement until so many differ (numpy's own draws without it either hold an order
    of everything or end at 1e9). More than half is what a draw of the rest leaves.
    """
    if 2 * count > total:
        left = np.ones(total, dtype=bool)
        left[distinct(rng, total, total - count)] = False
        return np.flatnonzero(left)
    found = np.empty(0, dtype=np.int64)
    while len(found) < count:
        drawn = rng.integers(0, total, count - len(found), dtype=np.int64)
        found = np.sort(np.concatenate([found, drawn]))
        found = found[np.append(True, found[1:] != found[:-1])]  # np.unique hashes: far slower
    return found
