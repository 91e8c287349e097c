"""Rows that repeat others are passed over: exact copies, near copies, and nothing else."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from dualsft.algorithm.duplicates import Duplicates, _Index, repeated_texts
from dualsft.algorithm.selection import choose_examples
from dualsft.data.examples import Example
from dualsft.errors import ConfigError


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
    assert repeated_texts(kind, rows, scores, np.arange(50)).tolist() == sorted(gone, reverse=True)
    if kind != "keep":
        copies = range(30, 40) if kind == "exact" else range(30, 50)
        assert repeated_texts(kind, rows, -scores, np.arange(50)).tolist() == list(copies)


def test_a_budget_beyond_the_distinct_rows_is_filled_by_the_best_copies() -> None:
    rows = [example(i, [1, 2, 3, 4, 5]) for i in range(6)]
    scores, said = np.array([0.0, 5.0, 4.0, 3.0, 2.0, 1.0]), list[str]()
    chosen = choose_examples(
        scores,
        np.zeros(6),
        np.arange(6),
        3,
        lambda at: scores[at],
        said.append,
        False,
        rows,
        "near",
    )
    assert chosen.positions.tolist() == [1, 2, 3]
    assert np.isneginf(chosen.scores).tolist() == [True, False, False, False, True, True]
    assert said == ["5 of 6 examples repeat others"]


def test_rows_that_share_an_instruction_are_no_copies() -> None:
    """A source of 61 rows in 600 whose instruction is a third of each row."""
    rng = np.random.default_rng(1)
    shared = list(range(900, 912))
    rows = [example(i, shared + rng.integers(0, 800, 18).tolist()) for i in range(61)]
    rows += [example(i, rng.integers(0, 800, 30).tolist()) for i in range(61, 600)]
    copies = repeated_texts("near", rows, -np.arange(600.0), np.arange(600))
    assert len(set(copies.tolist()) & set(range(61))) <= 1


def test_renamed_and_reordered_rows_are_passed_over() -> None:
    """300 problems, each three times: as it is, its sentences in another order, and with its names
    and numbers changed; at most 2 % of what is selected may share an origin."""
    rng = np.random.default_rng(3)
    frequency = 1 / np.arange(1, 3_001)
    words = rng.permutation(3_000)

    def sentence() -> list[int]:
        return rng.choice(words, 12, p=frequency / frequency.sum()).tolist() + [3_000]

    def changed(token: int) -> int:
        return int(rng.integers(3_001, 3_200)) if token > 3_000 else token

    rows, origin = list[Example](), list[int]()
    for at in range(300):
        names = rng.integers(3_001, 3_200, 5)
        told = [[int(names[k]), *sentence()] for k in range(5)]
        told = [s[:6] + [int(rng.choice(names))] + s[6:] for s in told]
        renamed = [list(map(changed, s)) for s in told]
        for sentences in (told, [told[k] for k in rng.permutation(5)], renamed):
            rows.append(example(len(rows), [token for s in sentences for token in s]))
            origin.append(at)
    scores = np.repeat(rng.standard_normal(300), 3) + 1e-3 * rng.standard_normal(900)
    copies = repeated_texts("near", rows, scores, np.arange(900))
    kept = np.setdiff1d(np.arange(900), copies)
    selected = kept[np.argsort(-scores[kept])][:90]
    assert len({origin[i] for i in selected}) >= 89
    assert len({origin[i] for i in kept}) >= 297, "distinct problems stay"


def test_looking_up_finds_what_comparing_all_finds() -> None:
    """Against the index of every pair of texts, written out; variants from equal to unrelated."""
    rng = np.random.default_rng(4)
    texts = [rng.integers(0, 300, rng.integers(20, 80)) for _ in range(60)]
    for share in (0.1, 0.2, 0.3, 0.4):
        texts += [np.where(rng.random(len(t)) < share, 7, t) for t in texts[:60]]
    rows = [example(i, ids.tolist()) for i, ids in enumerate(texts)]
    scores = rng.standard_normal(len(rows))

    def pairs(row: Example) -> set[tuple[int, int, int]]:
        ids = row.input_ids
        return {(gap, *p) for gap in (1, 2) for p in zip(ids, ids[gap:], strict=False)}

    every = [pairs(row) for row in rows]
    texts_with = Counter(pair for own in every for pair in own)
    weight = {pair: np.log((1 + len(rows)) / n) ** 2 for pair, n in texts_with.items()}
    kept: list[int] = []
    passed: list[int] = []
    for i in np.argsort(-scores).tolist():

        def index(j: int, i: int = i) -> float:
            both, either = every[i] & every[j], every[i] | every[j]
            return sum(weight[p] for p in both) / sum(weight[p] for p in either)

        (passed if any(index(j) >= 0.2 for j in kept) else kept).append(i)
    found = repeated_texts("near", rows, scores, np.arange(len(rows)))
    assert 100 < len(passed) < 240 and found.tolist() == passed


def test_more_texts_than_can_be_compared_are_refused_with_the_cure() -> None:
    with pytest.raises(ConfigError, match=r"16,777,216 texts, .*; use select\.duplicates=exact"):
        _Index(iter(()), 1 << 24)
