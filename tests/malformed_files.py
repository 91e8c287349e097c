"""Malformed and tricky data: single lines of JSON, and whole files of every kind.

`LINES` are lines that are no usable row; `FILES` are (name, content, outcome): the file is refused
whole, one of its rows is bad, or it is harmless and read. Nothing here knows the readers.
"""

from __future__ import annotations

import gzip
import json
from typing import Any, NamedTuple

import malformed as m
import pyarrow as pa

# --- lines of JSON -------------------------------------------------------------------------------

GOOD = b'{"prompt": "ask", "response": "tell"}'

LINES: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "cut": (GOOD[:20], ("JSON",)),
    "cut_in_string": (GOOD[:14], ("JSON",)),
    "cut_before_brace": (GOOD[:-1], ("JSON",)),
    "missing_colon": (b'{"prompt" "ask", "response": "tell"}', ("JSON",)),
    "missing_comma": (b'{"prompt": "ask" "response": "tell"}', ("column 18: Expecting",)),
    "trailing_comma": (b'{"prompt": "ask", "response": "tell",}', ("JSON",)),
    "single_quotes": (b"{'prompt': 'ask', 'response': 'tell'}", ("JSON",)),
    "bare_keys": (b'{prompt: "ask", response: "tell"}', ("JSON",)),
    "comment": (GOOD[:-1] + b" // yes\n}"[:-2] + b"}", ("JSON",)),
    "python_none": (b'{"prompt": "ask", "response": "tell", "x": None}', ("JSON",)),
    "bad_escape": (b'{"prompt": "a\\q", "response": "tell"}', ("JSON",)),
    "short_escape": (b'{"prompt": "a\\u12", "response": "tell"}', ("JSON",)),
    "raw_tab": (b'{"prompt": "a\tb", "response": "tell"}', ("column 14: Invalid control",)),
    "raw_nul": (b'{"prompt": "a\x00b", "response": "tell"}', ("JSON",)),
    "raw_escape": (b'{"prompt": "a\x1b[31mb", "response": "tell"}', ("JSON",)),
    "leading_zero": (b'{"prompt": "ask", "response": "tell", "x": 01}', ("JSON",)),
    "hex_number": (b'{"prompt": "ask", "response": "tell", "x": 0x1}', ("JSON",)),
    "nan": (b'{"prompt": "ask", "response": "tell", "x": NaN}', ("NaN is not valid JSON; remove",)),
    "infinity": (
        b'{"prompt": "ask", "response": "tell", "x": {"y": -Infinity}}',
        ("-Infinity is not",),
    ),
    "nan_response": (b'{"prompt": "ask", "response": NaN}', ("NaN",)),
    "long_integer": (GOOD[:-1] + b', "x": ' + b"9" * 5000 + b"}", ("not valid JSON: Exceeds",)),
    "repeated_key": (GOOD[:-1] + b', "response": "other"}', ("field 'response' is given twice",)),
    "repeated_deep": (GOOD[:-1] + b', "x": [{"k": 1, "k": 2}]}', ("field 'k' is given twice",)),
    "bad_utf8": (
        b'{"prompt": "ask \xc3(", "response": "tell"}',
        ("byte 17 of the row (0xc3) is not UTF-8",),
    ),
    "lone_continuation": (b'{"prompt": "ask \x80", "response": "tell"}', ("UTF-8",)),
    "overlong_utf8": (b'{"prompt": "ask \xc0\xaf", "response": "tell"}', ("UTF-8",)),
    "encoded_surrogate": (b'{"prompt": "ask \xed\xb0\x80", "response": "tell"}', ("UTF-8",)),
    "latin1": ('{"prompt": "café", "response": "tell"}'.encode("latin-1"), ("UTF-8",)),
    "low_surrogate": (b'{"prompt": "ask", "response": "a\\udc00b"}', ("response", "surrogate")),
    "surrogates_swapped": (b'{"prompt": "\\udc00\\ud800", "response": "b"}', ("prompt",)),
    "list": (b'["ask", "tell"]', ("a list where a JSON object is needed; write one object",)),
    "string": (b'"tell"', ("a string where a JSON object",)),
    "number": (b"17", ("a number where a JSON object",)),
    "true": (b"true", ("a boolean where a JSON object",)),
    "null": (b"null", ("null where a JSON object",)),
    "word": (b"hello", ("JSON",)),
    "deep_lists": (
        GOOD[:-1] + b', "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        ("nested too deeply",),
    ),
    "deep_objects": (
        GOOD[:-1] + b', "x": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
        ("nest",),
    ),
    "deep_unclosed": (b"[" * 100_000, ()),
}
RESYNC = {"cut", "cut_in_string", "cut_before_brace", "deep_unclosed", "word"}


