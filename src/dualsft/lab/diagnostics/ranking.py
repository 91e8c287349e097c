"""Agreement of rankings: Spearman, Jaccard, sums over a selection, and samples of long vectors.

Used by the diagnostics of the paper's appendices `local_regret` and `conditional_reselection`.
Ranks have ties averaged. A vector over the candidates is ranked completely up to `RANKED` entries,
and by an evenly spread sample of that size beyond; the result includes the number of ranked
entries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from dualsft.errors import ConfigError
from dualsft.storage.vectors import Seen, Vector

RANKED = 1 << 24
"""Most entries that are ranked; a sample of this size has a standard error of at most 3e-4."""
BLOCK = 1 << 20
"""Entries per block of the stratified sample."""


def ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1; equal values get the mean of their ranks."""
    order = np.argsort(values)
    ordered, found = values[order], np.empty(len(values))
    new = np.ones(len(values), bool)
    new[1:] = ordered[1:] != ordered[:-1]
    first = np.flatnonzero(new)
    last = np.append(first, len(values))[1:]
    found[order] = np.repeat((first + 1 + last) / 2, last - first)
    return found


def pearson(a: np.ndarray, b: np.ndarray) -> float | None:
    """Correlation; None if either is constant."""
    a, b = a - a.mean(), b - b.mean()
    size = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / size if size > 0 else None


def spearman(a: np.ndarray, b: np.ndarray) -> float | None:
    """Rank correlation; None if either is constant."""
    return pearson(ranks(np.asarray(a, np.float64)), ranks(np.asarray(b, np.float64)))


def cosine(a: np.ndarray, b: np.ndarray) -> float | None:
    size = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / size if size > 0 else None


def jaccard(a: np.ndarray, b: np.ndarray) -> float:
    """|a ∩ b| / |a ∪ b| of two sets of positions."""
    shared = len(np.intersect1d(a, b))
    return shared / (len(np.unique(a)) + len(np.unique(b)) - shared)


def mask_jaccard(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Jaccard index of two masks (sorted flat indices by parameter)."""
    shared = sum(
        int(torch.isin(index, b[name], assume_unique=True).sum())
        for name, index in a.items()
        if name in b
    )
    sizes = sum(index.numel() for mask in (a, b) for index in mask.values())
    return shared / (sizes - shared)


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
    total = sum(form.num_entries for form in forms.values())
    places = _places(total, count, rng)
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


def vector_spearman(
    a: Vector, b: Vector, rng: np.random.Generator, count: int = RANKED
) -> tuple[float | None, int]:
    """(rank correlation of two vectors, number of entries ranked)."""
    (left, right), places = sampled([a, b], count, rng)
    return spearman(left, right), len(places)


def numbers(text: str, field: str) -> list[float]:
    """Parse a comma-separated list of numbers in an option of a diagnostic."""
    found = []
    for word in text.split(","):
        try:
            found.append(float(word))
        except ValueError:
            raise ConfigError(
                f"{field}: {word.strip()!r} is not a number; give numbers separated by commas"
            ) from None
    return found


def counts(text: str, field: str) -> list[int]:
    """Parse a comma-separated list of whole numbers; sorted, without duplicates."""
    found = numbers(text, field)
    if any(n != int(n) or n < 0 for n in found):
        raise ConfigError(f"{field}: {text!r} must be whole numbers of at least 0")
    return sorted({int(n) for n in found})
