"""Malformed data: each file is refused or flagged by file, place and field, or read back exactly.

Three outcomes, none silent: a bad row (named with file and 1-based line or row; with
`data.bad_rows=skip` it is left out, counted, and the other rows are unharmed), a file that is
refused whole under both policies, and a harmless oddity whose text comes back character for
character. No exception but `DataError` and `ConfigError` may escape. The tables have one member for
each path through the readers. Random damage and hostile sizes are in test_hostile_sizes.py.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import malformed as m
import pyarrow as pa
import pytest
from malformed import GOOD, HEAD
from small_tokenizers import byte_tokenizer

from dualsft.config import settings
from dualsft.data.examples import tokenize
from dualsft.data.rows import read_rows
from dualsft.errors import ConfigError, DataError

TRANSPARENT = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] or '' }}"
    "{% for call in m['tool_calls'] or [] %}{{ call['function']['name'] }}{% endfor %}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""Changes nothing in a turn, so that a decoded example shows the row's text exactly."""
BYTES = byte_tokenizer(chat_template=TRANSPARENT)


def read(path: Path, **data: str) -> tuple[list[Any], Any]:
    words = [f"data.{key}={value}" for key, value in data.items()]
    config = settings.load(
        None, ["model.path=m", f"data.path={path}", "data.max_length=1000000", *words]
    )
    return read_rows(path, config.data)


def problems(path: Path, **data: str) -> list[str]:
    """What reading says when it refuses; anything but the two user errors is a failure."""
    with pytest.raises((DataError, ConfigError)) as caught:
        rows, report = read(path, **data)
        pytest.fail(f"{path.name} was read silently: {rows} {report}")
    return caught.value.problems


def texts(path: Path, **data: str) -> list[tuple[str, str]]:
    """(whole text, trained text) of each row that is read."""
    rows, report = read(path, **data)
    config = settings.load(
        None, ["model.path=m", f"data.path={path}", "data.max_length=1000000"]
    ).data
    examples, _ = tokenize(rows, BYTES, config, report)
    return [(decode(list(e.input_ids)), decode([i for i in e.labels if i >= 0])) for e in examples]


def decode(ids: list[int]) -> str:
    text = BYTES.decode(ids)
    assert isinstance(text, str)
    return text


def rendered(turns: Sequence[m.Turn]) -> tuple[str, str]:
    """The two texts that a conversation must give."""
    parts = [(r, f"[{r}]", c + ("</s>" if r == "assistant" else "")) for r, c in turns]
    whole = "".join(tag + content for _, tag, content in parts)
    return whole, "".join(content for role, _, content in parts if role == "assistant")


def check_message(text: str, path: Path, place: str, words: Sequence[str]) -> None:
    assert str(path) in text, text
    assert f"{path}, {place}: " in text, f"{place} is not named: {text}"
    for word in words:
        assert word in text, f"{word!r} is not named: {text}"
    assert "; " in text or " must " in text, f"no cure: {text}"
    assert len(text) < 1500 and text.isprintable(), "a message is short and safe to print"


def check_bad_row(path: Path, place: str, words: Sequence[str], total: int, **data: str) -> None:
    """One bad row: named under both policies, and the only one left out."""
    problem, cure = problems(path, **data)
    check_message(problem, path, place, words)
    rows_read = "1 row" if total == 1 else f"{total} rows"
    assert cure.startswith(f"1 of {rows_read} of {path} is bad") and "data.bad_rows=skip" in cure
    rows, report = read(path, bad_rows="skip", **data)
    assert (report.num_rows, report.num_bad, report.num_good) == (total, 1, total - 1)
    assert len(rows) == total - 1
    assert report.bad == [problem]
    assert any("1 of" in note for note in report.notes())


# --- rows, over shapes and containers ------------------------------------------------------------


def representable(suffix: str, rows: list[m.Fields]) -> bool:
    """Whether a typed file can hold the rows at all."""
    if suffix.removesuffix(".gz") not in ("parquet", "arrow"):
        return True
    if not set(rows[1]) <= set(rows[0]):
        return False
    try:
        stored = m.table_of(rows).to_pylist()
    except (pa.ArrowException, UnicodeEncodeError):
        return False
    return stored[0] == rows[0]  # a column that takes another type is another file


def row_cases() -> Iterator[Any]:
    for suffix in ("jsonl", "json", "parquet", "arrow", "jsonl.gz"):
        for shape_name, shape in m.SHAPES.items():
            for kind, (row, said) in shape.broken.items():
                rows = [shape.good, row, shape.good]
                if representable(suffix, rows):
                    yield pytest.param(
                        suffix, shape, rows, said, id=f"{suffix}-{shape_name}-{kind}"
                    )


