"""Malformed data: rows of every shape, damaged one way each, and the files they go into.

A `Shape` is a format with a good row, the conversation it means, and its broken variants: what is
wrong, the row, and the words that a message about it must hold. There is one variant for each path
through `data/formats.py`. `container` writes rows as a file of a kind; `TEXTS` are strings that
must come back exactly.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.ipc as ipc
import pyarrow.parquet as pq

Fields = dict[str, Any]
Turn = tuple[str, str]
Broken = tuple[Fields, str]
"""A row, and what a message about it says."""

SURROGATE = "half \ud800"
GOOD = b'{"prompt": "ask", "response": "tell"}'
HEAD = b"prompt,response\n"


@dataclass(frozen=True)
class Shape:
    """A row format: a good row, its turns, and named broken rows with the words of the message."""

    format: str
    good: Fields
    turns: tuple[Turn, ...]
    broken: Mapping[str, Broken]


NOT_TEXT: dict[str, tuple[Any, str]] = {
    "null": (None, "is null, must be a string"),
    "number": (3.5, "is a number, must be a string"),
    "boolean": (True, "is a boolean, must be a string"),
    "list": (["a", "b"], "is a list, must be a string"),
    "object": ({"a": "b"}, "is an object, must be a string"),
    "surrogate": (SURROGATE, "has half a surrogate pair at character 6"),
    "empty": ("", "is empty"),
    "blank": (" \n\t\u00a0", "is empty"),
}
"""The ways in which a field that must hold text does not."""


def _as_text(row: Fields, field: str, *kinds: str) -> dict[str, Broken]:
    return {
        f"{field}_{kind}": (
            {**row, field: NOT_TEXT[kind][0]},
            f"field {field!r} {NOT_TEXT[kind][1]}",
        )
        for kind in kinds
    }


def _without(row: Fields, name: str) -> dict[str, Broken]:
    return {f"{name}_missing": ({k: v for k, v in row.items() if k != name}, f"field {name!r} ")}


def _said(role: str, content: Any, **more: Any) -> Fields:
    return {"role": role, "content": content, **more}


ASK, TELL = _said("user", "ask"), _said("assistant", "tell")


def _turns(message: str, *turns: Any) -> Broken:
    return {"messages": list(turns)}, message


def _answer(content: Any, message: str) -> Broken:
    return _turns(f"turn 2 (assistant): 'content' {message}", ASK, _said("assistant", content))


IMAGE = [{"type": "image_url", "image_url": {"url": "x.png"}}]
BAD_TURNS: dict[str, Broken] = {
    "null": ({"messages": None}, "field 'messages' is null, must be a list of turns"),
    "empty": _turns("field 'messages' is an empty list"),
    "turn_null": _turns("turn 2 is null, must be an object", ASK, None),
    "no_role": _turns("turn 2 has no 'role' (it has 'content')", ASK, {"content": "tell"}),
    "role_number": _turns("turn 2: role '1' is not known; use system", ASK, _said(1, "tell")),  # pyright: ignore[reportArgumentType]
    "role_unknown": _turns("turn 2: role 'robot' is not known", ASK, _said("robot", "tell")),
    "no_content": _answer(None, "is missing or null"),
    "content_number": _answer(42, "is a number, must be a string"),
    "content_image": _turns("a part that is not text ('image_url')", _said("user", IMAGE), TELL),
    "part_string": _turns("has a part that is not text", _said("user", ["ask"]), TELL),
    "part_null": _turns("'content' is null", _said("user", [{"type": "text", "text": None}]), TELL),
    "answer_blank": _answer(" \n", "is empty"),
    "answer_no_parts": _answer([], "is empty"),
    "surrogate": _answer(SURROGATE, "has half a surrogate pair"),
    "no_assistant": _turns("has no assistant turn to train on; add the answer", ASK),
    "untrained": _turns("has no assistant turn to train on", ASK, {**TELL, "weight": 0}),
    "ends_with_user": _turns("ends with a user turn that has no answer", ASK, TELL, ASK),
}

CHAT_PAIR: Fields = {"prompt": [ASK], "completion": [TELL]}
BAD_COMPLETIONS: dict[str, Broken] = {
    "mixed": ({**CHAT_PAIR, "prompt": "ask"}, "'prompt' is a string and 'completion' a list"),
    "empty_list": ({**CHAT_PAIR, "completion": []}, "field 'completion' is an empty list"),
    "is_the_user": ({**CHAT_PAIR, "completion": [ASK]}, "has no assistant turn to train on"),
    "turn_number": ({**CHAT_PAIR, "completion": [5]}, "field 'completion', turn 1 is a number"),
    "prompt_turn_null": ({**CHAT_PAIR, "prompt": [None]}, "field 'prompt', turn 1 is null"),
}

ALPACA: Fields = {
    "instruction": "ask",
    "input": "this",
    "output": "tell",
    "history": [["before?", "before."]],
    "system": "be kind",
}


def _history(message: str, *pairs: Any) -> Broken:
    return {**ALPACA, "history": list(pairs)}, f"field 'history', pair 1{message}"


BAD_ALPACA: dict[str, Broken] = {
    **_as_text(ALPACA, "output", "null", "blank"),
    **_as_text(ALPACA, "instruction", "surrogate"),
    **_as_text(ALPACA, "input", "number"),
    **_as_text(ALPACA, "system", "list"),
    **_without(ALPACA, "output"),
    "history_string": ({**ALPACA, "history": "before"}, "'history' is a string"),
    "history_of_strings": _history(" must be a list of two", "before?", "before."),
    "history_odd_pair": _history(" must be a list of two", ["before?"]),
    "history_null_answer": _history(": the response is null", ["before?", None]),
    "history_empty_answer": _history(": the response is empty", ["before?", ""]),
    "history_surrogate": _history(": the response has half a", ["before?", SURROGATE]),
}

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "d", "parameters": {"type": "object"}},
}
OPENAI: Fields = {
    "messages": [ASK, _said("assistant", None, tool_calls=[CALL]), _said("tool", "2"), TELL],
    "tools": [TOOL],
}


def _called(value: Any, message: str) -> Broken:
    turns = [ASK, _said("assistant", None, tool_calls=value), _said("tool", "2"), TELL]
    return {**OPENAI, "messages": turns}, message


NAMED = "'tool_calls' must name its function"
BAD_OPENAI: dict[str, Broken] = {
    "calls_string": _called("add(1)", "'tool_calls' is a string, must be a list of calls"),
    "calls_of_strings": _called(["add"], NAMED),
    "calls_without_name": _called([{"type": "function", "function": {"arguments": {}}}], NAMED),
    "calls_empty_and_no_content": _called([], "'content' is missing or null"),
    "tools_number": ({**OPENAI, "tools": 3}, "'tools' must be a list of tool schemas"),
    "tools_not_json": ({**OPENAI, "tools": "{add"}, "'tools' is not valid JSON"),
}

HUMAN, GPT = {"from": "human", "value": "ask"}, {"from": "gpt", "value": "tell"}
SHAREGPT: Fields = {"conversations": [HUMAN, GPT], "system": "be kind"}


def _spoken(message: str, *turns: Any) -> Broken:
    return {**SHAREGPT, "conversations": list(turns)}, message


def _replied(value: Any, message: str, speaker: str = "gpt") -> Broken:
    return _spoken(f"turn 2{message}", HUMAN, {"from": speaker, "value": value})


BAD_SHAREGPT: dict[str, Broken] = {
    "null": ({**SHAREGPT, "conversations": None}, "field 'conversations' is null, must be a list"),
    "turn_string": _spoken("turn 2 is a string, must be an object", HUMAN, "tell"),
    "no_from": _spoken("turn 2 has no 'from' (it has 'value')", HUMAN, {"value": "tell"}),
    "no_value": _spoken("turn 2 (gpt): 'value' is null, must be", HUMAN, {"from": "gpt"}),
    "from_unknown": _replied("tell", ": from 'robot' is not known; use human, obs", "robot"),
    "value_surrogate": _replied(SURROGATE, " (gpt): 'value' has half a surrogate pair"),
    "answer_blank": _replied("  ", " (gpt): 'value' is empty"),
    "function_not_json": _replied("f(1)", " is not valid JSON", "function_call"),
    "function_no_name": _replied("{}", ": a function call must be an object", "function_call"),
    "two_answers": _spoken("'gpt' where human or observation is required", HUMAN, GPT, GPT),
    "two_openings": _spoken(
        "turn 2: 'gpt' where human or observation is req", GPT, GPT, HUMAN, GPT
    ),
    "two_humans": _spoken("'human' where gpt or function_call is required", HUMAN, HUMAN, GPT),
    "ends_with_human": _spoken("ends with a user turn that has no answer", HUMAN, GPT, HUMAN),
    "system_in_the_middle": _replied("x", ": from 'system' is not known", "system"),
    **_as_text(SHAREGPT, "system", "number"),
}

PAIR: Fields = {"prompt": "ask", "response": "tell"}
COMPLETION: Fields = {"prompt": "ask", "completion": "tell"}
TEXT: Fields = {"text": "once upon"}
SAID = (("user", "ask"), ("assistant", "tell"))
LONGER = (("system", "be kind"), ("user", "before?"), ("assistant", "before."))
LONGER += (("user", "ask\nthis"), ("assistant", "tell"))
BAD_PAIRS: dict[str, Broken] = {
    **_as_text(PAIR, "response", *NOT_TEXT),
    **_as_text(PAIR, "prompt", "null", "surrogate"),
    **_without(PAIR, "response"),
    "other_fields": ({"ask": "ask", "reply": "tell"}, "has 'ask', 'reply')"),
}

SEGMENTS: Fields = {"segments": [{"label": False, "text": "ask"}, {"label": True, "text": "tell"}]}


def _parts(message: str, *parts: Any) -> Broken:
    return {"segments": list(parts)}, message


TOLD = {"label": True, "text": "tell"}
BAD_SEGMENTS: dict[str, Broken] = {
    "null": ({"segments": None}, "field 'segments' is null, must be a list of objects"),
    "empty": _parts("field 'segments' is an empty list, must be a list of objects"),
    "strings": _parts("field 'segments' is a list, must be a list of objects", "ask", "tell"),
    "second_string": _parts("segment 2 has no 'label' that is true or false", TOLD, "tell"),
    "no_label": _parts("segment 1 has no 'label'", {"text": "ask"}, TOLD),
    "label_text": _parts("segment 1 has no 'label'", {"text": "ask", "label": "false"}, TOLD),
    "no_text": _parts("segment 2: 'text' is null, must be a string", TOLD, {"label": False}),
    "surrogate": _parts("'text' has half a surrogate pair", {**TOLD, "text": SURROGATE}),
    "untrained": _parts("has no text with 'label' true", {"label": False, "text": "ask"}),
}

TOKENS: Fields = {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]}
BAD_TOKENS: dict[str, Broken] = {
    "no_labels": ({"input_ids": [5, 6], "attention_mask": [1, 1]}, "without 'labels', so the resp"),
    "shifted": (
        {**TOKENS, "labels": [-100, 7, 8, -100]},
        "'labels' has 7 at position 2, where 'in",
    ),
    "negative": (
        {**TOKENS, "input_ids": [5, -6, 7, 8]},
        "field 'input_ids' has -6, which is no",
    ),
    "untrained": ({**TOKENS, "labels": [-100] * 4}, "has only -100, so there is no response"),
    "first_only": ({**TOKENS, "labels": [5, -100, -100, -100]}, "has only -100, so there is no"),
    "lengths": ({**TOKENS, "labels": [-100, 6]}, "4 input_ids and 2 labels"),
    "ids_text": ({**TOKENS, "input_ids": "[5, 6, 7, 8]"}, "field 'input_ids' must be a list"),
    "ids_words": ({**TOKENS, "input_ids": ["a", "b", "c", "d"]}, "field 'input_ids' must be who"),
    "ids_null": ({**TOKENS, "input_ids": None}, "field 'input_ids' must be a list"),
    "mask_values": (
        {**TOKENS, "attention_mask": [1, 1, 2, 2]},
        "'attention_mask' has other values than 0 and 1",
    ),
    "mask_gap": ({**TOKENS, "attention_mask": [1, 0, 1, 1]}, "zeros between its ones"),
    "packed": ({**TOKENS, "seq_lengths": [2, 2]}, "it packs several examples"),
    "positions": ({**TOKENS, "position_ids": [0, 1, 0, 1]}, "it packs several examples"),
}

SHAPES: dict[str, Shape] = {
    "pair": Shape("prompt_response", PAIR, SAID, BAD_PAIRS),
    "completion": Shape(
        "prompt_completion", COMPLETION, SAID, _as_text(COMPLETION, "completion", "null", "blank")
    ),
    "chat_completion": Shape("prompt_completion", CHAT_PAIR, SAID, BAD_COMPLETIONS),
    "alpaca": Shape("alpaca", ALPACA, LONGER, BAD_ALPACA),
    "messages": Shape("messages", {"messages": [ASK, TELL]}, SAID, BAD_TURNS),
    "openai": Shape("openai", OPENAI, (), BAD_OPENAI),
    "sharegpt": Shape("sharegpt", SHAREGPT, (("system", "be kind"), *SAID), BAD_SHAREGPT),
    "text": Shape(
        "text", TEXT, (), _as_text(TEXT, "text", "null", "blank") | _without(TEXT, "text")
    ),
    "segments": Shape("segments", SEGMENTS, (), BAD_SEGMENTS),
    "tokens": Shape("tokens", TOKENS, (), BAD_TOKENS | _without(TOKENS, "input_ids")),
}


# --- files ---------------------------------------------------------------------------------------


def json_lines(rows: Sequence[Fields]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def json_array(rows: Sequence[Fields]) -> bytes:
    """One element a line, so that element n stands on line n + 1."""
    return ("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n").encode()


def delimited(rows: Sequence[Fields], delimiter: str = ",") -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter, quoting=csv.QUOTE_ALL)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def table_of(rows: Sequence[Fields]) -> pa.Table:
    """Raises `pa.ArrowException` where a column would need two types."""
    return pa.Table.from_pylist([dict(row) for row in rows])


def parquet(table: pa.Table, **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, **options)
    return sink.getvalue().to_pybytes()


def arrow_file(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def arrow_stream(table: pa.Table, **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with ipc.new_stream(sink, table.schema, **options) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def feather_file(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    feather.write_feather(table, sink, compression="zstd")
    return sink.getvalue().to_pybytes()


def container(suffix: str, rows: Sequence[Fields]) -> bytes:
    """Rows as a file whose name ends in `suffix`."""
    inner = suffix.removesuffix(".gz")
    if inner != suffix:
        return gzip.compress(container(inner, rows), mtime=0)
    match inner:
        case "jsonl" | "ndjson":
            return json_lines(rows)
        case "json":
            return json_array(rows)
        case "csv":
            return delimited(rows)
        case "tsv":
            return delimited(rows, "\t")
        case "parquet":
            return parquet(table_of(rows))
        case "arrow":
            return arrow_stream(table_of(rows))
        case "feather":
            return feather_file(table_of(rows))
    raise ValueError(suffix)


def place(suffix: str, row: int) -> str:
    """How a message names the 1-based data row of a file written by `container`."""
    inner = suffix.removesuffix(".gz")
    if inner in ("parquet", "arrow", "feather"):
        return f"row {row}"
    return f"line {row + (inner in ('json', 'csv', 'tsv'))}"


TEXTS: dict[str, str] = {
    "rtl": "שלום עולם مرحبا \u202eabc\u202c",
    "emoji": "👩‍👩‍👧‍👦 🏴󠁧󠁢󠁳󠁣󠁴󠁿 𝒳",
    "nfd": "cafe\u0301 A\u030a",
    "boms": "\ufeffa\ufeffb",
    "line_separators": "a\u2028b\u2029c\u0085d",
    "controls": "a\x01b\x08c\x0bd\x0ce\x1bf\x1cg\x1dh\x1ei\x7fj",
    "newlines": "\n\na\r\nb\rc\n",
    "spaces": "  a\t\tb\u00a0\u3000\t ",
    "quotes": '"a" \'b\' `c` """',
    "backslashes": "\\n \\u0041 \\\\ \\",
    "commas": "a,b;c|d,,",
    "noncharacters": "\uffff\ufffe\U0010ffff \ue000\ufffd",
    "looks_null": "null",
    "looks_nan": "NaN",
    "looks_number": "007",
    "looks_json": '{"prompt": "x"}',
    "looks_like_template": "{{ 7 * 7 }}{% raw %} %s {0}",
    "long": "x" * 20_000,
}
