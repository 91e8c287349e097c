"""DualSFT's own selection methods, and the controls: reversed, random and all.

Algorithm 1 lines 9 to 11: the largest signed scores on both sides. Methods of other papers are in
`lab/methods/`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dualsft.data.examples import Example
from dualsft.runs.method import DataChoice, DataMethod, Job, ParamChoice, ParamMethod
from dualsft.runs.stages.selection import Scoring


def scoring(job: Job) -> Scoring:
    """u, G and the engine, loaded once for both sides."""
    return job.shared("scoring", lambda job: Scoring.of(job.ctx))


class DualData(DataMethod):
    """The exact b largest signed scores: certificate, then re-scoring of undecided examples."""

    pool_roles = ("pool",)
    reverse = False

    def choose(self, job: Job, pool: list[Example], b: int) -> DataChoice | None:
        found = scoring(job)
        data = found.choose_examples(b, self.reverse)
        job.accounts.backward_examples += len(data.rescored)
        return DataChoice(data.positions, found.describe(job.part, data, b))


class ReversedData(DualData):
    """The b smallest signed scores."""

    reverse = True


class DualParams(ParamMethod):
    """The k largest signed scores over all candidates."""

    reverse = False

    def choose(self, job: Job, k: int) -> ParamChoice | None:
        mask = scoring(job).choose_entries(k, self.reverse)
        return ParamChoice(mask.indices, scoring(job).describe_entries(mask))


class ReversedParams(DualParams):
    """The k smallest signed scores over all candidates."""

    reverse = True


class AllData(DataMethod):
    """All of D_train."""

    def choose(self, job: Job, pool: list[Example], b: int) -> DataChoice | None:
        return None


class RandomData(DataMethod):
    """b examples, uniformly at random, without replacement."""

    def choose(self, job: Job, pool: list[Example], b: int) -> DataChoice | None:
        return DataChoice(job.rng("examples").choice(len(pool), b, replace=False))


class AllParams(ParamMethod):
    """Every parameter."""

    def choose(self, job: Job, k: int) -> ParamChoice | None:
        return None


class RandomParams(ParamMethod):
    """k candidate entries, uniformly at random, without replacement."""

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
    """`count` distinct integers below `total`, sorted; every such set is equally likely.

    Draws with replacement until enough values are distinct, because numpy's draws without
    replacement either hold a permutation of `total` or are limited to 1e9. For more than half of
    `total`, the complement is drawn instead.
    """
    if 2 * count > total:
        left = np.ones(total, dtype=bool)
        left[distinct(rng, total, total - count)] = False
        return np.flatnonzero(left)
    found = np.empty(0, dtype=np.int64)
    while len(found) < count:
        drawn = rng.integers(0, total, count - len(found), dtype=np.int64)
        found = np.sort(np.concatenate([found, drawn]))
        found = found[
            np.append(True, found[1:] != found[:-1])
        ]  # np.unique hashes and is far slower
    return found
