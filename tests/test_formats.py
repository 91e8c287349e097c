"""Formats: every shape of row as a conversation, and what is wrong with those that are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dualsft.config.settings import DataConfig
from dualsft.data.rows import DataReport, Row, read_rows

USER = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}
SYSTEM = {"role": "system", "content": "s"}
CALLS = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
TOOL = {"type": "function", "function": {"name": "f"}}


def read(tmp_path: Path, *rows: dict[str, Any], **config: Any) -> tuple[list[Row], DataReport]:
    path = tmp_path / "c.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return read_rows(path, DataConfig(path=str(path), **config))


def said(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"from": speaker, "value": text} for speaker, text in pairs]


def turns(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in pairs]


CONVERSATIONS: dict[str, tuple[dict[str, Any], dict[str, Any], str, list[dict[str, Any]]]] = {
    "messages": ({"messages": [USER, ANSWER]}, {}, "messages", [USER, ANSWER]),
    "openai": ({"messages": [USER, ANSWER]}, {"format": "openai"}, "messages", [USER, ANSWER]),
    "rounds": (
        {"messages": [SYSTEM, USER, ANSWER, USER, ANSWER], "prompt": "x"},
        {},
        "messages",
        [SYSTEM, USER, ANSWER, USER, ANSWER],
    ),
    "own_field": ({"chat": [USER, ANSWER]}, {"messages_field": "chat"}, "messages", [USER, ANSWER]),
    "own_field_sharegpt": (
        {"chat": said(("human", "q"), ("gpt", "a"))},
        {"messages_field": "chat"},
        "sharegpt",
        [USER, ANSWER],
    ),
    "own_system": (
        {"messages": [USER, ANSWER], "persona": "s"},
        {"system_field": "persona"},
        "messages",
        [SYSTEM, USER, ANSWER],
    ),
    "own_system_of_a_pair": (
        {"prompt": "q", "response": "a", "persona": "s"},
        {"system_field": "persona"},
        "prompt_response",
        [SYSTEM, USER, ANSWER],
    ),
    "null_keys": (
        {"messages": [{**USER, "name": None, "tool_calls": None}, ANSWER]},
        {},
        "messages",
        [USER, ANSWER],
    ),
    "parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, ANSWER]},
        {},
        "messages",
        [USER, ANSWER],
    ),
    "calls": (
        {
            "messages": [
                USER,
                {"role": "assistant", "content": None, "tool_calls": CALLS},
                {"role": "tool", "content": "1"},
                ANSWER,
            ]
        },
        {},
        "messages",
        [
            USER,
            {"role": "assistant", "content": "", "tool_calls": CALLS},
            {"role": "tool", "content": "1"},
            ANSWER,
        ],
    ),
    "sharegpt": (
        {"conversations": said(("human", "q"), ("gpt", "a"), ("human", "r"), ("gpt", "b"))},
        {},
        "sharegpt",
        turns(("user", "q"), ("assistant", "a"), ("user", "r"), ("assistant", "b")),
    ),
    "sharegpt_system": (
        {"conversations": said(("system", "s"), ("human", "q"), ("gpt", "a"))},
        {},
        "sharegpt",
        [SYSTEM, USER, ANSWER],
    ),
    "sharegpt_system_column": (
        {"conversations": said(("human", "q"), ("gpt", "a")), "system": "s"},
        {},
        "sharegpt",
        [SYSTEM, USER, ANSWER],
    ),
    "sharegpt_tools": (
        {
            "conversations": said(
                ("human", "q"),
                ("function_call", '{"name": "f", "arguments": {"x": 1}}'),
                ("observation", "1"),
                ("gpt", "a"),
            ),
            "tools": '[{"name": "f"}]',
        },
        {},
        "sharegpt",
        [
            USER,
            {"role": "assistant", "content": "", "tool_calls": CALLS},
            {"role": "tool", "content": "1"},
            ANSWER,
        ],
    ),
    "conversations_of_messages": (
        {"conversations": [USER, ANSWER]},
        {},
        "messages",
        [USER, ANSWER],
    ),
    "messages_of_sharegpt": (
        {"messages": said(("human", "q"), ("gpt", "a"))},
        {},
        "sharegpt",
        [USER, ANSWER],
    ),
    "alpaca_history": (
        {"instruction": "r", "input": "x", "output": "b", "history": [["q", "a"]], "system": "s"},
        {},
        "alpaca",
        [SYSTEM, USER, ANSWER, *turns(("user", "r\nx"), ("assistant", "b"))],
    ),
    "alpaca_empty_history": (
        {"instruction": "q", "output": "a", "history": [], "system": ""},
        {},
        "alpaca",
        [],
    ),
    "completion": (
        {"prompt": [USER], "completion": [ANSWER]},
        {},
        "prompt_completion",
        [USER, ANSWER],
    ),
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_conversations(tmp_path: Path, name: str) -> None:
    values, config, form, expected = CONVERSATIONS[name]
    [row], report = read(tmp_path, values, **config)
    assert list(row.turns) == expected
    assert report.format == form
    if expected:
        assert row.response == expected[-1]["content"]
        assert row.prompt == [turn for turn in expected if turn["role"] == "user"][-1]["content"]
    else:
        assert (row.prompt, row.response) == ("q", "a")


def test_tools_come_as_schemas(tmp_path: Path) -> None:
    for tools in ([TOOL], json.dumps([TOOL]), [{"name": "f"}]):
        [row], _ = read(tmp_path, {"messages": [USER, ANSWER], "tools": tools})
        assert row.tools == (TOOL,)


def test_only_the_completion_is_trained_on(tmp_path: Path) -> None:
    [row], _ = read(tmp_path, {"prompt": [USER, ANSWER, USER], "completion": [ANSWER]})
    assert row.trained_from == 3


def test_a_text_beside_its_parts_is_no_second_format(tmp_path: Path) -> None:
    _, report = read(tmp_path, {"instruction": "i", "output": "o", "text": "i o"})
    assert report.format == "alpaca"
    [row], report = read(tmp_path, {"text": "whole"})
    assert (row.whole, row.response, report.format) == (True, "whole", "text")


def test_each_file_of_a_list_has_its_own_format(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "p", "response": "r"}\n\n')
    (tmp_path / "b.json").write_text(json.dumps([{"messages": [USER, ANSWER]}]))
    path = f"{tmp_path}/a.jsonl,{tmp_path}/b.json"
    rows, report = read_rows(path, DataConfig(path=path))
    assert [row.index for row in rows] == [0, 2]
    assert report.format == "prompt_response, messages"


def test_repeated_ids_are_counted(tmp_path: Path) -> None:
    rows = [{"id": name, "prompt": "p", "response": "r"} for name in (1, 2, 1, "x", "x", 1)]
    found, report = read(tmp_path, *rows)
    assert len({row.id for row in found}) == 6
    assert report.num_repeated_ids == 3
    assert "3 of 6 rows have the 'id' of an earlier row" in report.notes()[0]
