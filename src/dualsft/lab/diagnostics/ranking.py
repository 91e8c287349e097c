"""Agreement of rankings and selections, bootstrap intervals, samples of vectors, rows and masks.

Spearman's ρ has ties averaged. Pairwise agreement is the percentage of pairs that both rankings put
in the same order; a tie on either side counts half. Intervals are 95 % percentile bootstraps over
the items. Undefined values (all values equal) are None. A vector over the candidates is ranked
completely up to `RANKED` entries, and by an evenly spread sample of that size beyond. These are the
measures of the paper's diagnostic tables (`lab/diagnostics/__init__.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dualsft.data.examples import Example
from dualsft.errors import ConfigError
from dualsft.storage.vectors import Seen, Vector

RANKED = 1 << 24
"""Most entries that are ranked; a sample of this size has a standard error of at most 3e-4."""
BLOCK = 1 << 20
"""Entries per block of the stratified sample."""


def ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1; equal values get the mean of their ranks."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    return ((last - count + 1 + last) / 2)[place]


def spearman(a: np.ndarray, b: np.ndarray) -> float | None:
    """Rank correlation; None if either is constant."""
    a, b = ranks(a), ranks(b)
    a, b = a - a.mean(), b - b.mean()
    size = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / size if size > 0 else None


def cosine(a: np.ndarray, b: np.ndarray) -> float | None:
    size = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / size if size > 0 else None


def jaccard(a: np.ndarray, b: np.ndarray) -> float:
    """|a ∩ b| / |a ∪ b| of two sets of positions."""
    shared = len(np.intersect1d(a, b))
    return shared / (len(np.unique(a)) + len(np.unique(b)) - shared)


def mask_overlap(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Jaccard index of two masks (sorted flat indices by parameter)."""
    shared = sum(
        int(torch.isin(index, b[name], assume_unique=True).sum())
        for name, index in a.items()
        if name in b
    )
    sizes = sum(index.numel() for mask in (a, b) for index in mask.values())
    return shared / (sizes - shared)


def top_overlap(x: np.ndarray, y: np.ndarray, share: float) -> float:
    """Percentage of the top share (at least one item) of x that is in the top share of y."""
    count = max(1, int(share * len(x)))
    first, second = (np.argsort(-v, kind="stable")[:count] for v in (x, y))
    return 100.0 * len(np.intersect1d(first, second)) / count


def pair_agreement(x: np.ndarray, y: np.ndarray) -> float | None:
    """Percentage of pairs in the same order; None for a single item."""
    found = float(Bootstrap(np.ones((1, len(x)))).pairs(x, y)[0])
    return None if np.isnan(found) else found


@dataclass(frozen=True)
class Bootstrap:
    """Bootstrap resamples of n items, as the number of times each was drawn: [draws, n]."""

    weights: np.ndarray

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
    return [float(v) for v in np.percentile(finite, [2.5, 97.5])]


def mean_of(values: Sequence[float | None]) -> float | None:
    """Mean of the values that are not None."""
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


# --- vectors over the candidates -----------------------------------------------------------------


def chunks(vector: Vector) -> Iterator[tuple[str, Tensor]]:
    """(parameter, some of its entries) in flat order, with only one chunk in memory."""
    for name, form in vector.forms.items():
        for start, stop in form.chunks():
            yield name, vector.piece(name, start, stop)


def sum_at(scores: Vector, mask: Mapping[str, Tensor]) -> float:
    """Sum of the entries that a mask selects, in fp64."""
    total = 0.0
    for name, index in mask.items():
        if index.numel():
            block = scores[name].reshape(-1)
            total += float(block[index.to(block.device)].double().sum())
    return total


