"""Malformed and tricky data: rows of every shape, damaged one way each, and the files they go into.

A `Shape` is a format with a good row, the conversation it means, and its broken variants: what is
wrong, the row, and the words that a message about it must hold. `container` writes rows as a file
of a kind; `TEXTS` are strings that must come back exactly. Nothing here knows the readers.
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

SURROGATE = "half \ud800"


@dataclass(frozen=True)
class Shape:
    """A row format: a good row, its turns, and named broken rows with the words of the message."""

    format: str
    good: Fields
    turns: tuple[Turn, ...]
    broken: Mapping[str, tuple[Fields, tuple[str, ...]]]


def _with(row: Fields, **changes: Any) -> Fields:
    return {**row, **changes}


def _without(row: Fields, *names: str) -> Fields:
    return {name: value for name, value in row.items() if name not in names}


def _as_text(row: Fields, field: str, *, empty_is_bad: bool = True) -> dict[str, Any]:
    """The ways in which a field that must hold text does not."""
    wrong: dict[str, Any] = {
        "null": None,
        "number": 3.5,
        "boolean": True,
        "list": ["a", "b"],
        "object": {"a": "b"},
        "surrogate": SURROGATE,
    }
    if empty_is_bad:
        wrong |= {"empty": "", "blank": " \n\t\u00a0"}
    return {f"{field}_{kind}": (_with(row, **{field: v}), (field,)) for kind, v in wrong.items()}


def _said(role: str, content: Any, **more: Any) -> Fields:
    return {"role": role, "content": content, **more}


ASK, TELL = _said("user", "ask"), _said("assistant", "tell")


def _bad_turns(field: str, row: Fields) -> dict[str, Any]:
    """Damage to a list of role/content turns, in `row[field]`."""
    image = [{"type": "image_url", "image_url": {"url": "x.png"}}]

    def case(words: tuple[str, ...], *turns: Any) -> tuple[Fields, tuple[str, ...]]:
        return _with(row, **{field: list(turns)}), words

    return {
        f"{field}_null": (_with(row, **{field: None}), (field,)),
        f"{field}_string": (_with(row, **{field: "ask"}), (field,)),
        f"{field}_object": (_with(row, **{field: ASK}), (field,)),
        f"{field}_number": (_with(row, **{field: 7}), (field,)),
        f"{field}_empty": case((field,)),
        f"{field}_turn_string": case((field,), ASK, "tell"),
        f"{field}_turn_null": case((field,), ASK, None),
        f"{field}_turn_list": case((field,), ASK, ["assistant", "tell"]),
        f"{field}_no_role": case(("role",), ASK, {"content": "tell"}),
        f"{field}_role_null": case(("role",), ASK, _said(None, "tell")),  # type: ignore[arg-type]
        f"{field}_role_number": case(("role",), ASK, _said(1, "tell")),  # type: ignore[arg-type]
        f"{field}_role_unknown": case(("role", "robot"), ASK, _said("robot", "tell")),
        f"{field}_role_case": case(("role", "Assistant"), ASK, _said("Assistant", "tell")),
        f"{field}_no_content": case(("content",), ASK, {"role": "assistant"}),
        f"{field}_content_null": case(("content",), _said("user", None), TELL),
        f"{field}_answer_null": case(("content",), ASK, _said("assistant", None)),
        f"{field}_content_number": case(("content",), ASK, _said("assistant", 42)),
        f"{field}_content_object": case(("content",), ASK, _said("assistant", {"text": "t"})),
        f"{field}_content_image": case(("image",), _said("user", image), TELL),
        f"{field}_part_string": case(("content",), _said("user", ["ask"]), TELL),
        f"{field}_part_null_text": case(
            ("text",), _said("user", [{"type": "text", "text": None}]), TELL
        ),
        f"{field}_answer_empty": case(("empty",), ASK, _said("assistant", "")),
        f"{field}_answer_blank": case(("empty",), ASK, _said("assistant", " \n")),
        f"{field}_answer_no_parts": case(("empty",), ASK, _said("assistant", [])),
        f"{field}_surrogate": case(("surrogate",), ASK, _said("assistant", SURROGATE)),
        f"{field}_no_assistant": case(("assistant",), ASK),
        f"{field}_only_system": case(("assistant",), _said("system", "be kind")),
        f"{field}_ends_with_user": case(("answer",), ASK, TELL, _said("user", "and?")),
    }


def _bad_completions() -> dict[str, Any]:
    """Damage that only a pair of prompt and completion can have."""
    row = {"prompt": [ASK], "completion": [TELL]}
    pair = ("prompt", "completion")
    return {
        "mixed_text_and_list": (_with(row, prompt="ask"), pair),
        "mixed_list_and_text": (_with(row, completion="tell"), pair),
        "completion_null": (_with(row, completion=None), ("completion",)),
        "completion_empty_list": (_with(row, completion=[]), ("completion",)),
        "completion_is_the_user": (_with(row, completion=[ASK]), ("assistant",)),
        "completion_answer_empty": (_with(row, completion=[_said("assistant", "")]), ("empty",)),
        "completion_answer_null": (_with(row, completion=[_said("assistant", None)]), ("content",)),
        "completion_role_unknown": (_with(row, completion=[_said("bot", "x")]), ("role", "bot")),
        "completion_turn_number": (_with(row, completion=[5]), ("completion",)),
        "prompt_empty_list": (_with(row, prompt=[]), ("prompt",)),
        "prompt_turn_null": (_with(row, prompt=[None]), ("prompt",)),
        "prompt_content_null": (_with(row, prompt=[_said("user", None)]), ("content",)),
        "completion_missing": (_without(row, "completion"), ("completion",)),
    }


ALPACA: Fields = {
    "instruction": "ask",
    "input": "this",
    "output": "tell",
    "history": [["before?", "before."]],
    "system": "be kind",
}


def _bad_alpaca() -> dict[str, Any]:
    def history(*pairs: Any) -> tuple[Fields, tuple[str, ...]]:
        return _with(ALPACA, history=list(pairs)), ("history",)

    return {
        **_as_text(ALPACA, "output"),
        **_as_text(ALPACA, "instruction", empty_is_bad=False),
        "output_missing": (_without(ALPACA, "output"), ("output",)),
        "instruction_missing": (_without(ALPACA, "instruction"), ("instruction",)),
        "input_number": (_with(ALPACA, input=3), ("input",)),
        "input_list": (_with(ALPACA, input=["a"]), ("input",)),
        "input_surrogate": (_with(ALPACA, input=SURROGATE), ("input",)),
        "system_number": (_with(ALPACA, system=1), ("system",)),
        "system_list": (_with(ALPACA, system=["be"]), ("system",)),
        "history_string": (_with(ALPACA, history="before"), ("history",)),
        "history_object": (_with(ALPACA, history={"q": "a"}), ("history",)),
        "history_of_strings": history("before?", "before."),
        "history_odd_pair": history(["before?"]),
        "history_triple": history(["a", "b", "c"]),
        "history_empty_pair": history([]),
        "history_null_pair": history(None),
        "history_null_answer": history(["before?", None]),
        "history_number_answer": history(["before?", 4]),
        "history_empty_answer": history(["before?", ""]),
        "history_surrogate": history(["before?", SURROGATE]),
    }


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "d", "parameters": {"type": "object"}},
}
OPENAI: Fields = {
    "messages": [
        ASK,
        _said("assistant", None, tool_calls=[CALL]),
        _said("tool", "2"),
        TELL,
    ],
    "tools": [TOOL],
}


def _bad_openai() -> dict[str, Any]:
    def calls(value: Any) -> tuple[Fields, tuple[str, ...]]:
        turns = [ASK, _said("assistant", None, tool_calls=value), _said("tool", "2"), TELL]
        return _with(OPENAI, messages=turns), ("tool_calls",)

    return {
        "calls_string": calls("add(1)"),
        "calls_number": calls(3),
        "calls_object": calls(CALL),
        "calls_of_strings": calls(["add"]),
        "calls_without_function": calls([{"type": "function"}]),
        "calls_without_name": calls([{"type": "function", "function": {"arguments": {}}}]),
        "calls_empty_and_no_content": (calls([])[0], ("content",)),
        "tool_answer_null": (
            _with(OPENAI, messages=[*OPENAI["messages"][:2], _said("tool", None), TELL]),
            ("content",),
        ),
        "tools_number": (_with(OPENAI, tools=3), ("tools",)),
        "tools_not_json": (_with(OPENAI, tools="{add"), ("tools",)),
        "tools_of_numbers": (_with(OPENAI, tools=[1]), ("tools",)),
    }


HUMAN, GPT = {"from": "human", "value": "ask"}, {"from": "gpt", "value": "tell"}
SHAREGPT: Fields = {"conversations": [HUMAN, GPT], "system": "be kind"}


def _bad_sharegpt() -> dict[str, Any]:
    def case(words: tuple[str, ...], *turns: Any) -> tuple[Fields, tuple[str, ...]]:
        return _with(SHAREGPT, conversations=list(turns)), words

    field = ("conversations",)
    return {
        "null": (_with(SHAREGPT, conversations=None), field),
        "string": (_with(SHAREGPT, conversations="ask"), field),
        "object": (_with(SHAREGPT, conversations=HUMAN), field),
        "empty": case(field),
        "turn_string": case(field, HUMAN, "tell"),
        "turn_null": case(field, HUMAN, None),
        "no_from": case(("from",), HUMAN, {"value": "tell"}),
        "no_value": case(("value",), HUMAN, {"from": "gpt"}),
        "from_unknown": case(("robot",), HUMAN, {"from": "robot", "value": "tell"}),
        "from_number": case(("from",), HUMAN, {"from": 2, "value": "tell"}),
        "openai_keys": case(("from",), ASK, TELL),
        "value_null": case(("value",), {"from": "human", "value": None}, GPT),
        "value_number": case(("value",), HUMAN, {"from": "gpt", "value": 4}),
        "value_surrogate": case(("surrogate",), HUMAN, {"from": "gpt", "value": SURROGATE}),
        "answer_empty": case(("empty",), HUMAN, {"from": "gpt", "value": ""}),
        "answer_blank": case(("empty",), HUMAN, {"from": "gpt", "value": "  "}),
        "gpt_first": case(("gpt",), GPT, HUMAN, GPT),
        "two_humans": case(("human",), HUMAN, HUMAN, GPT),
        "two_answers": case(("gpt",), HUMAN, GPT, GPT),
        "ends_with_human": case(("answer",), HUMAN, GPT, HUMAN),
        "no_answer": case(("answer",), HUMAN),
        "system_in_the_middle": case(("system",), HUMAN, {"from": "system", "value": "x"}, GPT),
        "system_number": (_with(SHAREGPT, system=3), ("system",)),
        "tools_number": (_with(SHAREGPT, tools=3), ("tools",)),
    }


PAIR: Fields = {"prompt": "ask", "response": "tell"}
COMPLETION: Fields = {"prompt": "ask", "completion": "tell"}
CHAT_PAIR: Fields = {"prompt": [ASK], "completion": [TELL]}
SAID = (("user", "ask"), ("assistant", "tell"))

SHAPES: dict[str, Shape] = {
    "pair": Shape(
        "prompt_response",
        PAIR,
        SAID,
        {
            **_as_text(PAIR, "response"),
            **_as_text(PAIR, "prompt", empty_is_bad=False),
            "response_missing": (_without(PAIR, "response"), ("response",)),
            "prompt_missing": (_without(PAIR, "prompt"), ("prompt",)),
            "no_field": ({}, ("prompt",)),
            "other_fields": ({"question": "ask", "answer": "tell"}, ("prompt", "response")),
            "wrong_case": ({"Prompt": "ask", "Response": "tell"}, ("prompt", "response")),
        },
    ),
    "completion": Shape(
        "prompt_completion",
        COMPLETION,
        SAID,
        {
            **_as_text(COMPLETION, "completion"),
            "completion_missing": (_without(COMPLETION, "completion"), ("completion",)),
            "prompt_null": (_with(COMPLETION, prompt=None), ("prompt",)),
            "prompt_number": (_with(COMPLETION, prompt=3), ("prompt",)),
        },
    ),
    "chat_completion": Shape("prompt_completion", CHAT_PAIR, SAID, _bad_completions()),
    "alpaca": Shape(
        "alpaca",
        ALPACA,
        (
            ("system", "be kind"),
            ("user", "before?"),
            ("assistant", "before."),
            ("user", "ask\nthis"),
            ("assistant", "tell"),
        ),
        _bad_alpaca(),
    ),
    "messages": Shape(
        "messages", {"messages": [ASK, TELL]}, SAID, _bad_turns("messages", {"messages": []})
    ),
    "openai": Shape("openai", OPENAI, (), _bad_openai()),
    "sharegpt": Shape("sharegpt", SHAREGPT, (("system", "be kind"), *SAID), _bad_sharegpt()),
    "text": Shape(
        "text",
        {"text": "once upon"},
        (),
        {
            **_as_text({"text": "once upon"}, "text"),
            "text_missing": ({"txt": "once"}, ("text",)),
        },
    ),
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
    "nfc": "caf\u00e9 \u00c5",
    "nfd": "cafe\u0301 A\u030a",
    "zero_width": "a\u200bb\u200dc\u2060d",
    "inner_bom": "a\ufeffb",
    "first_bom": "\ufeffa",
    "line_separators": "a\u2028b\u2029c\u0085d",
    "old_controls": "a\x0bb\x0cc\x1cd\x1de\x1ef",
    "low_controls": "a\x01b\x08c\x1bd\x7fe",
    "newlines": "\n\na\r\nb\rc\n",
    "spaces": "  a  b\u00a0\u3000 ",
    "tabs": "\ta\t\tb\t",
    "quotes": '"a" \'b\' `c` """',
    "backslashes": "\\n \\u0041 \\\\ \\",
    "commas": "a,b;c|d,,",
    "noncharacters": "\uffff\ufffe\U0010ffff \ue000",
    "replacement": "\ufffd",
    "looks_null": "null",
    "looks_na": "NA",
    "looks_nan": "NaN",
    "looks_number": "007",
    "looks_float": "1e5",
    "looks_boolean": "true",
    "looks_date": "2024-01-02",
    "looks_json": '{"prompt": "x"}',
    "looks_formula": "=1+1",
    "looks_like_template": "{{ 7 * 7 }}{% raw %}",
    "looks_like_markup": "[bold]a[/bold] <b>&amp;</b>",
    "percent": "%s %d {} {0}",
    "long": "x" * 20_000,
}
