"""Rows: what is read, byte for byte, and every kind of row and file that cannot be."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from dualsft.config.settings import DataConfig
from dualsft.data.rows import DataReport, Limits, Row, read_rows, source_lines
from dualsft.errors import DataError

GOOD = b'{"prompt": "p", "response": "r"}'


def read(
    path: Path, content: bytes, limits: Limits | None = None, **config: Any
) -> tuple[list[Row], DataReport]:
    path.write_bytes(gzip.compress(content) if path.name.endswith(".gz") else content)
    return read_rows(path, DataConfig(path=str(path), **config), limits)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return tmp_path / "corpus.jsonl"


# --- what is read ------------------------------------------------------------------------------


def test_raw_rows_are_byte_exact_and_indices_are_lines(corpus: Path) -> None:
    second = b' {"response":"\\u00e9 \xc3\xa9", "x": [1.0, 1e2],  "prompt":"q"}\t\r'
    rows, report = read(corpus, b"\xef\xbb\xbf" + GOOD + b"\r\n\n  \r\n" + second + b"\n" + GOOD)
    assert [row.raw for row in rows] == [GOOD + b"\r", second, GOOD]
    assert [row.index for row in rows] == [0, 3, 4]
    assert rows[1].response == "é é"
    assert report.num_rows == 3


@pytest.mark.parametrize(
    ("row", "config", "expected"),
    [
        ({"prompt": "p", "response": "r"}, {}, ("p", "r", "prompt_response")),
        ({"prompt": "p", "completion": "r"}, {}, ("p", "r", "prompt_completion")),
        ({"instruction": "i", "output": "o"}, {}, ("i", "o", "alpaca")),
        ({"instruction": "i", "input": "", "output": "o"}, {}, ("i", "o", "alpaca")),
        ({"instruction": "i", "input": None, "output": "o"}, {}, ("i", "o", "alpaca")),
        ({"instruction": "i", "input": "x", "output": "o"}, {}, ("i\nx", "o", "alpaca")),
        (
            {"instruction": "i", "output": "o", "prompt": "p", "response": "r"},
            {"format": "alpaca"},
            ("i", "o", "alpaca"),
        ),
        (
            {"question": "q", "answer": "a", "prompt": "p", "response": "r"},
            {"prompt_field": "question", "response_field": "answer"},
            ("q", "a", "prompt_response"),
        ),
        (
            {"prompt": "p", "response": "r", "completion": "c"},
            {"prompt_field": "prompt", "response_field": "completion"},
            ("p", "c", "prompt_response"),
        ),
    ],
)
def test_formats_of_rows(
    corpus: Path, row: dict[str, Any], config: dict[str, Any], expected: tuple[str, str, str]
) -> None:
    [read_row], report = read(corpus, json.dumps(row).encode(), **config)
    assert (read_row.prompt, read_row.response, report.format) == expected


def test_the_first_complete_row_shows_the_format(corpus: Path) -> None:
    lines = [b'{"prompt": "p"}', b'{"x": 1}', GOOD, b'{"instruction": "i", "output": "o"}']
    rows, report = read(corpus, b"\n".join(lines), bad_rows="skip")
    assert [row.index for row in rows] == [2]
    assert [message.split(": ")[0].split()[-1] for message in report.bad] == ["1", "2", "4"]
    assert "field 'response' missing (the row has 'prompt')" in report.bad[0]
    assert "fields 'prompt', 'response' missing (the row has 'x')" in report.bad[1]
    cure = "give this row the fields of the other rows, or remove it"
    assert f"has 'instruction', 'output'); {cure}" in report.bad[2]
    assert all(message.endswith(cure) for message in report.bad)


def test_the_cure_of_a_missing_field_depends_on_the_other_rows(corpus: Path) -> None:
    """With a format that no row has shown, the setting may be wrong; else the row is."""
    lines, given = [b'{"q": "p"}', GOOD, b"{}"], {"prompt_field": "prompt"}
    configs: list[dict[str, Any]] = [{}, {**given, "response_field": "response"}]
    for config in configs:
        _, report = read(corpus, b"\n".join(lines), bad_rows="skip", **config)
        assert ("name your fields" in report.bad[0]) == bool(config)
        assert report.bad[1].endswith(
            "(the row has no fields); give this row the fields of the other rows, or remove it"
        )
    with pytest.raises(DataError, match="line 2: the fields 'q' match no known format"):
        read(corpus, b'{}\n{"q": "p"}')
    with pytest.raises(DataError, match="line 1: the row has no fields, nor has any later row; "):
        read(corpus, b"{}\n{}")


def test_notes_say_how_many_bad_rows_they_leave_out(corpus: Path) -> None:
    for num_bad, last in ((3, "line 4: "), (4, "and 1 more bad row; L"), (6, "3 more bad rows; L")):
        _, report = read(corpus, b"\n".join([GOOD, *[b"{"] * num_bad]), bad_rows="skip")
        notes = report.notes("L")
        assert f"{num_bad} of {num_bad + 1} rows are bad" in notes[0] and last in notes[-1]
        assert len(notes) == 1 + min(num_bad, 4)
    _, report = read(corpus, GOOD + b"\n{", bad_rows="skip")
    assert "1 of 2 rows is bad and left out" in report.notes()[0]


# --- rows and files that cannot be used (each kind: test_malformed.py) ---------------------------


def test_twenty_problems_are_shown_and_the_rest_counted(corpus: Path) -> None:
    content = b"\n".join([GOOD, *[b"{"] * 50])
    with pytest.raises(DataError) as caught:
        read(corpus, content)
    assert len(caught.value.problems) == 21
    assert "line 21: " in caught.value.problems[19]
    assert "50 of 51 rows" in caught.value.problems[20]
    assert "(20 shown)" in caught.value.problems[20]
    _, report = read(corpus, content, bad_rows="skip")
    assert len(report.bad) == report.num_bad == 50


@pytest.mark.parametrize(
    ("limits", "ends"),
    [
        (Limits(max_line_bytes=10_000, free_bytes=10_000, max_ratio=20), b"\n"),
        (Limits(max_line_bytes=10_000, free_bytes=10_000, max_ratio=20), b""),
        (Limits(max_expanded_bytes=100_000), b"\n"),
    ],
)
def test_a_gzip_bomb_is_refused(tmp_path: Path, limits: Limits, ends: bytes) -> None:
    bomb = GOOD + b"\n" + (b" " * 1000 + ends) * 1000
    with pytest.raises(DataError, match=r"line \d+: the gzip file expands to more than [\d,]+ byt"):
        read(tmp_path / "c.jsonl.gz", bomb, limits, bad_rows="skip")
    if ends:
        rows, _ = read(tmp_path / "c.jsonl", bomb, limits, bad_rows="skip")
        assert len(rows) == 1


def test_a_line_without_end_stops_the_reading(corpus: Path) -> None:
    with pytest.raises(DataError, match=r"line 2: the line does not end within [\d,]+ bytes"):
        read(corpus, GOOD + b"\n" + b" " * 500, Limits(max_line_bytes=100), bad_rows="skip")
    _, report = read(corpus, GOOD + b"\n" + b"x" * 400, Limits(max_line_bytes=100), bad_rows="skip")
    assert report.num_bad == 1


def test_a_line_at_the_limit_is_read(corpus: Path) -> None:
    for extra, num_bad in ((0, 0), (1, 1)):
        row = GOOD.ljust(100 + extra)
        _, report = read(corpus, row + b"\n" + GOOD, Limits(max_line_bytes=100), bad_rows="skip")
        assert (report.num_rows, report.num_bad) == (2, num_bad)


def test_fields_of_no_format_are_listed(corpus: Path) -> None:
    with pytest.raises(DataError) as caught:
        read(corpus, b'{"ask": "q", "reply": "a"}\n' * 3, bad_rows="skip")
    message = str(caught.value)
    for part in ("line 1:", "'ask', 'reply'", "prompt_response (prompt, response)"):
        assert part in message
    for part in ("(prompt, completion, optional tools)", "alpaca (instruction, output, optional"):
        assert part in message
    for part in ("messages (messages", "sharegpt (conversations", "data.prompt_field=..."):
        assert part in message


def test_many_rows_of_no_format_end_the_reading(corpus: Path) -> None:
    with pytest.raises(DataError, match="line 1: the fields 'x' match no known format"):
        read(corpus, b'{"x": 1}\n' * 1000 + GOOD, bad_rows="skip")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "p", "response": "r", "completion": "c"},
        {"prompt": "p", "response": "r", "instruction": "i", "output": "o"},
    ],
)
def test_fields_of_two_formats_must_be_settled(corpus: Path, row: dict[str, str]) -> None:
    with pytest.raises(
        DataError, match="line 1: the fields match more than one format.*data.format"
    ):
        read(corpus, json.dumps(row).encode())


# --- reading again -----------------------------------------------------------------------------


def test_source_lines_are_the_rows_as_they_came(tmp_path: Path) -> None:
    lines = [GOOD.replace(b'"p"', b'"%d"' % i) + b" " * i for i in range(5)]
    path = tmp_path / "c.jsonl.gz"
    rows, _ = read(path, b"\xef\xbb\xbf" + b"\n\n".join(lines))
    chosen = [rows[4], rows[0], rows[3]]
    found = source_lines(path, {row.index: row.id for row in chosen})
    assert list(found.items()) == [(0, lines[0]), (6, lines[3]), (8, lines[4])]
    assert source_lines(path, [8, 6, 0]) == found
    assert source_lines(path, []) == {}


@pytest.mark.parametrize("changed", [GOOD + b"\n" + GOOD.replace(b"r", b"R"), GOOD, GOOD + b"\n{"])
def test_source_lines_refuse_a_changed_file(corpus: Path, changed: bytes) -> None:
    rows, _ = read(corpus, GOOD + b"\n" + GOOD)
    corpus.write_bytes(changed)
    with pytest.raises(DataError, match="line 2: not the row that was read before"):
        source_lines(corpus, {row.index: row.id for row in rows})
