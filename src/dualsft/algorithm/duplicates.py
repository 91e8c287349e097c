"""Examples that repeat one another: which of the pool may be selected (`select.duplicates`).

Algorithm 1 takes the b largest scores, and near-copies of one row have nearly the same score: in
one run, a budget of 12 rows held 4 different texts. Here the pool is read in order of decreasing
score, and an example is passed over if one that was kept before is nearly the same text: the sets
of their token pairs have a Jaccard index of at least `SIMILAR`. Token pairs that more than ten
different texts share (a template, an instruction, a frequent phrase) do not count, so sources with
an instruction of their own stay; a text with more than ten variants is not recognised. `exact`
passes over identical texts only.

Measured on 1,200 rows of GSM8K: unrelated rows have an index of at most 0.11 (code: 0.17 for all
but one pair in ten thousand); rows with their sentences in another order at least 0.77; rows with
other names and numbers 0.61 in the median, at least 0.26 for 95 %.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Literal

import numpy as np

from dualsft.data.examples import Example

SIMILAR = 0.2
COMMON = 10  # token pairs in more texts of a sample are not compared
SAMPLE = 2_000  # texts from which common token pairs are found

Duplicates = Literal["keep", "exact", "near"]


def distinct_texts(
    kind: Duplicates, examples: Sequence[Example], scores: np.ndarray, ties: np.ndarray, b: int
) -> np.ndarray:
    """Positions, ascending, of the examples that may be selected; at least b of them.

    If fewer than b are distinct, the passed-over examples with the largest scores are included.
    """
    if kind == "keep":
        return np.arange(len(examples))
    order = np.lexsort((ties, -scores))
    kept, passed = _first_texts(examples, order)
    if kind == "near":
        kept, near = _dissimilar(examples, kept)
        passed += near
    if len(kept) < b:
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        kept += sorted(passed, key=lambda i: rank[i])[: b - len(kept)]
    return np.sort(np.array(kept))


def _first_texts(examples: Sequence[Example], order: np.ndarray) -> tuple[list[int], list[int]]:
    """(first position of each text, the others), both in the given order."""
    seen: set[str] = set()
    kept: list[int] = []
    passed: list[int] = []
    for i in order.tolist():
        (passed if examples[i].key in seen else kept).append(i)
        seen.add(examples[i].key)
    return kept, passed


def _dissimilar(examples: Sequence[Example], order: Sequence[int]) -> tuple[list[int], list[int]]:
    """(positions not similar to an earlier kept one, the others), by exact set overlaps."""
    common = _common_pairs([examples[i] for i in order])
    holders: defaultdict[int, list[int]] = defaultdict(list)  # token pair -> kept examples
    sizes: dict[int, int] = {}
    kept: list[int] = []
    passed: list[int] = []
    for i in order:
        pairs = _pairs(examples[i]) - common
        overlaps = Counter(holder for pair in pairs for holder in holders.get(pair, ()))
        size = len(pairs)
        if any(n >= SIMILAR * (size + sizes[j] - n) for j, n in overlaps.items()):
            passed.append(i)
            continue
        kept.append(i)
        sizes[i] = size
        for pair in pairs:
            holders[pair].append(i)
    return kept, passed


def _pairs(example: Example) -> set[int]:
    ids = example.input_ids
    return {(left << 32) | right for left, right in zip(ids, ids[1:], strict=False)}


def _common_pairs(texts: Sequence[Example]) -> set[int]:
    """Token pairs of more than `COMMON` texts of a random sample."""
    drawn = np.random.default_rng(0).permutation(len(texts))[:SAMPLE]
    counts = Counter(pair for i in drawn.tolist() for pair in _pairs(texts[i]))
    return {pair for pair, n in counts.items() if n > COMMON}
