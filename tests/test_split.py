"""Split: exact, disjoint, independent of the file's order, and honest where it cannot be exact."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from conftest import Runner, corpus_rows, write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st
from places import place

from dualsft.algorithm.split import (
    ROLES,
    Split,
    assign_roles,
    divide,
)
from dualsft.config.settings import SplitConfig
from dualsft.data.examples import IGNORE, Example, training_order
from dualsft.data.rows import DataReport
from dualsft.errors import ConfigError, RunError
from dualsft.runs.stages.split import read_split, write_split


def corpus(texts: list[int]) -> list[Example]:
    """One example per number; equal numbers are equal texts."""
    return [
        Example(f"{text:016x}-{i}", i, [1, text + 3, 2], [IGNORE, text + 3, 2])
        for i, text in enumerate(texts)
    ]


def role_of_text(examples: list[Example], split: Split) -> dict[str, str]:
    return {e.key: role for e, role in zip(examples, split.roles, strict=True)}


# --- budgets -----------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [0.0, 1.5, -0.1, -1, True, float("nan")])
def test_budgets_that_mean_nothing(budget: int | float) -> None:
    with pytest.raises(ConfigError, match="split.warm: "):
        assign_roles(corpus(list(range(100))), seed=0, warm=budget)


# --- roles -------------------------------------------------------------------------------------


def test_the_paper_s_sizes() -> None:
    split = assign_roles(corpus(list(range(10_241))), seed=42)
    assert split.counts == {"val": 1024, "anchor": 2048, "warm": 512, "pool": 6657}
    assert split.notes == []


def test_a_small_corpus_is_said_aloud() -> None:
    split = assign_roles(corpus(list(range(205))), seed=42)
    assert split.counts == {"val": 20, "anchor": 41, "warm": 10, "pool": 134}
    assert "split.val: 20 examples instead of the paper's 1,024" in split.notes[0]
    assert "split.anchor: 41 examples instead of the paper's 2,048" in split.notes[1]


def test_counts_of_one_are_singular() -> None:
    split = assign_roles(corpus(list(range(5))), seed=42)
    assert "split.val: 1 example instead of the paper's 1,024" in split.notes[0]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 15), min_size=4, max_size=60),
    st.integers(1, 12),
    st.integers(0, 12),
    st.integers(0, 12),
    st.integers(0, 5),
    st.randoms(use_true_random=False),
)
def test_identical_texts_stay_together_in_any_order(
    texts: list[int], val: int, anchor: int, warm: int, seed: int, rng: random.Random
) -> None:
    examples, shuffled = corpus(texts), corpus(rng.sample(texts, len(texts)))
    try:
        split = assign_roles(examples, seed, val, anchor, warm)
    except ConfigError as problem:
        with pytest.raises(ConfigError) as again:
            assign_roles(shuffled, seed, val, anchor, warm)
        assert str(again.value) == str(problem)
        return
    again = assign_roles(shuffled, seed, val, anchor, warm)
    by_text = role_of_text(examples, split)
    assert by_text == role_of_text(shuffled, again)
    assert [by_text[e.key] for e in examples] == split.roles  # no text has two roles
    assert (split.counts, split.notes) == (again.counts, again.notes)

    sizes = Counter(e.key for e in examples)
    order = ["val", "anchor", "warm"]
    for role, count in zip(order, (val, anchor, warm), strict=True):
        missing = count - split.counts[role]
        assert missing >= 0
        later = [*order[order.index(role) + 1 :], "pool"]
        if missing:  # then nothing that was left to this role would have fitted
            assert all(size > missing for key, size in sizes.items() if by_text[key] in later)
        assert any(note.startswith(f"split.{role}: ") for note in split.notes) == bool(missing)


def test_a_group_that_does_not_fit_is_passed_over() -> None:
    examples = corpus([0] * 30 + list(range(1, 31)))
    for seed in range(20):
        split = assign_roles(examples, seed, val=5, anchor=10, warm=3)
        assert split.counts == {"val": 5, "anchor": 10, "warm": 3, "pool": 42}


def test_a_role_that_cannot_be_exact_is_said() -> None:
    split = assign_roles(corpus([i // 2 for i in range(40)]), seed=0, val=5, anchor=4, warm=2)
    assert split.counts == {"val": 4, "anchor": 4, "warm": 2, "pool": 30}
    assert split.notes == [
        "split.val: 4 of 5 examples, because identical texts stay together and no group of them "
        "fits the rest"
    ]


@pytest.mark.parametrize(
    ("texts", "sizes", "message"),
    [
        (range(10), (5, 3, 2), r"split.val=5, split.anchor=3, split.warm=2: together 10 of 10 us"),
        (range(10), (20, 1, 1), r"together 22 of 10 usable rows.*lower split.val, split.anchor"),
        (range(3), (None, None, 0.05), r"together 3 of 3 usable rows, which leaves no pool"),
        (range(10), (0, 3, 2), r"split.val: 0 leaves nothing"),
        ([0] * 10, (2, 2, 1), r"split.val=2, split.anchor=2, split.warm=1 cannot be filled"),
        ([0] * 8, (1, 1, 1), r"hold only 1 different texts"),
    ],
)
def test_impossible_splits(
    texts: Sequence[int], sizes: tuple[int | None, int | None, int | float], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        assign_roles(corpus(list(texts)), 0, *sizes)


# --- order of training -------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=30), st.randoms(use_true_random=False))
def test_training_order_is_a_shuffle_of_texts(texts: list[int], rng: random.Random) -> None:
    examples, shuffled = corpus(texts), corpus(rng.sample(texts, len(texts)))
    order, again = (training_order(e, seed=1, epoch=2) for e in (examples, shuffled))
    assert sorted(order) == list(range(len(texts)))
    assert [examples[i].key for i in order] == [shuffled[i].key for i in again]
    listed = rng.sample(examples, len(examples))  # the same rows in another list: the same rows
    assert [listed[i].id for i in training_order(listed, 1, 2)] == [examples[i].id for i in order]


def test_training_order_changes_with_seed_and_epoch() -> None:
    examples = corpus(list(range(50)))
    orders = [training_order(examples, seed, epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    assert len({tuple(order) for order in orders}) == 3
    assert all(order != list(range(50)) for order in orders)


def test_copies_of_a_text_are_spread() -> None:
    order = training_order(corpus([0] * 10 + list(range(1, 91))), seed=0, epoch=0)
    places = sorted(order.index(i) for i in range(10))
    assert places[-1] - places[0] > 20


# --- files -------------------------------------------------------------------------------------


def test_write_and_read(tmp_path: Path) -> None:
    examples = corpus([5, 3, 5, 9, 8, 7, 6, 4, 2, 1])
    split = assign_roles(examples, seed=0, val=2, anchor=2, warm=1)
    report = DataReport("c.jsonl", "alpaca", num_rows=11, num_good=10)
    report.add(3, "c.jsonl, line 4", "no good")
    backwards = Split(split.roles[::-1], split.counts, ["a note"])
    write_split(place(tmp_path), examples[::-1], backwards, report)

    found = read_split(place(tmp_path))
    assert list(found) == list(ROLES)
    for role in ROLES:
        expected = [e for e, r in zip(examples, split.roles, strict=True) if r == role]
        assert found[role] == expected  # ids, tokens, labels and keys, in source order
    table = pq.read_table(tmp_path / "split.parquet")
    assert table.column_names == ["id", "role", "index"]
    assert table["index"].to_pylist() == list(range(10))
    assert table["role"].to_pylist() == split.roles
    tokens = pq.read_schema(tmp_path / "tokens.parquet")
    assert tokens.names == ["id", "role", "input_ids", "labels"]
    assert str(tokens.field("labels").type.value_type) == "int32"

    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["counts"] == split.counts
    assert summary["fractions"]["val"] == 0.2
    assert (summary["num_examples"], summary["num_texts"]) == (10, 9)
    assert (summary["num_tokens"], summary["num_response_tokens"]) == (30, 20)
    assert summary["notes"] == ["a note"]
    assert summary["data"]["num_bad"] == 1
    assert summary["bad"] == ["c.jsonl, line 4: no good"]


def test_files_of_two_splits_are_refused(tmp_path: Path) -> None:
    examples = corpus(list(range(20)))
    for seed in (0, 1):
        folder = tmp_path / str(seed)
        folder.mkdir()
        write_split(place(folder), examples, assign_roles(examples, seed, 5, 5, 5))
    (tmp_path / "0" / "split.parquet").replace(tmp_path / "1" / "split.parquet")
    with pytest.raises(RunError, match="are not of one split"):
        read_split(place(tmp_path / "1"))


# --- rows of other files -----------------------------------------------------------------------


def test_the_source_of_an_example_is_kept_if_it_has_one(tmp_path: Path) -> None:
    rows = [Example(f"e{i}", i, [1, i], [-100, i], source="ab"[i % 2]) for i in range(20)]
    trusted = [Example("val-e0", 0, [1, 99], [-100, 99])]
    for number, examples in enumerate((rows, [replace(row, source="") for row in rows])):
        folder = place(tmp_path / str(number))
        folder.mkdir()
        every, split = divide(examples, trusted, 0, SplitConfig(anchor=2, warm=2))
        write_split(folder, every, split)
        names = pq.read_schema(tmp_path / str(number) / "split.parquet").names
        assert ("source" in names) == (number == 0)
        found = {e.id: e.source for role in read_split(folder).values() for e in role}
        assert found == {e.id: e.source for e in [*examples, *trusted]}
    table = (place(tmp_path) / "0/split.parquet").read_table()
    odd = table.set_column(3, "source", [["a\x1b[2J"] * len(table)])
    (place(tmp_path) / "0/split.parquet").write_table(odd)
    with pytest.raises(RunError, match="control character"):
        read_split(place(tmp_path) / "0")


def test_a_text_of_both_files_stays_in_val() -> None:
    examples = corpus(list(range(50)))
    trusted, anchors = corpus([3, 100]), corpus([3, 5, 100, 101])
    everything, split = divide(examples, trusted, 0, SplitConfig(warm=5), anchors)
    assert everything[-4:] == [*trusted, anchors[1], anchors[3]]
    assert split.roles[-4:] == ["val", "val", "anchor", "anchor"]
    assert len(everything) == 48 + 4 and len({e.key for e in everything}) == len(everything)
    notes = "\n".join(split.notes)
    assert "2 rows of data.anchor_path have the text of a row of data.val_path" in notes
    assert "1 row of data.path has the text of a row of data.anchor_path" in notes
    assert "1 row of data.path has the text of a row of data.val_path" in notes
    with pytest.raises(ConfigError, match="data.anchor_path: every row has the text of"):
        divide(examples, trusted, 0, SplitConfig(warm=5), corpus([100, 3]))


def test_a_run_with_anchors_of_its_own(make_run: Runner, tmp_path: Path) -> None:
    """Ids do not collide with those of the same row elsewhere; budgets are of the corpus."""
    from oracle_run import load_run

    rows = corpus_rows()
    anchors = write_jsonl(tmp_path / "anchors.jsonl", [*corpus_rows(30, seed=9), rows[0]])
    trusted = write_jsonl(tmp_path / "trusted.jsonl", corpus_rows(12, seed=5))
    said: list[str] = []
    run = make_run(
        f"data.anchor_path={anchors}",
        f"data.val_path={trusted}",
        "split.anchor=null",
        "split.val=null",
        until="selection",
        said=said,
    )
    found = load_run(run)
    assert len(found.role("anchor")) == 31 and len(found.role("val")) == 12
    assert all(e.id.startswith("anchor-") for e in found.role("anchor"))
    assert [e.index for e in found.role("anchor")] == list(range(31))
    assert len({e.id for e in found.examples}) == len(found.examples)
    num_full = 119 + 12  # a row of the corpus is an anchor
    summary = json.loads((run / "1_split/summary.json").read_text())
    assert summary["num_full"] == num_full and summary["num_examples"] == num_full + 31
    assert summary["fractions"]["val"] == 12 / num_full
    chosen = json.loads((run / "5_selection/summary.json").read_text())
    assert (chosen["num_full"], chosen["b"]) == (num_full, 13)
    assert any("1 row of data.path has the text of a row of data.anchor_path" in s for s in said)
