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
    wrong: dict[str, tuple[Any, str]] = {
        "null": (None, "is null, must be a string"),
        "number": (3.5, "is a number, must be a string"),
        "boolean": (True, "is a boolean, must be a string"),
        "list": (["a", "b"], "is a list, must be a string"),
        "object": ({"a": "b"}, "is an object, must be a string"),
        "surrogate": (SURROGATE, "has half a surrogate pair at character 6"),
    }
    if empty_is_bad:
        wrong |= {"empty": ("", "is empty"), "blank": (" \n\t\u00a0", "is empty")}
    return {
        f"{field}_{kind}": (_with(row, **{field: value}), (f"field {field!r} {problem}",))
        for kind, (value, problem) in wrong.items()
    }


def _said(role: str, content: Any, **more: Any) -> Fields:
    return {"role": role, "content": content, **more}


ASK, TELL = _said("user", "ask"), _said("assistant", "tell")


def _bad_turns() -> dict[str, Any]:
    """Damage to a list of role/content turns."""
    image = [{"type": "image_url", "image_url": {"url": "x.png"}}]
    null_part = [{"type": "text", "text": None}]

    def case(message: str, *turns: Any) -> tuple[Fields, tuple[str, ...]]:
        return {"messages": list(turns)}, (message,)

    def whole(value: Any, kind: str) -> tuple[Fields, tuple[str, ...]]:
        return {"messages": value}, (f"field 'messages' is {kind}, must be a list of turns",)

    def answer(content: Any, message: str) -> tuple[Fields, tuple[str, ...]]:
        return case(f"turn 2 (assistant): 'content' {message}", ASK, _said("assistant", content))

    def role(name: Any, message: str) -> tuple[Fields, tuple[str, ...]]:
        return case(f"turn 2{message}", ASK, {"role": name, "content": "tell"})

    return {
        "null": whole(None, "null"),
        "string": whole("ask", "a string"),
        "object": whole(ASK, "an object"),
        "number": whole(7, "a number"),
        "empty": case("field 'messages' is an empty list"),
        "turn_string": case("turn 2 is a string, must be an object", ASK, "tell"),
        "turn_null": case("turn 2 is null, must be an object", ASK, None),
        "turn_list": case("turn 2 is a list, must be an object", ASK, ["assistant", "tell"]),
        "no_role": case("turn 2 has no 'role' (it has 'content')", ASK, {"content": "tell"}),
        "role_null": role(None, " has no 'role' (it has 'content')"),
        "role_number": role(1, ": role '1' is not known; use system"),
        "role_unknown": role("robot", ": role 'robot' is not known; use system"),
        "role_case": role("Assistant", ": role 'Assistant' is not known"),
        "no_content": case(
            "turn 2 (assistant): 'content' is missing or null", ASK, {"role": "assistant"}
        ),
        "content_null": case(
            "turn 1 (user): 'content' is missing or null", _said("user", None), TELL
        ),
        "answer_null": answer(None, "is missing or null"),
        "content_number": answer(42, "is a number, must be a string"),
        "content_object": answer({"text": "t"}, "is an object, must be a string"),
        "content_image": case(
            "has a part that is not text ('image_url')", _said("user", image), TELL
        ),
        "part_string": case("has a part that is not text", _said("user", ["ask"]), TELL),
        "part_null_text": case("'content' is null, must be", _said("user", null_part), TELL),
        "answer_empty": answer("", "is empty"),
        "answer_blank": answer(" \n", "is empty"),
        "answer_no_parts": answer([], "is empty"),
        "surrogate": answer(SURROGATE, "has half a surrogate pair"),
        "no_assistant": case("has no assistant turn to train on; add the answer", ASK),
        "only_system": case("has no assistant turn to train on", _said("system", "be kind")),
        "untrained": case("has no assistant turn to train on", ASK, _with(TELL, weight=0)),
        "ends_with_user": case(
            "ends with a user turn that has no answer", ASK, TELL, _said("user", "and?")
        ),
    }


