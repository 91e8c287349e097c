"""Formats: every shape of row as a conversation, and what is wrong with those that are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dualsft.config.settings import DataConfig
from dualsft.data.layouts import ASSISTANTS, USERS
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


class Case(NamedTuple):
    """A row, the turns that it is (none: a plain pair), the format that is told, the settings."""

    row: dict[str, Any]
    turns: list[dict[str, Any]]
    format: str = "messages"
    config: dict[str, str] = {}


PAIR, SPOKEN = [USER, ANSWER], said(("human", "q"), ("gpt", "a"))
ROUNDS = [SYSTEM, USER, ANSWER, USER, ANSWER]
CALLING = {"role": "assistant", "content": "", "tool_calls": CALLS}
CALLED = [USER, CALLING, {"role": "tool", "content": "1"}, ANSWER]
FUNCTION = ("function_call", '{"name": "f", "arguments": {"x": 1}}')
CONVERSATIONS: dict[str, Case] = {
    "rounds": Case({"messages": ROUNDS, "prompt": "x"}, ROUNDS),
    "own_field": Case({"chat": PAIR}, PAIR, config={"messages_field": "chat"}),
    "own_field_sharegpt": Case({"chat": SPOKEN}, PAIR, "sharegpt", {"messages_field": "chat"}),
    "own_system": Case(
        {"messages": PAIR, "persona": "s"}, [SYSTEM, *PAIR], config={"system_field": "persona"}
    ),
    "null_keys": Case({"messages": [{**USER, "name": None, "tool_calls": None}, ANSWER]}, PAIR),
    "parts": Case(
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, ANSWER]}, PAIR
    ),
    "calls": Case({"messages": [USER, {**CALLING, "content": None}, *CALLED[2:]]}, CALLED),
    "sharegpt": Case(
        {"conversations": [*SPOKEN, *said(("human", "r"), ("gpt", "b"))]},
        [*PAIR, {"role": "user", "content": "r"}, {"role": "assistant", "content": "b"}],
        "sharegpt",
    ),
    "sharegpt_system": Case(
        {"conversations": [*said(("system", "s")), *SPOKEN]}, [SYSTEM, *PAIR], "sharegpt"
    ),
    "sharegpt_tools": Case(
        {
            "conversations": said(("human", "q"), FUNCTION, ("observation", "1"), ("gpt", "a")),
            "tools": '[{"name": "f"}]',
        },
        CALLED,
        "sharegpt",
    ),
    "conversations_of_messages": Case({"conversations": PAIR}, PAIR),
    "messages_of_sharegpt": Case({"messages": SPOKEN}, PAIR, "sharegpt"),
    **{
        f"sharegpt_{user}_{assistant}": Case(
            {"conversations": said((user, "q"), (assistant, "a"))}, PAIR, "sharegpt"
        )
        for user in USERS
        for assistant in ASSISTANTS
    },
    "alpaca_empty_history": Case(
        {"instruction": "q", "output": "a", "history": [], "system": ""}, [], "alpaca"
    ),
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_conversations(tmp_path: Path, name: str) -> None:
    case = CONVERSATIONS[name]
    [row], report = read(tmp_path, case.row, **case.config)
    assert list(row.turns) == case.turns
    assert report.format == case.format
    users = [turn["content"] for turn in case.turns if turn["role"] == "user"] or ["q"]
    assert (row.prompt, row.response) == (users[-1], [*PAIR, *case.turns][-1]["content"])


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