def sampled(
    vectors: Sequence[Vector], count: int, rng: np.random.Generator
) -> tuple[list[np.ndarray], np.ndarray]:
    """(the same entries of every vector in fp64, their positions in flat order).

    All entries if there are at most `count`, otherwise a sample of `count` without replacement.
    """
    forms = vectors[0].forms
    places = _places(vectors[0].num_entries, count, rng)
    found: list[list[np.ndarray]] = [[] for _ in vectors]
    offset = 0
    for name, form in forms.items():
        for start, stop in form.chunks():
            first, last = np.searchsorted(places, [offset + start, offset + stop])
            if first == last:
                continue
            where = torch.from_numpy(places[first:last] - (offset + start))
            seen: Seen = {}
            for values, vector in zip(found, vectors, strict=True):
                piece = vector.piece(name, start, stop, seen)
                values.append(piece[where.to(piece.device)].double().cpu().numpy())
        offset += form.num_entries
    return [np.concatenate(values) for values in found], places


def _places(total: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """Sorted positions of a sample without replacement.

    Each block of a million entries contributes its share, which avoids a permutation of the whole
    vector.
    """
    if count >= total:
        return np.arange(total)
    found = []
    for start in range(0, total, BLOCK):
        size = min(BLOCK, total - start)
        share = count * (start + size) // total - count * start // total
        drawn = rng.choice(size, share, replace=False, shuffle=False)
        found.append(start + np.sort(drawn))
    return np.concatenate(found)


def vector_spearman(a: Vector, b: Vector, rng: np.random.Generator) -> tuple[float | None, int]:
    """(rank correlation of two vectors, number of entries ranked)."""
    (left, right), places = sampled([a, b], RANKED, rng)
    return spearman(left, right), len(places)


# --- lists of numbers in options -----------------------------------------------------------------


def numbers(
    text: str, field: str, allowed: Callable[[float], bool] = lambda _: True, rule: str = ""
) -> list[float]:
    """Parse a comma-separated list of numbers in an option of a diagnostic."""
    found = []
    for word in text.split(","):
        try:
            found.append(float(word))
        except ValueError:
            raise ConfigError(
                f"{field}: {word.strip()!r} is not a number; give numbers separated by commas"
            ) from None
    if not all(allowed(number) for number in found):
        raise ConfigError(f"{field}: {text!r} must be {rule}")
    return found


def counts(text: str, field: str) -> list[int]:
    """Parse a comma-separated list of whole numbers; sorted, without duplicates."""
    rule = "whole numbers of at least 0"
    found = numbers(text, field, lambda n: n >= 0 and n.is_integer(), rule)
    return sorted({int(n) for n in found})


def sample(rng: np.random.Generator, rows: Sequence[Example], count: int | None) -> list[Example]:
    """A random sample of `count` rows in their original order; all rows if there are fewer."""
    if count is None or count >= len(rows):
        return list(rows)
    return [rows[i] for i in np.sort(rng.choice(len(rows), count, replace=False))]


def stratified_mask(
    rng: np.random.Generator, sizes: Mapping[str, int], k: int, varied: bool = False
) -> dict[str, Tensor]:
    """k random entries, with a count per parameter in proportion to its size.

    `varied` also draws a random density per parameter (exponential), so that masks differ in their
    distribution over layers as well. The total stays k. Parameters without entries are left out.
    """
    limits = np.array(list(sizes.values()), dtype=np.int64)
    weights = limits * (rng.exponential(size=len(limits)) if varied else 1.0)
    quota = np.zeros(len(limits), dtype=np.int64)
    while (left := k - int(quota.sum())) > 0:  # redistribute what exceeded a parameter's size
        open_ = np.where(quota < limits, weights, 0.0)
        exact = left * open_ / open_.sum()
        more = np.floor(exact).astype(np.int64)
        rest = left - int(more.sum())
        more[np.argsort(-(exact - more), kind="stable")[:rest]] += 1
        quota = np.minimum(quota + more, limits)
    return {
        name: torch.from_numpy(rng.choice(size, count, replace=False, shuffle=False)).sort().values
        for (name, size), count in zip(sizes.items(), quota.tolist(), strict=True)
        if count
    }
