"""Agreement of two rankings of a small number of items, with bootstrap intervals.

In addition to Spearman's ρ (`lab/diagnostics/ranking.py`): pairwise agreement (percentage of pairs
that both rankings put in the same order; a tie on either side counts half) and the overlap of the
top share. These are the measures of the paper's score-fidelity and diagonal-vs-full tables.
Intervals are 95 % percentile bootstraps over the items. Undefined values (all values equal) are
None.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

LOW, HIGH = 2.5, 97.5


def pair_agreement(x: np.ndarray, y: np.ndarray) -> float | None:
    """Percentage of pairs in the same order."""
    return number(Bootstrap.once(len(x)).pairs(x, y)[0])


def top_overlap(x: np.ndarray, y: np.ndarray, share: float) -> float | None:
    """Percentage of the top share (at least one item) of x that is in the top share of y."""
    if not len(x):
        return None
    count = max(1, int(share * len(x)))
    first, second = (np.argsort(-v, kind="stable")[:count] for v in (x, y))
    return 100.0 * len(np.intersect1d(first, second)) / count


def number(value: float) -> float | None:
    """The value as JSON can hold it; None if it is not finite."""
    return float(value) if math.isfinite(value) else None


@dataclass(frozen=True)
class Bootstrap:
    """Bootstrap resamples of n items, as the number of times each was drawn: [draws, n]."""

    weights: np.ndarray

    @classmethod
    def once(cls, count: int) -> Bootstrap:
        """A single resample that has every item once."""
        return cls(np.ones((1, count)))

    @classmethod
    def of(cls, count: int, draws: int, rng: np.random.Generator) -> Bootstrap:
        return cls(rng.multinomial(count, np.full(count, 1.0 / count), draws).astype(float))

    def spearman(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """ρ in each resample; NaN if all values of one side are equal."""
        a, b = self._ranks(x), self._ranks(y)
        w = self.weights / self.weights.sum(1, keepdims=True)
        a, b = (r - (w * r).sum(1, keepdims=True) for r in (a, b))
        variances = (w * a * a).sum(1) * (w * b * b).sum(1)
        flat = variances <= 1e-18
        found = (w * a * b).sum(1) / np.sqrt(np.where(flat, 1.0, variances))
        return np.where(flat, np.nan, found)

    def pairs(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Pairwise agreement in each resample; copies of the same item are not a pair."""
        signs = np.sign(x[:, None] - x[None, :]) * np.sign(y[:, None] - y[None, :])
        same = (signs + 1.0) / 2.0
        np.fill_diagonal(same, 0.0)
        every = 1.0 - np.eye(len(x))
        agreed = ((self.weights @ same) * self.weights).sum(1)
        total = ((self.weights @ every) * self.weights).sum(1)
        return np.where(total > 0, 100.0 * agreed / np.where(total > 0, total, 1.0), np.nan)

    def _ranks(self, x: np.ndarray) -> np.ndarray:
        """Ranks of the n items within each resample, ties averaged: [draws, n]."""
        less = (x[:, None] < x[None, :]).astype(float)
        equal = (x[:, None] == x[None, :]).astype(float)
        return self.weights @ less + (self.weights @ equal + 1.0) / 2.0


def interval(values: np.ndarray) -> list[float | None]:
    """[low, high] of the 95 % interval over the finite values; [None, None] if there are none."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return [None, None]
    return [float(v) for v in np.percentile(finite, [LOW, HIGH])]


def mean_of(values: list[float | None]) -> float | None:
    """Mean of the values that are not None."""
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None