def _bad_completions() -> dict[str, Any]:
    """Damage that only a pair of prompt and completion can have."""
    row = {"prompt": [ASK], "completion": [TELL]}
    return {
        "mixed_text_and_list": (
            _with(row, prompt="ask"),
            ("'prompt' is a string and 'completion' a list",),
        ),
        "mixed_list_and_text": (
            _with(row, completion="tell"),
            ("'prompt' is a list and 'completion' a string",),
        ),
        "completion_null": (_with(row, completion=None), ("completion",)),
        "completion_empty_list": (_with(row, completion=[]), ("completion",)),
        "completion_is_the_user": (_with(row, completion=[ASK]), ("assistant",)),
        "completion_answer_empty": (_with(row, completion=[_said("assistant", "")]), ("empty",)),
        "completion_answer_null": (_with(row, completion=[_said("assistant", None)]), ("content",)),
        "completion_role_unknown": (_with(row, completion=[_said("bot", "x")]), ("role", "bot")),
        "completion_turn_number": (_with(row, completion=[5]), ("completion",)),
        "prompt_empty_list": (_with(row, prompt=[]), ("'prompt' is an empty list",)),
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
    def history(message: str, *pairs: Any) -> tuple[Fields, tuple[str, ...]]:
        return _with(ALPACA, history=list(pairs)), ("field 'history', pair ", message)

    two = "1 must be a list of two"

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
        "history_string": (_with(ALPACA, history="before"), ("'history' is a string",)),
        "history_object": (_with(ALPACA, history={"q": "a"}), ("'history' is an object",)),
        "history_of_strings": history(two, "before?", "before."),
        "history_odd_pair": history(two, ["before?"]),
        "history_triple": history(two, ["a", "b", "c"]),
        "history_empty_pair": history(two, []),
        "history_null_pair": history(two, None),
        "history_null_answer": history("1: the response is null", ["before?", None]),
        "history_number_answer": history("1: the response is a number", ["before?", 4]),
        "history_empty_answer": history("1: the response is empty", ["before?", ""]),
        "history_surrogate": history("1: the response has half a", ["before?", SURROGATE]),
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


def _bad_openai() -> dict[str, Any]:
    named = "must name its function"

    def calls(value: Any, message: str) -> tuple[Fields, tuple[str, ...]]:
        turns = [ASK, _said("assistant", None, tool_calls=value), _said("tool", "2"), TELL]
        return _with(OPENAI, messages=turns), (f"'tool_calls' {message}",)

    return {
        "calls_string": calls("add(1)", "is a string, must be a list of calls"),
        "calls_number": calls(3, "is a number, must be a list of calls"),
        "calls_object": calls(CALL, "is an object, must be a list of calls"),
        "calls_of_strings": calls(["add"], named),
        "calls_without_function": calls([{"type": "function"}], named),
        "calls_without_name": calls([{"type": "function", "function": {"arguments": {}}}], named),
        "calls_empty_and_no_content": (calls([], "")[0], ("'content' is missing or null",)),
        "tool_answer_null": (
            _with(OPENAI, messages=[*OPENAI["messages"][:2], _said("tool", None), TELL]),
            ("content",),
        ),
        "tools_number": (_with(OPENAI, tools=3), ("'tools' must be a list of tool schemas",)),
        "tools_not_json": (_with(OPENAI, tools="{add"), ("'tools' is not valid JSON",)),
        "tools_of_numbers": (_with(OPENAI, tools=[1]), ("'tools' must be a list of tool schemas",)),
    }


HUMAN, GPT = {"from": "human", "value": "ask"}, {"from": "gpt", "value": "tell"}
SHAREGPT: Fields = {"conversations": [HUMAN, GPT], "system": "be kind"}


def _bad_sharegpt() -> dict[str, Any]:
    def case(message: str, *turns: Any) -> tuple[Fields, tuple[str, ...]]:
        return _with(SHAREGPT, conversations=list(turns)), (message,)

    def answer(value: Any, message: str, speaker: str = "gpt") -> tuple[Fields, tuple[str, ...]]:
        return case(f"turn 2{message}", HUMAN, {"from": speaker, "value": value})

    def whole(value: Any) -> tuple[Fields, tuple[str, ...]]:
        return _with(SHAREGPT, conversations=value), ("field 'conversations' is ", "list of turns")

    return {
        "null": whole(None),
        "string": whole("ask"),
        "object": whole(HUMAN),
        "empty": case("field 'conversations' is an empty list"),
        "turn_string": case("turn 2 is a string, must be an object", HUMAN, "tell"),
        "turn_null": case("turn 2 is null, must be an object", HUMAN, None),
        "no_from": case("turn 2 has no 'from' (it has 'value')", HUMAN, {"value": "tell"}),
        "no_value": case("turn 2 (gpt): 'value' is null, must be", HUMAN, {"from": "gpt"}),
        "from_unknown": answer("tell", ": from 'robot' is not known; use human, obs", "robot"),
        "from_number": case("from '2' is not known", HUMAN, {"from": 2, "value": "tell"}),
        "openai_keys": case("turn 1 has no 'from'", ASK, TELL),
        "value_null": case(
            "turn 1 (human): 'value' is null", {"from": "human", "value": None}, GPT
        ),
        "value_number": answer(4, " (gpt): 'value' is a number"),
        "value_surrogate": answer(SURROGATE, " (gpt): 'value' has half a surrogate pair"),
        "answer_empty": answer("", " (gpt): 'value' is empty"),
        "answer_blank": answer("  ", " (gpt): 'value' is empty"),
        "function_not_json": answer("f(1)", " is not valid JSON", "function_call"),
        "function_no_name": answer("{}", ": a function call must be an object", "function_call"),
        "gpt_first": case("'gpt' where human or observation is required", GPT, HUMAN, GPT),
        "two_humans": case("'human' where gpt or function_call is required", HUMAN, HUMAN, GPT),
        "two_answers": case("turn 3: 'gpt' where human or observation", HUMAN, GPT, GPT),
        "ends_with_human": case("ends with a user turn that has no answer", HUMAN, GPT, HUMAN),
        "no_answer": case("has no assistant turn to train on", HUMAN),
        "system_in_the_middle": answer("x", ": from 'system' is not known", "system"),
        "system_number": (_with(SHAREGPT, system=3), ("field 'system' is a number",)),
        "tools_number": (_with(SHAREGPT, tools=3), ("'tools' must be a list of tool schemas",)),
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
            "response_missing": (_without(PAIR, "response"), ("field 'response' ",)),
            "prompt_missing": (_without(PAIR, "prompt"), ("field 'prompt' ",)),
            "no_field": ({}, ("'prompt'",)),
            "other_fields": ({"question": "ask", "answer": "tell"}, ("has 'question', 'answer')",)),
            "wrong_case": ({"Prompt": "ask", "Response": "tell"}, ("prompt", "response")),
        },
    ),
    "completion": Shape(
        "prompt_completion",
        COMPLETION,
        SAID,
        {
            **_as_text(COMPLETION, "completion"),
            "completion_list": (_with(COMPLETION, completion=["a"]), ("'completion' a list",)),
            "completion_object": (_with(COMPLETION, completion={}), ("'completion' an object",)),
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
    "messages": Shape("messages", {"messages": [ASK, TELL]}, SAID, _bad_turns()),
    "openai": Shape("openai", OPENAI, (), _bad_openai()),
    "sharegpt": Shape("sharegpt", SHAREGPT, (("system", "be kind"), *SAID), _bad_sharegpt()),
    "text": Shape(
        "text",
        {"text": "once upon"},
        (),
        {**_as_text({"text": "once upon"}, "text"), "text_missing": ({"txt": "once"}, ("text",))},
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