@pytest.mark.parametrize(("suffix", "shape", "rows", "said"), row_cases())
def test_a_bad_row_is_named(
    suffix: str, shape: m.Shape, rows: list[m.Fields], said: str, tmp_path: Path
) -> None:
    path = tmp_path / f"corpus.{suffix}"
    path.write_bytes(m.container(suffix, rows))
    check_bad_row(path, m.place(suffix, 2), [said], 3, format=shape.format)


@pytest.mark.parametrize("name", m.SHAPES)
def test_good_rows_are_recognised_and_read_exactly(name: str, tmp_path: Path) -> None:
    """The other half: what the broken rows differ from is fine, named or recognised."""
    shape = m.SHAPES[name]
    for suffix in ("jsonl", "json", "parquet", "arrow", "feather", "json.gz", "parquet.gz"):
        path = tmp_path / f"corpus.{suffix}"
        path.write_bytes(m.container(suffix, [shape.good] * 2))
        for named in ("auto", shape.format):
            found = texts(path, format=named)
            if shape.turns:
                assert found == [rendered(shape.turns)] * 2, suffix
            assert len(found) == 2


# --- lines of JSON -------------------------------------------------------------------------------

LINES: dict[str, tuple[bytes, str]] = {
    "cut": (GOOD[:20], "JSON"),
    "cut_before_brace": (GOOD[:-1], "JSON"),
    "missing_comma": (b'{"prompt": "ask" "response": "tell"}', "column 18: Expecting"),
    "comma_at_end": (GOOD[:-1] + b", }", "a comma before the closing '}'; remove it"),
    "comma_in_list": (GOOD[:-1] + b', "x": [1,]}', "a comma before the closing ']'; remove it"),
    "comma_twice": (GOOD[:-1] + b',, "x": 1}', "two commas side by side; remove one"),
    "raw_tab": (b'{"prompt": "a\tb", "response": "tell"}', "column 14: Invalid control"),
    "raw_escape": (b'{"prompt": "a\x1b[31mb", "response": "tell"}', "JSON"),
    "nan": (b'{"prompt": "ask", "response": NaN}', "NaN is not valid JSON; remove"),
    "infinity": (GOOD[:-1] + b', "x": {"y": -Infinity}}', "-Infinity is not"),
    "long_integer": (GOOD[:-1] + b', "x": ' + b"9" * 5000 + b"}", "not valid JSON: Exceeds"),
    "repeated_key": (GOOD[:-1] + b', "response": "other"}', "field 'response' is given twice"),
    "repeated_deep": (GOOD[:-1] + b', "x": [{"k": 1, "k": 2}]}', "field 'k' is given twice"),
    "bad_utf8": (
        b'{"prompt": "ask \xc3(", "response": "tell"}',
        "byte 17 of the row (0xc3) is not",
    ),
    "encoded_surrogate": (b'{"prompt": "ask \xed\xb0\x80", "response": "tell"}', "UTF-8"),
    "low_surrogate": (b'{"prompt": "ask", "response": "a\\udc00b"}', "'response' has half a surr"),
    "swapped": (b'{"prompt": "\\udc00\\ud800", "response": "b"}', "'prompt' has half a surrogate"),
    "list": (b'["ask", "tell"]', "a list where a JSON object is needed; write one object"),
    "null": (b"null", "null where a JSON object"),
    "word": (b"hello", "JSON"),
    "deep_lists": (GOOD[:-1] + b', "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too"),
    "deep_unclosed": (b"[" * 100_000, ""),
}
RESYNC = {"cut", "cut_before_brace", "deep_unclosed", "word"}


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
@pytest.mark.parametrize("kind", LINES)
def test_a_bad_line_is_named(kind: str, suffix: str, tmp_path: Path) -> None:
    line, said = LINES[kind]
    path = tmp_path / f"corpus.{suffix}"
    content = b"\r\n".join([GOOD, b" ", line, GOOD])
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    check_bad_row(path, "line 3", [said], 3)
    path.write_bytes(gzip.compress(line) if suffix.endswith("gz") else line)
    assert problems(path, bad_rows="skip")[0].startswith(f"{path}, line 1: ")


@pytest.mark.parametrize("kind", LINES)
def test_a_bad_element_is_named(kind: str, tmp_path: Path) -> None:
    """In a JSON array the rest may be lost with a broken element; it is never silent."""
    line, said = LINES[kind]
    path = tmp_path / "corpus.json"
    path.write_bytes(b"[" + GOOD + b",\n\n" + line + b",\n" + GOOD + b"]\n")
    for policy in ("error", "skip"):
        try:
            rows, report = read(path, bad_rows=policy)
            assert policy == "skip" and report.num_bad == 1 and len(rows) == 2
            found = report.bad
        except (DataError, ConfigError) as problem:
            found = problem.problems
        place = "line 4" if kind in RESYNC and "line 4" in found[0] else "line 3"
        check_message(found[0], path, place, [said] if place == "line 3" else ())


# --- whole files ---------------------------------------------------------------------------------


class File(NamedTuple):
    """A file, and what becomes of it: `pairs` are read, or `words` are said at `place`.

    One row of `total` is bad; with `total` 0 the file is refused, whatever `data.bad_rows` says.
    """

    name: str
    content: bytes
    words: tuple[str, ...] = ()
    place: str = ""
    total: int = 0
    pairs: tuple[tuple[str, str], ...] = ()


def refused(name: str, content: bytes, *words: str, at: str = "") -> File:
    return File(name, content, words, at)


def one_bad(name: str, content: bytes, total: int, at: str, *words: str) -> File:
    return File(name, content, words, at, total)


def accepted(name: str, content: bytes, count: int = 1, *pairs: tuple[str, str]) -> File:
    return File(name, content, pairs=pairs or (("ask", "tell"),) * count)


TABLE = m.table_of([m.PAIR, m.PAIR, m.PAIR])
PARQUET, STREAM, ARROW = m.parquet(TABLE), m.arrow_stream(TABLE), m.arrow_file(TABLE)
ROW = HEAD + b"ask,tell\n"
BOM = b"\xef\xbb\xbf"


def parquet(response: Any, count: int = 1, **more: Any) -> bytes:
    return m.parquet(pa.table({"prompt": ["ask"] * count, "response": response, **more}))


def unchecked(*values: bytes) -> pa.Array:
    """A string column whose bytes nobody has checked."""
    binary = pa.array(values, pa.binary())
    return pa.StringArray.from_buffers(len(values), *binary.buffers()[1:])


JSON_FILES = {
    "empty_lines": refused("c.jsonl", b"\n \n", "there is no row"),
    "only_bom": refused("c.jsonl", BOM, "there is no row"),
    "two_objects": one_bad(
        "c.jsonl", GOOD + b"\n" + GOOD * 2, 2, "line 2", "column 38: Extra data"
    ),
    "comma_after": one_bad(
        "c.jsonl", GOOD + b", \n" + GOOD, 2, "line 1", "column 38: a comma after the row; remove it"
    ),
    "comma_between": one_bad(
        "c.jsonl", GOOD + b"\n" + GOOD + b", " + GOOD, 2, "line 2", "one complete JSON object"
    ),
    "empty_array": refused("c.json", b"[]", "no row"),
    "only_open": refused("c.json", b"[", at="line 1"),
    "unclosed": refused("c.json", b"[\n" + GOOD + b",\n" + GOOD + b"\n", at="line 4"),
    "cut_element": refused("c.json", b"[\n" + GOOD + b",\n" + GOOD[:9], at="line 3"),
    "trailing_comma": one_bad("c.json", b"[\n" + GOOD + b",\n]", 2, "line 2", "comma"),
    "no_comma": refused("c.json", b"[\n" + GOOD + b"\n" + GOOD + b"]", "comma", at="line 3"),
    "two_commas": one_bad("c.json", b"[\n" + GOOD + b",,\n" + GOOD + b"]", 3, "line 2", "comma"),
    "after_the_end": refused("c.json", b"[" + GOOD + b"]\n" + GOOD, at="line 2"),
    "number": refused("c.json", b"3", at="line 1"),
    "wrapped": refused("c.json", b'{"data": [' + GOOD + b"]}", "data", at="line 1"),
    "columns": refused("c.json", b'{"prompt": ["a"], "response": ["b"]}', at="line 1"),
    "arrays_inside": refused("c.json", b"[[" + GOOD + b"]]", "list", at="line 1"),
    "pretty": accepted("c.json", json.dumps([m.PAIR] * 2, indent=2).encode(), 2),
    "lines_in_json": accepted("c.json", GOOD + b"\n" + GOOD + b"\n", 2),
    "spaced_array": accepted("c.json", BOM + b" \r\n[  " + GOOD + b" ,\r\n" + GOOD + b"] \n", 2),
    "utf16_array": refused("c.json", (b"[" + GOOD + b"]").decode().encode("utf-16"), "UTF-16"),
    "utf16_be": refused(
        "c.jsonl",
        b"\xfe\xff" + GOOD.decode().encode("utf-16-be"),
        "the file is UTF-16, not JSON; save it as UTF-8",
        at="line 1",
    ),
    "utf16_no_mark": refused("c.jsonl", GOOD.decode().encode("utf-16-le"), at="line 1"),
    "nul_tail": one_bad("c.jsonl", GOOD + b"\n" + b"\x00" * 4096, 2, "line 2"),
    "array_in_jsonl": refused("c.jsonl", b"[" + GOOD + b"," + GOOD + b"]", "list", at="line 1"),
    "pretty_in_jsonl": refused("c.jsonl", json.dumps(m.PAIR, indent=1).encode(), at="line 1"),
    "bom": accepted("c.jsonl", BOM + GOOD + b"\n" + GOOD, 2),
    "two_boms": one_bad("c.jsonl", BOM * 2 + GOOD + b"\n" + GOOD, 2, "line 1", "UTF-8 BOM"),
    "old_mac": refused("c.jsonl", GOOD + b"\r" + GOOD, at="line 1"),
    "many_blank_lines": accepted("c.jsonl", b"\n" * 5000 + GOOD + b"\n\n"),
    "extra_keys": accepted("c.jsonl", GOOD[:-1] + b', "id": 1, "x": {"y": [null, 1.5e3]}}'),
    "surrogates": accepted(
        "c.jsonl", b'{"prompt": "\\ud83d\\ude00", "response": "tell"}', 1, ("😀", "tell")
    ),
    "upper_suffix": accepted("C.JSONL", GOOD),
    "odd_name": accepted("a b,c é [x] *?.jsonl", GOOD),
}

CSV_FILES = {
    "blank": refused("c.csv", b"\n\n\n", "no row"),
    "header_only": refused("c.csv", HEAD, "no row"),
    "blank_lines": accepted("c.csv", BOM + HEAD + b"\nask,tell\r\n\n\nask,tell", 2),
    "many_lines": accepted(
        "c.csv", HEAD + b'"a\n""b""\r\nc,d",tell\n', 1, ('a\n"b"\r\nc,d', "tell")
    ),
    "extra_column": accepted("c.csv", b"id,prompt,response\n1,ask,tell\n"),
    "tabs": accepted("c.tsv", b"prompt\tresponse\nask\ttell\n"),
    "wrong_header": refused("c.csv", b"ask,reply\nask,tell\n", "'ask', 'reply'"),
    "semicolons": accepted("c.csv", b"prompt;response\nask;tell\n"),
    "tabs_in_csv": accepted("c.csv", b"prompt\tresponse\nask\ttell\n"),
    "bars": accepted("c.csv", b"prompt|response\nask|tell\n"),
    "semicolons_quoted": accepted(
        "c.csv", b"\xef\xbb\xbf" + b'prompt;response;"a,b"\nask;tell;x\n'
    ),
    "two_delimiters": refused(
        "c.csv", b"prompt;response,x\nask;tell,1\n", "',' and ';'", "quotes", at="line 1"
    ),
    "index_column": accepted("c.csv", b",prompt,response\n0,ask,tell\n"),
    "index_column_semicolons": accepted("c.csv", b";prompt;response\n0;ask;tell\n"),
    "utf16_delimiters": refused("c.csv", "a;b,c\n".encode("utf-16"), "UTF-16", at="line 1"),
    "double_header": refused(
        "c.csv", b"prompt,response,response\na,b,c\n", "response", at="line 1"
    ),
    "empty_header": refused("c.csv", b"prompt,,response\na,b,c\n", "column 2", at="line 1"),
    "blank_response": one_bad("c.csv", ROW + b'ask,"  "\n', 2, "line 3", "response"),
    "short_record": one_bad(
        "c.csv",
        ROW + b"ask\n",
        2,
        "line 3",
        "has 1 field and the header 2, delimited by ','; add the missing one",
    ),
    "short_semicolons": one_bad("c.csv", b"prompt;response\na;b\nask,x\n", 2, "line 3", "by ';'"),
    "long_record": one_bad(
        "c.csv", ROW + b"a,b,c\nask,tell\n", 3, "line 3", "3 fields", "by ','; quote a field"
    ),
    "after_long": one_bad("c.csv", HEAD + b'"a\nb\nc",tell\nask,\n', 2, "line 5", "response"),
    "open_quote": refused("c.csv", ROW + b'"ask,tell\nask,tell\n', "quote", at="line 3"),
    "after_a_quote": one_bad("c.csv", ROW + b'"ask"x,tell\n', 2, "line 3", "quote"),
    "nul": accepted("c.csv", HEAD + b"a\x00b,tell\n", 1, ("a\0b", "tell")),
    "bad_utf8": one_bad("c.csv", ROW + b"a\xffb,tell\n", 2, "line 3", "UTF-8"),
    "bad_utf8_header": refused("c.csv", b"prompt,response,\xe9\na,b,c\n", "UTF-8", at="line 1"),
    "utf16": refused("c.csv", ROW.decode().encode("utf-16"), "UTF-16"),
    "gzip_as_csv": refused("c.csv", gzip.compress(ROW), "gzip"),
    "wide_field": accepted(
        "c.csv", HEAD + b'"' + b"x" * 140_000 + b'",tell\n', 1, ("x" * 140_000, "tell")
    ),
    "looks_typed": accepted("c.csv", HEAD + b"1,007\nNA,null\n", 2, ("1", "007"), ("NA", "null")),
}

NESTED = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
ODD_COLUMNS = {
    "when": pa.array([1], pa.timestamp("ns", "UTC")),
    "weight": [float("nan")],
    "blob": pa.array([b"\xff\x00"], pa.binary()),
    "span": pa.array([3], pa.duration("s")),
    "money": pa.array([1], pa.decimal128(5, 2)),
    "nested": [[{"a": [None, 1.0]}]],
}


def talks(last: Any) -> pa.Table:
    return pa.table({"messages": pa.array([[m.ASK, m.TELL], [m.ASK, last]], NESTED)})


TABLE_FILES = {
    "parquet_groups": accepted("c.parquet", m.parquet(TABLE, row_group_size=1), 3),
    "parquet_gz": accepted("c.parquet.gz", gzip.compress(PARQUET), 3),
    "parquet_no_rows": refused("c.parquet", m.parquet(TABLE.slice(0, 0)), "no row"),
    "parquet_no_columns": refused("c.parquet", m.parquet(pa.table({}))),
    "parquet_cut_half": refused("c.parquet", PARQUET[: len(PARQUET) // 2]),
    "parquet_footer_length": refused("c.parquet", PARQUET[:-8] + b"\xff\xff\xff\x7fPAR1"),
    "parquet_pages_gone": refused("c.parquet", b"PAR1" + bytes(60) + PARQUET[64:]),
    "jsonl_as_parquet": refused("c.parquet", GOOD, "Parquet"),
    "arrow_as_parquet": refused("c.parquet", ARROW, "Parquet"),
    "gzip_as_parquet": refused("c.parquet", gzip.compress(PARQUET), "gzip"),
    "parquet_as_jsonl": refused("c.jsonl", PARQUET, "Parquet"),
    "wrong_columns": refused(
        "c.parquet", m.parquet(pa.table({"ask": ["a"], "reply": ["b"]})), "'ask', 'reply'"
    ),
    "two_columns_of_a_name": refused(
        "c.parquet",
        m.parquet(pa.table([["a"], ["b"], ["c"]], names=["prompt", "response", "response"])),
        "response",
    ),
    "numbers": refused("c.parquet", parquet([3]), "response", "number", at="row 1"),
    "null_type": refused("c.parquet", parquet(pa.nulls(1)), "response", "null", at="row 1"),
    "bytes": refused("c.parquet", parquet(pa.array([b"\xff"])), "response", at="row 1"),
    "bad_utf8": one_bad(
        "c.parquet", parquet(unchecked(b"tell", b"a\xff"), 2), 2, "row 2", "response", "UTF-8"
    ),
    "bad_utf8_extra": one_bad(
        "c.parquet", parquet(["tell"] * 2, 2, x=unchecked(b"a", b"\xff")), 2, "row 2", "UTF-8"
    ),
    "bad_utf8_arrow": one_bad(
        "c.arrow",
        m.arrow_stream(pa.table({"prompt": ["a"] * 2, "response": unchecked(b"tell", b"a\xff")})),
        2,
        *("row 2", "response", "UTF-8"),
    ),
    "null_in_second_group": one_bad(
        "c.parquet",
        m.parquet(
            pa.table({"prompt": ["a"] * 5, "response": ["b"] * 4 + [None]}), row_group_size=2
        ),
        5,
        *("row 5", "response", "null"),
    ),
    "null_turn": one_bad("c.parquet", m.parquet(talks(None)), 2, "row 2", "messages"),
    "null_content": one_bad(
        "c.arrow", m.arrow_file(talks({"role": "assistant"})), 2, "row 2", "content", "null"
    ),
    "dictionary": accepted("c.parquet", parquet(pa.array(["tell"]).dictionary_encode())),
    "large_strings": accepted(
        "c.arrow",
        m.arrow_file(
            pa.table(
                {
                    "prompt": pa.array(["ask"], pa.large_string()),
                    "response": pa.array(["tell"], pa.string_view()),
                }
            )
        ),
    ),
    "odd_extra_columns": accepted("c.parquet", parquet(["tell"], **ODD_COLUMNS)),
    "stream": accepted("c.arrow", STREAM, 3),
    "feather": accepted("c.feather", m.feather_file(TABLE), 3),
    "arrow_no_rows": refused("c.arrow", m.arrow_stream(TABLE.slice(0, 0)), "no row"),
    "stream_cut_schema": refused("c.arrow", STREAM[:40]),
    "stream_cut_batch": refused("c.arrow", STREAM[:-60]),
    "file_cut": refused("c.arrow", ARROW[:-9]),
    "stream_huge_message": refused("c.arrow", b"\xff\xff\xff\xff\xff\xff\xff\x7f" + bytes(64)),
}

DAMAGED = ("the gzip file is damaged or cut off here", "copy or download it again")
PACKED = gzip.compress((GOOD + b"\n") * 500, mtime=0)
GZIP_FILES = {
    "named_jsonl": refused(
        "c.jsonl", PACKED, "the file is gzip, not JSON; rename it to end in .gz", at="line 1"
    ),
    "not_gzip": refused("c.jsonl.gz", GOOD, *DAMAGED, at="line 1"),
    "json_not_gzip": refused("c.json.gz", b"[" + GOOD + b"]", "gzip"),
    "csv_not_gzip": refused("c.csv.gz", ROW, "gzip"),
    "parquet_not_gzip": refused("c.parquet.gz", PARQUET, "gzip"),
    "empty_inside": refused("c.jsonl.gz", gzip.compress(b""), "no row"),
    "cut_body": refused("c.jsonl.gz", PACKED[: len(PACKED) // 2], *DAMAGED, at="line "),
    "cut_arrow": refused("c.arrow.gz", gzip.compress(STREAM)[:-5], "gzip"),
    "wrong_sum": refused("c.jsonl.gz", PACKED[:-8] + bytes(4) + PACKED[-4:], *DAMAGED, at="line "),
    "tail": refused("c.jsonl.gz", PACKED + b"more", *DAMAGED, at="line "),
    "twice": refused("c.jsonl.gz", gzip.compress(PACKED), "gzip"),
    "members": accepted("c.jsonl.gz", gzip.compress(GOOD[:7]) + gzip.compress(GOOD[7:])),
    "bad_line": one_bad("c.jsonl.gz", gzip.compress(GOOD + b"\n{\n"), 2, "line 2", "JSON"),
    "no_inner_suffix": refused("c.gz", PACKED, ".jsonl"),
    "only_suffix": refused(".json", GOOD, "supported: *.jsonl, *.ndjson, *.json"),
}
FILES = {
    f"{kind}-{name}": case
    for kind, cases in {
        **{"json": JSON_FILES, "csv": CSV_FILES, "table": TABLE_FILES, "gzip": GZIP_FILES}
    }.items()
    for name, case in cases.items()
}


@pytest.mark.parametrize("name", FILES)
def test_each_file_is_refused_flagged_or_read_exactly(name: str, tmp_path: Path) -> None:
    file = FILES[name]
    path = tmp_path / file.name
    path.write_bytes(file.content)
    if file.pairs:
        turns = [(("user", p), ("assistant", r)) for p, r in file.pairs]
        assert texts(path) == [rendered(pair) for pair in turns]
    elif file.total:
        check_bad_row(path, file.place, file.words, file.total)
    else:
        for policy in ("error", "skip"):
            text = problems(path, bad_rows=policy)[0]
            assert str(path) in text and text.isprintable() and len(text) < 1500
            assert f"{path}, {file.place}" in text or not file.place, text
            assert all(word in text for word in file.words), text


# --- exact texts ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "suffix", ["jsonl", "json", "csv", "tsv", "parquet", "arrow", "feather", "jsonl.gz", "csv.gz"]
)
@pytest.mark.parametrize("kind", m.TEXTS)
def test_text_comes_back_character_for_character(kind: str, suffix: str, tmp_path: Path) -> None:
    text = m.TEXTS[kind]
    path = tmp_path / f"c.{suffix}"
    path.write_bytes(m.container(suffix, [{"prompt": text, "response": "-" + text}] * 2))
    assert texts(path) == [rendered((("user", text), ("assistant", "-" + text)))] * 2


@pytest.mark.parametrize("name", ["pair", "messages", "sharegpt", "alpaca", "chat_completion"])
def test_raw_utf8_and_escapes_are_the_same_text(name: str, tmp_path: Path) -> None:
    """`é` and `\\u00e9`, in every shape: one text, two spellings."""
    odd = m.TEXTS["rtl"] + m.TEXTS["emoji"] + m.TEXTS["nfd"] + m.TEXTS["line_separators"]
    spelled = json.dumps(m.SHAPES[name].good).replace("tell", "X")
    raw, escaped = (
        spelled.replace("X", json.dumps(odd, ensure_ascii=ascii)[1:-1]) for ascii in (False, True)
    )
    path = tmp_path / "c.jsonl"
    path.write_text(f"{raw}\n{escaped}\n", encoding="utf-8", newline="")
    first, second = texts(path)
    assert first == second
    assert first[1].endswith(odd + "</s>")


# --- places that are no files --------------------------------------------------------------------


def test_places_that_are_no_files(tmp_path: Path) -> None:
    """A pipe would block for ever, a loop of links never ends: each is refused by name."""
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "loop.jsonl").symlink_to(tmp_path / "loop.jsonl")
    (tmp_path / "broken.jsonl").symlink_to(tmp_path / "nowhere.jsonl")
    (tmp_path / "zero.jsonl").symlink_to("/dev/zero")
    (tmp_path / "folder.jsonl").mkdir()
    places = {
        **dict.fromkeys(("pipe", "zero"), "is not a regular file"),
        **dict.fromkeys(("loop", "broken", "missing", "x" * 300), "does not exist"),
        "folder": "holds no data file",
    }
    for name, what in places.items():
        assert f"{name}.jsonl' {what}; " in problems(tmp_path / f"{name}.jsonl")[0]
    (tmp_path / "real.jsonl").write_bytes(GOOD)
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "real.jsonl")
    assert len(read(tmp_path / "link.jsonl")[0]) == 1


# --- folders and several files --------------------------------------------------------------------

Tree = dict[str, bytes]
ALPACA = json.dumps(m.ALPACA).encode()


def info(**entry: Any) -> Tree:
    """A LLaMA-Factory folder with one entry, `mine`, and its file."""
    text = json.dumps({"mine": {"file_name": "a.json", **entry}}).encode()
    return {"dataset_info.json": text, "a.json": b"[" + ALPACA + b"]"}


def saved(state: Any) -> Tree:
    """A folder as `save_to_disk` writes it."""
    return {"state.json": json.dumps(state).encode(), "data.arrow": STREAM}


Words = tuple[str, ...]


def entry(*words: str, **settings: Any) -> tuple[Tree, dict[str, str], Words]:
    """A case of `FOLDERS`: an entry that cannot be used, and what the message says."""
    return info(**settings), {"dataset": "mine"}, words


def listed(content: bytes, *words: str) -> tuple[Tree, dict[str, str], Words]:
    """A case of `FOLDERS`: a dataset_info.json of these bytes."""
    return {"dataset_info.json": content}, {"dataset": "mine"}, words


OUTSIDE = "which is outside its folder"
FOLDERS: dict[str, tuple[Tree, dict[str, str], Words]] = {
    "only_notes": ({"README.md": b"hello", ".hidden.jsonl": GOOD}, {}, ("no data file",)),
    "two_kinds": ({"a.jsonl": GOOD, "b.csv": b""}, {}, ("several kinds (.csv, .jsonl); give a",)),
    "other_split": ({"test.jsonl": GOOD}, {}, ("'train'", "test", "data.split")),
    "empty_file_among_several": ({"a.jsonl": GOOD, "b.jsonl": b""}, {}, ("b.jsonl: there is no",)),
    "bad_row_in_second": ({"a.jsonl": GOOD, "b.jsonl": b"\n{"}, {}, ("b.jsonl, line 2: ",)),
    "bad_row_in_parquet": (
        {"a.parquet": PARQUET, "b.parquet": PARQUET[:-9]},
        {},
        ("b.parquet, row 1: ",),
    ),
    "info_broken": listed(b"{", "dataset_info.json", "JSON"),
    "info_list": listed(b"[]", "dataset_info.json", "object"),
    "info_not_chosen": (info(), {}, ("set data.dataset (mine)",)),
    "info_unknown": (info(), {"dataset": "mime"}, ("has no dataset 'mime'; did you mean 'mine'?",)),
    "info_entry_text": listed(b'{"mine": "a"}', "the entry must be a JSON object"),
    "info_no_file": listed(b'{"mine": {}}', "needs file_name or hf_hub_url"),
    "info_script": entry("script_url 'run.py' is a loading script, which", script_url="run.py"),
    "info_ranking": entry("ranking: true is preference data", ranking=True),
    "info_cloud": entry("cloud_file_name 's3://x' is in a cloud bucket", cloud_file_name="s3://x"),
    "info_formatting": entry("formatting 'chatml' is not known", "sharegpt", formatting="chatml"),
    "info_unknown_key": entry("the key 'colums' is not known", colums={}),
    "info_split": entry("split 'test' needs a hub dataset", split="test"),
    "info_columns_list": entry("columns must be an object with string values", columns=["a"]),
    "info_columns_unknown": entry("columns: 'images' cannot be used", columns={"images": "i"}),
    "info_column_missing": entry(
        *("a.json, line 1: ", "'ask'", "'tell'"), columns={"prompt": "ask", "response": "tell"}
    ),
    "info_tags_same": entry(
        "tags use 'x'", formatting="sharegpt", tags={"user_tag": "x", "assistant_tag": "x"}
    ),
    "info_samples": entry("num_samples -3 must be an integer of 1", num_samples=-3),
    "info_file_missing": entry("names 'b.json', which does not exist", file_name="b.json"),
    "info_outside": entry("'../x.json'", OUTSIDE, file_name="../x.json"),
    "info_odd_suffix": entry(file_name="dataset_info.json"),
    "saved_broken": ({"state.json": b"nope"}, {}, ("state.json", "JSON")),
    "saved_without_files": (saved({}), {}, ("state.json", "no data file")),
    **{
        f"saved_outside_{name}": (saved({"_data_files": [{"filename": name}]}), {}, (OUTSIDE,))
        for name in ("../x.arrow", "/etc/passwd", None)
    },
    "saved_missing": (saved({"_data_files": [{"filename": "b.arrow"}]}), {}, ("'b.arrow'",)),
    "saved_folder": (saved({"_data_files": [{"filename": "."}]}), {}, ()),
    "saved_indices": (
        saved({"_data_files": [{"filename": "data.arrow"}], "_indices_data_files": [1]}),
        {},
        ("indices mapping", "flatten_indices"),
    ),
    "splits_number": ({"dataset_dict.json": b'{"splits": 5}'}, {}, ("dataset_dict.json",)),
    "splits_other": ({"dataset_dict.json": b'{"splits": ["test"]}'}, {}, ("'train'", "test")),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_each_folder_is_refused_by_name(name: str, tmp_path: Path) -> None:
    tree, data, words = FOLDERS[name]
    for file, content in tree.items():
        (tmp_path / file).write_bytes(content)
    text = problems(tmp_path, **data)[0]
    assert str(tmp_path) in text and text.isprintable() and len(text) < 1500
    assert all(word in text for word in words), text


def test_good_folders_are_read(tmp_path: Path) -> None:
    """The other half: what the refused folders differ from."""
    trees: list[tuple[Tree, dict[str, str], int]] = [
        ({"a.jsonl": GOOD, "b.jsonl": GOOD}, {}, 2),
        (info(), {"dataset": "mine"}, 1),
        (saved({"_data_files": [{"filename": "data.arrow"}]}), {}, 3),
    ]
    for number, (tree, data, count) in enumerate(trees):
        (tmp_path / str(number)).mkdir()
        for file, content in tree.items():
            (tmp_path / str(number) / file).write_bytes(content)
        assert len(read(tmp_path / str(number), **data)[0]) == count


@pytest.mark.parametrize(
    "item", ["~nosuchuser/x.jsonl", "none/*.jsonl", "[", "a\0b.jsonl", ",", "x" * 5000, "\ud800"]
)
def test_items_that_name_nothing(item: str, tmp_path: Path) -> None:
    good = tmp_path / "good.jsonl"
    good.write_bytes(GOOD)
    config = settings.load(None, ["model.path=m", f"data.path={good}"]).data
    for path in (item, f"{good},{item}x"):
        with pytest.raises((DataError, ConfigError), match="data.path: "):
            pytest.fail(f"read silently: {read_rows(path, config)}")
