"""How two rankings agree: Spearman, Jaccard, sums over a selection, and samples of long vectors.

What the diagnostics of the paper's appendices `local_regret` and `conditional_reselection` measure
with. Ranks have ties averaged. A vector over billions of candidates is ranked whole up to a limit,
and by a sample that is spread evenly over it beyond; the result says how many entries were ranked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from dualsft.errors import ConfigError
from dualsft.storage.vectors import Seen, Vector

RANKED = 1 << 24
"""Most entries that are ranked; a sample of this size has a standard error of 3e-4 at most."""
BLOCK = 1 << 20
"""Entries among which a share of a sample is drawn."""


def ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1, equal values sharing the mean of theirs."""
    order = np.argsort(values)
    ordered, found = values[order], np.empty(len(values))
    new = np.ones(len(values), bool)
    new[1:] = ordered[1:] != ordered[:-1]
    first = np.flatnonzero(new)
    last = np.append(first, len(values))[1:]
    found[order] = np.repeat((first + 1 + last) / 2, last - first)
    return found


def pearson(a: np.ndarray, b: np.ndarray) -> float | None:
    """Correlation; None when either is constant."""
    a, b = a - a.mean(), b - b.mean()
    size = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / size if size > 0 else None


def spearman(a: np.ndarray, b: np.ndarray) -> float | None:
    """Rank correlation; None when either is constant."""
    return pearson(ranks(np.asarray(a, np.float64)), ranks(np.asarray(b, np.float64)))


def cosine(a: np.ndarray, b: np.ndarray) -> float | None:
    size = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / size if size > 0 else None


def jaccard(a: np.ndarray, b: np.ndarray) -> float:
    """|a ∩ b| / |a ∪ b| of two sets of positions."""
    shared = len(np.intersect1d(a, b))
    return shared / (len(np.unique(a)) + len(np.unique(b)) - shared)


def mask_jaccard(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """The same of two masks: sorted flat indices by parameter."""
    shared = sum(
        int(torch.isin(index, b[name], assume_unique=True).sum())
        for name, index in a.items()
        if name in b
    )
    sizes = sum(index.numel() for mask in (a, b) for index in mask.values())
    return shared / (sizes - shared)


def sum_at(scores: Vector, mask: Mapping[str, Tensor]) -> float:
    """Σ of the entries that a mask selects, in fp64."""
    total = 0.0
    for name, index in mask.items():
        if index.numel():
            block = scores[name].reshape(-1)
            total += float(block[index.to(block.device)].double().sum())
    return total


def sampled(
    vectors: Sequence[Vector], count: int, rng: np.random.Generator
) -> tuple[list[np.ndarray], np.ndarray]:
    """The same entries of every vector in fp64, and their places in the flat order.

    All of them when there are no more than `count`, otherwise a sample of that size, none twice.
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
    """Every block of a million entries gives its share of the sample, so nothing is ever drawn
    again, and the whole is never permuted."""
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
    """(rank correlation of two vectors, how many entries it was taken over)."""
    (left, right), places = sampled([a, b], count, rng)
    return spearman(left, right), len(places)


def numbers(text: str, field: str) -> list[float]:
    """A comma-separated list of numbers of a diagnostic's option."""
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
    """A comma-separated list of whole numbers, increasing, without repeats."""
    found = numbers(text, field)
    if any(n != int(n) or n < 0 for n in found):
        raise ConfigError(f"{field}: {text!r} must be whole numbers, none negative")
    return sorted({int(n) for n in found})