# --- whole files ---------------------------------------------------------------------------------


class Refused(NamedTuple):
    """The file cannot be used, whatever `data.bad_rows` says."""

    words: tuple[str, ...]
    place: str = ""


class Bad(NamedTuple):
    """One row of `total` is bad."""

    place: str
    words: tuple[str, ...]
    total: int


class Accepted(NamedTuple):
    """Harmless: these prompts and responses are read."""

    pairs: tuple[tuple[str, str], ...]


TABLE = m.table_of([m.PAIR, m.PAIR, m.PAIR])
PARQUET, STREAM, ARROW = m.parquet(TABLE), m.arrow_stream(TABLE), m.arrow_file(TABLE)
ONE = Accepted((("ask", "tell"),))
TWO = Accepted((("ask", "tell"),) * 2)
THREE = Accepted((("ask", "tell"),) * 3)
HEAD = b"prompt,response\n"


def columns(**values: Any) -> pa.Table:
    return pa.table(values)


def parquet(**values: Any) -> bytes:
    return m.parquet(pa.table(values))


def unchecked_strings(*values: bytes) -> pa.Array:
    """A string column whose bytes nobody has checked."""
    binary = pa.array(values, pa.binary())
    return pa.StringArray.from_buffers(len(values), *binary.buffers()[1:])


