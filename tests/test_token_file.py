"""Tokens on disk: the same numbers as in memory, the same run, and nothing left behind."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow.parquet as pq
import pytest
from conftest import Runner, corpus_rows, write_jsonl
from faults import content
from models import tiny_tokenizer
from places import place

from dualsft.config.settings import DataConfig
from dualsft.data import examples as examples_module
from dualsft.data import tokens
from dualsft.data.examples import Example, tokenize
from dualsft.data.rows import DataReport, Row, stream_rows
from dualsft.data.tokens import TokenFile
from dualsft.errors import DataError
from dualsft.runs.stages import split


@pytest.mark.parametrize("held", [0, 100, 1 << 20])
def test_stored_tokens_are_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: int
) -> None:
    monkeypatch.setattr(tokens, "HELD_BYTES", held)
    rng, file = random.Random(0), TokenFile(place(tmp_path / "run"))
    plain = [
        Example(f"e{i}", i, ids, [-100, *ids[1:]])
        for i in range(50)
        for ids in [[rng.randrange(1 << 31) for _ in range(rng.randrange(2, 40))]]
    ]
    stored = [example.stored(file) for example in plain]
    for i in rng.sample(range(50), 50):
        one, other = plain[i], stored[i]
        assert one == other and one.num_response_tokens == other.num_response_tokens
        assert list(other.labels) == one.labels and other.input_ids[1:] == one.input_ids[1:]
        assert other.input_ids[-1] == one.input_ids[-1] and len(other.labels) == len(one.labels)
        assert np.asarray(other.input_ids, np.int64).tolist() == one.input_ids
        assert pickle.loads(pickle.dumps(other)) == one
    assert stored[0] != stored[1] and not list((tmp_path / "run").glob("*"))


def test_a_run_with_its_tokens_on_disk_is_the_same_run(
    make_run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = make_run()
    monkeypatch.setattr(tokens, "HELD_BYTES", 0)
    assert content(make_run(out="other")) == content(expected)
    monkeypatch.setattr(split, "WRITTEN_ROWS", 7)
    again = make_run(out="third")
    grouped = "1_split/tokens.parquet"
    assert pq.ParquetFile(again / grouped).num_row_groups > 7
    assert pq.read_table(again / grouped).equals(pq.read_table(expected / grouped))
    same = content(again) | {grouped: content(expected)[grouped]}
    assert same == content(expected) and not list(again.glob("scratch*"))


def test_rows_are_tokenised_while_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    write_jsonl(path, corpus_rows(2_500))
    config, report = DataConfig(path=str(path), template="plain"), DataReport(path=str(path))
    waiting = largest = 0

    def counted() -> Iterator[Row]:
        nonlocal waiting, largest
        for row in stream_rows(report, config):
            waiting += 1
            largest = max(largest, waiting)
            yield row

    def done(num_rows: int, _: int) -> None:
        nonlocal waiting
        waiting -= num_rows

    found, after = tokenize(counted(), tiny_tokenizer(), config, report, progress=done)
    assert (len(found), after.num_good, after.num_rows) == (2_500, 2_500, 2_500)
    assert largest == 1_000 and waiting == 0


@pytest.mark.parametrize("policy", ["error", "skip"])
def test_a_bad_row_ends_tokenising_but_not_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: Literal["error", "skip"]
) -> None:
    """With `error` the other problems of the file are still told; nothing is tokenised in vain."""
    path, encoded, encode = tmp_path / "c.jsonl", list[int](), examples_module._encode
    rows: list[dict[str, Any]] = [{"prompt": "q", "response": "a"}] * 5_000
    write_jsonl(path, [*rows[:1_500], {"prompt": 1, "response": "a"}, *rows, {"prompt": "q"}])
    config = DataConfig(path=str(path), template="plain", bad_rows=policy)
    report = DataReport(path=str(path))

    def counting(chunk: list[Row], *rest: object) -> list[Example]:
        encoded.append(len(chunk))
        return encode(chunk, *rest)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(examples_module, "_encode", counting)
    if policy == "skip":
        found, after = tokenize(stream_rows(report, config), tiny_tokenizer(), config, report)
        assert (len(found), after.num_bad, sum(encoded)) == (6_500, 2, 6_500)
        return
    with pytest.raises(DataError) as problem:
        tokenize(stream_rows(report, config), tiny_tokenizer(), config, report)
    told = problem.value.problems
    assert "line 1501: field 'prompt' is a number" in told[0] and "line 6502" in told[1]
    assert encoded == [1_000]


def test_progress_of_a_long_file_ends_at_its_end(
    make_run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(split, "LONG_ROWS", 10)
    make_run(until="split", said=said)
    assert any("reading data.path: 100/100 % of the bytes" in line for line in said)
