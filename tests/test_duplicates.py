"""Rows that repeat others are passed over: exact copies, near copies, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from dualsft.algorithm.duplicates import Duplicates, distinct_texts
from dualsft.data.examples import Example


def example(i: int, ids: list[int]) -> Example:
    return Example(f"e{i}", i, ids, ids)


def corpus(seed: int = 0) -> list[Example]:
    """30 texts of 60 tokens behind a common start; texts 30 to 39 repeat 0 to 9 word for word, 40
    to 49 repeat 10 to 19 with one token in six changed."""
    rng = np.random.default_rng(seed)
    start = list(range(900, 910))
    texts = [rng.integers(0, 800, 60) for _ in range(30)]
    changed = [np.where(np.arange(60) % 6 == 3, rng.integers(0, 800, 60), t) for t in texts[10:20]]
    return [
        example(i, start + list(map(int, t))) for i, t in enumerate([*texts, *texts[:10], *changed])
    ]


@pytest.mark.parametrize(
    ("kind", "gone"),
    [("keep", set()), ("exact", set(range(10))), ("near", set(range(20)))],
)
def test_the_copy_with_the_higher_score_stays(kind: Duplicates, gone: set[int]) -> None:
    rows = corpus()
    scores = np.arange(50.0)  # the copies have the higher scores
    kept = distinct_texts(kind, rows, scores, np.arange(50), 5)
    assert set(range(50)) - set(kept.tolist()) == gone
    if kind != "keep":
        kept = distinct_texts(kind, rows, -scores, np.arange(50), 5)
        copies = set(range(30, 40)) if kind == "exact" else set(range(30, 50))
        assert set(range(50)) - set(kept.tolist()) == copies


def test_equal_scores_keep_the_first_row() -> None:
    kept = distinct_texts("exact", corpus(), np.zeros(50), np.arange(50), 5)
    assert set(kept.tolist()) == set(range(50)) - set(range(30, 40))


def test_a_budget_beyond_the_distinct_rows_is_filled_by_the_best_copies() -> None:
    rows = [example(i, [1, 2, 3, 4, 5]) for i in range(6)]
    kept = distinct_texts("near", rows, np.array([0.0, 5.0, 4.0, 3.0, 2.0, 1.0]), np.arange(6), 3)
    assert kept.tolist() == [1, 2, 3]


def test_rows_that_share_an_instruction_are_no_copies() -> None:
    """A source of 61 rows in 600 whose instruction is a third of each row."""
    rng = np.random.default_rng(1)
    shared = list(range(900, 912))
    rows = [example(i, shared + rng.integers(0, 800, 18).tolist()) for i in range(61)]
    rows += [example(i, rng.integers(0, 800, 30).tolist()) for i in range(61, 600)]
    kept = distinct_texts("near", rows, -np.arange(600.0), np.arange(600), 100)
    assert len(set(kept.tolist()) & set(range(61))) >= 60