JSON_FILES: dict[str, tuple[str, bytes, Refused | Bad | Accepted]] = {
    "empty": ("c.json", b"", Refused(("there is no row",))),
    "empty_lines": ("c.jsonl", b"\n \n", Refused(("there is no row",))),
    "only_bom": ("c.jsonl", b"\xef\xbb\xbf", Refused(("there is no row",))),
    "two_objects": (
        "c.jsonl",
        GOOD + b"\n" + GOOD * 2,
        Bad("line 2", ("column 38: Extra data",), 2),
    ),
    "blank": ("c.json", b" \n\t\r\n", Refused(("no row",))),
    "empty_array": ("c.json", b"[]", Refused(("no row",))),
    "only_open": ("c.json", b"[", Refused((), "line 1")),
    "unclosed": ("c.json", b"[\n" + GOOD + b",\n" + GOOD + b"\n", Refused((), "line 4")),
    "cut_element": ("c.json", b"[\n" + GOOD + b",\n" + GOOD[:9], Refused((), "line 3")),
    "trailing_comma": ("c.json", b"[\n" + GOOD + b",\n]", Bad("line 2", ("comma",), 2)),
    "no_comma": ("c.json", b"[\n" + GOOD + b"\n" + GOOD + b"]", Refused(("comma",), "line 3")),
    "two_commas": ("c.json", b"[\n" + GOOD + b",,\n" + GOOD + b"]", Bad("line 2", ("comma",), 3)),
    "after_the_end": ("c.json", b"[" + GOOD + b"]\n" + GOOD, Refused((), "line 2")),
    "two_arrays": ("c.json", b"[" + GOOD + b"]\n[" + GOOD + b"]", Refused((), "line 2")),
    "number": ("c.json", b"3", Refused((), "line 1")),
    "text": ("c.json", b'"ask"', Refused((), "line 1")),
    "null": ("c.json", b"null", Refused((), "line 1")),
    "wrapped": ("c.json", b'{"data": [' + GOOD + b"]}", Refused(("data",), "line 1")),
    "columns": ("c.json", b'{"prompt": ["a"], "response": ["b"]}', Refused((), "line 1")),
    "arrays_inside": ("c.json", b"[[" + GOOD + b"]]", Refused(("list",), "line 1")),
    "strings_inside": ("c.json", b'["ask", "tell"]', Refused(("string",), "line 1")),
    "pretty": ("c.json", json.dumps([m.PAIR] * 2, indent=2).encode(), TWO),
    "one_line": ("c.json", b"[" + GOOD + b"," + GOOD + b"]", TWO),
    "no_newline": ("c.jsonl", GOOD + b"\n" + GOOD, TWO),
    "lines_in_json": ("c.json", GOOD + b"\n" + GOOD + b"\n", TWO),
    "bom_array": ("c.json", b"\xef\xbb\xbf[" + GOOD + b"]", ONE),
    "crlf_array": ("c.json", b"[\r\n" + GOOD + b",\r\n" + GOOD + b"\r\n]\r\n", TWO),
    "spaced_array": ("c.json", b"\n\n  [  " + GOOD + b"  ,\n\n" + GOOD + b" ]  \n", TWO),
    "utf16_array": ("c.json", (b"[" + GOOD + b"]").decode().encode("utf-16"), Refused(("UTF-16",))),
    "utf16_be": (
        "c.jsonl",
        b"\xfe\xff" + GOOD.decode().encode("utf-16-be"),
        Refused(("the file is UTF-16, not JSON; save it as UTF-8",), "line 1"),
    ),
    "utf16_no_mark": ("c.jsonl", GOOD.decode().encode("utf-16-le"), Refused((), "line 1")),
    "utf32": ("c.jsonl", GOOD.decode().encode("utf-32"), Refused(("UTF-",))),
    "nuls": ("c.jsonl", b"\x00" * 5000, Refused((), "line 1")),
    "nul_tail": ("c.jsonl", GOOD + b"\n" + b"\x00" * 4096, Bad("line 2", (), 2)),
    "array_in_jsonl": ("c.jsonl", b"[" + GOOD + b"," + GOOD + b"]", Refused(("list",), "line 1")),
    "pretty_in_jsonl": ("c.jsonl", json.dumps(m.PAIR, indent=1).encode(), Refused((), "line 1")),
    "bom": ("c.jsonl", b"\xef\xbb\xbf" + GOOD + b"\n" + GOOD, TWO),
    "two_boms": (
        "c.jsonl",
        b"\xef\xbb\xbf\xef\xbb\xbf" + GOOD + b"\n" + GOOD,
        Bad("line 1", ("Unexpected UTF-8 BOM",), 2),
    ),
    "crlf": ("c.jsonl", GOOD + b"\r\n\r\n" + GOOD + b"\r\n", TWO),
    "old_mac": ("c.jsonl", GOOD + b"\r" + GOOD, Refused((), "line 1")),
    "many_blank_lines": ("c.jsonl", b"\n" * 5000 + GOOD + b"\n\n", ONE),
    "extra_keys": ("c.jsonl", GOOD[:-1] + b', "id": 1, "x": {"y": [null, 1.5e3]}}', ONE),
    "pair_of_surrogates": (
        "c.jsonl",
        b'{"prompt": "\\ud83d\\ude00", "response": "tell"}',
        Accepted((("😀", "tell"),)),
    ),
    "upper_suffix": ("C.JSONL", GOOD, ONE),
    "odd_name": ("a b,c é [x] *?.jsonl", GOOD, ONE),
    "html": ("c.jsonl", b"<!DOCTYPE html>\n<html></html>", Refused((), "line 1")),
    "lfs_pointer": (
        "c.jsonl",
        b"version https://git-lfs.github.com/spec/v1\n",
        Refused((), "line 1"),
    ),
    "csv_as_jsonl": ("c.jsonl", HEAD + b"ask,tell\n", Refused((), "line 1")),
}

