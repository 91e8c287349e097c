"""Rows: what is read, byte for byte, and every kind of row and file that cannot be."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualsft.config.settings import DataConfig
from dualsft.data.rows import DataReport, Limits, Row, read_rows, source_lines
from dualsft.errors import ConfigError, DataError

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


@pytest.mark.parametrize("name", ["c.jsonl", "c.jsonl.gz", "c.json.gz", "C.JSONL"])
def test_formats_of_files(tmp_path: Path, name: str) -> None:
    rows, report = read(tmp_path / name, GOOD + b"\n" + GOOD)
    assert [(row.index, row.prompt, row.response) for row in rows] == [(0, "p", "r"), (1, "p", "r")]
    assert (report.num_rows, report.num_good, report.num_bad, report.bad) == (2, 2, 0, [])
    assert report.format == "prompt_response"


def test_raw_rows_are_byte_exact_and_indices_are_lines(corpus: Path) -> None:
    second = b' {"response":"\\u00e9 \xc3\xa9", "x": [1.0, 1e2],  "prompt":"q"}\t\r'
    rows, report = read(corpus, b"\xef\xbb\xbf" + GOOD + b"\r\n\n  \r\n" + second + b"\n" + GOOD)
    assert [row.raw for row in rows] == [GOOD + b"\r", second, GOOD]
    assert [row.index for row in rows] == [0, 3, 4]
    assert rows[1].response == "é é"
    assert report.num_rows == 3


def test_ids_are_content_and_position(corpus: Path) -> None:
    other_spelling = b'{ "response" : "r", "prompt": "\\u0070"}'
    rows, _ = read(corpus, b"\n".join([GOOD, other_spelling, GOOD.replace(b'"r"', b'"s"')]))
    (first, _), (second, place), (third, _) = (row.id.split("-") for row in rows)
    assert first == second != third
    assert len(first) == 16
    assert place == "1"


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
    assert "has 'instruction', 'output'); name your fields" in report.bad[2]


# --- rows that cannot be used ------------------------------------------------------------------

BAD_ROWS: dict[str, tuple[bytes, str]] = {
    "invalid_json": (b'{"prompt": "p" "response": "r"}', "not valid JSON at column 16: Expecting"),
    "cut_off": (b'{"prompt": "p", "respo', "not valid JSON at column 17: Unterminated"),
    "two_objects": (GOOD + GOOD, "not valid JSON at column 33: Extra data"),
    "python_repr": (b"{'prompt': 'p', 'response': 'r'}", "not valid JSON at column 2"),
    "raw_control": (b'{"prompt": "a\tb", "response": "r"}', "column 14: Invalid control"),
    "inner_mark": (b"\xef\xbb\xbf" + GOOD, "not valid JSON at column 1: Unexpected UTF-8 BOM"),
    "bad_utf8": (
        b'{"prompt": "p\xff", "response": "r"}',
        "byte 14 of the row (0xff) is not UTF-8",
    ),
    "encoded_surrogate": (b'{"prompt": "\xed\xa0\x80", "response": "r"}', "byte 13 of the row"),
    "nan": (b'{"prompt": "p", "response": "r", "w": NaN}', "NaN is not valid JSON; remove"),
    "infinity": (b'{"prompt": "p", "response": "r", "w": [-Infinity]}', "-Infinity is not valid"),
    "long_integer": (b'{"prompt": "p", "w": ' + b"9" * 5000 + b"}", "not valid JSON: Exceeds"),
    "list": (b'["p", "r"]', "a list where a JSON object is needed; write one object per row"),
    "string": (b'"p"', "a string where a JSON object"),
    "number": (b"3", "a number where a JSON object"),
    "null": (b"null", "null where a JSON object"),
    "missing_response": (b'{"prompt": "p", "answer": "r"}', "field 'response' missing (the row"),
    "missing_prompt": (b'{"response": "r"}', "field 'prompt' missing (the row has 'response');"),
    "no_fields": (b"{}", "fields 'prompt', 'response' missing (the row has no fields)"),
    "null_response": (b'{"prompt": "p", "response": null}', "field 'response' is null, must be a"),
    "null_prompt": (b'{"prompt": null, "response": "r"}', "field 'prompt' is null, must be a"),
    "number_response": (b'{"prompt": "p", "response": 3.5}', "field 'response' is a number, must"),
    "boolean_response": (b'{"prompt": "p", "response": true}', "field 'response' is a boolean"),
    "list_response": (b'{"prompt": "p", "response": ["r"]}', "field 'response' is a list, must"),
    "object_prompt": (b'{"prompt": {"a": 1}, "response": "r"}', "field 'prompt' is an object"),
    "empty_response": (b'{"prompt": "p", "response": ""}', "field 'response' is empty; write"),
    "blank_response": (b'{"prompt": "p", "response": " \\n\\t"}', "field 'response' is empty"),
    "repeated_key": (b'{"prompt": "p", "response": "r", "prompt": "q"}', "field 'prompt' is given"),
    "repeated_inside": (b'{"prompt": "p", "response": "r", "m": {"k": 1, "k": 1}}', "field 'k' is"),
    "lone_surrogate": (b'{"prompt": "p", "response": "ab\\ud800"}', "'response' has half a surr"),
    "deep_nesting": (b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    "long_line": (b'{"prompt": "' + b"p" * 300_000 + b'", "response": "r"}', "longer than 250,000"),
}
SMALL = Limits(max_line_bytes=250_000, max_ratio=10_000)


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
@pytest.mark.parametrize("kind", BAD_ROWS)
def test_bad_rows_are_named_or_skipped(tmp_path: Path, kind: str, suffix: str) -> None:
    path, (line, message) = tmp_path / f"corpus.{suffix}", BAD_ROWS[kind]
    content = b"\n".join([GOOD, b"", line, GOOD])
    with pytest.raises(DataError) as caught:
        read(path, content, SMALL)
    problem, total = caught.value.problems
    assert problem.startswith(f"{path}, line 3: ")
    assert message in problem
    assert total.startswith(f"1 of 3 rows of {path} are bad") and "data.bad_rows=skip" in total

    rows, report = read(path, content, SMALL, bad_rows="skip")
    assert [row.index for row in rows] == [0, 3]
    assert report.bad == [problem]
    assert (report.num_rows, report.num_good, report.num_bad) == (3, 2, 1)


@pytest.mark.parametrize("kind", sorted(BAD_ROWS.keys() - {"inner_mark"}))
def test_a_corpus_with_nothing_usable_is_always_an_error(corpus: Path, kind: str) -> None:
    with pytest.raises(DataError, match="corpus.jsonl, line 1: "):
        read(corpus, BAD_ROWS[kind][0], SMALL, bad_rows="skip")


def test_alpaca_input_must_be_text(corpus: Path) -> None:
    with pytest.raises(DataError, match="line 1: field 'input' is a list"):
        read(corpus, b'{"instruction": "i", "input": [], "output": "o"}')


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


def test_skipping_is_said(corpus: Path) -> None:
    _, report = read(corpus, b"\n".join([b"{", GOOD, b"[]"]), bad_rows="skip")
    said = "\n".join(report.notes())
    assert "2 of 3 rows are bad and left out" in said
    assert "line 1: not valid JSON" in said and "line 3: a list" in said


# --- files that cannot be used -----------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("name", ["c.jsonl", "c.jsonl.gz"])
def test_an_empty_file_is_an_error(tmp_path: Path, content: bytes, name: str) -> None:
    with pytest.raises(DataError, match=rf"{name}: there is no row"):
        read(tmp_path / name, content, bad_rows="skip")


@pytest.mark.parametrize(
    "name", ["c.txt", "c.xlsx", "c.parquet.zip", "c.gz", "c", "jsonl", ".json"]
)
def test_other_files_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"data.path: .*supported: \*.jsonl, \*.ndjson, \*.json"):
        read(tmp_path / name, GOOD)


def test_missing_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    os.mkfifo(tmp_path / "pipe.jsonl")
    for name, what in (
        ("none.jsonl", "does not exist"),
        ("folder.jsonl", "holds no data file"),
        ("pipe.jsonl", "is not a regular file"),
    ):
        with pytest.raises(ConfigError, match=f"data.path: .*{name}' {what}; "):
            read_rows(tmp_path / name, DataConfig(path=name))


@pytest.mark.parametrize("policy", ["error", "skip"])
@pytest.mark.parametrize("cut", [3, 12, 60, -9, -3])
def test_a_cut_off_gzip_is_an_error(tmp_path: Path, policy: str, cut: int) -> None:
    path = tmp_path / "c.jsonl.gz"
    lines = [json.dumps({"prompt": str(i), "response": str(i * i)}) for i in range(500)]
    path.write_bytes(gzip.compress("\n".join(lines).encode())[:cut])
    with pytest.raises(DataError, match=r"c.jsonl.gz, line \d+: the gzip file is damaged or cut"):
        read_rows(path, DataConfig(path=str(path), bad_rows=policy))  # type: ignore[arg-type]


def test_other_damage_to_gzip(tmp_path: Path) -> None:
    path, packed = tmp_path / "c.jsonl.gz", gzip.compress(GOOD * 3)
    damaged = {
        "crc": packed[:-6] + bytes([packed[-6] ^ 1]) + packed[-5:],
        "body": packed[:12] + b"\xff\xff\xff" + packed[15:],
        "not_gzip": GOOD,
        "tail": packed + b"tail",
    }
    for kind, content in damaged.items():
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"c.jsonl.gz, line \d: the gzip file is damaged"):
            pytest.fail(f"{kind}: {read_rows(path, DataConfig(path=str(path), bad_rows='skip'))}")


@pytest.mark.parametrize(
    ("limits", "ends"),
    [
        (Limits(max_line_bytes=10_000, max_ratio=20), b"\n"),
        (Limits(max_line_bytes=10_000, max_ratio=20), b""),
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


def test_several_gzip_members_are_one_file(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl.gz"
    path.write_bytes(gzip.compress(GOOD[:9]) + gzip.compress(GOOD[9:] + b"\n" + GOOD))
    assert len(read_rows(path, DataConfig(path=str(path)))[0]) == 2


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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(GOOD), "line 1: the file is gzip, not JSON; rename it to end in .gz"),
        (GOOD.decode().encode("utf-16"), "line 1: the file is UTF-16, not JSON; save it as UTF-8"),
    ],
    ids=["gzip", "UTF-16"],
)
def test_a_file_that_is_something_else_is_named(corpus: Path, content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(corpus, content, bad_rows="skip")


def test_fields_of_no_format_are_listed(corpus: Path) -> None:
    with pytest.raises(DataError) as caught:
        read(corpus, b'{"question": "q", "answer": "a"}\n' * 3, bad_rows="skip")
    message = str(caught.value)
    for part in ("line 1:", "'question', 'answer'", "prompt_response (prompt, response)"):
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


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
json_rows = st.dictionaries(
    st.sampled_from(["prompt", "response", "completion", "instruction", "input", "output"]),
    json_values | st.text(),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.binary(max_size=40) | json_rows.map(lambda row: json.dumps(row).encode())))
def test_any_bytes_give_rows_or_a_named_problem(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_bytes(b"\n".join(lines))
    physical = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    try:
        rows, report = read_rows(path, DataConfig(path=str(path), bad_rows="skip"))
    except DataError as problem:
        assert problem.problems and all(str(path) in text for text in problem.problems)
        return
    assert report.num_good == len(rows) > 0
    assert report.num_rows == report.num_good + report.num_bad
    assert report.num_rows == sum(bool(line.strip()) for line in physical)
    for row in rows:
        assert row.raw == physical[row.index]
        assert row.response.strip() and row.response in json.loads(row.raw).values()