CSV_FILES: dict[str, tuple[str, bytes, Refused | Bad | Accepted]] = {
    "empty": ("c.csv", b"", Refused(("no row",))),
    "blank": ("c.csv", b"\n\n\n", Refused(("no row",))),
    "header_only": ("c.csv", HEAD, Refused(("no row",))),
    "good": ("c.csv", HEAD + b"ask,tell\n" * 2, TWO),
    "no_newline": ("c.csv", HEAD + b"ask,tell\nask,tell", TWO),
    "crlf": ("c.csv", b"prompt,response\r\nask,tell\r\n", ONE),
    "bom": ("c.csv", b"\xef\xbb\xbf" + HEAD + b"ask,tell\n", ONE),
    "blank_lines": ("c.csv", HEAD + b"\nask,tell\n\n\nask,tell\n", TWO),
    "many_lines": (
        "c.csv",
        HEAD + b'"a\n""b""\r\nc,d",tell\n',
        Accepted((('a\n"b"\r\nc,d', "tell"),)),
    ),
    "extra_column": ("c.csv", b"id,prompt,response\n1,ask,tell\n", ONE),
    "tabs": ("c.tsv", b"prompt\tresponse\nask\ttell\n", ONE),
    "gzip": ("c.csv.gz", gzip.compress(HEAD + b"ask,tell\n"), ONE),
    "no_header": ("c.csv", b"ask,tell\nask,tell\n", Refused(("ask", "tell"), "line ")),
    "wrong_header": ("c.csv", b"question,answer\nask,tell\n", Refused(("question", "answer"))),
    "semicolons": ("c.csv", b"prompt;response\nask;tell\n", Refused(("prompt;response",))),
    "tabs_in_csv": ("c.csv", b"prompt\tresponse\nask\ttell\n", Refused(("prompt",))),
    "double_header": (
        "c.csv",
        b"prompt,response,response\na,b,c\n",
        Refused(("response",), "line 1"),
    ),
    "empty_header": ("c.csv", b"prompt,,response\na,b,c\n", Refused(("column 2",), "line 1")),
    "empty_response": ("c.csv", HEAD + b"ask,tell\nask,\n", Bad("line 3", ("response",), 2)),
    "blank_response": ("c.csv", HEAD + b'ask,tell\nask,"  "\n', Bad("line 3", ("response",), 2)),
    "short_record": ("c.csv", HEAD + b"ask,tell\nask\n", Bad("line 3", ("1", "2"), 2)),
    "long_record": ("c.csv", HEAD + b"ask,tell\na,b,c\nask,tell\n", Bad("line 3", ("3",), 3)),
    "after_a_long_field": (
        "c.csv",
        HEAD + b'"a\nb\nc",tell\nask,\n',
        Bad("line 5", ("response",), 2),
    ),
    "open_quote": (
        "c.csv",
        HEAD + b'ask,tell\n"ask,tell\nask,tell\n',
        Refused(("quote",), "line 3"),
    ),
    "open_quote_at_end": ("c.csv", HEAD + b'ask,tell\nask,"tell', Refused(("quote",), "line 3")),
    "after_a_quote": ("c.csv", HEAD + b'ask,tell\n"ask"x,tell\n', Bad("line 3", ("quote",), 2)),
    "nul": ("c.csv", HEAD + b"a\x00b,tell\n", Accepted((("a\0b", "tell"),))),
    "bad_utf8": ("c.csv", HEAD + b"ask,tell\na\xffb,tell\n", Bad("line 3", ("UTF-8",), 2)),
    "bad_utf8_header": ("c.csv", b"prompt,response,\xe9\na,b,c\n", Refused(("UTF-8",), "line 1")),
    "latin1": (
        "c.csv",
        HEAD + "café,tell\nask,tell\n".encode("latin-1"),
        Bad("line 2", ("UTF-8",), 2),
    ),
    "utf16": ("c.csv", (HEAD + b"ask,tell\n").decode().encode("utf-16"), Refused(("UTF-16",))),
    "jsonl_as_csv": ("c.csv", GOOD + b"\n" + GOOD, Refused((), "line ")),
    "parquet_as_csv": ("c.csv", PARQUET, Refused(("Parquet",))),
    "gzip_as_csv": ("c.csv", gzip.compress(HEAD + b"ask,tell\n"), Refused(("gzip",))),
    "wide_field": (
        "c.csv",
        HEAD + b'"' + b"x" * 140_000 + b'",tell\n',
        Accepted((("x" * 140_000, "tell"),)),
    ),
    "looks_typed": (
        "c.csv",
        HEAD + b"1,007\nNA,null\ntrue,1e5\n",
        Accepted((("1", "007"), ("NA", "null"), ("true", "1e5"))),
    ),
}

NESTED = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
TABLE_FILES: dict[str, tuple[str, bytes, Refused | Bad | Accepted]] = {
    "parquet": ("c.parquet", PARQUET, THREE),
    "parquet_gz": ("c.parquet.gz", gzip.compress(PARQUET), THREE),
    "parquet_zstd": ("c.parquet", m.parquet(TABLE, compression="zstd"), THREE),
    "parquet_groups": ("c.parquet", m.parquet(TABLE, row_group_size=1), THREE),
    "parquet_empty": ("c.parquet", b"", Refused((), "")),
    "parquet_no_rows": ("c.parquet", m.parquet(TABLE.slice(0, 0)), Refused(("no row",))),
    "parquet_no_columns": ("c.parquet", m.parquet(pa.table({})), Refused(())),
    "parquet_cut_tail": ("c.parquet", PARQUET[:-20], Refused(())),
    "parquet_cut_half": ("c.parquet", PARQUET[: len(PARQUET) // 2], Refused(())),
    "parquet_cut_head": ("c.parquet", PARQUET[4:], Refused(())),
    "parquet_footer_length": ("c.parquet", PARQUET[:-8] + b"\xff\xff\xff\x7fPAR1", Refused(())),
    "parquet_zeros": ("c.parquet", b"PAR1" + bytes(200) + b"PAR1", Refused(())),
    "parquet_pages_gone": ("c.parquet", b"PAR1" + bytes(60) + PARQUET[64:], Refused(())),
    "jsonl_as_parquet": ("c.parquet", GOOD, Refused(("Parquet",))),
    "csv_as_parquet": ("c.parquet", HEAD + b"ask,tell\n", Refused(("Parquet",))),
    "arrow_as_parquet": ("c.parquet", ARROW, Refused(("Parquet",))),
    "gzip_as_parquet": ("c.parquet", gzip.compress(PARQUET), Refused(("gzip",))),
    "parquet_as_jsonl": ("c.jsonl", PARQUET, Refused(("Parquet",))),
    "parquet_as_json": ("c.json", PARQUET, Refused(("Parquet",))),
    "parquet_as_arrow": ("c.arrow", PARQUET, Refused(("Parquet",))),
    "arrow_as_jsonl": ("c.jsonl", ARROW, Refused(("Arrow",))),
    "wrong_columns": (
        "c.parquet",
        parquet(question=["a"], answer=["b"]),
        Refused(("question", "answer")),
    ),
    "two_columns_of_a_name": (
        "c.parquet",
        m.parquet(pa.table([["a"], ["b"], ["c"]], names=["prompt", "response", "response"])),
        Refused(("response",)),
    ),
    "numbers": (
        "c.parquet",
        parquet(prompt=["a"], response=[3]),
        Refused(("response", "number"), "row 1"),
    ),
    "null_type": (
        "c.parquet",
        parquet(prompt=["a"], response=pa.nulls(1)),
        Refused(("response", "null"), "row 1"),
    ),
    "lists": (
        "c.parquet",
        parquet(prompt=["a"], response=[["b"]]),
        Refused(("response", "list"), "row 1"),
    ),
    "timestamps": (
        "c.parquet",
        m.parquet(columns(prompt=["a"], response=pa.array([5], pa.timestamp("s")))),
        Refused(("response",), "row 1"),
    ),
    "bytes": (
        "c.parquet",
        m.parquet(columns(prompt=["a"], response=pa.array([b"\xff"], pa.binary()))),
        Refused(("response",), "row 1"),
    ),
    "bad_utf8": (
        "c.parquet",
        parquet(prompt=["a", "a"], response=unchecked_strings(b"tell", b"a\xff")),
        Bad("row 2", ("response", "UTF-8"), 2),
    ),
    "bad_utf8_arrow": (
        "c.arrow",
        m.arrow_stream(columns(prompt=["a", "a"], response=unchecked_strings(b"tell", b"a\xff"))),
        Bad("row 2", ("response", "UTF-8"), 2),
    ),
    "bad_utf8_extra": (
        "c.parquet",
        m.parquet(
            columns(prompt=["ask"] * 2, response=["tell"] * 2, x=unchecked_strings(b"a", b"\xff"))
        ),
        Bad("row 2", ("UTF-8",), 2),
    ),
    "null_in_second_group": (
        "c.parquet",
        m.parquet(columns(prompt=["a"] * 5, response=["b"] * 4 + [None]), row_group_size=2),
        Bad("row 5", ("response", "null"), 5),
    ),
    "null_turn": (
        "c.parquet",
        parquet(messages=pa.array([[m.ASK, m.TELL], [m.ASK, None]], NESTED)),
        Bad("row 2", ("messages",), 2),
    ),
    "null_content": (
        "c.arrow",
        m.arrow_file(
            columns(messages=pa.array([[m.ASK, m.TELL], [m.ASK, {"role": "assistant"}]], NESTED))
        ),
        Bad("row 2", ("content", "null"), 2),
    ),
    "dictionary": (
        "c.parquet",
        parquet(prompt=pa.array(["ask"]).dictionary_encode(), response=["tell"]),
        ONE,
    ),
    "large_strings": (
        "c.arrow",
        m.arrow_file(
            columns(
                prompt=pa.array(["ask"], pa.large_string()),
                response=pa.array(["tell"], pa.string_view()),
            )
        ),
        ONE,
    ),
    "odd_extra_columns": (
        "c.parquet",
        m.parquet(
            columns(
                prompt=["ask"],
                response=["tell"],
                when=pa.array([1], pa.timestamp("ns", "UTC")),
                weight=[float("nan")],
                blob=pa.array([b"\xff\x00"], pa.binary()),
                span=pa.array([3], pa.duration("s")),
                money=pa.array([1], pa.decimal128(5, 2)),
                nested=[[{"a": [None, 1.0]}]],
            )
        ),
        ONE,
    ),
    "stream": ("c.arrow", STREAM, THREE),
    "file": ("c.arrow", ARROW, THREE),
    "feather": ("c.feather", m.feather_file(TABLE), THREE),
    "arrow_gz": ("c.arrow.gz", gzip.compress(STREAM), THREE),
    "arrow_empty": ("c.arrow", b"", Refused(())),
    "arrow_no_rows": ("c.arrow", m.arrow_stream(TABLE.slice(0, 0)), Refused(("no row",))),
    "stream_cut_schema": ("c.arrow", STREAM[:40], Refused(())),
    "stream_cut_batch": ("c.arrow", STREAM[:-60], Refused(())),
    "file_cut": ("c.arrow", ARROW[:-9], Refused(())),
    "file_cut_half": ("c.arrow", ARROW[: len(ARROW) // 2], Refused(())),
    "stream_huge_message": (
        "c.arrow",
        b"\xff\xff\xff\xff\xff\xff\xff\x7f" + bytes(64),
        Refused(()),
    ),
    "arrow_zeros": ("c.arrow", bytes(400), Refused(())),
    "jsonl_as_arrow": ("c.arrow", GOOD, Refused(("Arrow",))),
    "arrow_null": (
        "c.arrow",
        m.arrow_stream(columns(prompt=["a", "b"], response=["c", None])),
        Bad("row 2", ("response", "null"), 2),
    ),
}

DAMAGED = ("the gzip file is damaged or cut off here", "copy or download it again")
PACKED = gzip.compress((GOOD + b"\n") * 500, mtime=0)
GZIP_FILES: dict[str, tuple[str, bytes, Refused | Bad | Accepted]] = {
    "named_jsonl": (
        "c.jsonl",
        PACKED,
        Refused(("the file is gzip, not JSON; rename it to end in .gz",), "line 1"),
    ),
    "named_json": ("c.json", PACKED, Refused(("gzip",))),
    "not_gzip": ("c.jsonl.gz", GOOD, Refused(DAMAGED, "line 1")),
    "json_not_gzip": ("c.json.gz", b"[" + GOOD + b"]", Refused(("gzip",))),
    "csv_not_gzip": ("c.csv.gz", HEAD + b"ask,tell\n", Refused(("gzip",))),
    "parquet_not_gzip": ("c.parquet.gz", PARQUET, Refused(("gzip",))),
    "empty": ("c.jsonl.gz", b"", Refused(())),
    "empty_inside": ("c.jsonl.gz", gzip.compress(b""), Refused(("no row",))),
    "empty_csv_inside": ("c.csv.gz", gzip.compress(b""), Refused(("no row",))),
    "cut_header": ("c.jsonl.gz", PACKED[:6], Refused(DAMAGED, "line 1")),
    "cut_body": ("c.jsonl.gz", PACKED[: len(PACKED) // 2], Refused(DAMAGED, "line ")),
    "cut_sum": ("c.jsonl.gz", PACKED[:-4], Refused(DAMAGED, "line ")),
    "cut_json": ("c.json.gz", gzip.compress(b"[" + GOOD + b"]")[:-5], Refused(("gzip",))),
    "cut_csv": ("c.csv.gz", gzip.compress(HEAD + b"ask,tell\n")[:-5], Refused(("gzip",))),
    "cut_parquet": ("c.parquet.gz", gzip.compress(PARQUET)[:-5], Refused(("gzip",))),
    "cut_arrow": ("c.arrow.gz", gzip.compress(STREAM)[:-5], Refused(("gzip",))),
    "wrong_sum": ("c.jsonl.gz", PACKED[:-8] + b"\0\0\0\0" + PACKED[-4:], Refused(DAMAGED, "line ")),
    "body": ("c.jsonl.gz", PACKED[:12] + b"\xff\xff\xff" + PACKED[15:], Refused(DAMAGED, "line ")),
    "tail": ("c.jsonl.gz", PACKED + b"more", Refused(DAMAGED, "line ")),
    "twice": ("c.jsonl.gz", gzip.compress(PACKED), Refused(("gzip",))),
    "members": ("c.jsonl.gz", gzip.compress(GOOD[:7]) + gzip.compress(GOOD[7:]), ONE),
    "bad_line": ("c.jsonl.gz", gzip.compress(GOOD + b"\n{\n"), Bad("line 2", ("JSON",), 2)),
    "no_inner_suffix": ("c.gz", PACKED, Refused((".jsonl",))),
    "zip": ("c.jsonl", b"PK\x03\x04" + bytes(60), Refused((), "line 1")),
    "zip_suffix": ("c.zip", b"PK\x03\x04" + bytes(60), Refused((".jsonl",))),
    "txt": ("c.txt", GOOD, Refused((".jsonl",))),
    "xlsx": ("c.xlsx", b"PK\x03\x04" + bytes(60), Refused((".jsonl",))),
    "pickle": ("c.pkl", b"\x80\x04K\x01.", Refused((".jsonl",))),
    "no_suffix": ("corpus", GOOD, Refused((".jsonl",))),
    "only_suffix": (".json", GOOD, Refused(("supported: *.jsonl, *.ndjson, *.json",))),
}

FILES = {
    f"{kind}-{name}": case
    for kind, cases in {
        "json": JSON_FILES,
        "csv": CSV_FILES,
        "table": TABLE_FILES,
        "gzip": GZIP_FILES,
    }.items()
    for name, case in cases.items()
}
